"""What a session is promised to cost however long it lasts: no time for its tokens, no memory beside its KV.

Pure. A turn's fact `held` is the position at which its session stood before it; None where nobody knows.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Final

from . import stats
from .checks import Check, bounded, judged

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .samples import Sample, Turn

#: Attention to tokens that a session holds costs a few percent of their prefill; prefilling them anew, all.
BELIEVED: Final = 0.25
GROWTH_PER_HOUR: Final = 8 * 2**20
#: A process fills its caches first: a short run shows nothing else, and of a long one its first quarter.
MIN_GROWTH_S: Final = 600.0
WARM_UP: Final = 0.25
STRETCHES: Final = 10


def held_tokens_are_cheap(runs: Mapping[str, Sequence[Turn]]) -> Check:
    """Check that tokens reported as cached cost next to no time until the first chunk, by the client's clock.

    `runs` are named sets of turns that are judged apart.
    """
    name = f"a token that a session holds costs at most {BELIEVED:.0%} of a prefilled one's time"
    return bounded(
        name, {label: _costs(turns) for label, turns in runs.items()}, at_most=BELIEVED, unit="share"
    )


def _costs(turns: Sequence[Turn]) -> list[float]:
    """Return, for each block, what a token costs that a session holds, of the time of a prefilled one.

    That time is told by turns that found next to nothing in any cache. What a turn waits beyond its own
    prefill grows with its session, by a slope within each block.
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
    """Hold a process's growth, its KV left out, against its bound; a reading's `x` is when it was taken."""
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
