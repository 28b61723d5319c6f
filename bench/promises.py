"""Promises about long sessions: held tokens cost almost no time, and no memory beside their KV.

Pure. A turn's fact `held` is its session's position before the turn; None if unknown.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Final

from . import stats
from .checks import Check, bounded, judged

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .samples import Sample, Turn

#: The most that a held token may cost, as a share of its prefill; attention to it costs a few percent.
BELIEVED: Final = 0.25
GROWTH_PER_HOUR: Final = 8 * 2**20
#: At first a process fills its own caches, so short runs, and the first quarter of a run, show no growth.
MIN_GROWTH_S: Final = 600.0
WARM_UP: Final = 0.25
STRETCHES: Final = 10


def held_tokens_are_cheap(runs: Mapping[str, Sequence[Turn]]) -> Check:
    """Check that tokens reported as cached hardly delay the first chunk, by the client's clock.

    `runs` are named sets of turns, each with a verdict of its own.
    """
    name = f"a token that a session holds costs at most {BELIEVED:.0%} of a prefilled one's time"
    return bounded(
        name, {label: _costs(turns) for label, turns in runs.items()}, at_most=BELIEVED, unit="share"
    )


def _costs(turns: Sequence[Turn]) -> list[float]:
    """Return, for each block, the cost of a held token as a share of a prefilled token's.

    The time of a prefilled token is taken from turns that found almost nothing in a cache. The cost is the
    slope, within a block, of the wait beyond a turn's own prefill against the session's length.
    """
    answered = [turn for turn in turns if turn.error is None]
    cold = [
        turn for turn in answered if turn.fact("held") == 0 and turn.prefilled_tokens > turn.cached_tokens
    ]
    rate_s = min(((turn.first_s or 0.0) / turn.prefilled_tokens for turn in cold), default=0.0)
    return stats.slopes(
        (turn.block, held, (turn.first_s or 0.0) / rate_s - turn.prefilled_tokens)
        for turn in answered
        if rate_s and (held := turn.fact("held"))
    )


def keeps_its_size(readings: Sequence[Sample]) -> Check:
    """Check that a process without its KV hardly grows; a reading's `x` is its time."""
    name = "the process without its KV grows by at most 8 MiB an hour"
    times = [reading.x or 0.0 for reading in readings]
    begin, end = min(times, default=0.0), max(times, default=0.0)
    warm_s = begin + WARM_UP * (end - begin)
    parts: dict[int, list[tuple[float, float]]] = {}
    for at_s, reading in zip(times, readings, strict=True):
        if at_s >= warm_s < end:
            part = int(STRETCHES * (at_s - warm_s) / (end - warm_s) * (1 - 1e-9))
            parts.setdefault(part, []).append((at_s / 3600, reading.value))
    points = [(median(at for at, _ in part), median(size for _, size in part)) for part in parts.values()]
    if end - begin < MIN_GROWTH_S:
        return judged(name, {"a run of minutes shows none:": None}, at_most=GROWTH_PER_HOUR)
    return judged(name, {"": stats.trend(points)}, at_most=GROWTH_PER_HOUR, unit="bytes")
