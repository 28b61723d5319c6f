"""Reads how much memory macOS can hand out without taking any from programs. Mac only."""

from __future__ import annotations

import re
import subprocess
from typing import Final

_VM_STAT: Final = "/usr/bin/vm_stat"
#: Pages that hold nothing, or what can be dropped. Activity Monitor counts the same as not in use.
_DROPPABLE: Final = re.compile(r"^(?:Pages free|Pages purgeable|File-backed pages):\s+(\d+)\.", re.MULTILINE)
_PAGE_SIZE: Final = re.compile(r"page size of (\d+) bytes")


def droppable_bytes() -> int:
    """Return the bytes of memory that are free or hold copies of files; 0 if macOS does not say."""
    try:
        told = subprocess.run([_VM_STAT], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return parsed(told)


def parsed(told: str) -> int:
    """Return the bytes of free, purgeable and file-backed pages by the output of `vm_stat`; 0 if unknown."""
    page = _PAGE_SIZE.search(told)
    return int(page[1]) * sum(map(int, _DROPPABLE.findall(told))) if page else 0
