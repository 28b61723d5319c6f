"""Runs rows and prompts one after the other, each by a call of the unchanged model. Device thread only.

Used for models whose rows cannot share a pass (`forward`). Only merged rows (`merged`) run in one call.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from cache.kv.ring import RingCache
from cache.kv.states import leaves

from .forward import RingView
from .image_rows import input_embeddings, layer_additions
from .parts import MergedPart, OwnPart, rotary_offsets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .parts import Part
    from .ring_attention import Rotate
    from .rows import PrefillPiece


class OwnPass:
    """Runs a pass as several calls of the unchanged model, one after the other; see `rows.Pass`."""

    def __init__(self, model: Any, rotations: Sequence[Rotate] | None = None) -> None:
        """`rotations` are the functions that rotate each layer's queries; None if no cache is a ring."""
        self._model = model
        self._rotations = rotations

    def __call__(
        self,
        parts: Sequence[Part],
        tokens: Sequence[int] | mx.array,
        pieces: Sequence[PrefillPiece] = (),
        *,
        hidden: bool = False,
    ) -> mx.array:
        """Call the model separately for each part and piece; arguments and result as for `rows.Pass`.

        `hidden` applies only to pieces.
        """
        found: list[mx.array] = []
        tokens = tokens if isinstance(tokens, mx.array) else mx.array([*tokens], mx.int32)
        for part in parts:
            some, tokens = tokens[: len(part.positions)], tokens[len(part.positions) :]
            if isinstance(part, MergedPart):
                found.append(self._model(some[:, None], cache=_shown_at(part))[:, -1])
            elif isinstance(part, OwnPart):
                found.append(run_alone(self._model, _shown_at(part), some, self._rotations)[0])
        for piece in pieces:
            part = piece.part()
            # In a separate call, so that no logits are computed for these tokens.
            num_plain = len(piece.tokens) - piece.has_output
            rows, whole, more = None, mx.array(piece.tokens), list[mx.array]()
            if piece.images is not None:
                rows, whole = input_embeddings(self._model, whole, [(0, piece.images)])
                more = layer_additions(rows, [(0, piece.images)])
            if num_plain:
                some, shown = whole[:num_plain], _shown_at(part, 0, num_plain, more)
                run_alone(self._model, shown, some, self._rotations, rows)
            if piece.has_output:
                model = self._model.model if hidden else self._model
                last, shown = whole[num_plain:], _shown_at(part, num_plain, more=more)
                rows = rows[num_plain:] if rows is not None else None
                found.append(run_alone(model, shown, last, self._rotations, rows)[0])
        return mx.concatenate(found) if found else mx.array([])


class _CacheView:
    """Replaces a layer's cache while the model runs tokens of a part that have other positions, or masks."""

    def __init__(self, part: OwnPart, layer: int, added: mx.array | None) -> None:
        self._part, self._layer, at = part, layer, part.positions
        self.offset = at.start if isinstance(at, range) else rotary_offsets(at)
        self.added = added  # to the layer's output

    def make_mask(self, num_tokens: int, **options: Any) -> Any:
        del num_tokens
        return self._part.masks(self._layer, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part.caches[self._layer], name)


def _shown_at(
    whole: OwnPart, start: int = 0, end: int | None = None, more: Sequence[mx.array] = ()
) -> Sequence[Any]:
    """Return what replaces a part's caches while the model runs its tokens `[start, end)`.

    `more` are rows that the first layers add to their outputs, one for each of the part's tokens.
    """
    if whole.positions == whole.numbers and not whole.joint:
        return whole.caches
    part, rows = whole.cut(start, end), (each[start:end][None] for each in more)
    return [
        _CacheView(part, layer, next(rows, None)) if hasattr(cache, "offset") else cache
        for layer, cache in enumerate(part.caches)
    ]


def run_alone(
    model: Any,
    caches: Sequence[Any],
    tokens: mx.array,
    rotations: Sequence[Rotate] | None,
    rows: mx.array | None = None,
) -> mx.array:
    """Run a model over one session's next `tokens`; return its unevaluated outputs, (1, tokens, size).

    `rows` are the input embeddings of at least these tokens; without them the model embeds the tokens.

    A ring's positions restart at each multiple of `RingCache.grid`. One call of the model cannot run tokens
    on both sides of such a multiple; they run in several calls.
    """
    rings = [cache for _, cache in leaves(caches) if type(cache) is RingCache]

    def run(start: int, end: int, shown: Sequence[Any]) -> mx.array:
        options = {} if rows is None else {"input_embeddings": rows[start:end][None]}
        outputs: mx.array = model(tokens[start:end][None], cache=shown, **options)
        return outputs

    if not rings or rotations is None:
        return run(0, len(tokens), caches)
    found: list[mx.array] = []
    start = 0
    while start < len(tokens):
        num = min(len(tokens) - start, *(ring.grid - ring.offset % ring.grid for ring in rings))
        found.append(run(start, start + num, _shown(caches, num, rotations)))
        start += num
    return found[0] if len(found) == 1 else mx.concatenate(found, axis=1)


def _shown(caches: Sequence[Any], num_tokens: int, rotations: Sequence[Rotate]) -> list[Any]:
    """Return the caches for a pass over the next `num_tokens` tokens, with each ring behind a `RingView`."""
    held = [cache for _, cache in leaves(caches)]
    start = next(cache.offset for cache in held if type(cache) is RingCache)
    part, number = OwnPart(held, start, num_tokens), count()

    def shown(cache: Any, rotate: Rotate) -> Any:
        if type(cache) is CacheList:
            members = [shown(member, rotate) for member in cache.caches]
            return CacheList(*members)  # type: ignore[no-untyped-call]
        leaf = next(number)
        return RingView(leaf, part, rotate) if type(cache) is RingCache else cache

    return [shown(cache, rotate) for cache, rotate in zip(caches, rotations, strict=True)]
