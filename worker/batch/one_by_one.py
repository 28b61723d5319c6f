"""Runs answers and prompts one after the other, each in separate passes. Device thread only.

For models whose rows can neither share a pass (`forward`) nor be merged (`merged`). Every row uses its
session's own caches, in which a failed step cannot be rolled back.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from cache.kv.ring import RingCache
from cache.kv.states import leaves

from .batch import Batch
from .forward import OwnPart, RingView

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .batch import PrefillPiece, Row
    from .ring_attention import Rotate


class OneByOne(Batch):
    """Rows that run one after the other."""

    def __init__(self, model: Any, rotations: Sequence[Rotate] | None = None) -> None:
        """`rotations` says how layers rotate queries, if their caches may be rings."""
        super().__init__()
        self.has_rings = rotations is not None
        self._model = model
        self._rotations = rotations

    def step(self, pieces: Sequence[PrefillPiece], *, run_ahead: bool = False) -> None:
        """Run each row, then each piece. Never runs ahead."""
        del run_ahead
        self._draw(self._rows, pieces, run_apart(self._model, self._rows, pieces, rotations=self._rotations))


def run_apart(
    model: Any,
    rows: Sequence[Row],
    pieces: Sequence[PrefillPiece],
    logits: Sequence[mx.array] = (),
    rotations: Sequence[Rotate] | None = None,
) -> mx.array:
    """Build a separate pass over each row and piece; return the logits that rows draw from.

    The result is `logits`, then the logits of `rows`, then of the rows whose prompts end in these pieces.
    """

    def run(caches: list[Any], tokens: list[int]) -> mx.array:
        return run_alone(model, caches, tokens, rotations)[:, -1]

    found = [*logits, *(run(row.caches or [], [row.known[-1]]) for row in rows)]
    for piece in pieces:
        if piece.row is None:
            run(piece.caches, piece.tokens)
            continue
        if len(piece.tokens) > 1:  # else the logits of the whole piece would be computed
            run(piece.caches, piece.tokens[:-1])
        found.append(run(piece.caches, piece.tokens[-1:]))
    return mx.concatenate(found) if found else mx.array([])


def run_alone(
    model: Any, caches: list[Any], tokens: list[int], rotations: Sequence[Rotate] | None
) -> mx.array:
    """Build a pass over one session's next tokens; return their logits, (1, tokens, vocabulary).

    One call of the model cannot cross a multiple of a ring's grid (see `RingCache`), so tokens on both sides
    of it take several calls.
    """
    rings = [cache for _, cache in leaves(caches) if type(cache) is RingCache]
    if not rings or rotations is None:
        whole: mx.array = model(mx.array([tokens]), cache=caches)
        return whole
    found: list[mx.array] = []
    while tokens:
        num = min(len(tokens), *(ring.grid - ring.offset % ring.grid for ring in rings))
        found.append(model(mx.array([tokens[:num]]), cache=_shown(caches, num, rotations)))
        tokens = tokens[num:]
    return found[0] if len(found) == 1 else mx.concatenate(found, axis=1)


def _shown(caches: list[Any], num_tokens: int, rotations: Sequence[Rotate]) -> list[Any]:
    """Replace ring caches by views, for a pass over the next tokens."""
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
