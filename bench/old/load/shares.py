"""Who got how much of a worker, and when: fairness between sessions, tokens a second over time. Pure."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from bench.old import stats

from .turns import whole_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .turns import Turn

#: Sessions whose tokens lie within this share of the median's did equal work.
EQUAL: Final = 0.1
#: Parts of a level of which each one has its throughput: their spread is that of the level.
SLICES: Final = 10


class Fairness(Struct, frozen=True, kw_only=True):
    """Tokens a second of `sessions` that did equal work: the best over the worst, and Jain's index."""

    sessions: int
    max_min: float
    jain: float


def jain(rates: Sequence[float]) -> float:
    """Return Jain's index: 1 where all are equal, 1/n where one has it all.

    `sum(x)^2 / (n * sum(x^2))`; Jain, Chiu and Hawe, "A quantitative measure of fairness" (1984). Raises
    ValueError without a rate above 0.
    """
    squares = math.fsum(rate * rate for rate in rates)
    if squares <= 0:
        raise ValueError("an index needs a rate above 0")
    return math.fsum(rates) ** 2 / (len(rates) * squares)


def rates(turns: Sequence[Turn]) -> dict[int, float]:
    """Return, by session, the tokens generated per second that its turns took, for those of equal work."""
    tokens: dict[int, int] = {}
    seconds: dict[int, float] = {}
    broken = {turn.session for turn in turns if turn.answer is None}
    for turn in turns:
        if turn.answer is not None and turn.session not in broken:
            tokens[turn.session] = tokens.get(turn.session, 0) + turn.answer.completion_tokens
            seconds[turn.session] = seconds.get(turn.session, 0.0) + whole_s(turn)
    if not tokens:
        return {}
    middle = statistics.median(tokens.values())
    return {
        session: count / seconds[session]
        for session, count in tokens.items()
        if abs(count - middle) <= EQUAL * middle and count and seconds[session] > 0
    }


def fairness(turns: Sequence[Turn]) -> Fairness | None:
    """Compare the sessions of a level; None where no two did equal work."""
    found = list(rates(turns).values())
    if len(found) < 2:
        return None
    return Fairness(sessions=len(found), max_min=max(found) / min(found), jain=jain(found))


class Throughput(Struct, frozen=True, kw_only=True):
    """Tokens a second while the load was full; `slices` are its tenths.

    `low` and `high` are the 5th and the 95th percentile of those.
    """

    mean: float
    low: float
    high: float
    slices: tuple[float, ...]


def generated(turns: Sequence[Turn], busy_s: float) -> Throughput | None:
    """Return the tokens generated a second, each answer's spread evenly from its first chunk to its end."""
    spans = [
        (t.sent_s + t.answer.first_chunk_s, t.sent_s + t.latency_s, t.answer.completion_tokens)
        for t in turns
        if t.answer is not None
    ]
    return throughput(spans, busy_s)


def prefilled(turns: Sequence[Turn], busy_s: float) -> Throughput | None:
    """Return the tokens prefilled a second, each turn's spread from its queue's end to its first chunk."""
    spans = [
        (
            t.sent_s + min(t.answer.queued_s, t.answer.first_chunk_s),
            t.sent_s + t.answer.first_chunk_s,
            t.answer.prefilled_tokens,
        )
        for t in turns
        if t.answer is not None
    ]
    return throughput(spans, busy_s)


def throughput(spans: Sequence[tuple[float, float, float]], busy_s: float) -> Throughput | None:
    """Spread amounts over their spans (start, end, amount) and measure the rate over `[0, busy_s]`."""
    if busy_s <= 0 or not spans:
        return None
    width = busy_s / SLICES
    slices = [
        math.fsum(_part(span, i * width, (i + 1) * width) for span in spans) / width for i in range(SLICES)
    ]
    return Throughput(
        mean=statistics.fmean(slices),
        low=stats.percentile(slices, 0.05),
        high=stats.percentile(slices, 0.95),
        slices=tuple(slices),
    )


def _part(span: tuple[float, float, float], low: float, high: float) -> float:
    """Return how much of a span's amount falls into `[low, high)`."""
    start, end, amount = span
    if end <= start:
        return amount if low <= start < high else 0.0
    return amount * max(0.0, min(end, high) - max(start, low)) / (end - start)
