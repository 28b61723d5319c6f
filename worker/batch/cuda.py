"""Computes attention on CUDA in few shapes, since cuDNN needs a plan for each new shape. Device thread only.

MLX computes attention of several queries in 16 bits with cuDNN (`scaled_dot_product_attention.cpp` in MLX's
CUDA back end). Plans are cached by exact shape, and a new one takes the host 40 to 70 ms (H200, cuDNN 9). The
length of a session's KV differs at each turn, so each turn would wait for a plan. If arrays are padded to few
lengths, plans are reused, and the results have the same bits.
"""

from __future__ import annotations

from typing import Any, Final

import mlx.core as mx

from .cpu import on_cpu

#: The smallest step between padded lengths of keys, and the largest step between padded lengths of queries.
_GRID: Final = 256
_MOST_STEP: Final = 1024
#: The largest size of a head for which MLX uses cuDNN.
_MOST_DIM: Final = 128


def pads_attention(queries: Any, keys: Any, mask: Any) -> bool:
    """Say whether `attention` should handle these arguments: 16 bits, a causal mask, on CUDA."""
    return (
        isinstance(keys, mx.array)
        and mask == "causal"
        and queries.dtype == keys.dtype
        and queries.dtype in (mx.bfloat16, mx.float16)
        and queries.shape[3] <= _MOST_DIM
        and not on_cpu()
        and mx.cuda.is_available()
    )


def attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Compute causal attention of a session's last tokens to all its tokens, with padded shapes.

    Shapes as for `mx.fast.scaled_dot_product_attention`. The causal mask hides padding at the end from all
    tokens. Padding at the start rounds up the number of queries; the output for it is dropped.
    """
    num, length = queries.shape[2], keys.shape[2]
    before, after = padding(num, length)
    found: mx.array = mx.fast.scaled_dot_product_attention(
        _padded(queries, before, after),
        _padded(keys, 0, after),
        _padded(values, 0, after),
        scale=scale,
        mask="causal",
    )
    return found[:, :, before : before + num] if before or after else found


def padding(num_queries: int, num_keys: int) -> tuple[int, int]:
    """Return how many queries to add before the queries, and how many tokens to add after queries and keys.

    The number of keys becomes a multiple of a step: 256, or from 8,192 keys on the largest power of two up to
    a sixteenth of their number. The number of queries becomes a multiple of twice the step (1,024 at most),
    but not more than the number of keys. Attention for the padding takes a few milliseconds at most.
    """
    grid = max(_GRID, (1 << num_keys.bit_length()) >> 5)
    after = -num_keys % grid
    step = min(2 * grid, _MOST_STEP)
    num = min(num_queries + after + -(num_queries + after) % step, num_keys + after)
    return num - num_queries - after, after


def _padded(array: mx.array, before: int, after: int) -> mx.array:
    return mx.pad(array, [(0, 0), (0, 0), (before, after), (0, 0)]) if before or after else array
