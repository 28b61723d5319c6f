"""Where a data directory's gateways are: `gateway` writes a file there, `serve` a note into its lock file."""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING, Final

from worker.process.datadir import holder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: What their names begin with; an address follows.
_NAME: Final = "gateway-"
#: Addresses of all networks, and where this machine reaches them.
_LOOPBACK: Final = {"//0.0.0.0:": "//127.0.0.1:", "//[::]:": "//[::1]:"}


@contextlib.contextmanager
def noted(data_dir: Path, url: str) -> Iterator[None]:
    """Note until the block ends that a gateway is at `url`, in place of one that was noted there before.

    Notes nothing in a data directory that does not exist or cannot be written.
    """
    for everywhere, here in _LOOPBACK.items():
        url = url.replace(everywhere, here)
    path = data_dir / f"{_NAME}{url.partition('//')[2]}"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            file = stack.enter_context(path.open("xb", buffering=0))  # else its close writes again
            stack.callback(_remove, path, os.fstat(file.fileno()))
            fcntl.flock(file, fcntl.LOCK_EX)  # until this process ends, however it does
            file.write(url.encode())
        yield


def _remove(path: Path, own: os.stat_result) -> None:
    with contextlib.suppress(OSError):
        if os.path.samestat(path.stat(), own):  # else it is another gateway's
            path.unlink()


def noted_gateway(data_dir: Path) -> str | None:
    """Return the URL of the running worker's gateway, also while it starts; without one, of another gateway.

    That is the one that was noted last of those that run. None if there is none.
    """
    held = holder(data_dir)
    if held is not None and held.gateway is not None:
        return f"http://127.0.0.1:{held.gateway}"
    for path in sorted(data_dir.glob(f"{_NAME}*"), key=_noted_ns, reverse=True):
        with contextlib.suppress(OSError), path.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if url := file.read():
                    return url
    return None


def _noted_ns(path: Path) -> int:
    with contextlib.suppress(OSError):  # its gateway has just ended
        return path.stat().st_mtime_ns
    return 0
