"""Computes attention for a model's layers, and chooses the fastest implementation for the given KV.

Device thread only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from mlx_lm.models import base

from . import cpu, cuda, ring_attention
from .streamed_attention import StreamedAttention

if TYPE_CHECKING:
    from collections.abc import Callable

    from .ring_attention import Rotate, VisibleSlots

#: mlx-lm's own function. It is saved here because `forward` replaces it even in the module that defines it.
THEIR_ATTENTION: Final[Any] = base.scaled_dot_product_attention


@dataclass(slots=True)
class Attention:
    """Computes the attention of one layer; holds the arguments that do not depend on the KV."""

    #: The factor of the scores, mostly head_dim ** -0.5.
    scale: float
    #: The model's other keyword arguments, such as `sinks`, learned sinks.
    more: dict[str, Any]
    #: Applies the rotary embedding to queries; needed only for rings.
    rotate: Rotate | None = None

    def __call__(self, queries: mx.array, keys: Any, values: Any, *, cache: Any, mask: Any) -> mx.array:
        """Compute attention to keys and values from a cache, with the fastest implementation for them."""
        plain = all(value is None for value in self.more.values())  # no attention sinks
        if plain and cpu.should_dequantise(keys):
            precision = {"group_size": cache.group_size, "bits": cache.bits}
            keys, values = (mx.dequantize(*part, **precision) for part in (keys, values))
            cache = None
        if plain and cpu.faster_attention(queries, keys):
            return cpu.attention(queries, keys, values, self.scale, mask)
        if plain and cuda.pads_attention(queries, keys, mask):
            return cuda.attention(queries, keys, values, self.scale)
        theirs: mx.array = THEIR_ATTENTION(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask, **self.more
        )
        return theirs

    def running(self, queries: mx.array) -> StreamedAttention:
        """Return a `StreamedAttention` of `queries`, to which the caller adds keys and values in parts."""
        return StreamedAttention(queries, self.scale, self.more.get("sinks"))

    def to_ring(
        self,
        queries: mx.array,
        places: tuple[mx.array, mx.array],
        sight: VisibleSlots,
        to_rows: Callable[[mx.array], mx.array],
    ) -> mx.array:
        """Compute attention to a ring cache; `places` are its keys and values.

        Calls `ring_attention.attend`, or plain attention if no query must be rotated. For the shapes and for
        `to_rows` see there.
        """
        keys, values = places
        if sight.is_plain:
            return self(to_rows(queries), keys, values, cache=None, mask=sight.seen)
        if self.rotate is None:
            raise AssertionError("a ring without its layer's rotation")
        return ring_attention.attend(
            queries,
            keys,
            values,
            sight,
            scale=self.scale,
            rotate=self.rotate,
            to_rows=to_rows,
            sink_logits=self.more.get("sinks"),
        )
