"""Estimates, from measured times and accepted drafts, how many tokens a step should draft. Pure.

Costs are shares of the time of a plain step (one without drafts) with the same number of rows, so that the
machine's speed cancels out.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

#: A median is taken over this many last measurements, and only if there are at least `_ENOUGH`.
_KEPT: Final = 7
_ENOUGH: Final = 3
#: Number of drafted steps after which a plain step is measured again.
_FRESH: Final = 64
#: After this many plain steps in a row the costs of drafts are forgotten, since other work on the machine may
#: have raised them. The number doubles each time, from the first value up to the second. After `_PAYING`
#: steps with drafts it returns to the first value.
_FORGOTTEN: Final = (64, 2048)
_PAYING: Final = 32
#: The cost of verifying one draft token in a step, until it is measured.
_CHECKED: Final = 0.05
#: The least expected gain for which a step drafts.
LEAST: Final = 1.03
#: The prior share of right tokens counts as much as this many measured draft tokens.
_WEIGHT: Final = 3.0


class Acceptance:
    """Estimates the share of draft tokens that are right. Tokens after a wrong one do not count."""

    def __init__(self, by_draft: float, by_step: float) -> None:
        """A new draft multiplies the weight of older results by `by_draft`, a call of `fade` by `by_step`."""
        self._by_draft = by_draft
        self._by_step = by_step
        self._num_right = self._num_tested = 0.0

    def share(self, before: float) -> float:
        """Return the share; `before` is the prior, the share expected before any draft."""
        return (_WEIGHT * before + self._num_right) / (_WEIGHT + self._num_tested)

    def learn(self, num_right: int, num_drafted: int) -> None:
        """Record a draft of `num_drafted` tokens, of which the first `num_right` were right."""
        self._num_right = self._by_draft * self._num_right + num_right
        self._num_tested = self._by_draft * self._num_tested + min(num_right + 1, num_drafted)

    def fade(self) -> None:
        """Weigh past results a little less, so that a drafter that was wrong is tried again."""
        self._num_right *= self._by_step
        self._num_tested *= self._by_step


class _Typical:
    """The median of the last measurements."""

    def __init__(self) -> None:
        self._some: deque[float] = deque(maxlen=_KEPT)
        self._median = 0.0

    def add(self, value: float) -> None:
        self._some.append(value)
        self._median = median(self._some)

    @property
    def known(self) -> float | None:
        """The median; None until there are `_ENOUGH` measurements."""
        return self._median if len(self._some) >= _ENOUGH else None

    def or_before(self, before: float) -> float:
        """Return the median; with too few measurements, the smallest of them and `before`.

        The smallest is used because a delay can make single measurements too high.
        """
        return self._median if len(self._some) >= _ENOUGH else min((*self._some, before))


class StepTimes:
    """Measured times of plain steps (without drafts), and the time that each draft token adds to a step.

    Both depend on the number of rows.

    A plain step takes less time if it is launched ahead, before the previous tokens are read.
    """

    def __init__(self) -> None:
        self._plain: defaultdict[tuple[int, bool], _Typical] = defaultdict(_Typical)
        self._each: defaultdict[int, _Typical] = defaultdict(_Typical)
        self._since: defaultdict[int, int] = defaultdict(int)
        self._num_plain = self._num_drafted = 0
        self._patience = _FORGOTTEN[0]

    def plain_s(self, num_rows: int, *, ahead: bool) -> float | None:
        """Return the seconds that a plain step takes; None if unknown.

        Steps launched ahead may take another time than others; `ahead` says which to prefer.
        """
        return self._plain[num_rows, ahead].known or self._plain[num_rows, not ahead].known

    def late(self, num_rows: int, *, ahead: bool) -> float:
        """Return how many times longer a plain step takes if not launched ahead; 1 if `ahead` is false."""
        alone_s, ahead_s = (self.plain_s(num_rows, ahead=kind) for kind in (False, True))
        return max(alone_s / ahead_s, 1.0) if ahead and alone_s and ahead_s else 1.0

    def is_due(self, num_rows: int) -> bool:
        """Say whether the next step should have no drafts, to measure the time of such a step again."""
        return self._since[num_rows] >= _FRESH

    def note_plain(self, num_rows: int, step_s: float, *, ahead: bool, could: bool) -> bool:
        """Record a plain step's time, and whether it was, or could have been, launched ahead.

        Returns True if the measured costs of drafts were dropped, because of many plain steps in a row.
        """
        self._plain[num_rows, ahead].add(step_s)
        if ahead or not could:
            self._since[num_rows] = 0
        self._num_plain += 1
        if self._num_plain < self._patience:
            return False
        self._each.clear()
        self._num_plain = self._num_drafted = 0
        self._patience = min(2 * self._patience, _FORGOTTEN[1])
        return True

    def note_drafted(self, num_rows: int, num_drafted: int, step_s: float) -> None:
        """Record the time of a step with drafts; `step_s` does not include the time for drafting."""
        if alone_s := self.plain_s(num_rows, ahead=False):
            self._each[num_rows].add((step_s / alone_s - 1) / num_drafted)
        self._since[num_rows] += 1
        self._num_plain = 0
        self._num_drafted += 1
        if self._num_drafted >= _PAYING:
            self._patience = _FORGOTTEN[0]

    def is_measured(self, num_rows: int) -> bool:
        """Whether enough steps with drafts have been measured to know what a draft token costs."""
        return self._each[num_rows].known is not None

    def checked(self, num_rows: int, num_drafted: float) -> float:
        """Estimate the time of a step with draft tokens, in units of a plain step not launched ahead."""
        return 1 + num_drafted * max(self._each[num_rows].or_before(_CHECKED), 0.0)


class Passes:
    """Times of a drafter's passes, as shares of the time of a step without drafts, by the number of rows."""

    def __init__(self, share: float) -> None:
        """`share` is assumed until passes have been measured."""
        self._share = share
        self._measured: defaultdict[int, _Typical] = defaultdict(_Typical)

    def learn(self, num_rows: int, share: float) -> None:
        """Record the time of one pass, as a share of a plain step's time."""
        self._measured[num_rows].add(share)

    def share(self, num_rows: int) -> float:
        """Return the typical time of a pass, as a share of a plain step's time."""
        return self._measured[num_rows].or_before(self._share)


def expected(share: float, num_drafted: int) -> float:
    """Return the expected number of accepted tokens of a draft, each of which is right with chance `share`.

    A token is accepted only if all before it are right.
    """
    share = min(share, 0.99)
    return share * (1 - share**num_drafted) / (1 - share)


class DraftCosts(NamedTuple):
    """The costs of drafts for some rows of a step, relative to a step without drafts."""

    #: Has the cost of verifying drafts.
    times: StepTimes
    #: The number of all rows of the step.
    num_rows: int
    #: The cost of drafting one token for each of the rows with drafts.
    pass_share: float = 0.0
    #: How many times longer the step takes since it is not launched ahead: `StepTimes.late`.
    late: float = 1.0


def best(costs: DraftCosts, shares: Sequence[float], most: int) -> tuple[float, int]:
    """Return the largest factor by which drafts of up to `most` tokens make a step's tokens faster.

    Also returns the length of these drafts. `shares` has, for each of their rows, the expected share of right
    tokens.
    """
    each = costs.times.checked(costs.num_rows, 1) - 1
    lengths = range(1, most + 1) if shares else ()
    return max(((_gain(costs, shares, num, each), num) for num in lengths), default=(1.0, 0))


def _gain(costs: DraftCosts, shares: Sequence[float], num_drafted: int, each: float) -> float:
    more = sum(expected(share, num_drafted) for share in shares)
    checked = 1 + each * num_drafted * len(shares)
    took = costs.late * checked + costs.pass_share * num_drafted
    return (1 + more / costs.num_rows) / took
