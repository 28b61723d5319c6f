"""Compares measurements with what the worker promises. A check holds, fails or cannot tell. Pure.

An exact check counts violations and cannot fail by chance, so it decides the command's exit code. A
statistical check compares an interval with the bound in the check's name. It fails if the whole interval is
beyond the bound, and cannot tell if the interval contains the bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from statistics import linear_regression
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from . import stats
from .figures import Unit, interval, number
from .stats import Estimate
from .turns import Sample, TimedTurn

T = TypeVar("T")

#: How late the measuring loop may be at p99: its lateness is part of every time that it measures.
LAG_BOUND_S: Final = 0.05
#: The most that a cached token may cost, as a share of its prefill; attention to it costs a few percent.
BELIEVED: Final = 0.25
GROWTH_PER_HOUR: Final = 8 * 2**20
#: A process first fills its own caches, so growth is not judged in short runs, nor in a run's first quarter.
MIN_GROWTH_S: Final = 600.0
WARM_UP: Final = 0.25
#: The number of blocks of a long run.
STRETCHES: Final = 10


class Verdict(StrEnum):
    """The result of a check."""

    HOLDS = "holds"
    FAILS = "fails"
    CANNOT_TELL = "cannot tell"


class Check(Struct, frozen=True, kw_only=True):
    """One promise of the worker, and whether it was kept. `exact`: the check cannot fail by chance."""

    name: str
    outcome: Verdict
    detail: str
    exact: bool

    @property
    def failed(self) -> bool:
        """Whether the command exits with code 1 because of this check."""
        return self.exact and self.outcome is Verdict.FAILS


def count(name: str, of: Collection[T], broken: Callable[[T], object], things: str = "turns") -> Check:
    """Return an exact check that `broken` is true for no element of `of`; without any it cannot tell."""
    wrong = sum(bool(broken(one)) for one in of)
    detail = f"{wrong:,} of {len(of):,} {things} break it" if wrong else f"{len(of):,} {things}"
    outcome = Verdict.FAILS if wrong else Verdict.HOLDS if of else Verdict.CANNOT_TELL
    return Check(name=name, outcome=outcome, detail=detail, exact=True)


def bounded(
    name: str,
    numbers: Mapping[str, Sequence[float] | float | None],
    *,
    at_most: float = math.inf,
    at_least: float = -math.inf,
    unit: Unit = "",
) -> Check:
    """Return a check that the median of each label's `numbers`, one number per block, is within the bounds.

    A label can also have a single number, without an interval. The check gets the worst label's verdict.
    """

    def estimate(one: Sequence[float] | float | None) -> Estimate | None:
        if isinstance(one, int | float):
            return Estimate(one, one, one)
        return None if one is None else stats.estimate(one)

    def verdict(one: Estimate | None) -> Verdict:
        ends = (-math.inf, math.inf) if one is None else (one.low, one.high)
        within = [at_least <= end <= at_most for end in ends]
        return Verdict.HOLDS if all(within) else Verdict.CANNOT_TELL if any(within) else Verdict.FAILS

    found = {label: estimate(one) for label, one in numbers.items()}
    verdicts = [verdict(one) for one in found.values()] or [Verdict.CANNOT_TELL]
    worst = next(one for one in (Verdict.FAILS, Verdict.CANNOT_TELL, Verdict.HOLDS) if one in verdicts)
    said = [f"{label} {interval(one, unit)}".strip() for label, one in found.items()]
    return Check(name=name, outcome=worst, detail="; ".join(said) or "nothing was measured", exact=False)


def common(turns: Sequence[TimedTurn], lags_s: Sequence[float]) -> Iterable[Check]:
    """Yield the checks that all benches share: answers, chunks, token counts, and the event loop's lag."""
    answered = [turn for turn in turns if turn.error is None]
    every = count("every turn was answered", turns, lambda turn: turn.error)
    if errors := Counter(turn.error for turn in turns if turn.error):
        first = {turn.error: turn.message for turn in reversed(turns)}
        told = ", ".join(f"{times:,} {error} ({first[error]})" for error, times in errors.most_common())
        every = replace(every, detail=f"{every.detail}: {told}")
    yield every
    if streamed := [turn for turn in answered if turn.joined is not None]:
        yield count("the chunks of an answer joined are its result", streamed, lambda turn: not turn.joined)
    if accounted := [turn for turn in answered if turn.prompt_tokens]:
        name = "what was cached and what was prefilled make the prompt"
        yield count(name, accounted, lambda t: t.cached_tokens + t.prefilled_tokens != t.prompt_tokens)
    yield kept_time(lags_s)


def kept_time(lags_s: Sequence[float]) -> Check:
    """Check that the bench's event loop, which measures all times, was hardly late while turns ran."""
    name = f"the measuring loop was late by at most {number(LAG_BOUND_S, 's')} at p99"
    return bounded(name, {"": stats.quantile(lags_s, 0.99)}, at_most=LAG_BOUND_S, unit="s")


def cached_tokens_are_cheap(turns: Sequence[TimedTurn]) -> Check:
    """Check that a session's earlier tokens, whose KV is cached, hardly delay the first chunk.

    The check compares two times per token, both by the client's clock. For a prefilled token: the wait for
    the first chunk, divided by the prefilled tokens, in the fastest turn of a session that had none. For a
    cached token: in each block, the slope by which the wait, less that for the turn's own prefill, grows with
    the number of the session's earlier tokens (the turn's fact `held`, None if unknown).
    """
    answered = [turn for turn in turns if turn.error is None]
    cold = [
        turn for turn in answered if turn.fact("held") == 0 and turn.prefilled_tokens > turn.cached_tokens
    ]
    rate_s = min(((turn.first_s or 0.0) / turn.prefilled_tokens for turn in cold), default=0.0)
    costs = stats.slopes(
        (turn.block, held, (turn.first_s or 0.0) / rate_s - turn.prefilled_tokens)
        for turn in answered
        if rate_s and (held := turn.fact("held"))
    )
    name = f"a token that a session holds costs at most {BELIEVED:.0%} of a prefilled one's time"
    return bounded(name, {"": costs}, at_most=BELIEVED, unit="share")


def keeps_its_size(readings: Sequence[Sample]) -> Check:
    """Check that a process's memory without KV, in bytes, hardly grows; `x` of a reading is its time in s.

    Cannot tell in a run of less than ten minutes.
    """
    name = "the process without its KV grows by at most 8 MiB an hour"
    times = [reading.x or 0.0 for reading in readings]
    begin, end = min(times, default=0.0), max(times, default=0.0)
    if end - begin < MIN_GROWTH_S:
        return bounded(name, {"a run of minutes shows none:": None}, at_most=GROWTH_PER_HOUR)
    warm = [one for one in readings if (one.x or 0.0) >= begin + WARM_UP * (end - begin)]
    hours, sizes = [(one.x or 0.0) / 3600 for one in warm], [one.value for one in warm]
    growth = linear_regression(hours, sizes).slope if len(warm) > 1 else None
    return bounded(name, {"": growth}, at_most=GROWTH_PER_HOUR, unit="bytes")
