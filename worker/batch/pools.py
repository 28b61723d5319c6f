"""Keeps rows of similar length in pools (`slots`), so that one operation computes their attention.

Used for models whose caches are plain or rings. Device thread only.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from .rows import CommonKv
from .slots import Pool, PoolPart, capacity_for, form_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .parts import Part
    from .rows import Row
    from .slots import Form

#: A row joins a pool with room for at least this many more tokens, so that it need not soon move again.
_ROOM: Final = 32


class Pools(CommonKv):
    """Keeps rows' KV in pools, one for each `slots.Form` and capacity; see `rows.CommonKv`."""

    def __init__(self, room: Callable[[int], bool], least: int) -> None:
        """`room(n)` says whether `n` more bytes may be allocated; `least` rows are needed for a pool."""
        self._room = room
        self._least = least
        self._pools: dict[tuple[Form, int], Pool] = {}
        self._slots: dict[Row, tuple[Pool, int]] = {}

    @property
    def removal_bytes(self) -> int:  # type: ignore[override]
        """The most bytes that `leave` allocates: a copy of the largest slot."""
        return max((pool.slot_bytes for pool in self._pools.values()), default=0)

    def place(self, rows: Sequence[Row]) -> None:
        """Move rows of similar length into a pool if there are enough; move rows out of full slots."""
        for row in rows:
            if row in self._slots and not self.may_run_ahead(row, 0):
                self.leave(row)
            row.form = row.form or form_of(row.caches or ())
        wanted = {row: self._pool_of(row, row.form) for row in rows if row.form}
        together = Counter(wanted.values())
        for row, key in wanted.items():
            if row.caches is None or together[key] < self._least:
                continue
            pool = self._pools.get(key) or Pool(*key)
            if self._room(pool.growth_bytes(row.caches) + self.removal_bytes):
                self._slots[row] = pool, pool.join(row.caches)
                self._pools[key], row.caches = pool, None

    def fitted(self, drafts: Mapping[Row, list[int]]) -> dict[Row, list[int]]:
        """Pad or shorten the drafts of a pool's rows to one length, for which every slot has room.

        The padding is verified like a draft; it is hardly ever accepted.
        """
        fitted = dict(drafts)
        for pool in self._pools.values():
            rows = [row for row, (own, _) in self._slots.items() if own is pool]
            most = max((len(drafts[row]) for row in rows if row in drafts), default=0)
            most = min(most, *(pool.capacity - row.num_cached - 1 for row in rows))
            for row in rows:
                more = [row.known[-1]] * most
                fitted[row] = (drafts.get(row, []) + more)[: max(most, 0)]
        return fitted

    def can_draft(self, row: Row) -> bool:
        """Say whether a row can have a draft: in a ring, it would overwrite keys that are still needed."""
        return row.form is not None and set(row.form) == {None}

    def parts(
        self, rows: Sequence[Row], num_ahead: int, drafts: Mapping[Row, list[int]]
    ) -> list[tuple[Part, list[Row]]]:
        """Make one part for each pool, with its rows in the order of their slots."""
        found: list[tuple[Part, list[Row]]] = []
        for pool in self._pools.values():
            pooled = sorted((row for row in rows if self._slots[row][0] is pool), key=self._slot)
            if pooled:
                lengths = [row.num_cached + num_ahead for row in pooled]
                num_each = 1 + len(drafts.get(pooled[0], ()))
                shifts = [row.shift for row in pooled]
                found.append((PoolPart(pool, [*map(self._slot, pooled)], lengths, num_each, shifts), pooled))
        return found

    def caches(self, row: Row) -> list[Any]:
        """Return a row's KV as caches that share its slot's memory; valid until the next step."""
        pool, slot = self._slots[row]
        return pool.views(slot, row.num_cached)

    def leave(self, row: Row) -> None:
        """Copy a row's KV to new caches of the row, and free its slot."""
        pool, slot = self._slots.pop(row)
        row.caches = pool.leave(slot, row.num_cached)
        if not pool.num_rows:
            self._pools = {key: kept for key, kept in self._pools.items() if kept is not pool}

    def may_run_ahead(self, row: Row, num_ahead: int = 1) -> bool:
        """Say whether a row's slot has room for `num_ahead` tokens and one more."""
        return not self._slots[row][0].is_full(row.num_cached + num_ahead)

    def clear(self) -> None:
        """Drop the pools and their rows."""
        self._pools, self._slots = {}, {}

    def _slot(self, row: Row) -> int:
        return self._slots[row][1]

    def _pool_of(self, row: Row, form: Form) -> tuple[Form, int]:
        held = self._slots.get(row)
        return form, held[0].capacity if held else capacity_for(form, row.num_cached + _ROOM)
