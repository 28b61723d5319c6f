"""The statistics of the reports: intervals, ratios and slopes, from one number per block. Pure.

A block (a round, a session, a section of a long run) is independent of other blocks. Values within a block
depend on each other (turns share the machine's state, rows share a step), so a block is reduced to its
median. An interval is Student's t over the blocks' numbers, or over their logarithms for times, sizes and
ratios. Sides that took turns are paired by block. `tests/bench/test_bench_figures.py` checks the coverage on
a known truth, where a percentile bootstrap has 0.83 at five blocks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from statistics import fmean, median, stdev
from typing import Final, TypeVar

import numpy as np
from msgspec import Struct

#: With fewer blocks, an interval depends more on its assumptions than on the data.
MIN_BLOCKS: Final = 5
#: A quantile is reported if this many values are beyond it.
BEYOND: Final = 5
CONFIDENCE: Final = 0.95

Blocks = dict[int, float]
K = TypeVar("K")
V = TypeVar("V")


class Estimate(Struct, frozen=True):
    """A mean over blocks and its confidence interval, which is infinite if there are too few blocks."""

    value: float
    low: float
    high: float


def mean(numbers: Iterable[float], *, log: bool = False, confidence: float = CONFIDENCE) -> Estimate | None:
    """Estimate the mean of the blocks' numbers; with `log` the geometric mean.

    None if there are no numbers, or with `log` if a number is 0 or negative.
    """
    found = list(numbers)
    if not found or (log and min(found) <= 0):
        return None
    if log:
        return transformed(mean(map(math.log, found), confidence=confidence), math.exp)
    n, centre, half = len(found), fmean(found), math.inf
    if n >= MIN_BLOCKS:
        half = student_t(n - 1, confidence) * stdev(found, centre) / math.sqrt(n)
    return Estimate(centre, centre - half, centre + half)


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Collect the values of each key; keys and values keep their order."""
    found: defaultdict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return found


def by_block(values: Iterable[tuple[int, float]]) -> Blocks:
    """Reduce each block's values to their median."""
    return {block: median(some) for block, some in sorted(grouped(values).items())}


def ratios(base: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """Divide `other` by `base`, block by block. This cancels the speed of the machine in each block."""
    return [other[block] / base[block] for block in base if block in other and base[block] > 0]


def differences(base: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """Subtract `base` from `other`, block by block."""
    return [other[block] - base[block] for block in base if block in other]


def slopes(points: Iterable[tuple[int, float, float]]) -> list[float]:
    """Fit a line to the points `(block, x, y)` of each block, and return the slopes.

    A block with only one x has no slope.
    """
    found = grouped((block, (x, y)) for block, x, y in points)
    lines = (np.asarray(some).T for _, some in sorted(found.items()))
    return [float(np.polyfit(x, y, 1)[0]) for x, y in lines if np.ptp(x) > 0]


def trend(points: Sequence[tuple[float, float]]) -> Estimate | None:
    """Estimate the slope of a long run, whose blocks are the points `(x, y)`: least squares, Student's t.

    Blocks must be long enough to be independent. None with fewer than three points, or only one x.
    """
    n = len(points)
    xs, ys = np.asarray(points, dtype=float).reshape(-1, 2).T
    if n < 3 or np.ptp(xs) == 0:
        return None
    (slope, _), covariance = np.polyfit(xs, ys, 1, cov=True)
    half = student_t(n - 2) * math.sqrt(covariance[0, 0]) if n >= MIN_BLOCKS else math.inf
    return Estimate(float(slope), float(slope - half), float(slope + half))


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the quantile at `share`; None if fewer than `BEYOND` values lie beyond the quantile.

    Beyond means below the quantile if `share` is under a half, else above.
    """
    if len(values) * min(share, 1 - share) < BEYOND - 1e-9:
        return None
    return float(np.quantile(values, share))


@lru_cache(maxsize=1024)
def student_t(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return t for a two-sided interval with `degrees` degrees of freedom (1 or more).

    Inverts the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4, by bisection.
    """
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return (low + high) / 2


def _within(t: float, degrees: int) -> float:
    """Return the probability that Student's t lies between -t and t."""
    angle = math.atan(t / math.sqrt(degrees))
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = term if degrees > 1 else 0.0
    for i in range(2 + odd, degrees, 2):
        term *= math.cos(angle) ** 2 * (i - 1) / i
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def transformed(estimate: Estimate | None, to: Callable[[float], float]) -> Estimate | None:
    """Apply an increasing function to an estimate and its interval."""
    return estimate and Estimate(to(estimate.value), to(estimate.low), to(estimate.high))
