"""The file in a data directory that says where a gateway is: `gateway` writes it, `launch` reads it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NAME: Final = "gateway"
#: Addresses of all networks, and where this machine reaches them.
_LOOPBACK: Final = {"//0.0.0.0:": "//127.0.0.1:", "//[::]:": "//[::1]:"}


@contextlib.contextmanager
def noted(data_dir: Path, url: str) -> Iterator[None]:
    """Note until the block ends that a gateway is at `url`, in place of a gateway that was noted before.

    Notes nothing in a data directory that does not exist or cannot be written.
    """
    for everywhere, here in _LOOPBACK.items():
        url = url.replace(everywhere, here)
    path = data_dir / _NAME
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
    """Return the URL of the gateway that is noted in a data directory; None if none runs."""
    with contextlib.suppress(OSError), (data_dir / _NAME).open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read() or None
    return None
