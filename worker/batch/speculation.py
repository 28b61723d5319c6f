"""Decides which rows get drafts, from which drafter and of how many tokens, so that answers get faster.

The batch calls it once before and once after a step. It measures times and accepted drafts, from which
`gains` computes estimates. In steps that also run prompts, only drafters that run no model are used, so that
prompts do not wait for drafts. Device thread only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from .cpu import on_cpu
from .gains import LEAST, Acceptance, DraftCosts, Passes, StepTimes, best

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from .drafter import Drafter
    from .rows import Row

log = structlog.get_logger()

#: Assumed number of tokens of an answer, before any has ended; weight of the latest answer in the average.
_USUAL: Final = 64.0
_SHARE: Final = 0.1
#: The arguments of `Acceptance`, for the results of all rows together and for those of one row.
_OF_ALL: Final = (0.98, 0.999)
_OF_ROW: Final = (0.93, 0.99)
#: Time per token of a pass over many tokens, as a share of a pass over one, until it is measured.
_PREPARED: Final = 0.1
#: Unless the cost of drafts is measured, a row is prepared only if that should save this many times as much.
_UNSURE: Final = 3.0
#: At least this many tokens are run to prepare a row, even if they take longer than a plain step.
_LEAST_PIECE: Final = 16
#: At most this many tokens are run to prepare a row.
MOST_PIECE: Final = 256
#: The most draft tokens of all rows in a step: each needs logits, of which there are several copies.
MOST_TOKENS: Final = 32


class _Source:
    """A drafter, with its measured times and acceptance."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.passes = Passes(drafter.pass_share)
        self.prepared_s: float | None = None  # per token
        self.accepted = Acceptance(*_OF_ALL)
        self.of_rows: dict[Row, Acceptance] = {}

    @property
    def is_free(self) -> bool:
        return self.drafter.pass_share == 0.0

    def share(self, row: Row) -> float:
        """Estimate the share of a row's draft tokens that will be right."""
        before = self.accepted.share(self.drafter.hope)
        return self.of_rows[row].share(before) if row in self.of_rows else before

    def token_s(self, plain_s: float) -> float:
        """Return the seconds per token that `prepare` takes."""
        expected_s = self.drafter.pass_share * plain_s * _PREPARED
        return expected_s if self.prepared_s is None else self.prepared_s

    def learn(self, row: Row, num_right: int, num_drafted: int) -> None:
        self.accepted.learn(num_right, num_drafted)
        self.of_rows.setdefault(row, Acceptance(*_OF_ROW)).learn(num_right, num_drafted)


class StepDrafts(NamedTuple):
    """The drafts for a step; a row without a draft is left out."""

    drafts: dict[Row, list[int]]
    #: Whose draft it is.
    sources: dict[Row, _Source]
    #: The seconds that drafting took.
    took_s: float


NOTHING: Final = StepDrafts({}, {}, 0.0)


class Speculation:
    """Gets drafts from drafters, in the order of their expected gain, and learns from the steps' results."""

    def __init__(self, drafters: Sequence[Drafter], most: int, clock: Callable[[], float]) -> None:
        """`most` limits a draft, in tokens; `clock` returns seconds."""
        self._sources = [_Source(drafter) for drafter in drafters] if most else []
        self._most = most
        self._clock = clock
        self._times = StepTimes()
        self._usual = _USUAL
        #: Since the start: draft tokens, accepted draft tokens, and estimated seconds saved.
        self.num_drafted = self.num_accepted = 0
        self.saved_s = 0.0

    @property
    def has_drafters(self) -> bool:
        """Whether any drafter is in use."""
        return bool(self._sources)

    def draft(self, rows: Sequence[Row], num_rows: int, *, ahead: bool, beside: bool) -> StepDrafts:
        """Return drafts for some of the `rows`, or for none; the step has `num_rows` rows in all.

        `ahead` says that without drafts the step could have been launched ahead, `beside` that it also runs
        prompts. A drafter that raises is not used again; on a GPU the error is raised.
        """
        began_s = self._clock()
        plain_s = self._plain_s(num_rows, ahead=ahead)
        if not rows or plain_s is None:
            return NOTHING
        found: dict[Row, list[int]] = {}
        sources: dict[Row, _Source] = {}
        late = self._times.late(num_rows, ahead=ahead)
        able = [source for source in self._sources if source.is_free or not beside]
        for source in sorted(able, key=lambda one: -self._best(one, rows, num_rows, late)[0]):
            rest = [row for row in rows if row not in found and row.num_left > 1]
            try:
                drafts = self._drafts(source, rest, num_rows, plain_s, late)
            except Exception:
                if not on_cpu():  # on a GPU, other work in flight has failed, too
                    raise
                log.exception("drafting failed; answers go on without")
                source.drafter.clear()
                self._sources.remove(source)
                drafts = {}
            found |= drafts
            sources |= dict.fromkeys(drafts, source)
        return StepDrafts(found, sources, self._clock() - began_s)

    def may_draft(self, rows: Sequence[Row], num_rows: int) -> bool:
        """Say whether the next step may have drafts, so that it must not be launched ahead."""
        plain_s = self._plain_s(num_rows, ahead=True)
        if plain_s is None:
            return False
        late = self._times.late(num_rows, ahead=True)
        for source in self._sources:
            gained, _ = self._best(source, rows, num_rows, late)
            if gained <= LEAST:  # no draft would pay, so do not search for one
                continue
            some = [row for row in rows if row.num_left > 1]
            some = [row for row in some if self._lacks(source, row, num_rows, gained, plain_s) is not None]
            if self._best(source, some, num_rows, late)[0] > LEAST:
                return True
        return False

    def _plain_s(self, num_rows: int, *, ahead: bool) -> float | None:
        """Return the seconds of a step without drafts; None if the next step must be one, to measure it."""
        must_be_plain = not self._sources or self._times.is_due(num_rows)
        return None if must_be_plain else self._times.plain_s(num_rows, ahead=ahead)

    def learn(
        self,
        drafted: StepDrafts,
        right: Mapping[Row, int],
        num_rows: int,
        took_s: float | None,
        ahead: tuple[bool, bool],
    ) -> None:
        """Learn from a step that took `took_s`: `right` counts the accepted tokens of each row's draft.

        `took_s` is None if the step also ran prompts. `ahead` is a pair: whether the step was launched ahead,
        and whether that was possible.
        """
        if not self._sources:
            return
        drafts = drafted.drafts
        was_ahead, could = ahead
        plain_s = self._times.plain_s(num_rows, ahead=could)
        self._learn_right(drafted, right)
        if took_s is None:
            return
        num = sum(map(len, drafts.values()))
        if num and plain_s:
            self._times.note_drafted(num_rows, num, max(took_s - drafted.took_s, 0.0))
            self.saved_s += (1 + sum(right.values()) / num_rows) * plain_s - took_s
        elif not num:
            if self._times.note_plain(num_rows, took_s - drafted.took_s, ahead=was_ahead, could=could):
                for source in self._sources:
                    source.passes = Passes(source.drafter.pass_share)
            self.saved_s -= drafted.took_s

    def _learn_right(self, drafted: StepDrafts, right: Mapping[Row, int]) -> None:
        drafts = drafted.drafts
        for row, accepted in right.items():
            num_drafted = len(drafts[row])
            num_right = min(accepted, num_drafted)
            drafted.sources[row].learn(row, num_right, num_drafted)
            self.num_drafted += num_drafted
            self.num_accepted += num_right
        for source in self._sources:
            for row in [row for row in source.of_rows if row not in drafts]:
                source.of_rows[row].fade()
            if not drafts:
                source.accepted.fade()

    def leave(self, row: Row) -> None:
        """End drafting for a row whose answer has ended."""
        self._usual += _SHARE * (row.sampler.num_drawn - self._usual)
        for source in self._sources:
            source.of_rows.pop(row, None)
            source.drafter.leave(row)

    def forget(self, session: Hashable) -> None:
        """Drop the drafters' state of a session that has no row."""
        for source in self._sources:
            source.drafter.forget(session)

    def clear(self) -> None:
        """Drop the drafters' state of all rows and sessions."""
        for source in self._sources:
            source.of_rows.clear()
            source.drafter.clear()

    def _drafts(
        self, source: _Source, rows: Sequence[Row], num_rows: int, plain_s: float, late: float
    ) -> dict[Row, list[int]]:
        """Return a drafter's drafts for the `rows` for which drafts pay; prepare rows that lack KV."""
        # Preparing serves later steps: those could be launched ahead, even if this one could not.
        gained, _ = self._best(source, rows, num_rows, self._times.late(num_rows, ahead=True))
        ready = []
        for row in rows:
            num_missing = self._lacks(source, row, num_rows, gained, plain_s)
            if num_missing:
                self._prepare(source, row, num_missing, plain_s)
            elif num_missing == 0:
                ready.append(row)
        gained, num = self._best(source, ready, num_rows, late)
        wanted = {row: min(num, row.num_left - 1) for row in ready}
        if gained <= LEAST:
            return {}
        began_s = self._clock()
        drafts = source.drafter.propose(wanted)
        num_passes = max(map(len, drafts.values()), default=0)
        if plain_s and num_passes and not source.is_free:
            source.passes.learn(len(drafts), (self._clock() - began_s) / num_passes / plain_s)
        return drafts

    def _best(self, source: _Source, rows: Sequence[Row], num_rows: int, late: float) -> tuple[float, int]:
        """Return the largest expected gain of drafts for `rows`, and their length; see `gains.best`."""
        shares = [source.share(row) for row in rows]
        most = min(self._most, max(MOST_TOKENS // num_rows, 1))
        costs = DraftCosts(self._times, num_rows, source.passes.share(len(rows)), late)
        return best(costs, shares, most)

    def _lacks(self, source: _Source, row: Row, num_rows: int, gained: float, plain_s: float) -> int | None:
        """Return how many tokens a drafter must run before it drafts for a row; None if that does not pay."""
        num_missing = source.drafter.num_missing(row)
        if not num_missing:
            return num_missing
        num_drawn = row.sampler.num_drawn
        num_expected = min(row.num_left, max(self._usual - num_drawn, num_drawn, _LEAST_PIECE))
        saved_s = num_expected * plain_s / num_rows * (1 - 1 / gained)
        is_measured = self._times.is_measured(num_rows)
        worth_s = saved_s if is_measured else saved_s / _UNSURE
        return num_missing if gained > LEAST and worth_s > num_missing * source.token_s(plain_s) else None

    def _prepare(self, source: _Source, row: Row, num_missing: int, plain_s: float) -> None:
        """Run some of the tokens that a drafter lacks for a row, in about the time of a plain step."""
        token_s = source.token_s(plain_s)
        fitting = int(plain_s / token_s) if token_s else num_missing
        num = min(num_missing, max(fitting, _LEAST_PIECE), MOST_PIECE)
        began_s = self._clock()
        source.drafter.prepare(row, num)
        took_s = (self._clock() - began_s) / num
        source.prepared_s = took_s if source.prepared_s is None else (source.prepared_s + took_s) / 2
