"""What runs in one step: a token of every running answer, and pieces of prompts. Device thread only.

Owns where each answer's KV is while it runs: in its session's own caches, in a slot of a pool, or merged.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import structlog
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from cache.kv import layers

from .forward import Forward, OwnPart
from .lookup import Lookup
from .merged import merged_for
from .sampling import Sampling, draw_all, looks
from .slots import Pool, capacity_for
from .trials import Trials

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cache.names.blocks import Tokens

    from .forward import Part
    from .merged import Merged

log = structlog.get_logger()

#: A row joins a pool that has room for at least this many more tokens, so that it does not move at once.
_ROOM = 32
#: Fewer rows of like length stay on their own caches.
_POOLED_ROWS = 3
#: A row alone is not merged.
_MERGED_ROWS = 2
#: With more rows than this a step computes as much as it reads, and guessing costs other rows their time.
_DRAFTING_ROWS = 2


@dataclass(slots=True, eq=False)
class Row:
    """One running answer. Its KV is in `caches`, or, where that is None, in a pool's slot or merged.

    `known` are all tokens of its session, `num_left` is how many more it may have; `drawn` are those of the
    last step, of which the last one has no KV yet. `num_drawn` counts the answer's tokens. Of the tokens that
    its caches hold, those from `num_cached` on are in a step whose outcome nobody has looked at yet.
    """

    caches: list[Any] | None
    known: Tokens
    sampling: Sampling
    num_drawn: int
    num_cached: int
    num_left: int
    seen: set[int] = field(default_factory=set)
    num_ahead: int = 0
    drawn: list[int] = field(default_factory=list)
    lookup: Lookup | None = None
    pool: Pool | None = None
    slot: int = 0


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that the device was told to run: each row with the tokens it had guessed, and what was drawn."""

    drafts: list[tuple[Row, list[int]]]
    beginning: list[Row]
    choice: mx.array | None
    changed: list[Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of a prompt, to be added to a session's caches, which hold `start` tokens before it.

    With `row` set they end the prompt, and the row's first token is drawn after them.
    """

    caches: list[Any]
    start: int
    tokens: list[int]
    row: Row | None = None


class Batch:
    """The running answers, and the steps over them."""

    def __init__(
        self,
        model: Any,
        room: Callable[[int], bool] = lambda _: True,
        *,
        max_draft: int = 0,
        trials: Trials | None = None,
    ) -> None:
        """`room` says whether a pool may allocate so many bytes more; `max_draft` bounds a row's guesses.

        `trials` remembers from start to start how this model's rows run together.
        """
        trials = trials or Trials()
        self._model = model
        self._room = room
        self._max_draft = max_draft
        self.num_drafted = 0
        self.num_accepted = 0
        self._forward = Forward(model)
        shares = trials.outcome("share", lambda: 0 if self._forward.fits() else None, 1)
        self._shares = shares is not None
        classes = {type(cache) for cache in make_prompt_cache(model)}
        # What a step adds to such caches lies behind what they held: it is taken back by counting back.
        self._adds = self._shares and classes <= {KVCache, QuantizedKVCache}
        self._pools_rows = self._shares and classes == {KVCache}
        self._merged: Merged[Row] | None = None if self._adds else merged_for(model, trials)
        self._rows: list[Row] = []
        self._pools: dict[int, Pool] = {}
        self._flight: _Flight | None = None
        if not self._shares and self._merged:
            log.info("this model's prompts run one after the other; its answers decode together")
        elif not self._shares:
            log.warning(
                "sessions of this model run one after the other: it can neither share a pass nor be merged"
            )

    @property
    def growing(self) -> list[int]:
        """Lengths of the rows whose caches are full, so that the next step allocates for them."""
        own = [row.num_cached for row in self._rows if row.caches and _full(row.caches[0])]
        return own + (self._merged.growing if self._merged else [])

    @property
    def num_held(self) -> int:
        """Tokens that the rows hold, all together."""
        return sum(row.num_cached for row in self._rows)

    @property
    def leaving_bytes(self) -> int:
        """The most that a row takes when it is copied out of its pool, or of the merged batch."""
        pooled = max((pool.slot_bytes for pool in self._pools.values()), default=0)
        return max(pooled, self._merged.leaving_bytes if self._merged else 0)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The running answers, in the order in which they began."""
        return tuple(self._rows)

    def caches(self, row: Row) -> list[Any]:
        """Show a row's KV, to be read before the next step."""
        if row.pool is not None:
            return row.pool.views(row.slot, row.num_cached)
        if row.caches is None and self._merged is not None:
            return self._merged.show(row)
        return row.caches or []

    @property
    def is_ahead(self) -> bool:
        """Whether the next step runs already, so that it can take no more pieces."""
        return self._flight is not None

    def remove(self, row: Row) -> list[Any]:
        """Take a row out, and return its KV as caches of its own."""
        self._rows.remove(row)
        if not self._rows:
            self._flight = None
        if row.pool is not None:
            self._move_out(row)
        elif row.caches is None and self._merged is not None:
            row.caches, row.num_ahead = self._merged.leave(row), 0
        elif row.num_ahead:
            self._forget_ahead(row)
        return row.caches or []

    def clear(self) -> None:
        """Forget every row and its KV, after a failed step left the caches in an unknown state."""
        self._rows, self._pools, self._flight = [], {}, None
        if self._merged is not None:
            self._merged.clear()

    def roll_back(self) -> bool:
        """Bring every row back to where it was before a step that failed; False where that is not possible.

        What the step wrote lies behind the rows' ends, and is overwritten; what it replaced in merged
        states is put back. States and windows of a row on its own caches cannot be.
        """
        self._flight = None
        if not self._adds:
            merged = self._merged.rows if self._merged else []
            if any(row not in merged for row in self._rows):
                return False
        if self._merged is not None:
            self._merged.roll_back()
        for row in self._rows:
            self._forget_ahead(row)
        return True

    def step(self, pieces: Sequence[Piece], *, go_on: bool = False) -> None:
        """Draw the next tokens of every row, and the first of the rows that begin here; they run from now on.

        A row gets one token, or more where it had guessed them: see `Row.drawn`. The KV of every row and
        piece has what was run. `go_on` lets the device begin with the step after this one while the caller
        looks at what this one drew; that step takes no pieces.
        """
        if not self._rows and not pieces:
            return
        if self._flight is not None and pieces:
            raise ValueError("the step that runs ahead takes no pieces")
        flight, self._flight = self._flight or self._launch(pieces), None
        if go_on:
            self._flight = self._launch_next(flight)
        mx.eval(flight.choice, flight.changed)
        if self._merged is not None:
            self._merged.settle()
        tokens: Any = [] if flight.choice is None else flight.choice.tolist()
        for row in self._rows:
            row.drawn = []
        for row, draft in flight.drafts:
            mine, tokens = tokens[: len(draft) + 1], tokens[len(draft) + 1 :]
            if row in self._rows or row in flight.beginning:
                self._take(row, draft, mine, begins=row in flight.beginning)
        self._rows += flight.beginning

    def _launch(self, pieces: Sequence[Piece]) -> _Flight:
        beginning = [piece.row for piece in pieces if piece.row is not None]
        self._place_rows()
        merged = len(self._merged.rows) if self._merged else 0
        if not self._shares or (merged == len(self._rows) and not pieces):  # a pass's views are for pieces
            drafts, logits, changed = self._run_apart(pieces)
            return self._draw(drafts, beginning, logits, changed)
        drafts, parts = self._row_parts(self._rows)
        tokens = [token for row, draft in drafts for token in (row.known[-1], *draft)]
        wanted = list(range(len(tokens)))
        for piece in pieces:
            parts.append(OwnPart(piece.caches, piece.start, len(piece.tokens)))
            tokens += piece.tokens
            if piece.row is not None:
                wanted.append(len(tokens) - 1)
                drafts.append((piece.row, []))
        logits = self._forward(parts, mx.array(tokens), wanted or [0])
        changed = [part.states() for part in parts]
        return self._draw(drafts, beginning, logits if wanted else None, changed)

    def _launch_next(self, flight: _Flight) -> _Flight | None:
        """Begin with the step after `flight` before its tokens are known here: they stay on the device."""
        order = {row: i for i, (row, _) in enumerate(flight.drafts)}
        rows = [row for row in self._rows if row in order and row.num_left > 1]
        if not rows or flight.beginning or flight.choice is None or len(order) < len(flight.choice):
            return None
        if any(not self._may_go_on(row) for row in rows):
            return None
        if self._adds:
            drafts, parts = self._row_parts(rows, drafting=False)
            tokens = flight.choice[mx.array([order[row] for row, _ in drafts])]
            logits = self._forward(parts, tokens, range(len(drafts)))
        elif self._merged is not None and self._merged.is_tidy and self._merged.rows == list(order):
            drafts, logits = flight.drafts, self._merged.run(flight.choice)
        else:
            return None
        found = self._draw(drafts, [], logits, [])
        begin: Any = mx.async_eval
        begin(flight.choice, found.choice)
        return found

    def _may_go_on(self, row: Row) -> bool:
        """Say whether a row's next token can be run unseen: nothing has to be decided by it."""
        if row.pool is not None and row.num_cached + row.num_ahead >= row.pool.capacity:
            return False
        lookup = self._lookup(row)
        if row.sampling.repetition_penalty != 1.0 or looks(row.sampling):
            return False
        return not (lookup and lookup.may_propose)

    def _draw(
        self,
        drafts: list[tuple[Row, list[int]]],
        beginning: list[Row],
        logits: mx.array | None,
        changed: list[Any],
    ) -> _Flight:
        """Build the choice of the tokens, and count what the rows' caches have got."""
        choice = None
        if logits is not None:
            draws = [
                (row.sampling, row.num_drawn + row.num_ahead + i, row.seen)
                for row, draft in drafts
                for i in range(len(draft) + 1)
            ]
            choice = draw_all(logits, draws)
        for row, draft in drafts:
            if row not in beginning:
                row.num_ahead += 1 + len(draft)
        return _Flight(drafts, beginning, choice, changed)

    def _take(self, row: Row, draft: list[int], tokens: list[int], *, begins: bool) -> None:
        """Give a row what was drawn for it: up to the first token that its draft had not foreseen."""
        num_right = next((i for i, token in enumerate(draft) if tokens[i] != token), len(draft))
        row.drawn = tokens[: num_right + 1]
        row.known.extend(row.drawn)
        row.num_drawn += len(row.drawn)
        row.num_left -= len(row.drawn)
        if not begins:
            row.num_cached += len(row.drawn)
            row.num_ahead -= len(draft) + 1
        if row.sampling.repetition_penalty != 1.0:
            row.seen.update(row.drawn)
        if row.lookup is not None:
            for token in row.drawn:
                row.lookup.push(token)
        if draft and row.lookup is not None:
            row.lookup.learn(len(draft), num_right)
            self.num_drafted += len(draft)
            self.num_accepted += num_right
            self._forget_ahead(row)  # what was guessed wrong

    def _forget_ahead(self, row: Row) -> None:
        """Let what comes next overwrite what a row's caches hold beyond what is known to be right."""
        row.num_ahead = 0
        for cache in row.caches or ():
            cache.offset = row.num_cached

    def _lookup(self, row: Row) -> Lookup | None:
        """Return what a row guesses by; None where it does not: a longer pass is cheap beside few others."""
        if not self._max_draft or not self._adds or len(self._rows) > _DRAFTING_ROWS:
            return None
        if row.pool is not None or row.sampling.repetition_penalty != 1.0:
            return None
        row.lookup = row.lookup or Lookup(row.known, most=self._max_draft)
        return row.lookup

    def _row_parts(
        self, rows: list[Row], *, drafting: bool = True
    ) -> tuple[list[tuple[Row, list[int]]], list[Part]]:
        """Make the parts of a pass for these rows, with what they guess, in the order of the parts."""
        drafts: list[tuple[Row, list[int]]] = []
        parts: list[Part] = []
        if self._merged is not None and self._merged.rows:
            parts.append(self._merged.part([row.num_cached + row.num_ahead for row in self._merged.rows]))
            drafts += [(row, []) for row in self._merged.rows]
        for pool in self._pools.values():
            in_pool = sorted((row for row in rows if row.pool is pool), key=lambda row: row.slot)
            if in_pool:
                lengths = [row.num_cached + row.num_ahead for row in in_pool]
                parts.append(pool.part([row.slot for row in in_pool], lengths))
                drafts += [(row, []) for row in in_pool]
        for row in rows:
            if row.caches is not None:
                lookup = self._lookup(row) if drafting else None
                draft = lookup.propose(row.num_left - 1) if lookup else []
                parts.append(OwnPart(row.caches, row.num_cached + row.num_ahead, 1 + len(draft)))
                drafts.append((row, draft))
        return drafts, parts

    def _run_apart(
        self, pieces: Sequence[Piece]
    ) -> tuple[list[tuple[Row, list[int]]], mx.array | None, list[Any]]:
        """Run merged rows in one pass, and every other row and piece by itself: they cannot share one."""
        merged = self._merged.rows if self._merged else []
        rows = [*merged, *(row for row in self._rows if row.caches is not None)]
        logits = []
        if self._merged is not None and merged:
            logits.append(self._merged.run(mx.array([row.known[-1] for row in merged])))
        logits += [
            self._model(mx.array([[row.known[-1]]]), cache=row.caches)[:, -1] for row in rows[len(merged) :]
        ]
        for piece in pieces:
            if piece.row is None:
                self._model(mx.array([piece.tokens]), cache=piece.caches)
                continue
            rows.append(piece.row)
            if len(piece.tokens) > 1:  # without logits: those of a whole prompt would be computed for one
                self._model(mx.array([piece.tokens[:-1]]), cache=piece.caches)
            logits.append(self._model(mx.array([piece.tokens[-1:]]), cache=piece.caches)[:, -1])
        changed = [cache.state for piece in pieces for cache in piece.caches]
        return [(row, []) for row in rows], mx.concatenate(logits) if logits else None, changed

    def _merge_rows(self, merged: Merged[Row]) -> None:
        """Merge rows with those that are, once there are two: a row alone needs no copies."""
        merged.tidy()
        apart = [row for row in self._rows if row.caches is not None and merged.takes(row.caches)]
        if not apart or len(apart) + len(merged.rows) < _MERGED_ROWS:
            return
        for some in (apart, *([row] for row in apart)):
            newcomers = [(row, row.caches) for row in some if row.caches is not None]
            if newcomers and self._room(merged.joining_bytes([caches for _, caches in newcomers])):
                merged.join(newcomers)
                for row in some:
                    row.caches = None

    def _place_rows(self) -> None:
        """Bring rows of like length into one pool, once there are enough of them to pay for the copies."""
        if self._merged is not None:
            self._merge_rows(self._merged)
        if not self._pools_rows:
            return
        for row in self._rows:
            if row.pool is not None and row.num_cached >= row.pool.capacity:
                self._move_out(row)
        wanted = {
            row: row.pool.capacity if row.pool else capacity_for(row.num_cached + _ROOM) for row in self._rows
        }
        together = Counter(wanted.values())
        for row, capacity in wanted.items():
            if row.caches is None or together[capacity] < _POOLED_ROWS:
                continue
            pool = self._pools.get(capacity) or Pool(capacity)
            if self._room(pool.growth_bytes(row.caches) + self.leaving_bytes):
                self._pools[capacity] = pool
                row.slot, row.pool = pool.join(row.caches), pool
                row.caches = None

    def _move_out(self, row: Row) -> None:
        pool = row.pool
        if pool is None:
            return
        row.caches, row.pool, row.num_ahead = pool.leave(row.slot, row.num_cached), None, 0
        if not pool.num_rows:
            del self._pools[pool.capacity]


def _full(cache: Any) -> bool:
    # A step ahead counts: it runs before anybody asks again.
    return bool(layers.grows(cache, 2))
