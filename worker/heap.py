"""Memory that the process has ready before it needs it, and keeps when it is freed.

The first write to a fresh page waits for the kernel, and in a virtual machine for its host too: it took
8 times as long as writing to used memory where this was measured, and was most of a restore. glibc's
allocator returns what is freed to the system, unless it is told to keep it. Linux with glibc only; elsewhere
nothing happens. Knows nothing of MLX, which takes memory for the CPU from that allocator.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any, Final

#: Of glibc's <malloc.h>.
_TRIM_THRESHOLD: Final = -1
_TOP_PAD: Final = -2
_MMAP_THRESHOLD: Final = -3
_ARENA_MAX: Final = -8

#: The most that glibc takes for a threshold: what is larger has a mapping of its own, and ends with it.
_LARGEST: Final = 32 << 20
_STEP: Final = 16 << 20


class Spare:
    """So much memory, written to once on a thread of its own while the process has other things to do.

    Make it before there are threads: one that has a heap of its own keeps that.
    """

    def __init__(self, size_bytes: int) -> None:
        """`size_bytes`, 1 GiB at the most, is also what is kept of freed memory; 0 asks for nothing."""
        self._libc = _glibc() if size_bytes else None
        self._taken: list[int] = []
        self._thread: threading.Thread | None = None
        if self._libc is None:
            return
        self._libc.mallopt(_ARENA_MAX, 1)
        self._libc.mallopt(_MMAP_THRESHOLD, _LARGEST)
        self._libc.mallopt(_TRIM_THRESHOLD, size_bytes + _LARGEST)
        self._libc.mallopt(_TOP_PAD, size_bytes)  # what it keeps when it gives back what is beyond
        self._taken = [self._libc.malloc(_STEP) for _ in range(size_bytes // _STEP)]
        self._thread = threading.Thread(target=self._write, name="spare memory", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let whoever needs memory have it; waits until all of it was written to. Any thread, once."""
        if self._thread is None or self._libc is None:
            return
        self._thread.join()
        for address in self._taken:
            self._libc.free(address)
        self._taken = []

    def _write(self) -> None:
        for address in self._taken:
            if address:  # else there is no such memory
                ctypes.memset(address, 0, _STEP)


def _glibc() -> Any:
    """Return the C library of this process; None where it is another one."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return None
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    return libc
