"""Says how far the KV of the same tokens, computed twice, differs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cache.names.snapshot import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import mlx.core as mx
#: Types of real numbers. The codes of quantised KV are integers: their scales, which follow from the same
#: numbers, are compared.
_REAL: Final[dict[str, Any]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def difference(stored: Mapping[str, mx.array | Tensor], computed: Sequence[Tensor]) -> float | None:
    """Return the largest relative difference of a tensor: its difference's norm by the stored tensor's norm.

    None if no tensor of real numbers is in both. Infinite if numbers are not finite, or shapes differ. States
    of recurrent layers are not compared.
    """
    pairs = [(stored[one.name], one) for one in computed if one.name in stored and one.dtype in _REAL]
    return max((_relative(array, one) for array, one in pairs), default=None)


def _relative(stored: mx.array | Tensor, tensor: Tensor) -> float:
    view: Any = stored  # arrays have the buffer protocol, but MLX's stubs do not say so
    data = stored.data if isinstance(stored, Tensor) else memoryview(view).cast("B")
    if tuple(stored.shape) != tensor.shape or data.nbytes != tensor.data.nbytes:
        return float("inf")
    ours, theirs = _numbers(data, tensor.dtype), _numbers(tensor.data, tensor.dtype)
    found = float(np.linalg.norm(ours - theirs) / max(float(np.linalg.norm(ours)), 1e-30))
    return found if np.isfinite(found) else float("inf")


def _numbers(data: memoryview, dtype: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    numbers: np.ndarray[Any, Any] = np.frombuffer(data, _REAL[dtype])
    if dtype == "BF16":  # the upper half of a 32-bit number
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32)
