"""What follows from the sessions and turns of `bench many`: pure, to a report."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Final, get_args

from msgspec import Struct

from bench.old import stats
from bench.old.report import Report, Series
from bench.old.session.summary import MIN_READINGS, Slope, Wait, growth
from bench.old.session.turns import Memory
from bench.old.stats import Spread, spread
from bench.watch import Reading  # noqa: TC001  # msgspec reads the annotations

from .turns import Account, Built, Found, Turn, forgotten, found

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_NAMED: Final = 20
#: A process fills its caches with the first sessions; what each costs is looked for in the others.
WARM_UP: Final = 0.25
PARTS: Final = 8
MIN_SLOPES: Final = 4


class PerSession(Struct, frozen=True, kw_only=True):
    """Bytes of the worker's process, KV left out, for each session more, with the 95% interval."""

    size_bytes: float
    low: float
    high: float
    readings: int


class Where(Struct, frozen=True, kw_only=True):
    """The turns that found their session's KV in one place."""

    place: Found
    whole: Spread
    first_chunk: Spread
    prefilled: float


class ManySummary(Struct, frozen=True, kw_only=True):
    """The aggregates. `ssd_bytes_per_session` is what was stored when all were built and written.

    `counted` are the tokens that the bench saw, `account` those that the worker says it worked on.
    """

    built: int
    build_s: float
    build: Spread | None
    turns: int
    answered: int
    errors: dict[str, int]
    asked_sessions: int
    unanswered_sessions: int
    forgotten: tuple[int, ...]
    rewinds: int
    places: tuple[Where, ...]
    restored_bytes: int | None
    readings: int
    over_limit: int
    most_kv_bytes: int | None
    max_memory_bytes: int | None
    per_session: PerSession | None
    ssd_bytes_per_session: float | None
    beyond_kv: Slope | None
    counted: Account
    account: Account | None
    wait: Wait | None


class ManyReport(Report, frozen=True, kw_only=True):
    """The report of `bench many`. `messages` has the first message of every kind of error."""

    summary: ManySummary
    messages: dict[str, str]
    written_at_s: float | None
    built: tuple[Built, ...]
    turns: tuple[Turn, ...]
    readings: tuple[Reading, ...]


def series(built: Sequence[Built], turns: Sequence[Turn], readings: Sequence[Reading]) -> dict[str, Series]:
    """Return the measures that two reports are compared by."""
    good = [one for one in built if one.error is None]
    measures = {"build": Series(unit="s", better="lower", values=tuple(one.latency_s for one in good))}
    for place in get_args(Found):
        some = [turn for turn in turns if found(turn) == place]
        measures[f"turn, found in {place}" if place != "prefilled" else "turn, prefilled"] = Series(
            unit="s", better="lower", values=tuple(turn.latency_s for turn in some)
        )
    measures["process memory"] = Series(
        unit="bytes", better="lower", values=tuple(float(reading.process_bytes) for reading in readings)
    )
    return measures


def summarise(
    built: Sequence[Built],
    turns: Sequence[Turn],
    readings: Sequence[Reading],
    *,
    rewinds: int,
    looks: int,
    over_limit: int,
    written_at_s: float | None,
    account: Account | None,
    cold_s: Sequence[float],
) -> ManySummary:
    """Aggregate all so far.

    `looks` are readings that were checked but not kept, `over_limit` those of them that were over it.
    `cold_s` are seconds per prefilled token where nothing was cached.
    """
    good = [one for one in built if one.error is None]
    answered = [turn for turn in turns if turn.error is None]
    asked = {turn.session for turn in turns}
    over = over_limit + sum(r.resident_kv_bytes > r.max_memory_bytes for r in readings)
    turned = [] if written_at_s is None else [r for r in readings if r.at_s >= written_at_s]
    build_s = max((one.at_s for one in built), default=0.0) - min(
        (one.at_s - one.latency_s for one in built), default=0.0
    )
    return ManySummary(
        built=len(good),
        build_s=build_s,
        build=spread([one.latency_s for one in good]),
        turns=len(turns),
        answered=len(answered),
        errors=errors(built, turns),
        asked_sessions=len(asked),
        unanswered_sessions=len(asked - {turn.session for turn in answered}),
        forgotten=tuple(sorted({turn.session for turn in turns if forgotten(turn)}))[:MAX_NAMED],
        rewinds=rewinds,
        places=places(turns),
        restored_bytes=turned[-1].restored_bytes - turned[0].restored_bytes if len(turned) > 1 else None,
        readings=looks + len(readings),
        over_limit=over,
        most_kv_bytes=max((r.resident_kv_bytes for r in readings), default=None),
        max_memory_bytes=readings[-1].max_memory_bytes if readings else None,
        per_session=per_session(good, readings),
        ssd_bytes_per_session=turned[0].stored_bytes / len(good) if turned and good else None,
        beyond_kv=growth([memory(r) for r in turned], lambda m: m.process_bytes - m.resident_kv_bytes),
        counted=counted(built, turns),
        account=account,
        wait=wait(turns, cold_s),
    )


def errors(built: Sequence[Built], turns: Sequence[Turn]) -> dict[str, int]:
    """Count the faults by class."""
    every: tuple[Built | Turn, ...] = (*built, *turns)
    return dict(Counter(one.error for one in every if one.error is not None))


def places(turns: Sequence[Turn]) -> tuple[Where, ...]:
    """Aggregate turns by where their session's KV was found."""
    made = []
    for place in get_args(Found):
        some = [turn for turn in turns if found(turn) == place]
        whole, first = spread([t.latency_s for t in some]), spread([t.first_chunk_s for t in some])
        if whole is not None and first is not None:
            prefilled = stats.percentile([turn.prefilled_tokens for turn in some], 0.5)
            made.append(Where(place=place, whole=whole, first_chunk=first, prefilled=prefilled))
    return tuple(made)


def growing(built: Sequence[Built], readings: Sequence[Reading]) -> list[tuple[int, int]]:
    """Return points (sessions built, bytes of the process without KV) until all were built."""
    ends = sorted(one.at_s for one in built if one.error is None)
    if not ends:
        return []
    return [
        (bisect_right(ends, r.at_s), r.process_bytes - r.resident_kv_bytes)
        for r in readings
        if r.at_s <= ends[-1]
    ]


def per_session(built: Sequence[Built], readings: Sequence[Reading]) -> PerSession | None:
    """Say what each session more costs the process; None where there is too little to tell.

    A process grows in steps, and neighbouring readings are not independent: the interval is that of the
    mean over `PARTS` parts of the build.
    """
    kept = [point for point in growing(built, readings) if point[0] >= WARM_UP * len(built)]
    if len(kept) <= PARTS:
        return None
    edges = [kept[round(i * (len(kept) - 1) / PARTS)] for i in range(PARTS + 1)]
    slopes = [(d - b) / (c - a) for (a, b), (c, d) in pairwise(edges) if c > a]
    if len(slopes) < MIN_SLOPES:
        return None
    mean = statistics.fmean(slopes)
    margin = stats.student_t(len(slopes) - 1) * statistics.stdev(slopes) / math.sqrt(len(slopes))
    return PerSession(size_bytes=mean, low=mean - margin, high=mean + margin, readings=len(kept))


def wait(turns: Sequence[Turn], cold_s: Sequence[float]) -> Wait | None:
    """Hold the wait for the first chunk against the tokens that the worker says it prefilled.

    What a turn waits beyond its own prefill must not grow with the session as if it were all prefilled anew.
    None where there is too little to fit.
    """
    kept = [turn for turn in turns if turn.held and turn.error is None]
    if not cold_s or len(kept) < MIN_READINGS:
        return None
    rate = min(cold_s)
    line = stats.robust_line(
        [turn.held or 0 for turn in kept],
        [turn.first_chunk_s - rate * turn.prefilled_tokens for turn in kept],
    )
    if line is None:
        return None
    return Wait(per_position_s=line.slope, low_s=line.low, high_s=line.high, per_prefilled_s=rate)


def counted(built: Sequence[Built], turns: Sequence[Turn]) -> Account:
    """Add up the tokens that the bench saw."""
    every: tuple[Built | Turn, ...] = (*built, *turns)
    return Account(
        cached=sum(one.cached_tokens for one in every),
        prefilled=sum(one.prefilled_tokens for one in every),
        generated=sum(one.generated_tokens for one in every),
    )


def memory(reading: Reading) -> Memory:
    """Take from a reading what growth is fitted to."""
    return Memory(
        at_s=reading.at_s,
        worker=reading.worker,
        uptime_s=reading.uptime_s,
        process_bytes=reading.process_bytes,
        resident_kv_bytes=reading.resident_kv_bytes,
        written_bytes=reading.written_bytes,
    )
