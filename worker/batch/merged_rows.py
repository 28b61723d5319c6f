"""Keeps the KV of several rows in mlx-lm's batch caches (`merged`). Device thread only.

Used for models whose caches are not all plain, or whose rows cannot share a pass: windows, recurrent states,
hybrids, custom attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .rows import Keeping

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .merged import MergedCaches
    from .parts import Part
    from .rows import Row


class MergedRows(Keeping):
    """Merges the KV of enough rows; see `rows.Keeping`. A row for which memory is short is not merged."""

    includes_ahead = True

    def __init__(self, merged: MergedCaches[Row], room: Callable[[int], bool], least: int) -> None:
        """`room(n)` says whether `n` more bytes may be allocated; fewer than `least` rows are not merged."""
        self._merged = merged
        self._room = room
        self._least = least

    @property
    def growing(self) -> list[int]:  # type: ignore[override]
        """The numbers of tokens for which the next step allocates memory; see `MergedCaches.growing`."""
        return self._merged.growing

    @property
    def removal_bytes(self) -> int:  # type: ignore[override]
        """The most bytes that `leave` and the next `place` allocate; see `MergedCaches.removal_bytes`."""
        return self._merged.removal_bytes

    def place(self, rows: Sequence[Row]) -> None:
        """Merge the rows that are not merged yet: all at once, or one by one while memory allows it."""
        merged = self._merged
        merged.tidy()
        own = [row for row in rows if row.caches is not None and merged.can_join(row.caches)]
        if len(own) + len(merged.rows) < self._least:
            return
        for some in (own, *([row] for row in own)):
            newcomers = [(row, row.caches) for row in some if row.caches is not None]
            if newcomers and self._room(merged.joining_bytes([caches for _, caches in newcomers])):
                merged.join(newcomers)
                for row, _ in newcomers:
                    row.caches = None

    def parts(
        self,
        rows: Sequence[Row],
        num_ahead: int,
        drafts: Mapping[Row, list[int]],  # noqa: ARG002
    ) -> list[tuple[Part, list[Row]]] | None:
        """Make one part of all merged rows.

        Returns None if `rows` are not exactly the merged ones, or if a row left after `place`.
        """
        every = self._merged.rows
        if set(every) != set(rows) or not self._merged.is_tidy:
            return None
        return [(self._merged.part([row.num_cached + num_ahead for row in every]), every)] if every else []

    def caches(self, row: Row) -> list[Any]:
        """Return a row's KV, copied to separate caches, not evaluated."""
        return self._merged.show(row)

    def leave(self, row: Row) -> None:
        """Copy a row's KV to new caches of the row; the next `place` frees its memory in the batch."""
        row.caches = self._merged.leave(row)

    def commit(self) -> None:
        """Make the last step final: it can no longer be undone."""
        self._merged.commit()

    def roll_back(self) -> None:
        """Undo the last step, unless it is final."""
        self._merged.roll_back()

    def clear(self) -> None:
        """Drop all merged rows."""
        self._merged.clear()
