"""Answers and prompts one after the other, each in passes of its own. Device thread only.

For models whose rows can neither share a pass (`forward`) nor be merged (`merged`). Every row stays on its
session's own caches, where a failed step cannot be rolled back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .batch import Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .batch import PrefillPiece, Row


class OneByOne(Batch):
    """Rows that run one after the other."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def step(self, pieces: Sequence[PrefillPiece], *, run_ahead: bool = False) -> None:
        """Run each row, then each piece. Never runs ahead."""
        del run_ahead
        self._draw(self._rows, pieces, run_apart(self._model, self._rows, pieces))


def run_apart(
    model: Any, rows: Sequence[Row], pieces: Sequence[PrefillPiece], logits: Sequence[mx.array] = ()
) -> mx.array:
    """Build a pass over each row and piece; returns `logits`, the rows' and the new rows' first."""
    found = [*logits, *(model(mx.array([[row.known[-1]]]), cache=row.caches)[:, -1] for row in rows)]
    for piece in pieces:
        if piece.row is None:
            model(mx.array([piece.tokens]), cache=piece.caches)
            continue
        if len(piece.tokens) > 1:  # else the logits of the whole piece would be computed
            model(mx.array([piece.tokens[:-1]]), cache=piece.caches)
        found.append(model(mx.array([piece.tokens[-1:]]), cache=piece.caches)[:, -1])
    return mx.concatenate(found) if found else mx.array([])
