"""Lays out masks for Metal's attention kernels, and knows its errors. Device thread only."""

from __future__ import annotations

from typing import Final

import mlx.core as mx

#: The most queries of a row that the vector kernel takes.
_MOST_QUERIES: Final = 8


def has_failed(error: BaseException) -> bool:
    """Say whether an error is of the GPU itself, not of the operation that raises it."""
    return "Command buffer execution failed" in str(error)


def spreads_masks(mask: mx.array) -> bool:
    """Say whether Metal's attention would copy this mask, (rows, 1, tokens, keys), in each layer.

    The vector kernel needs rows and heads in one stride, so it copies a mask that all heads of several rows
    share (`mask_copy_unless` in MLX's `scaled_dot_product_attention.cpp`).
    """
    return mask.shape[0] > 1 and mask.shape[2] <= _MOST_QUERIES and _on_metal()


def spread(mask: mx.array, num_heads: int) -> mx.array:
    """Return a mask, (rows, 1, tokens, keys), with a copy for each head: (rows, heads, tokens, keys)."""
    rows, _, num_tokens, num_keys = mask.shape
    return mx.contiguous(mx.broadcast_to(mask, (rows, num_heads, num_tokens, num_keys)))


def _on_metal() -> bool:
    return mx.metal.is_available() and bool(mx.default_device() == mx.gpu)
