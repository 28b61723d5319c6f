"""Finds a model's layers with induction heads: attention heads that match repeated text.

Device thread only.

Such a head attends from a token to the token's earlier occurrence, or to the token that followed it there. A
trial measures this on a repeated sequence of random tokens. Only these layers have sketches (2-bit copies)
of keys, which choose the chunks that are read from SSD.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from .parts import OwnPart

if TYPE_CHECKING:
    from .attention import Attention
    from .forward import Forward

#: Number of random tokens in the repeated sequence, and their seed.
_NUM_TOKENS: Final = 128
_SEED: Final = 0
#: Sketches are kept for one layer in `_ONE_IN`, but at least for `_FEWEST` layers.
_ONE_IN: Final = 5
_FEWEST: Final = 4


def num_sketched(num_layers: int) -> int:
    """Return how many of a model's `num_layers` layers have sketches of keys."""
    return min(num_layers, max(_FEWEST, -(-num_layers // _ONE_IN)))


def find(model: Any, forward: Forward) -> tuple[int, ...]:
    """Return the indices of the layers with the best induction heads, in ascending order.

    Only layers without a sliding window are considered.
    """
    own = make_prompt_cache(model)
    whole = [layer for layer, cache in enumerate(own) if type(cache) in (KVCache, QuantizedKVCache)]
    if len(whole) <= _FEWEST:
        return tuple(whole)
    plain: list[Any] = [KVCache() for _ in own]  # type: ignore[no-untyped-call]
    part = _Matching(plain)
    num_ids = model(mx.array([[0]]), cache=own).shape[-1]
    text = np.random.default_rng(_SEED).integers(num_ids, size=_NUM_TOKENS).tolist()
    mx.eval(forward([part], text + text), part.matched)
    shares: Any = mx.stack(part.matched).tolist()
    best = sorted(whole, key=lambda layer: -float(shares[layer]))
    return tuple(sorted(best[: num_sketched(len(whole))]))


class _Matching(OwnPart):
    """A pass over a text and its repetition, which measures how well each layer's heads match them.

    `matched` has one number per layer, not evaluated yet: the result of its best head. The result is the
    larger of two means over the repeated tokens: the share of attention on the token's first occurrence, and
    on the token after that.
    """

    def __init__(self, caches: list[Any]) -> None:
        super().__init__(caches, 0, 2 * _NUM_TOKENS)
        self.matched: list[mx.array] = []
        at = mx.arange(2 * _NUM_TOKENS)
        self._seen = at <= at[_NUM_TOKENS:, None]

    def attend(self, layer: int, queries: mx.array, mask: Any, attention: Attention) -> mx.array:
        """Compute attention, and add the layer's result to `matched`."""
        keys = self._fetched[0][0]  # (KV heads, tokens, head_dim)
        again = queries[_NUM_TOKENS:, :, 0].swapaxes(0, 1)  # (heads, tokens, head_dim)
        grouped = again.reshape(keys.shape[0], -1, again.shape[-1])
        scores = (grouped @ keys.swapaxes(-1, -2) * attention.scale).reshape(-1, *self._seen.shape)
        shares = mx.softmax(mx.where(self._seen, scores.astype(mx.float32), -mx.inf), axis=-1)
        there = [mx.diagonal(shares, offset, 1, 2).mean(axis=-1).max() for offset in (0, 1)]
        self.matched.append(mx.maximum(*there))
        return super().attend(layer, queries, mask, attention)
