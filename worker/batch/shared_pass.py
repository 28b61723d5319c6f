"""Runs answers and pieces of prompts in one pass over the weights, for models with plain KV.

Device thread only.

A step runs all rows and pieces in one pass of `forward`, and draws the rows' tokens. Three things make a step
faster without changing the tokens: rows of similar length attend together in a pool (`slots`), rows speculate
while there are few of them (`lookup`), and the next step may be in flight before the last tokens are known.

A step only appends to plain caches, so setting a cache's offset back undoes the step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx

from .batch import Batch
from .forward import OwnPart
from .lookup import Lookup
from .sampling import draw_all, waits_for_logits
from .slots import Pool, capacity_for, form_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from .batch import PrefillPiece, Row
    from .forward import Forward, Part
    from .slots import Form

    #: A row, and its draft: the tokens speculated after its last one.
    Draft: TypeAlias = tuple[Row, list[int]]

#: A row joins a pool with room for at least this many more tokens, so that it does not move at once.
_ROOM: Final = 32
#: With more rows than this a step is bound by computing, and speculation would delay the other rows.
_DRAFTING_ROWS: Final = 2


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    """A step in flight.

    `choice` has the tokens drawn for `drafts`, then the first tokens of the rows that begin.
    """

    drafts: list[Draft]
    beginning: list[Row]
    choice: mx.array | None
    states: list[Any]


class SharedPass(Batch):
    """Rows whose KV is in the caches of their sessions, or in a slot of a pool."""

    def __init__(
        self,
        forward: Forward,
        room: Callable[[int], bool],
        *,
        pools: bool,
        max_draft: int,
        pooled_rows: int,
        has_rings: bool = False,
        sketched: tuple[int, ...] = (),
    ) -> None:
        """`room(n)` says whether a pool may allocate `n` more bytes. `max_draft` limits a row's draft.

        Fewer than `pooled_rows` rows of similar length stay on their own caches. `pools` is true if no KV is
        quantised: slots hold plain arrays of keys and values.
        """
        super().__init__()
        self.has_rings = self.windows_are_rings = has_rings
        self.sketched = sketched
        self._forward = forward
        self._room = room
        self._has_pools = pools
        self._max_draft = max_draft
        self._pooled_rows = pooled_rows
        self._pools: dict[tuple[Form, int], Pool] = {}  # by form and capacity
        self._ahead: _LaunchedStep | None = None

    @property
    def removal_bytes(self) -> int:
        """The most bytes that removing one row allocates meanwhile: a copy of its slot."""
        return max((pool.slot_bytes for pool in self._pools.values()), default=0)

    @property
    def is_ahead(self) -> bool:
        """Whether the next step has been launched already, so that it can take no pieces of prompts."""
        return self._ahead is not None

    def caches(self, row: Row) -> list[Any]:
        """Return a row's KV, to be read before the next step."""
        return row.caches or [] if row.pool is None else row.pool.views(row.slot, row.num_cached)

    def step(self, pieces: Sequence[PrefillPiece], *, run_ahead: bool = False) -> None:
        """Run in one pass: the next token of each row, the row's draft, and the pieces."""
        if not self._rows and not pieces:
            return
        if self._ahead is not None and pieces:
            raise ValueError("a step that is in flight takes no pieces")
        launched, self._ahead = self._ahead or self._launch(pieces), None
        if run_ahead:
            self._ahead = self._launch_next(launched)
        mx.eval(launched.choice, launched.states)
        self._collect(launched)

    def remove(self, row: Row) -> list[Any]:
        """Remove a row, and return its KV as separate caches."""
        self._rows.remove(row)
        if row.pool is not None:
            self._leave_pool(row, row.pool)
        elif self._ahead is not None:
            _count_back(row)
        if not self._rows:
            self._ahead = None
        return row.caches or []

    def roll_back(self) -> bool:
        """Undo the failed step: it wrote only after the end of each row, which the next step overwrites."""
        self._ahead = None
        for row in self._rows:
            _count_back(row)
        return True

    def clear(self) -> None:
        """Drop every row and its KV."""
        self._rows, self._pools, self._ahead = [], {}, None

    def _launch(self, pieces: Sequence[PrefillPiece]) -> _LaunchedStep:
        """Build a step over every row and these pieces."""
        self._place_rows()
        drafts, parts = self._row_parts(self._rows)
        tokens = [token for row, draft in drafts for token in (row.known[-1], *draft)]
        logits = self._forward(parts, tokens, pieces)
        draws = [row.draw(i) for row, draft in drafts for i in range(len(draft) + 1)]
        beginning = [piece.row for piece in pieces if piece.row is not None]
        draws += [row.draw() for row in beginning]
        choice = draw_all(logits, draws) if draws else None
        return _LaunchedStep(drafts, beginning, choice, [piece.states for piece in pieces])

    def _launch_next(self, launched: _LaunchedStep) -> _LaunchedStep | None:
        """Launch the step after `launched` before its tokens are read; None if that is not possible."""
        if launched.choice is None or launched.beginning:
            return None
        order = {row: i for i, (row, _) in enumerate(launched.drafts)}
        rows = [row for row in self._rows if row in order and row.num_left > 1]
        if not rows or any(draft for _, draft in launched.drafts) or not all(map(self._may_run_ahead, rows)):
            return None
        drafts, parts = self._row_parts(rows, num_ahead=1)
        tokens = launched.choice[mx.array([order[row] for row, _ in drafts])]
        logits = self._forward(parts, tokens)
        choice = draw_all(logits, [row.draw(num_ahead=1) for row, _ in drafts])
        begin: Any = mx.async_eval
        begin(launched.choice, choice)
        return _LaunchedStep(drafts, [], choice, [])

    def _may_run_ahead(self, row: Row) -> bool:
        """Say whether a row's next step can be launched without knowing its last token."""
        if row.pool is not None and row.pool.is_full(row.num_cached + 1):
            return False
        if row.sampling.repetition_penalty != 1.0 or waits_for_logits(row.sampling):
            return False
        lookup = self._lookup(row)
        return not (lookup and lookup.may_propose)

    def _collect(self, launched: _LaunchedStep) -> None:
        """Give each row its drawn tokens: the accepted part of its draft, and the token after that."""
        tokens: Any = [] if launched.choice is None else launched.choice.tolist()
        for row in self._rows:
            row.drawn = []
        for row, draft in launched.drafts:
            drawn, tokens = tokens[: len(draft) + 1], tokens[len(draft) + 1 :]
            if row not in self._rows:  # its answer ended with the step before
                continue
            num_right = next((i for i, token in enumerate(draft) if drawn[i] != token), len(draft))
            row.append(drawn[: num_right + 1])
            row.num_cached += num_right + 1
            if row.lookup is not None:
                for token in row.drawn:
                    row.lookup.push(token)
                if draft:
                    row.lookup.learn(len(draft), num_right)
                    self.num_drafted += len(draft)
                    self.num_accepted += num_right
                    _count_back(row)  # the rejected part of the draft
        for row, token in zip(launched.beginning, tokens, strict=True):
            row.append([token])
        self._rows += launched.beginning

    def _row_parts(self, rows: Sequence[Row], num_ahead: int = 0) -> tuple[list[Draft], list[Part]]:
        """Make the parts of a pass over these rows; returns the rows with their drafts in the same order.

        `num_ahead` is 1 for the step after the one in flight, which has no drafts.
        """
        drafts: list[Draft] = []
        parts: list[Part] = []
        for pool in self._pools.values():
            pooled = sorted((row for row in rows if row.pool is pool), key=lambda row: row.slot)
            if pooled:
                lengths = [row.num_cached + num_ahead for row in pooled]
                parts.append(pool.part([row.slot for row in pooled], lengths))
                drafts += [(row, []) for row in pooled]
        for row in rows:
            if row.caches is not None:
                lookup = None if num_ahead else self._lookup(row)
                draft = lookup.propose(row.num_left - 1) if lookup else []
                parts.append(OwnPart(row.caches, row.num_cached + num_ahead, 1 + len(draft)))
                drafts.append((row, draft))
        return drafts, parts

    def _lookup(self, row: Row) -> Lookup | None:
        """Return a row's lookup; None if the row does not speculate, as drafts pay off only with few rows."""
        if not self._max_draft or len(self._rows) > _DRAFTING_ROWS:
            return None
        if row.pool is not None or row.sampling.repetition_penalty != 1.0:
            return None
        row.lookup = row.lookup or Lookup(row.known, most=self._max_draft)
        return row.lookup

    def _place_rows(self) -> None:
        """Move rows of similar length into a pool, once there are enough to pay for the copies."""
        if not self._has_pools:
            return
        for row in self._rows:
            if row.pool is not None and row.pool.is_full(row.num_cached):
                self._leave_pool(row, row.pool)
            if row.form is None:
                row.form = form_of(row.caches or ())
        wanted = {
            row: (row.form, row.pool.capacity if row.pool else capacity_for(row.form, row.num_cached + _ROOM))
            for row in self._rows
            if row.form
        }
        together = Counter(wanted.values())
        for row, pooled in wanted.items():
            if row.caches is None or together[pooled] < self._pooled_rows:
                continue
            pool = self._pools.get(pooled) or Pool(*pooled)
            if self._room(pool.growth_bytes(row.caches) + self.removal_bytes):
                self._pools[pooled] = pool
                row.slot, row.pool, row.caches = pool.join(row.caches), pool, None

    def _leave_pool(self, row: Row, pool: Pool) -> None:
        row.caches, row.pool = pool.leave(row.slot, row.num_cached), None
        if not pool.num_rows:
            self._pools = {key: kept for key, kept in self._pools.items() if kept is not pool}


def _count_back(row: Row) -> None:
    """Set a row's caches back to its known tokens; the next step overwrites everything after them."""
    for cache in row.caches or ():
        cache.offset = row.num_cached
