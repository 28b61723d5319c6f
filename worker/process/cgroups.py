"""Reads how much memory this process's control group still allows: the limit of a container or of systemd.

Linux only.

The limit may be lower than the machine's free memory. Before the kernel kills a process of the group, it
frees file pages that were not read lately (`inactive_file`), so these pages count as free.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

#: File names by cgroup version: the limits, the usage, and the field of `memory.stat` for file pages.
_V2: Final = (("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1: Final = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")


def left_bytes(own: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that this process may still use under its tightest limit; None if it has no limit."""
    return min((max(limit - taken, 0) for limit, taken in _limits(own, mounted)), default=None)


def limit_bytes(own: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return this process's tightest limit in bytes, whatever its usage; None if it has no limit."""
    return min((limit for limit, _ in _limits(own, mounted)), default=None)


def _limits(own: Path, mounted: Path) -> Iterator[tuple[int, int]]:
    """Yield each limit of this process's groups with the group's usage, in bytes."""
    try:
        lines = own.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon and not controllers:
            yield from _of_group(mounted, path, *_V2)
        elif "memory" in controllers.split(","):
            yield from _of_group(mounted / "memory", path, *_V1)


def _of_group(
    root: Path, path: str, limits: tuple[str, ...], used: str, files: str
) -> Iterator[tuple[int, int]]:
    """Yield limits and usage, in bytes, from the process's group up to the root group.

    A container sees only its own groups.
    """
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            return
        with contextlib.suppress(OSError, ValueError):
            taken = int((folder / used).read_text()) - _stat(folder / "memory.stat").get(files, 0)
            for name in limits:
                with contextlib.suppress(OSError, ValueError):  # "max", or a file that older kernels lack
                    yield int((folder / name).read_text()), taken


def _stat(path: Path) -> dict[str, int]:
    with contextlib.suppress(OSError, ValueError):
        return {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}
    return {}
