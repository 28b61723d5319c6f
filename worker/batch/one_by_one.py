"""Answers and prompts one after the other, each in passes of its own. Device thread only.

For models whose rows can neither share a pass (`forward`) nor be merged (`merged`). Every row stays on its
session's own caches, in which a step that failed cannot be taken back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .batch import Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .batch import PrefillPiece, Row


class OneByOne(Batch):
    """Rows that run alone, in turns."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def step(self, pieces: Sequence[PrefillPiece], *, run_ahead: bool = False) -> None:
        """Run each row, then each piece. Nothing begins ahead."""
        del run_ahead
        self._draw(self._rows, pieces, run_apart(self._model, self._rows, pieces))


def run_apart(
    model: Any, rows: Sequence[Row], pieces: Sequence[PrefillPiece], logits: Sequence[mx.array] = ()
) -> mx.array:
    """Build passes over one row or piece each: `logits`, those of the rows, and of the rows that begin."""
    found = [*logits, *(model(mx.array([[row.known[-1]]]), cache=row.caches)[:, -1] for row in rows)]
    for piece in pieces:
        if piece.row is None:
            model(mx.array([piece.tokens]), cache=piece.caches)
            continue
        if len(piece.tokens) > 1:  # without logits: those of a whole prompt would be computed for one
            model(mx.array([piece.tokens[:-1]]), cache=piece.caches)
        found.append(model(mx.array([piece.tokens[-1:]]), cache=piece.caches)[:, -1])
    return mx.concatenate(found) if found else mx.array([])
