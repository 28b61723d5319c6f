"""Answers decode together in merged caches; prompts run on their own caches. Device thread only.

For models whose caches are not all plain, or whose rows cannot share a pass: windows, recurrent states,
hybrids, custom attention. Owns the list of merged rows; `merged` owns their KV.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx

from .batch import Batch
from .forward import OwnPart
from .one_by_one import run_apart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .batch import PrefillPiece, Row
    from .forward import Forward, Part
    from .merged import MergedCaches
    from .ring_attention import Rotate

#: A single row stays on its own caches, which spares the copies.
_LEAST_ROWS: Final = 2


class MergedRows(Batch):
    """Rows are merged once there are two. A row that does not fit into memory stays on its own caches."""

    def __init__(
        self,
        model: Any,
        merged: MergedCaches[Row],
        forward: Forward | None,
        room: Callable[[int], bool],
        rotations: Sequence[Rotate] | None = None,
    ) -> None:
        """`forward` runs pieces beside the rows in one pass; None if the model cannot share a pass.

        `room(n)` says whether `n` more bytes may be allocated. `rotations` says how layers rotate queries, if
        their caches can be rings; rows with rings are not merged.
        """
        super().__init__()
        self.has_rings = rotations is not None
        self._rotations = rotations
        self._model = model
        self._merged = merged
        self._forward = forward
        self._room = room

    @property
    def growing(self) -> list[int]:
        """The lengths in tokens of all rows, merged or not, whose caches the next step enlarges."""
        return super().growing + self._merged.growing

    @property
    def removal_bytes(self) -> int:
        """The most bytes that removing one row allocates meanwhile."""
        return self._merged.removal_bytes

    def caches(self, row: Row) -> list[Any]:
        """Return a row's KV, to be read before the next step."""
        return self._merged.show(row) if row.caches is None else row.caches

    def step(self, pieces: Sequence[PrefillPiece], *, run_ahead: bool = False) -> None:
        """Run the merged rows, and beside them the unmerged rows and the pieces. Never runs ahead."""
        del run_ahead
        self._join()
        merged, own = self._merged.rows, [row for row in self._rows if row.caches is not None]
        if self._forward is not None and (own or pieces):
            parts: list[Part] = [self._merged.part([row.num_cached for row in merged])] if merged else []
            parts += [OwnPart(row.caches or [], row.num_cached, 1) for row in own]
            logits = self._forward(parts, [row.known[-1] for row in (*merged, *own)], pieces)
        else:  # without the views of a shared pass
            first = [self._merged.run(mx.array([row.known[-1] for row in merged]))] if merged else []
            logits = run_apart(self._model, own, pieces, first, self._rotations)
        self._draw([*merged, *own], pieces, logits)
        self._merged.commit()

    def remove(self, row: Row) -> list[Any]:
        """Remove a row, and return its KV as separate caches."""
        self._rows.remove(row)
        if row.caches is None:
            row.caches = self._merged.leave(row)
        return row.caches

    def roll_back(self) -> bool:
        """Undo the step in the merged caches; False if some row is not merged."""
        self._merged.roll_back()
        return set(self._rows) <= set(self._merged.rows)

    def clear(self) -> None:
        """Drop every row and its KV."""
        super().clear()
        self._merged.clear()

    def _join(self) -> None:
        """Merge the rows that are not merged yet: all at once, or as many as fit into memory."""
        merged = self._merged
        merged.tidy()
        own = [row for row in self._rows if row.caches is not None and merged.can_join(row.caches)]
        if len(own) + len(merged.rows) < _LEAST_ROWS:
            return
        for some in (own, *([row] for row in own)):
            newcomers = [(row, row.caches) for row in some if row.caches is not None]
            if newcomers and self._room(merged.joining_bytes([caches for _, caches in newcomers])):
                merged.join(newcomers)
                for row, _ in newcomers:
                    row.caches = None
