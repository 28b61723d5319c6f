"""Checks of promises against what was measured, with three verdicts. Pure.

An exact check counts violations and cannot fail by chance, so it decides the command's exit code. A
statistical check compares an interval with the bound in its name: it fails if the whole interval is beyond
the bound, and cannot tell if the interval contains the bound. A value at the bound fails once in forty runs.
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

#: How late the measuring loop may be at p99: its lateness is part of every time that it measures.
LAG_BOUND_S: Final = 0.05
MIN_LAGS: Final = 500


class Verdict(StrEnum):
    """The result of a check."""

    HOLDS = "holds"
    FAILS = "fails"
    CANNOT_TELL = "cannot tell"


class Check(Struct, frozen=True, kw_only=True):
    """One checked promise. `exact`: the check cannot fail by chance."""

    name: str
    outcome: Verdict
    detail: str
    exact: bool

    @property
    def failed(self) -> bool:
        """Whether the check ends the command with exit code 1."""
        return self.exact and self.outcome is Verdict.FAILS


def count(name: str, wrong: Collection[object], of: Collection[object], things: str = "turns") -> Check:
    """Check that nothing broke the promise: exact. Cannot tell if `of` is empty."""
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
    """Compare the mean over blocks with a bound, for several labels, each with its blocks' numbers.

    The confidence holds for all labels together: the more labels, the wider each interval.
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
    """Compare estimates with a bound; the worst verdict counts."""
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
    """Compare one estimate's interval with a bound."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return Verdict.CANNOT_TELL
    below = at_most is not None and estimate.low > at_most
    if below or (at_least is not None and estimate.high < at_least):
        return Verdict.FAILS
    inside = at_most is None or estimate.high <= at_most
    return _verdict(True if inside and (at_least is None or estimate.low >= at_least) else None)


def common(findings: Findings[Any], lags_s: Sequence[float]) -> Iterable[Check]:
    """Yield the checks of every bench: all answered, chunks complete, token counts consistent, loop on time.

    A bench that has only samples gets none.
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
    """Check the measuring loop's own lag while turns were in flight."""
    late = stats.quantile(lags_s, 0.99) if len(lags_s) >= MIN_LAGS else None
    name = f"the measuring loop was late by at most {number(LAG_BOUND_S, 's')} at p99"
    detail = (
        f"{number(late, 's')}, at most {number(max(lags_s), 's')}" if late is not None else "too few turns"
    )
    verdict = _verdict(None if late is None else late <= LAG_BOUND_S)
    return Check(name=name, outcome=verdict, detail=detail, exact=False)


def _verdict(kept: bool | None) -> Verdict:
    return {True: Verdict.HOLDS, False: Verdict.FAILS, None: Verdict.CANNOT_TELL}[kept]
