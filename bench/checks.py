"""Promises held against what was measured, with three verdicts. Pure.

An exact check counts, and cannot fail by chance: the command's exit code is its. A statistical one holds an
interval against the bound in its name: it fails where all of the interval lies beyond the bound, and cannot
tell where the interval holds it. So an honest run fails it once in forty at the very bound, and never far
from it.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from . import stats
from .figures import interval, number

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from .samples import Findings
    from .spec import Unit
    from .stats import Estimate

#: How late the measuring loop may be at p99: its own lateness is in every time that it takes.
LAG_BOUND_S: Final = 0.05
MIN_LAGS: Final = 500


class Verdict(StrEnum):
    """What a check has come to."""

    HOLDS = "holds"
    FAILS = "fails"
    CANNOT_TELL = "cannot tell"


class Check(Struct, frozen=True, kw_only=True):
    """One promise and what became of it. `exact`: it cannot fail by chance."""

    name: str
    outcome: Verdict
    detail: str
    exact: bool

    @property
    def failed(self) -> bool:
        """Say whether it ends the run with exit code 1."""
        return self.exact and self.outcome is Verdict.FAILS


def count(name: str, wrong: Collection[object], of: Collection[object], things: str = "turns") -> Check:
    """Count those that break the promise: exact. Without anything to count it cannot tell."""
    detail = f"{len(wrong):,} of {len(of):,} {things} break it" if wrong else f"{len(of):,} {things}"
    return Check(name=name, outcome=_verdict(None if not of else not wrong), detail=detail, exact=True)


def bounded(
    name: str,
    numbers: Mapping[str, Sequence[float]],
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    unit: Unit = "",
    log: bool = False,
) -> Check:
    """Hold the mean over blocks against a bound, for each of several things, each with its blocks' numbers.

    All of them together have the confidence of one: each one's interval is the wider, the more there are.
    """
    sure = 1 - (1 - stats.CONFIDENCE) / max(len(numbers), 1)
    found = {label: stats.mean(some, log=log, confidence=sure) for label, some in numbers.items()}
    return judged(name, found, at_most=at_most, at_least=at_least, unit=unit)


def judged(
    name: str,
    estimates: Mapping[str, Estimate | None],
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    unit: Unit = "",
) -> Check:
    """Hold estimates against a bound."""
    verdicts = [judge(estimate, at_most=at_most, at_least=at_least) for estimate in estimates.values()]
    worst = next((one for one in (Verdict.FAILS, Verdict.CANNOT_TELL) if one in verdicts), Verdict.HOLDS)
    told = {
        label: interval(one, unit, signed=one is not None and min(one.value, one.low or 0) < 0)
        for label, one in estimates.items()
    }
    said = "; ".join(f"{label} {estimate}".strip() for label, estimate in told.items())
    detail = said or "nothing was measured"
    return Check(name=name, outcome=worst if verdicts else Verdict.CANNOT_TELL, detail=detail, exact=False)


def judge(
    estimate: Estimate | None, *, at_most: float | None = None, at_least: float | None = None
) -> Verdict:
    """Hold one estimate's interval against a bound."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return Verdict.CANNOT_TELL
    below = at_most is not None and estimate.low > at_most
    if below or (at_least is not None and estimate.high < at_least):
        return Verdict.FAILS
    inside = at_most is None or estimate.high <= at_most
    return _verdict(True if inside and (at_least is None or estimate.low >= at_least) else None)


def common(findings: Findings[Any], lags_s: Sequence[float]) -> Iterable[Check]:
    """Yield what is promised of every bench: answers, whole ones, honest sums, and a loop that kept time.

    Of a bench that has samples alone nothing.
    """
    if findings.given and not findings.turns:
        return
    turns = [turn for turn in findings.turns if not findings.bench.planned(turn)]
    answered = [turn for turn in turns if turn.error is None]
    failed = [turn for turn in turns if turn.error is not None]
    every = count("every turn was answered", failed, turns)
    if failed:
        errors = Counter(turn.error for turn in failed)
        first = {turn.error: turn.message for turn in reversed(failed)}
        told = ", ".join(f"{times:,} {error} ({first[error]})" for error, times in errors.most_common())
        every = Check(name=every.name, outcome=every.outcome, detail=f"{every.detail}: {told}", exact=True)
    yield every
    if streamed := [turn for turn in answered if turn.joined is not None]:
        torn = [turn for turn in streamed if not turn.joined]
        yield count("the chunks of an answer joined are its result", torn, streamed)
    if accounted := [turn for turn in answered if turn.prompt_tokens]:
        uneven = [t for t in accounted if t.cached_tokens + t.prefilled_tokens != t.prompt_tokens]
        yield count("what was cached and what was prefilled make the prompt", uneven, accounted)
    yield kept_time(lags_s)


def kept_time(lags_s: Sequence[float]) -> Check:
    """Hold the measuring loop's own lag, while turns were in flight, against its bound."""
    late = stats.quantile(lags_s, 0.99) if len(lags_s) >= MIN_LAGS else None
    name = f"the measuring loop was late by at most {number(LAG_BOUND_S, 's')} at p99"
    detail = (
        f"{number(late, 's')}, at most {number(max(lags_s), 's')}" if late is not None else "too few turns"
    )
    verdict = _verdict(None if late is None else late <= LAG_BOUND_S)
    return Check(name=name, outcome=verdict, detail=detail, exact=False)


def _verdict(kept: bool | None) -> Verdict:
    return {True: Verdict.HOLDS, False: Verdict.FAILS, None: Verdict.CANNOT_TELL}[kept]
