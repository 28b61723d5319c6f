"""Says from measured times and accepted drafts how many tokens a step should draft. Pure.

All costs are shares of a plain step's time over as many rows, so they hold while the machine's speed changes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Measurements whose median counts, and how many of them have to be there.
_KEPT: Final = 7
_ENOUGH: Final = 3
#: Drafted steps until plain ones are measured again.
_FRESH: Final = 64
#: Plain steps in a row after which the costs of drafts are forgotten, so that they are tried again: the first
#: time, as other work on the machine may have raised them, and the last, if they never pay. After so many
#: drafted steps it is the first number again.
_FORGOTTEN: Final = (64, 2048)
_PAYING: Final = 32
#: What a draft's token costs in the step that checks it, until that is measured.
_CHECKED: Final = 0.05
#: Drafts have to promise this gain.
LEAST: Final = 1.03
#: Draft tokens that weigh as much as what is known beforehand.
_WEIGHT: Final = 3.0


class Acceptance:
    """The share of draft tokens that are right, among those whose predecessors were."""

    def __init__(self, by_draft: float, by_step: float) -> None:
        """By so much what was seen weighs less after another draft, and after a step without one."""
        self._by_draft = by_draft
        self._by_step = by_step
        self._num_right = self._num_tested = 0.0

    def share(self, before: float) -> float:
        """Return the share; `before` is what to expect without any draft."""
        return (_WEIGHT * before + self._num_right) / (_WEIGHT + self._num_tested)

    def learn(self, num_right: int, num_drafted: int) -> None:
        """Learn from a draft of which the first `num_right` tokens were right."""
        self._num_right = self._by_draft * self._num_right + num_right
        self._num_tested = self._by_draft * self._num_tested + min(num_right + 1, num_drafted)

    def fade(self) -> None:
        """Forget a little, so that a drafter that was wrong is tried again."""
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
        """The median; None until there are enough."""
        return self._median if len(self._some) >= _ENOUGH else None

    def or_before(self, before: float) -> float:
        """Return the median; of too few the least, as any of them may have waited for something else."""
        return self._median if len(self._some) >= _ENOUGH else min((*self._some, before))


class Times:
    """The times of steps by the number of rows: of plain ones, and what each draft token adds to them.

    A plain step takes less time if it was launched ahead.
    """

    def __init__(self) -> None:
        self._plain: defaultdict[tuple[int, bool], _Typical] = defaultdict(_Typical)
        self._each: defaultdict[int, _Typical] = defaultdict(_Typical)
        self._since: defaultdict[int, int] = defaultdict(int)
        self._num_plain = self._num_drafted = 0
        self._patience = _FORGOTTEN[0]

    def plain_s(self, num_rows: int, *, ahead: bool) -> float | None:
        """Return the time of a plain step; None until enough are measured."""
        return self._plain[num_rows, ahead].known or self._plain[num_rows, not ahead].known

    def late(self, num_rows: int, *, ahead: bool) -> float:
        """Return how many times as long a plain step takes that cannot be launched `ahead` as others are."""
        alone_s, ahead_s = (self.plain_s(num_rows, ahead=kind) for kind in (False, True))
        return max(alone_s / ahead_s, 1.0) if ahead and alone_s and ahead_s else 1.0

    def is_due(self, num_rows: int) -> bool:
        """Whether the next step should be plain, to measure it."""
        return self._since[num_rows] >= _FRESH

    def note_plain(self, num_rows: int, step_s: float, *, ahead: bool, could: bool) -> bool:
        """Learn from a plain step; `could` says that one like it may be launched ahead.

        Return whether costs of drafts are forgotten now.
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
        """Learn from a step that took `step_s` seconds without what drafting took."""
        if alone_s := self.plain_s(num_rows, ahead=False):
            self._each[num_rows].add((step_s / alone_s - 1) / num_drafted)
        self._since[num_rows] += 1
        self._num_plain = 0
        self._num_drafted += 1
        if self._num_drafted >= _PAYING:
            self._patience = _FORGOTTEN[0]

    def checked(self, num_rows: int, num_drafted: float) -> float:
        """Estimate the time of a step with so many draft tokens, as a share of a plain one's not ahead."""
        return 1 + num_drafted * max(self._each[num_rows].or_before(_CHECKED), 0.0)


class Passes:
    """What a drafter's passes take, as a share of a plain step, by the number of rows that they draft for."""

    def __init__(self, share: float) -> None:
        """`share` is expected until it is measured."""
        self._share = share
        self._measured: defaultdict[int, _Typical] = defaultdict(_Typical)

    def learn(self, num_rows: int, share: float) -> None:
        """Learn from one pass."""
        self._measured[num_rows].add(share)

    def share(self, num_rows: int) -> float:
        """Return what a pass takes."""
        return self._measured[num_rows].or_before(self._share)


def expected(share: float, num_drafted: int) -> float:
    """Return how many draft tokens are right, if each one behind right ones is with this probability."""
    share = min(share, 0.99)
    return share * (1 - share**num_drafted) / (1 - share)


class Costs(NamedTuple):
    """What drafts for some of `num_rows` rows cost: a pass, being late (see `Times`), and being checked.

    Of the rows for which drafts are asked, a share `often` has one.
    """

    times: Times
    num_rows: int
    pass_share: float = 0.0
    late: float = 1.0
    often: float = 1.0


def gain(costs: Costs, shares: Sequence[float], num_drafted: int) -> float:
    """Return by how much `num_drafted` tokens for each of some of the rows raise the tokens a second.

    `shares` are the drafted rows' acceptances.
    """
    return _gain(costs, shares, num_drafted, costs.times.checked(costs.num_rows, 1) - 1)


def best(costs: Costs, shares: Sequence[float], most: int) -> tuple[float, int]:
    """Return the largest gain, and how many tokens to draft for it."""
    each = costs.times.checked(costs.num_rows, 1) - 1
    lengths = range(1, most + 1) if shares else ()
    return max(((_gain(costs, shares, num, each), num) for num in lengths), default=(1.0, 0))


def _gain(costs: Costs, shares: Sequence[float], num_drafted: int, each: float) -> float:
    more = costs.often * sum(expected(share, num_drafted) for share in shares)
    checked = 1 + each * costs.often * num_drafted * len(shares)
    took = costs.late * checked + costs.pass_share * num_drafted
    return (1 + more / costs.num_rows) / took
