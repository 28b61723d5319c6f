"""Ask the system for large pages under memory that is about to be filled. Linux only; nothing anywhere else.

A page of 4 KiB costs some 1.5 us when it is first written to, in a virtual machine, and that is most of what
a restore takes. Best effort: contents never change, and where there are no large pages all stays as it is.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_LARGE_BYTES: Final = 2 << 20
#: `MADV_COLLAPSE`, since Linux 6.1: at once, and without a lasting mark on the process's mappings, of which
#: `MADV_HUGEPAGE` would leave many more.
_COLLAPSE: Final = 25
_SETTING: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
#: Above this share of pages that are there already, moving them costs more than the others would.
_MOST_RESIDENT: Final = 0.25


def enlarge(memories: Iterable[memoryview]) -> None:
    """Put large pages under parts of memory, wherever they are next to each other and not yet in use.

    Nobody else may write to them meanwhile.
    """
    libc = _libc()
    if libc is None:
        return
    for start, end in _extents(memories):
        first = -(-start // _LARGE_BYTES) * _LARGE_BYTES
        num_large = (end - first) // _LARGE_BYTES
        if num_large < 1:
            continue
        for i, resident in enumerate(_resident(libc, first, num_large)):
            if resident <= _MOST_RESIDENT:
                at = first + i * _LARGE_BYTES
                if not resident:  # where nothing was ever written there is nothing to collapse
                    ctypes.memset(at, ctypes.string_at(at, 1)[0], 1)
                libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(_LARGE_BYTES), _COLLAPSE)


def _extents(memories: Iterable[memoryview]) -> Iterator[tuple[int, int]]:
    """Join what is next to each other but for what the allocator notes in between."""
    spans = sorted(
        (at, at + memory.nbytes)
        for memory in memories
        if memory.nbytes
        for at in (ctypes.addressof(ctypes.c_char.from_buffer(memory)),)
    )
    start = end = 0
    for at, until in spans:
        if at - end >= mmap.PAGESIZE:
            yield start, end
            start = at
        end = until
    yield start, end


def _resident(libc: Any, at: int, num_large: int) -> list[float]:
    """Say of the places of so many large pages which share of each has pages already."""
    pages = np.ones((num_large, _LARGE_BYTES // mmap.PAGESIZE), np.uint8)
    size_bytes = ctypes.c_size_t(num_large * _LARGE_BYTES)
    libc.mincore(ctypes.c_void_p(at), size_bytes, ctypes.c_void_p(pages.ctypes.data))
    return [float(share) for share in (pages & 1).mean(axis=1)]


@cache
def _libc() -> Any:
    """Find the system's calls; None where there are no large pages, or nobody wants them."""
    try:
        if sys.platform != "linux" or "[never]" in _SETTING.read_text():
            return None
        return ctypes.CDLL(None)
    except OSError:
        return None
