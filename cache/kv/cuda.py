"""Copies restored KV from host memory to arrays on a CUDA device, by a call of the driver. I/O threads.

MLX copies host data to CUDA through managed memory: page faults of the host when it writes there (1.5 GB/s on
an H200), then page faults of the device. The driver copies to the same array at 7 GB/s, and its pages stay on
the device (ADR 0061). MLX needs the driver's library too, so the library is always installed.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final

import mlx.core as mx
import numpy as np

#: MLX's default device is the first one.
_DEVICE: Final = 0


def to_device(host: np.ndarray[Any, Any], dtype: mx.Dtype) -> mx.array:
    """Copy the numpy array `host` to the device; return an evaluated array with its bytes and shape.

    Waits for the copy without the GIL. Raises `RuntimeError` if the driver refuses.
    """
    array: Any = mx.empty(host.shape, dtype, stream=mx.gpu)
    mx.eval(array)
    if not host.nbytes:
        return array  # type: ignore[no-any-return]  # MLX's stubs have no buffer protocol
    place = np.frombuffer(memoryview(array).cast("B"), np.uint8)
    driver = _driver()
    _check("cuCtxSetCurrent", driver.cuCtxSetCurrent(_context()))
    _check("cuMemcpyHtoD", driver.cuMemcpyHtoD_v2(place.ctypes.data, host.ctypes.data, host.nbytes))
    return array  # type: ignore[no-any-return]


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemcpyHtoD_v2.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t]
    driver.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
    return driver


@cache
def _context() -> ctypes.c_void_p:
    """Return the context that CUDA's runtime, and so MLX, uses on the device."""
    context, retain = ctypes.c_void_p(), _driver().cuDevicePrimaryCtxRetain
    _check("cuDevicePrimaryCtxRetain", retain(ctypes.byref(context), _DEVICE))
    return context


def _check(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name} failed with CUDA's error {status}")
