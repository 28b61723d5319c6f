"""What follows from the turns of `bench load`: pure, from turns and readings to a report."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec import Struct

from bench.old import stats
from bench.old.report import Report, Series
from bench.old.session.summary import MIN_READINGS, Wait
from bench.old.stats import Spread, spread
from bench.watch import Lag, Reading, lag

from . import shares
from .shares import Fairness, Throughput  # noqa: TC001  # msgspec reads the annotations
from .turns import Span, Stall, Turn, first_chunk_s, lateness_s, per_token_s, whole_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .plan import Level


class LevelSummary(Struct, frozen=True, kw_only=True):
    """One level. All times but `gaps` count from when a turn was due. `queued` is the worker's account."""

    name: str
    kind: str
    amount: float
    turns: int
    answered: int
    errors: dict[str, int]
    seconds: float
    generated: Throughput | None
    prefilled: Throughput | None
    first_chunk: Spread | None
    per_token: Spread | None
    whole: Spread | None
    gaps: Spread | None
    queued: Spread | None
    lateness: Spread | None
    fairness: Fairness | None
    lag: Lag | None
    process_bytes: int | None


class StallSummary(Struct, frozen=True, kw_only=True):
    """The gaps of running answers, alone and beside a long prompt.

    `worst` is the 99th percentile beside it over the median alone; `ratio` that of the medians, with its 95%
    interval.
    """

    rounds: int
    tokens: float
    seconds: Spread
    alone: Spread | None
    during: Spread | None
    worst: float | None
    ratio: tuple[float, float, float] | None


class LoadReport(Report, frozen=True, kw_only=True):
    """The report of `bench load`. `messages` has the first message of every kind of error."""

    levels: tuple[LevelSummary, ...]
    stall: StallSummary | None
    wait: Wait | None
    messages: dict[str, str]
    spans: tuple[Span, ...]
    stalls: tuple[Stall, ...]
    readings: tuple[Reading, ...]
    turns: tuple[Turn, ...]


def summarise(
    level: Level, span: Span | None, turns: Sequence[Turn], readings: Sequence[Reading]
) -> LevelSummary:
    """Aggregate one level's turns, without the openings; without a span it is not over."""
    load = [turn for turn in turns if turn.turn]
    answers = [turn.answer for turn in load if turn.answer is not None]
    firsts = [first for turn in load if (first := first_chunk_s(turn)) is not None]
    paces = [pace for turn in load if (pace := per_token_s(turn)) is not None]
    seen = [] if span is None else [r for r in readings if span.started_s <= r.at_s <= span.ended_s]
    busy_s = 0.0 if span is None else span.busy_s
    return LevelSummary(
        name=level.name,
        kind=level.kind,
        amount=level.amount,
        turns=len(load),
        answered=len(answers),
        errors=dict(Counter(turn.error for turn in turns if turn.error is not None)),
        seconds=0.0 if span is None else span.ended_s - span.started_s,
        generated=shares.generated(load, busy_s),
        prefilled=shares.prefilled(load, busy_s),
        first_chunk=spread(firsts),
        per_token=spread(paces),
        whole=spread([whole_s(turn) for turn in load if turn.answer is not None]),
        gaps=spread([gap for turn in load for gap in turn.gaps_s]),
        queued=spread([answer.queued_s for answer in answers]),
        lateness=None if level.kind == "closed" else spread([lateness_s(turn) for turn in load]),
        fairness=shares.fairness(load),
        lag=lag(seen),
        process_bytes=max((reading.process_bytes for reading in seen), default=None),
    )


def series(
    levels: Sequence[LevelSummary], turns: Sequence[Turn], stalls: Sequence[Stall]
) -> dict[str, Series]:
    """Return the measures that two reports are compared by."""
    found: dict[str, Series] = {}
    for number, level in enumerate(levels):
        load = [turn for turn in turns if turn.level == number and turn.turn and turn.answer is not None]
        firsts = [first for turn in load if (first := first_chunk_s(turn)) is not None]
        paces = [pace for turn in load if (pace := per_token_s(turn)) is not None]
        found[f"whole turn, {level.name}"] = _lower("s", [whole_s(turn) for turn in load])
        found[f"first chunk, {level.name}"] = _lower("s", firsts)
        found[f"per token, {level.name}"] = _lower("s", paces)
        found[f"generated, {level.name}"] = Series(
            unit="tokens/s",
            better="higher",
            values=level.generated.slices if level.generated else (),
        )
    if stalls:
        found["gap, alone"] = _lower("s", [gap for one in stalls for gap in one.alone_s])
        found["gap beside a long prompt"] = _lower("s", [gap for one in stalls for gap in one.during_s])
    return found


def stall(stalls: Sequence[Stall]) -> StallSummary | None:
    """Aggregate the rounds of the long prompt; None without one."""
    seconds = spread([one.seconds for one in stalls])
    if seconds is None:
        return None
    alone = [gap for one in stalls for gap in one.alone_s]
    during = [gap for one in stalls for gap in one.during_s]
    ratio = stats.median_ratio(alone, during)
    quiet, loud = spread(alone), spread(during)
    return StallSummary(
        rounds=len(stalls),
        tokens=stats.percentile([one.prefilled_tokens for one in stalls], 0.5),
        seconds=seconds,
        alone=quiet,
        during=loud,
        worst=loud.p99 / quiet.p50 if quiet and loud and quiet.p50 > 0 else None,
        ratio=(ratio.ratio, ratio.low, ratio.high) if ratio else None,
    )


def wait(turns: Sequence[Turn]) -> Wait | None:
    """Hold the wait for the first chunk against the tokens that the worker says it prefilled.

    `turns` are those of one session at a time, openings included. The time of a prefilled token is that of
    turns that found next to nothing in any cache: what a chat template puts first is the same for all. What a
    turn waits beyond its own prefill must not grow with the session's length. None where there is too little
    to fit.
    """
    answers = [turn.answer for turn in turns if turn.answer is not None]
    cold = [
        a.first_chunk_s / a.prefilled_tokens
        for a in answers
        if a.position_before == 0 and a.prefilled_tokens > a.cached_tokens
    ]
    warm = [(a.position_before, a) for a in answers if a.position_before]
    if not cold or len(warm) < MIN_READINGS:
        return None
    rate = min(cold)
    line = stats.robust_line(
        [before for before, _ in warm],
        [answer.first_chunk_s - rate * answer.prefilled_tokens for _, answer in warm],
    )
    if line is None:
        return None
    return Wait(per_position_s=line.slope, low_s=line.low, high_s=line.high, per_prefilled_s=rate)


def _lower(unit: str, values: Sequence[float]) -> Series:
    return Series(unit=unit, better="lower", values=tuple(values))
