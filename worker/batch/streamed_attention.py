"""Computes attention to keys that arrive in parts, such as those that are read from SSD.

Device thread only.

Only one part of the keys and its scores are in memory. The result so far is rescaled when a part has larger
scores: "Online normalizer calculation for softmax" (arXiv 1805.02867).
"""

from __future__ import annotations

import mlx.core as mx

from . import cpu


class StreamedAttention:
    """Computes the attention of `queries`, (1, heads, tokens, head_dim), to keys added in parts."""

    def __init__(self, queries: mx.array, scale: float, sink_logits: mx.array | None = None) -> None:
        """`sink_logits`, one per head, are the scores of learned attention sinks, which have no keys."""
        _, heads, num_tokens, _ = queries.shape
        self._queries = queries * scale
        shape = (1, heads, num_tokens, 1)
        self._largest = mx.full(shape, -mx.inf)
        self._sums, self._values = mx.zeros(shape), mx.zeros((1, 1, 1, 1))
        if sink_logits is not None:
            self._largest = mx.broadcast_to(sink_logits[None, :, None, None].astype(mx.float32), shape)
            self._sums = mx.ones(shape)

    def add(self, keys: mx.array, values: mx.array, seen: mx.array | None = None) -> None:
        """Add the attention to more keys, (1, KV heads, length, head_dim), and their values; evaluate it.

        `seen`, (tokens, length), says which token sees which key; each token must see at least one key of the
        part.
        """
        (_, heads, num_tokens, size), (_, kv_heads, length, _) = self._queries.shape, keys.shape
        together = self._queries.reshape(1, kv_heads, -1, size)
        scores = (together @ keys.swapaxes(-1, -2)).reshape(1, heads, num_tokens, length)
        if seen is not None:
            scores = mx.where(seen, scores, mx.array(-mx.inf, scores.dtype))
        if cpu.faster_weighted(scores):
            largest, sums = cpu.exponentiated(scores)
        else:
            scores = scores.astype(mx.float32)
            largest = scores.max(axis=-1, keepdims=True)
            scores = mx.exp(scores - largest)
            sums = scores.sum(axis=-1, keepdims=True)
        grouped = scores.astype(values.dtype).reshape(1, kv_heads, -1, length)
        found = (grouped @ values).reshape(1, heads, num_tokens, -1).astype(mx.float32)
        before, self._largest = self._largest, mx.maximum(self._largest, largest)
        kept, added = mx.exp(before - self._largest), mx.exp(largest - self._largest)
        self._sums = self._sums * kept + sums * added
        self._values = self._values * kept + found * added
        mx.eval(self._largest, self._sums, self._values)

    def result(self) -> mx.array:
        """Return the attention's output, (1, heads, tokens, size of a value), in the queries' dtype."""
        return (self._values / self._sums).astype(self._queries.dtype)
