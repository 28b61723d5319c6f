"""What follows from the turns of `bench session`: pure, from turns to a report.

The formulas are in `stats`; here is which turns they are taken over.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from bench.old import stats
from bench.old.report import Report, Series
from bench.old.stats import Spread, spread

from .turns import Memory, Rewind, Turn, excess_prefilled, per_token_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .turns import Answer

#: A process fills its caches first; growth is looked for in what comes after this share of the run.
WARM_UP: Final = 0.25
#: Below this many readings after the warm-up a slope says nothing.
MIN_READINGS: Final = 10
MAX_NAMED: Final = 20


class Bucket(Struct, frozen=True, kw_only=True):
    """The turns that were sent within the same ten minutes."""

    start_s: float
    turns: int
    errors: int
    p50_s: float | None
    p95_s: float | None


class Slope(Struct, frozen=True, kw_only=True):
    """Growth in bytes per hour with its 95% confidence interval, from readings over `seconds`."""

    bytes_per_hour: float
    low: float
    high: float
    readings: int
    seconds: float


class Wait(Struct, frozen=True, kw_only=True):
    """What the client sees of prefill, whatever the worker says of it.

    `per_position` is how much longer the first chunk takes for every token that the session held before,
    with its 95% confidence interval; `per_prefilled` is the time of one token that was prefilled, from turns
    that found nothing in any cache.
    """

    per_position_s: float
    low_s: float
    high_s: float
    per_prefilled_s: float


class Summary(Struct, frozen=True, kw_only=True):
    """The aggregates. `process` is all of the worker's memory, `beyond_kv` what of it is not KV.

    `written_per_token` are bytes of snapshots per generated token; the KV of prompts is among them.
    """

    turns: int
    answered: int
    errors: dict[str, int]
    latency: Spread | None
    first_chunk: Spread | None
    per_token: Spread | None
    kv_bounded: bool | None
    prefill_bounded: bool | None
    kv_bytes_per_token: int | None
    kv_formula_broken_at: tuple[int, ...]
    prefilled_tokens_max: int
    excess_prefilled_max: int
    excess_prefilled_at: tuple[int, ...]
    wait: Wait | None
    process: Slope | None
    beyond_kv: Slope | None
    written_bytes: int | None
    written_per_token: float | None
    buckets: tuple[Bucket, ...]


class SessionReport(Report, frozen=True, kw_only=True):
    """The report of `bench session`. `messages` has the first message of every kind of error."""

    summary: Summary
    rewinds: tuple[Rewind, ...]
    messages: dict[str, str]
    turns: tuple[Turn, ...]


def series(turns: Sequence[Turn]) -> dict[str, Series]:
    """Return the measures that two reports are compared by."""
    answers = [turn.answer for turn in turns if turn.answer is not None]
    paces = [pace for turn in turns if (pace := per_token_s(turn)) is not None]
    return {
        "whole turn": _lower("s", [turn.latency_s for turn in turns if turn.answer is not None]),
        "first chunk": _lower("s", [answer.first_chunk_s for answer in answers]),
        "per token": _lower("s", paces),
        "prefilled tokens": _lower("tokens", [answer.prefilled_tokens for answer in answers]),
        "written per generated token": _lower("bytes", written_per_turn(turns)),
        "process memory": _lower("bytes", [turn.memory.process_bytes for turn in turns if turn.memory]),
    }


def summarise(turns: Sequence[Turn]) -> Summary:
    """Aggregate all turns so far."""
    answered = [(turn, turn.answer) for turn in turns if turn.answer is not None]
    latency = spread([turn.latency_s for turn, _ in answered])
    paces = [pace for turn, _ in answered if (pace := per_token_s(turn)) is not None]
    sizes = [answer.kv_live_bytes for _, answer in answered]
    per_token = stats.kv_bytes_per_token([answer.position for _, answer in answered], sizes)
    broken = [
        turn.turn
        for turn, answer in answered
        if per_token is None or not stats.keeps_kv_formula(answer.position, answer.kv_live_bytes, per_token)
    ]
    excess = {turn.turn: over for turn, answer in answered if (over := excess_prefilled(answer))}
    memories = [turn.memory for turn in turns if turn.memory is not None]
    return Summary(
        turns=len(turns),
        answered=len(answered),
        errors=dict(Counter(turn.error for turn in turns if turn.error is not None)),
        latency=latency,
        first_chunk=spread([answer.first_chunk_s for _, answer in answered]),
        per_token=spread(paces),
        kv_bounded=stats.kv_bounded(sizes),
        prefill_bounded=stats.prefill_bounded(latency.drift if latency else None),
        kv_bytes_per_token=per_token,
        kv_formula_broken_at=tuple(broken[:MAX_NAMED]),
        prefilled_tokens_max=max((answer.prefilled_tokens for _, answer in answered), default=0),
        excess_prefilled_max=max(excess.values(), default=0),
        excess_prefilled_at=tuple(excess)[:MAX_NAMED],
        wait=wait([answer for _, answer in answered]),
        process=growth(memories, lambda memory: memory.process_bytes),
        beyond_kv=growth(memories, lambda memory: memory.process_bytes - memory.resident_kv_bytes),
        written_bytes=written(memories),
        written_per_token=written_per_token(turns),
        buckets=buckets(turns),
    )


def wait(answers: Sequence[Answer]) -> Wait | None:
    """Fit the wait for the first chunk to the session's length; None where there is too little to fit.

    Robustly: a few slow turns on a busy machine must neither hide a growing wait nor look like one.
    """
    rates = [
        a.first_chunk_s / a.prompt_tokens for a in answers if a.position_before == 0 and not a.cached_tokens
    ]
    known = [(a.position_before, a.first_chunk_s) for a in answers if a.position_before is not None]
    line = stats.robust_line([length for length, _ in known], [first_s for _, first_s in known])
    if line is None or not rates or len(known) < MIN_READINGS:
        return None
    return Wait(per_position_s=line.slope, low_s=line.low, high_s=line.high, per_prefilled_s=min(rates))


def growth(memories: Sequence[Memory], size: Callable[[Memory], int]) -> Slope | None:
    """Fit the growth of one process after its warm-up; None where there is too little to fit.

    Where the worker was restarted or another one took the session over, the last process counts.
    """
    if not memories:
        return None
    first = _first_of_last_process(memories)
    run = memories[first:]
    kept = [m for m in run if m.at_s >= run[0].at_s + WARM_UP * (run[-1].at_s - run[0].at_s)]
    line = stats.fit_line([m.at_s for m in kept], [size(m) for m in kept])
    if line is None or len(kept) < MIN_READINGS:
        return None
    return Slope(
        bytes_per_hour=line.slope * 3600,
        low=line.low * 3600,
        high=line.high * 3600,
        readings=len(kept),
        seconds=kept[-1].at_s - kept[0].at_s,
    )


def written(memories: Sequence[Memory]) -> int | None:
    """Return the bytes written to SSD since the first reading, over restarts of the worker."""
    points = written_over_time(memories)
    return round(points[-1][1]) if points else None


def written_over_time(memories: Sequence[Memory]) -> list[tuple[float, float]]:
    """Return points (seconds, bytes written to SSD since the first reading)."""
    points: list[tuple[float, float]] = []
    total, before = 0, None
    for memory in memories:
        if before is not None:
            since = 0 if _restarted(before, memory) else before.written_bytes
            total += max(0, memory.written_bytes - since)
        points.append((memory.at_s, total))
        before = memory
    return points


def written_per_token(turns: Sequence[Turn]) -> float | None:
    """Return the bytes written to SSD per generated token, from the first reading to the last."""
    size_bytes = written([turn.memory for turn in turns if turn.memory is not None])
    first = next((i for i, turn in enumerate(turns) if turn.memory is not None), len(turns))
    num_tokens = sum(_num_generated(turn) for turn in turns[first + 1 :])
    return size_bytes / num_tokens if size_bytes is not None and num_tokens else None


def written_per_turn(turns: Sequence[Turn]) -> list[float]:
    """Return the same for each turn alone: a write that was under way as it ended counts for the next."""
    read = [turn for turn in turns if turn.memory is not None]
    sizes = [size for _, size in written_over_time([turn.memory for turn in read if turn.memory is not None])]
    return [
        (size - before) / num_tokens
        for turn, (before, size) in zip(read[1:], pairwise(sizes), strict=True)
        if (num_tokens := _num_generated(turn))
    ]


def buckets(turns: Sequence[Turn]) -> tuple[Bucket, ...]:
    """Aggregate by ten minutes of the run."""
    indices = stats.bucket([turn.started_s for turn in turns], list(range(len(turns))))
    found = []
    for number, members in indices.items():
        some = [turns[int(i)] for i in members]
        latencies = [turn.latency_s for turn in some if turn.answer is not None]
        found.append(
            Bucket(
                start_s=number * stats.BUCKET_S,
                turns=len(some),
                errors=sum(turn.error is not None for turn in some),
                p50_s=stats.percentile(latencies, 0.5) if latencies else None,
                p95_s=stats.percentile(latencies, 0.95) if latencies else None,
            )
        )
    return tuple(found)


def _lower(unit: str, values: Sequence[float]) -> Series:
    return Series(unit=unit, better="lower", values=tuple(values))


def _num_generated(turn: Turn) -> int:
    return turn.answer.completion_tokens if turn.answer is not None else 0


def _restarted(before: Memory, after: Memory) -> bool:
    return after.worker != before.worker or after.uptime_s < before.uptime_s


def _first_of_last_process(memories: Sequence[Memory]) -> int:
    for i in range(len(memories) - 1, 0, -1):
        if _restarted(memories[i - 1], memories[i]):
            return i
    return 0
