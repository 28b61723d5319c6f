"""Merges quantised KV into one batch cache: a token's codes, scales and biases become a row of bytes.

Device thread only. mlx-lm's batch cache moves, pads and cuts keys and values without interpreting them, so it
can hold bytes. Attention gets codes, scales and biases again, and reads `bits` and `group_size` from this
cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

if TYPE_CHECKING:
    from collections.abc import Sequence


class MergedQuantised(BatchKVCache):
    """Rows with the same group size and number of bits; `dtype` is the type of the scales."""

    group_size: int
    bits: int
    dtype: mx.Dtype

    @classmethod
    def merge(cls, caches: Sequence[QuantizedKVCache]) -> MergedQuantised:
        """Copy non-empty caches into one, padded on the left to the length of the longest."""
        plain = []
        for cache in caches:
            held: Any = (cache.keys, cache.values)
            packed = KVCache()  # type: ignore[no-untyped-call]  # mlx-lm has no annotations
            packed.state = (*map(_packed, held), cache.offset)
            plain.append(packed)
        merged: MergedQuantised = super().merge(plain)  # type: ignore[no-untyped-call]
        merged.group_size, merged.bits = caches[0].group_size, caches[0].bits
        first: Any = caches[0].keys
        merged.dtype = first[1].dtype
        return merged

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Quantise and add a token for each row; return all KV as codes, scales and biases."""
        packed = (_packed(self._quantised(part)) for part in (keys, values))
        held = super().update_and_fetch(*packed)  # type: ignore[no-untyped-call]
        return self._unpacked(held[0]), self._unpacked(held[1])

    def extract(self, idx: int) -> QuantizedKVCache:
        """Copy a row to a cache of its own, with the same codes."""
        plain: Any = super().extract(idx)  # type: ignore[no-untyped-call]
        cache = QuantizedKVCache(group_size=self.group_size, bits=self.bits)
        parts = (self._unpacked(plain.keys), self._unpacked(plain.values), plain.offset)
        cache.state = (*parts, self.group_size, self.bits)
        return cache

    def _quantised(self, part: mx.array) -> Any:
        return mx.quantize(part, group_size=self.group_size, bits=self.bits)

    def _unpacked(self, packed: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Split `(rows, heads, tokens, bytes)` into codes, scales and biases."""
        of_codes, of_scales = self.group_size * self.bits // 8, self.dtype.size
        num_groups = packed.shape[3] // (of_codes + 2 * of_scales)
        ends = (num_groups * of_codes, num_groups * (of_codes + of_scales))
        codes, scales, biases = mx.split(packed, ends, axis=-1)
        return codes.view(mx.uint32), scales.view(self.dtype), biases.view(self.dtype)


def _packed(parts: Sequence[mx.array]) -> mx.array:
    """Concatenate codes, scales and biases of each token and head, as bytes."""
    return mx.concatenate([part.view(mx.uint8) for part in parts], axis=-1)
