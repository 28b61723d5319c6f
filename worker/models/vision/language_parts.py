"""Parts of a language model that images need: rotary positions in three (M-RoPE), rows for several layers.

Nothing of an image is kept in them: positions and rows come with the caches of a pass. Device thread only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.nn.layers.base import Module

if TYPE_CHECKING:
    from collections.abc import Sequence


class SectionedRope(Module):
    """Wraps a layer's `rope`. Sections of its frequencies rotate by time, by height and by width."""

    def __init__(self, rope: Any, axes: Sequence[int]) -> None:
        """`axes` has, for each frequency, the position by which it rotates: 0, 1 or 2."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.rope = rope
        self._axes = mx.array([*axes, *axes])  # each frequency turns a pair of dimensions, half a head apart

    def __call__(self, x: mx.array, offset: mx.array | int = 0) -> mx.array:
        """Rotate by `offset`: the first token's position, or one for each token, or three, (3, tokens).

        `x` is (tokens, heads, 1, head_dim), or (1, heads, tokens, head_dim).
        """
        if not isinstance(offset, int) and x.shape[0] != offset.shape[-1]:
            return self(x.swapaxes(0, 2), offset).swapaxes(0, 2)
        if isinstance(offset, int) or offset.ndim < 2:
            plain: mx.array = self.rope(x, offset=offset)
            return plain
        time, height, width = (self.rope(x, offset=offset[i]) for i in range(3))
        axes = mx.pad(self._axes, (0, x.shape[-1] - self._axes.size))  # some dimensions are not rotated
        return mx.where(axes == 0, time, mx.where(axes == 1, height, width))


def patch(model: Any, axes: Sequence[int], num_deep: int) -> None:
    """Make the layers of a language model rotate by three positions, and the first `num_deep` add rows."""
    for attention in (layer.self_attn for layer in model.layers if "self_attn" in layer):
        attention.rope = SectionedRope(attention.rope, axes)
    for layer in model.layers[:num_deep]:
        layer.__class__ = _adding(type(layer))


def _adding(kind: Any) -> Any:
    """Return a layer's class that adds the rows `added` of its cache to its output (DeepStack)."""

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        output: mx.array = kind.__call__(self, x, mask, cache)
        added = getattr(cache, "added", None)
        return output if added is None else output + added

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
