"""The statistics of the reports: intervals, ratios and slopes, from one number per block. Pure.

A block (a round, a session, a section of a long run) is independent of other blocks. Values within a block
depend on each other (turns share the machine's state, rows share a step), so a block is reduced to its
median. The ends of an interval are two of the blocks' numbers. It contains the true median in 93% of runs or
more, whatever the distribution. Sides that took turns are paired by block.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import linear_regression, median
from typing import Final, TypeVar

import numpy as np
from msgspec import Struct

#: Fewer blocks have no interval: the range of four contains the true median in 87% of runs only.
MIN_BLOCKS: Final = 5
#: The most runs whose interval may miss the true median, as a share.
MISSED: Final = 0.07
#: A quantile is reported if this many values are beyond it.
BEYOND: Final = 5

Blocks = dict[int, float]
K = TypeVar("K")
V = TypeVar("V")


class Estimate(Struct, frozen=True):
    """A median over blocks and its interval, which is infinite if there are too few blocks."""

    value: float
    low: float
    high: float


def estimate(numbers: Iterable[float]) -> Estimate | None:
    """Return the median of the blocks' numbers with its interval; None if there are no numbers."""
    found = sorted(numbers)
    if len(found) < MIN_BLOCKS:
        return Estimate(median(found), -math.inf, math.inf) if found else None
    left_out = _left_out(len(found))
    return Estimate(median(found), found[left_out], found[-1 - left_out])


def _left_out(blocks: int) -> int:
    """Return how many numbers at each end are outside the interval.

    Each number is above the true median with a chance of one half, so the tails are binomial.
    """
    left_out, tails = 0, 2.0 / 2**blocks
    while (tails := tails + 2 * math.comb(blocks, left_out + 1) / 2**blocks) <= MISSED:
        left_out += 1
    return left_out


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key, by key; keys and values keep their order."""
    found: defaultdict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return found


def by_block(values: Iterable[tuple[int, float]]) -> Blocks:
    """Return the median of each block's values, by block."""
    return {block: median(some) for block, some in sorted(grouped(values).items())}


def ratios(base: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """Return `other / base` for each block that both have. This cancels the machine's speed in a block.

    Leaves out blocks in which `base` is 0.
    """
    return [other[block] / base[block] for block in base if block in other and base[block] > 0]


def slopes(points: Iterable[tuple[int, float, float]]) -> list[float]:
    """Fit a line to the points `(block, x, y)` of each block, and return the slopes.

    A block with only one x has no slope.
    """
    found = grouped((block, (x, y)) for block, x, y in points)
    lines = (tuple(zip(*some, strict=True)) for _, some in sorted(found.items()))
    return [linear_regression(xs, ys).slope for xs, ys in lines if len(set(xs)) > 1]


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the quantile at `share`; None if fewer than `BEYOND` values lie beyond the quantile.

    Beyond means below the quantile if `share` is under a half, else above.
    """
    if len(values) * min(share, 1 - share) < BEYOND - 1e-9:
        return None
    return float(np.quantile(values, share))
