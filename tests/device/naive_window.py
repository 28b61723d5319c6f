"""A plain reference for attention to sinks and a window (arXiv 2309.17453): runs a whole session at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

from cache.kv.states import leaves
from cache.names.policy import Policy


def kinds_of(model: Any, policy: Policy) -> list[tuple[int, int | None] | None]:
    """Return each layer's number of sinks and window under a policy; None for a layer without attention."""
    found: list[tuple[int, int | None] | None] = []
    for cache in make_prompt_cache(model):
        attending = next((leaf for _, leaf in leaves([cache]) if type(leaf) is not ArraysCache), None)
        if attending is None:
            found.append(None)
        else:
            plain = type(attending) is KVCache
            found.append((policy.sink, policy.window) if plain else (0, attending.max_size))
    return found


class _Unrotated(nn.Module):
    def __init__(self, rope: Any) -> None:
        super().__init__()
        self.real = rope

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        return x


class Naive:
    """The model `fresh` with the weights of `model`; `kinds` are the sinks and windows by layer.

    A token at t sees key j if t - window < j <= t or j < sink. For a sink outside the window, the query is
    rotated to `sink + window - 1` instead of t. A token in a layer without a window sees all before it.
    """

    def __init__(self, model: Any, fresh: Any, kinds: Sequence[tuple[int, int | None] | None]) -> None:
        fresh.update(model.parameters())
        self._model = fresh
        self._kinds = [kind for kind in kinds if kind is not None]
        self._layer = 0
        self._ropes: list[Any] = []
        for layer, kind in zip(fresh.layers, kinds, strict=True):
            if kind is None:
                continue
            found = [(part, name) for part in layer.modules() for name in part if "rope" in name]
            self._ropes.append(getattr(*found[0]) if found else None)
            for part, name in found:
                setattr(part, name, _Unrotated(getattr(part, name)))

    def logits(self, tokens: Sequence[int]) -> mx.array:
        """Run a whole session at once; return logits, (tokens, vocabulary)."""
        modules = [sys.modules[type(part).__module__] for part in self._model.modules()]
        known = [module for module in modules if hasattr(module, "scaled_dot_product_attention")]
        theirs = [module.scaled_dot_product_attention for module in known]
        self._layer = 0
        try:
            for module in known:
                module.scaled_dot_product_attention = self._attend  # type: ignore[attr-defined]
            found: mx.array = self._model(mx.array([list(tokens)]))[0]
            mx.eval(found)
        finally:
            for module, function in zip(known, theirs, strict=True):
                module.scaled_dot_product_attention = function  # type: ignore[attr-defined]
        return found

    def _attend(
        self, q: Any, k: Any, v: Any, cache: Any, scale: float, mask: Any = None, **more: Any
    ) -> mx.array:
        del cache, mask
        (sink, window), rope = self._kinds[self._layer], self._ropes[self._layer]
        self._layer += 1
        num = q.shape[2]
        t, j = np.arange(num)[:, None], np.arange(num)[None]
        window = window or num
        near = (j <= t) & (j > t - window)
        far = (j < sink) & (j <= t - window)

        def scores(at: np.ndarray) -> mx.array:
            turned = q
            if rope is not None:  # a row for each query, at its own place
                turned = rope(q.transpose(2, 1, 0, 3), offset=mx.array(at)).transpose(2, 1, 0, 3)
            keys = k if rope is None else rope(k, offset=0)
            keys = mx.repeat(keys, q.shape[1] // k.shape[1], axis=1)
            return (turned @ keys.swapaxes(-1, -2)) * scale

        at = np.arange(num)
        found = mx.where(mx.array(far), scores(np.minimum(at, sink + window - 1)), scores(at))
        found = mx.where(mx.array(near | far), found, -mx.inf)
        if more.get("sinks") is not None:
            column = mx.broadcast_to(more["sinks"][None, :, None, None], (*found.shape[:3], 1))
            found = mx.concatenate([found, column], axis=-1)
        weights = mx.softmax(found, axis=-1, precise=True)[..., :num]
        return weights @ mx.repeat(v, q.shape[1] // v.shape[1], axis=1)
