"""Reads how much memory the system still allows this process: by its control group on Linux, or on macOS.

The limit of a control group, of a container or of systemd, may be lower than the free memory of the machine.
Before the kernel kills a process of the group, it frees file pages that were not read lately
(`inactive_file`), so these pages count as free. macOS can hand out more than is free without taking any from
programs.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
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


_VM_STAT: Final = "/usr/bin/vm_stat"
#: Pages that hold nothing, or what can be dropped. Activity Monitor counts the same as not in use.
_DROPPABLE: Final = re.compile(r"^(?:Pages free|Pages purgeable|File-backed pages):\s+(\d+)\.", re.MULTILINE)
_PAGE_SIZE: Final = re.compile(r"page size of (\d+) bytes")


def droppable_bytes() -> int:
    """Return the bytes of memory that are free or hold copies of files; 0 if not on macOS, or unknown."""
    try:
        told = subprocess.run([_VM_STAT], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return parse_vm_stat(told)


def parse_vm_stat(told: str) -> int:
    """Return the bytes of free, purgeable and file-backed pages by the output of `vm_stat`; 0 if unknown."""
    page = _PAGE_SIZE.search(told)
    return int(page[1]) * sum(map(int, _DROPPABLE.findall(told))) if page else 0
