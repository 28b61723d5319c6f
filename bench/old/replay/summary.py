"""What follows from a replay: pure, from requests beside their record to a report."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from bench.old import stats
from bench.old.report import Check, Report, Series

from .turns import Played  # noqa: TC001  # msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .turns import Times


class Beside(Struct, frozen=True, kw_only=True):
    """One measure, replayed against recorded: the median of the ratios of single requests.

    Fewer than five pairs have no interval.
    """

    measure: str
    pairs: int
    recorded_p50: float
    replayed_p50: float
    ratio: float
    low: float | None
    high: float | None


class Summary(Struct, frozen=True, kw_only=True):
    """The aggregates. `equal` of the `comparable` answers are the record's, token by token.

    `standings` counts all answered generates by whether they could be compared, `first_differences` are the
    token indices at which comparable ones differ.
    """

    requests: int
    answers: int
    comparable: int
    equal: int
    sampled_comparable: int
    sampled_equal: int
    standings: dict[str, int]
    first_differences: tuple[int, ...]
    forced: int
    errors: dict[str, int]
    late_s: stats.Spread | None
    beside: tuple[Beside, ...]


class ReplayReport(Report, frozen=True, kw_only=True):
    """The report of `bench replay`. `left_out` are requests of the record that were not played.

    `serve` are the settings of the bench's own worker, no part of what two replays must share. `messages`
    has the first message of every class of error.
    """

    record: str
    serve: str
    recorded_models: tuple[str, ...]
    replayed_models: tuple[str, ...]
    recorded_sessions: int
    recorded_requests: int
    left_out: dict[str, int]
    summary: Summary
    messages: dict[str, str]
    played: tuple[Played, ...]


#: What is put beside each other, by name.
MEASURES: Final[Mapping[str, Callable[[Times], float | None]]] = {
    "turnaround in the log": lambda times: times.turnaround_s,
    "time to first token": lambda times: times.first_token_s,
    "time per token": lambda times: times.per_token_s,
    "whole generate": lambda times: times.total_s,
}


def summarise(played: Sequence[Played]) -> Summary:
    """Aggregate what was played so far."""
    answers = [one for one in played if one.kind == "generate" and one.replayed is not None]
    comparable = [one for one in answers if one.standing == "comparable"]
    sampled = [one for one in comparable if one.sampled]
    return Summary(
        requests=len(played),
        answers=len(answers),
        comparable=len(comparable),
        equal=sum(one.first_difference is None for one in comparable),
        sampled_comparable=len(sampled),
        sampled_equal=sum(one.first_difference is None for one in sampled),
        standings=dict(Counter(one.standing for one in answers)),
        first_differences=tuple(
            one.first_difference for one in comparable if one.first_difference is not None
        ),
        forced=sum(one.forced for one in played),
        errors=dict(Counter(one.error for one in played if one.error is not None)),
        late_s=stats.spread([one.late_s for one in played]),
        beside=tuple(row for name in MEASURES if (row := beside(name, played)) is not None),
    )


def pairs(measure: str, played: Sequence[Played]) -> list[tuple[float, float]]:
    """Return a measure of every request that has it on both sides: recorded, replayed."""
    read = MEASURES[measure]
    found = []
    for one in played:
        recorded, replayed = read(one.recorded), read(one.replayed) if one.replayed else None
        if recorded is not None and replayed is not None and recorded > 0:
            found.append((recorded, replayed))
    return found


def beside(measure: str, played: Sequence[Played]) -> Beside | None:
    """Put a measure of the replay beside the record's; None without a pair."""
    found = pairs(measure, played)
    recorded, replayed = [one for one, _ in found], [other for _, other in found]
    ratio = stats.paired_ratio(recorded, replayed)
    if ratio is None:
        return None
    return Beside(
        measure=measure,
        pairs=len(found),
        recorded_p50=statistics.median(recorded),
        replayed_p50=statistics.median(replayed),
        ratio=ratio.ratio,
        low=ratio.low if math.isfinite(ratio.low) else None,
        high=ratio.high if math.isfinite(ratio.high) else None,
    )


def series(played: Sequence[Played]) -> dict[str, Series]:
    """Return the replay's measures, for comparing two replays of one record."""
    return {
        name: Series(unit="s", better="lower", values=tuple(replayed for _, replayed in pairs(name, played)))
        for name in MEASURES
    }


def checks(summary: Summary, *, same_model: bool | None) -> tuple[Check, ...]:
    """Hold a replay against its record. `same_model` is None where that is not known."""
    errors = ", ".join(f"{count} {name}" for name, count in summary.errors.items())
    equal = summary.equal == summary.comparable
    others = ", ".join(f"{n} {name}" for name, n in summary.standings.items() if name != "comparable")
    sampled = f", {summary.sampled_equal} of {summary.sampled_comparable} sampled ones"
    return (
        Check(
            name="every request that the record has answered is answered again",
            passed=not errors if summary.requests else None,
            detail=errors or f"{summary.requests} requests",
            exact=True,
        ),
        Check(
            name="the same model gives the same tokens",
            passed=equal if summary.comparable and same_model else None,
            detail=(
                "the record is another model's; " * (same_model is False)
                + f"{summary.equal} of {summary.comparable} comparable answers are equal"
                + sampled * bool(summary.sampled_comparable)
                + f"; not comparable: {others}" * bool(others)
            ),
            exact=False,  # what runs in one batch differs, and with it the last bits
        ),
    )
