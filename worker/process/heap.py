"""Touches memory before the process needs it, and keeps freed memory for reuse.

The first write to a fresh page waits for the kernel, and in a virtual machine for its host: it took 8 times
as long as a write to used memory, and most of a restore's time. By default glibc's allocator returns freed
memory to the system. Linux with glibc only; elsewhere nothing happens. Knows nothing of MLX, which allocates
CPU memory from the same allocator.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Final

#: From glibc's <malloc.h>.
_TRIM_THRESHOLD: Final = -1
_TOP_PAD: Final = -2
_MMAP_THRESHOLD: Final = -3
_ARENA_MAX: Final = -8

#: glibc's maximum of this threshold: a larger allocation gets its own mapping, unmapped when freed.
_LARGEST: Final = 32 << 20
_STEP: Final = 16 << 20


class SpareMemory:
    """Reserved memory, which a thread of its own writes to while a model is loaded.

    Create it before other threads: a thread that already has its own heap keeps that heap.
    """

    def __init__(self, size_bytes: int) -> None:
        """Reserve `size_bytes`, at most 1 GiB, and let glibc keep as much freed memory; 0 does neither."""
        self._libc = _glibc() if size_bytes else None
        self._addresses: list[int] = []
        self._thread: threading.Thread | None = None
        if self._libc is None:
            return
        self._libc.mallopt(_ARENA_MAX, 1)
        self._libc.mallopt(_MMAP_THRESHOLD, _LARGEST)
        self._libc.mallopt(_TRIM_THRESHOLD, size_bytes + _LARGEST)
        self._libc.mallopt(_TOP_PAD, size_bytes)  # what glibc keeps when it returns memory to the system
        self._addresses = [self._libc.malloc(_STEP) for _ in range(size_bytes // _STEP)]

    def fill(self) -> None:
        """Start to write to the memory. Call once, before `release`."""
        if self._addresses:
            self._thread = threading.Thread(target=self._write, name="spare memory", daemon=True)
            self._thread.start()

    def release(self) -> None:
        """Wait until all of the memory was written to, then free it for reuse. Call once, on any thread."""
        if self._thread is None or self._libc is None:
            return
        self._thread.join()
        for address in self._addresses:
            self._libc.free(address)
        self._addresses = []

    def _write(self) -> None:
        for address in self._addresses:
            if address:  # 0 if malloc failed
                ctypes.memset(address, 0, _STEP)


def _glibc() -> Any:
    """Return the C library of this process; None if it is not glibc."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return None
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    return libc
