"""Holds the running answers (rows) and runs steps: one loop for all models. Device thread only.

A step runs all rows and pieces of prompts, and draws the rows' tokens. Two things differ between models, and
`batch_kinds` chooses both: how a pass runs (`Pass`: shared by all rows, or the model's own), and where rows
can keep KV besides their own caches (`CommonKv`: in pools, merged, or nowhere). Two things make answers
faster without changing their tokens: drafts for some rows (`speculation`), and launching the next step before
the host has read the tokens of the step before. On a GPU this is true up to rounding: other kernels compute
several tokens, or a row beside others, and of two tokens that are almost equally likely, the other one may
be drawn.

A step only appends to plain caches, so setting a cache's offset back undoes the step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from cache.kv import layers

from .parts import OwnPart
from .sampling import Choice, Logprobs, draw_all, rows_of, waits_for_logits
from .speculation import NOTHING, Speculation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from .drafter import Drafter
    from .parts import Part
    from .rows import CommonKv, Pass, PrefillPiece, Row
    from .speculation import StepDrafts

    #: A row and its draft: the tokens that are speculated to follow its last token.
    Draft: TypeAlias = "tuple[Row, list[int]]"


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    """A step in flight: `choice` has the tokens drawn for `drafts`, then the first tokens of `beginning`.

    `beginning` are rows whose prompts end in this step. `ahead` is a pair: whether the step was launched
    before the previous tokens were read, and whether that was possible. `drafts` are `drafted`, padded or
    shortened.
    """

    drafts: list[Draft]
    beginning: list[Row]
    choice: Choice | None
    logprobs: Logprobs | None
    states: list[Any]
    began_s: float
    ahead: tuple[bool, bool] = (False, False)
    drafted: StepDrafts = NOTHING


class Batch:
    """The running answers (rows) of one model. `step` runs one step over them and over pieces of prompts."""

    def __init__(
        self,
        run: Pass,
        keeping: CommonKv,
        *,
        is_plain: bool,
        drafters: Sequence[Drafter] = (),
        max_draft: int = 0,
        runs_ahead: bool = True,
        has_rings: bool = False,
        windows_are_rings: bool = False,
        sketched: tuple[int, ...] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`run` runs passes; `keeping` keeps the KV of rows in common arrays.

        `is_plain` says that a step can be undone by setting back the offsets of rows' own caches.
        `drafters` draft up to `max_draft` tokens for a row. `has_rings` says that rows may have a `RingCache`
        instead of plain caches, `windows_are_rings` that the model's own sliding windows are such rings.
        `sketched` are the layers for which a policy with `recall` keeps 2-bit copies of keys (sketches).
        """
        self.has_rings = has_rings
        self.windows_are_rings = windows_are_rings
        self.sketched = sketched
        #: Makes drafts, and counts how many of their tokens were accepted.
        self.speculation = Speculation(drafters, max_draft, clock)
        self._run = run
        self._keeping = keeping
        self._is_plain = is_plain
        self._runs_ahead = runs_ahead
        self._clock = clock
        #: The running answers, in the order of their first tokens; `remove` changes the list.
        self.rows: list[Row] = []
        self._ahead: _LaunchedStep | None = None
        self._ended_s = 0.0
        self._could_run_ahead = False
        #: Whether the last step had drafts.
        self.has_drafted = False

    @property
    def num_cached(self) -> int:
        """Number of tokens whose KV is on the device, over all rows."""
        return sum(min(row.num_cached, row.most_held) for row in self.rows)

    @property
    def growing(self) -> list[int]:
        """The lengths in tokens of the rows for which the next step must, or may, allocate memory."""
        # One step may be in flight and another launched before the next check: check for two tokens.
        full = (row for row in self.rows if row.caches and layers.grows(row.caches, 2) is not False)
        return [min(row.num_cached, row.most_held) for row in full] + list(self._keeping.growing)

    @property
    def removal_bytes(self) -> int:
        """The most bytes that `remove` allocates."""
        return self._keeping.removal_bytes

    @property
    def is_ahead(self) -> bool:
        """Whether the next step is already in flight; if so, it cannot include pieces of prompts."""
        return self._ahead is not None

    def caches(self, row: Row) -> list[Any]:
        """Return a row's KV as caches. They are valid until the next step and must not be written to.

        If the step in flight has changed the KV, it is undone; `step` repeats it with the same result.
        """
        self._drop_ahead_of(row)
        return self._keeping.caches(row) if row.caches is None else row.caches

    def step(self, pieces: Sequence[PrefillPiece], *, run_ahead: bool = False) -> None:
        """Run all rows and pieces, and draw each row's next token; a piece's `row`, if set, joins the batch.

        `Row.drawn` gets one token, or more if part of the row's draft is accepted. Afterwards only the last
        token of a row has no KV. With `run_ahead` the next step may be launched before the caller has read
        this step's tokens: see `is_ahead`. Raises `ValueError` if there are pieces while a step is in flight;
        after any other error call `roll_back` or `clear`.
        """
        if not self.rows and not pieces:
            return
        if self._ahead is not None and pieces:
            raise ValueError("a step that is in flight takes no pieces")
        launched, self._ahead = self._ahead or self._launch(pieces), None
        self._could_run_ahead = False
        if run_ahead and self._runs_ahead:
            self._ahead = self._launch_next(launched)
        mx.eval(launched.choice, launched.logprobs and launched.logprobs.arrays, launched.states)
        self._collect(launched, is_last=self._ahead is None)

    def embed(self, pieces: Sequence[PrefillPiece]) -> None:
        """Run the last pieces of prompts in a separate pass, and set the `vector` of their embeddings.

        Raises `ValueError` if a step is in flight, or unless all embeddings are hidden states, or all are
        logits of the same tokens.
        """
        wanted = {piece.embedding.tokens for piece in pieces if piece.embedding is not None}
        if self._ahead is not None or len(wanted) != 1:
            raise ValueError("a step is in flight, or several kinds of embeddings are asked for")
        (tokens,) = wanted
        vectors = self._run([], (), pieces, hidden=not tokens).astype(mx.float32)
        if tokens:
            vectors = vectors[:, mx.array(tokens)]
        else:
            vectors = vectors / mx.linalg.norm(vectors, axis=-1, keepdims=True)
        mx.eval(vectors, [piece.states for piece in pieces])
        for piece, vector in zip(pieces, np.array(vectors), strict=True):
            if piece.embedding is not None:
                piece.embedding.is_sound = bool(np.isfinite(vector).all())
                piece.embedding.vector = vector.astype("<f4").tobytes()

    def remove(self, row: Row) -> list[Any]:
        """Remove a row from the batch, and return its KV as separate caches."""
        self._drop_ahead_of(row)
        self.rows.remove(row)
        self.speculation.leave(row)
        if row.caches is None:
            self._keeping.leave(row)
        elif self._ahead is not None:
            _count_back(row)
        if not self.rows:
            self._ahead = None
        return row.caches or []

    def roll_back(self) -> bool:
        """Restore all rows to their state before a failed step; return False if that is not possible."""
        self._ahead = None
        own = [row for row in self.rows if row.caches is not None]
        if len(own) < len(self.rows) and not self._keeping.roll_back():
            return False
        if self._is_plain:
            for row in own:
                _count_back(row)
        return self._is_plain or not own

    def clear(self) -> None:
        """Drop every row and its KV, after a failed step left the caches in an unknown state."""
        self.rows, self._ahead = [], None
        self.speculation.clear()
        self._keeping.clear()

    def _drop_ahead_of(self, row: Row) -> None:
        """Undo the step in flight if it has changed this row's KV; `step` repeats it with the same result."""
        if self._ahead is not None and row.caches is None and self._keeping.includes_ahead:
            self.roll_back()

    def _launch(self, pieces: Sequence[PrefillPiece]) -> _LaunchedStep:
        """Build a step over all rows and `pieces`: get drafts, then build the pass and draws, unevaluated."""
        began_s = self._clock()
        self._keeping.place(self.rows)
        could, able = self._could_run_ahead, self._able(self.rows)
        drafted = self.speculation.draft(able, len(self.rows), ahead=could, beside=bool(pieces))
        found = self._parts(self.rows, self._keeping.fitted(drafted.drafts))
        if found is None:
            raise AssertionError("every row that is kept runs in each step")
        drafts, parts = found
        tokens = [token for row, draft in drafts for token in (row.known[-1], *draft)]
        logits = self._run(parts, tokens, pieces)
        draws = [draw for row, draft in drafts for draw in row.sampler.draws(draft)]
        beginning = [piece.row for piece in pieces if piece.row is not None]
        draws += [draw for row in beginning for draw in row.sampler.draws()]
        choice = draw_all(logits, draws) if draws else None
        logprobs = Logprobs(logits, choice.tokens, draws) if choice is not None else None
        states = [piece.states for piece in pieces]
        return _LaunchedStep(drafts, beginning, choice, logprobs, states, began_s, (False, could), drafted)

    def _launch_next(self, launched: _LaunchedStep) -> _LaunchedStep | None:
        """Launch the step after `launched` before `launched.choice` is read; None if that is not possible."""
        if launched.choice is None or launched.beginning:
            return None
        began_s = self._clock()
        order = {row: i for i, (row, _) in enumerate(launched.drafts)}
        rows = [row for row in self.rows if row in order and row.num_left > 1]
        if not rows or not all(map(self._may_run_ahead, rows)):
            return None
        self._could_run_ahead = True
        if any(draft for _, draft in launched.drafts):
            return None
        if self.speculation.may_draft(self._able(rows), len(rows)):
            return None
        begin: Any = mx.async_eval
        if not launched.ahead[0]:  # separately, so that its tokens can be read while the next step runs
            begin(launched.choice, launched.logprobs and launched.logprobs.arrays)
        self._keeping.commit()
        found = self._parts(rows, {}, num_ahead=1)
        if found is None:
            return None
        drafts, parts = found
        logits = self._run(parts, rows_of(launched.choice.tokens, [order[row] for row, _ in drafts]))
        draws = [draw for row, _ in drafts for draw in row.sampler.draws(num_ahead=1)]
        choice = draw_all(logits, draws)
        logprobs = Logprobs(logits, choice.tokens, draws)
        begin(*choice, *logprobs.arrays)
        return _LaunchedStep(drafts, [], choice, logprobs, [], began_s, (True, True))

    def _able(self, rows: Sequence[Row]) -> list[Row]:
        """Return those `rows` whose KV can be set back after a rejected draft."""
        return [row for row in rows if row.caches is not None or self._keeping.can_draft(row)]

    def _may_run_ahead(self, row: Row) -> bool:
        """Say whether a step can be launched before the host knows this row's last token."""
        if row.sampler.needs_last or waits_for_logits(row.sampler.sampling):
            return False
        if row.caches is None:
            return self._keeping.may_run_ahead(row)
        return self._is_plain

    def _parts(
        self, rows: Sequence[Row], fitted: Mapping[Row, list[int]], num_ahead: int = 0
    ) -> tuple[list[Draft], list[Part]] | None:
        """Return each row with its draft, and the parts of a pass over `rows` in the same order.

        `num_ahead` is 1 if a step in flight adds a token to each row, else 0. None if not possible.
        """
        kept = self._keeping.parts([row for row in rows if row.caches is None], num_ahead, fitted)
        if kept is None:
            return None
        drafts: list[Draft] = [(row, fitted.get(row, [])) for _, some in kept for row in some]
        parts: list[Part] = [part for part, _ in kept]
        for row in rows:
            if row.caches is not None:
                draft = fitted.get(row, [])
                start, num = row.num_cached + num_ahead, 1 + len(draft)
                positions = range(start + row.shift, start + row.shift + num)
                parts.append(OwnPart(row.caches, start, num, positions))
                drafts.append((row, draft))
        return drafts, parts

    def _collect(self, launched: _LaunchedStep, *, is_last: bool) -> None:
        """Add to each row its drawn tokens: the accepted part of its draft, and the token after that.

        `is_last` says that no later step is in flight.
        """
        took_s = self._time(launched)
        if is_last:
            self._keeping.commit()
        tokens, sound = ([], []) if launched.choice is None else map(_listed, launched.choice)
        found = launched.logprobs.drawn(tokens) if launched.logprobs is not None else []
        right: dict[Row, int] = {}
        self.has_drafted = bool(launched.drafted.drafts)
        for row in self.rows:
            row.drawn = []
        for row, draft in launched.drafts:
            drawn, found = found[: len(draft) + 1], found[len(draft) + 1 :]
            are_sound, sound = sound[: len(draft) + 1], sound[len(draft) + 1 :]
            if row not in self.rows:  # its answer ended in the previous step
                continue
            num_right = next((i for i, token in enumerate(draft) if drawn[i].token != token), len(draft))
            num_right = max(min(num_right, row.num_left - 1), 0)
            row.append(drawn[: num_right + 1], is_sound=all(are_sound[: num_right + 1]))
            row.num_cached += num_right + 1
            if draft:
                _count_back(row)  # the rejected part of the draft
            if row in launched.drafted.drafts:
                right[row] = num_right
        self.speculation.learn(launched.drafted, right, len(launched.drafts), took_s, launched.ahead)
        for row, first, is_sound in zip(launched.beginning, found, sound, strict=True):
            row.append([first], is_sound=is_sound)
        self.rows += launched.beginning

    def _time(self, launched: _LaunchedStep) -> float | None:
        """Return the seconds that a step took; None if it ran pieces of prompts."""
        now_s = self._clock()
        took_s, self._ended_s = now_s - max(launched.began_s, self._ended_s), now_s
        return None if launched.states or not launched.drafts else took_s


def _listed(array: Any) -> list[Any]:
    return list(array.tolist())


def _count_back(row: Row) -> None:
    """Set a row's own caches back to `num_cached` tokens; the next step overwrites the later ones."""
    for cache in row.caches or ():
        cache.offset = row.num_cached
