"""Whether the statistics say what they claim, held against simulations whose truth is known.

Each simulation has a seed, and bounds that leave room for its own scatter: a coverage of 95% in 2,000 runs
scatters by 0.5 points. `test_bench_load.py` has one more, of rows that share their passes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bench import stats
from bench.checks import Verdict, bounded

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.stats import Estimate

RUNS = 2000
BLOCKS = (5, 6, 8, 10, 20, 50)
RNG = np.random.Generator
#: The estimates of all runs, and the truth.
Simulated = tuple[list["Estimate | None"], float]


def means(numbers: np.ndarray, *, log: bool = True) -> list[Estimate | None]:
    return [stats.mean(run, log=log) for run in numbers.tolist()]


def clustered(draw: RNG, blocks: int) -> Simulated:
    """Twenty turns a block; the machine's mood moves a whole block more than turns scatter within it."""
    mood = draw.normal(0, 0.3, (RUNS, blocks, 1))
    turns = 0.2 * np.exp(mood + draw.normal(0, 0.2, (RUNS, blocks, 20)))
    return means(np.median(turns, axis=2)), 0.2


def paired(draw: RNG, blocks: int, scatter: float = 0.1, hiccup: float = 1.0) -> Simulated:
    """Sides that take turns: a block's mood is large and both have it; some turns may hiccup."""
    mood, size = draw.normal(0, 1.0, (RUNS, blocks)), (2, RUNS, blocks)
    sides = np.exp(mood + draw.normal(0, scatter, size)) * np.where(draw.random(size) < 0.1, hiccup, 1.0)
    found = [
        stats.ratios(dict(enumerate(base)), dict(enumerate(other)))
        for base, other in zip(sides[0].tolist(), (1.17 * sides[1]).tolist(), strict=True)
    ]
    return means(np.array(found)), 1.17


def hiccups(draw: RNG, blocks: int) -> Simulated:
    """Every tenth turn takes three times as long. Student's t is careful then: too wide, never too narrow."""
    return paired(draw, blocks, hiccup=3.0)


def differing(draw: RNG, blocks: int) -> Simulated:
    """Sides that take turns, of which one has 30 ms more."""
    mood = draw.normal(0.5, 0.2, (RUNS, blocks))
    sides = [mood + more + draw.normal(0, 0.02, (RUNS, blocks)) for more in (0.0, 0.03)]
    found = [
        stats.differences(dict(enumerate(base)), dict(enumerate(other)))
        for base, other in zip(sides[0].tolist(), sides[1].tolist(), strict=True)
    ]
    return means(np.array(found), log=False), 0.03


def skewed(draw: RNG, blocks: int) -> Simulated:
    """Waits with a long tail: 100 ms, and an exponential wait on top, whose size is the block's own."""

    def medians(runs: int, blocks: int) -> np.ndarray:
        sizes = draw.exponential(0.1, (runs, blocks, 5)) * np.exp(draw.normal(0, 0.3, (runs, blocks, 1)))
        return np.median(0.1 + sizes, axis=2)

    return means(medians(RUNS, blocks)), math.exp(np.log(medians(200_000, 1)).mean())


def sloping(draw: RNG, blocks: int) -> Simulated:
    """Each session has a speed of its own, and so a slope; the truth is their mean."""
    xs, found = np.arange(8.0), []
    for _ in range(500):
        slopes = draw.normal(0.25, 0.05, (blocks, 1))
        ys = draw.normal(1, 0.5, (blocks, 1)) + slopes * xs + draw.normal(0, 0.1, (blocks, 8))
        found.append(stats.slopes((block, x, y) for (block, x), y in np.ndenumerate(ys)))
    return means(np.array(found), log=False), 0.25


def growing(draw: RNG, blocks: int) -> Simulated:
    """Memory, read 60 times a stretch, each reading much like the one before: stretches are the blocks."""
    noise = draw.normal(0, 1.0, (1000, max(blocks, 10) * 60))
    for i in range(1, noise.shape[1]):
        noise[:, i] += 0.9 * noise[:, i - 1]
    numbers = np.median(noise.reshape(1000, -1, 60), axis=2)
    numbers += 0.5 * np.arange(numbers.shape[1])
    return [stats.trend(list(enumerate(run))) for run in numbers.tolist()], 0.5


@pytest.mark.parametrize("simulation", [clustered, paired, hiccups, differing, skewed, sloping, growing])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_an_interval_of_95_percent_holds_the_truth_in_92_to_98(
    simulation: Callable[[RNG, int], Simulated], blocks: int
) -> None:
    found, truth = simulation(np.random.default_rng(blocks), blocks)
    coverage = np.mean([one.low <= truth <= one.high for one in found])
    low, high = {hiccups: (0.93, 0.995), growing: (0.915, 0.98)}.get(simulation, (0.92, 0.98))
    assert low <= coverage <= high, f"{coverage:.1%}"


@pytest.mark.parametrize("numbers", range(1, 5))
def test_below_five_blocks_there_is_no_interval_and_nothing_is_judged(numbers: int) -> None:
    found = stats.mean([1.0, 1.1, 1.2, 1.3][:numbers], log=True)
    assert (found.low, found.high) == (None, None)
    assert bounded("it is small", {"": [5.0] * numbers}, at_most=1.0).outcome is Verdict.CANNOT_TELL


@pytest.mark.parametrize("things", [1, 3, 10])
def test_a_check_of_several_things_fails_no_more_often_than_one_of_one(things: int) -> None:
    """At the very bound, where false alarms are most; three times as far off it catches what it names."""
    draw, alarms, caught, runs = np.random.default_rng(things), 0, 0, 1000
    for _ in range(runs):
        noise = draw.normal(0, 0.1, (things, 5))
        for truth in (0.5, 1.0):
            numbers = {f"{i}": (truth + some).tolist() for i, some in enumerate(noise)}
            failed = bounded("at most a half", numbers, at_most=0.5).outcome is Verdict.FAILS
            alarms += failed and truth == 0.5
            caught += failed and truth == 1.0
    assert alarms / runs <= 0.07
    assert caught / runs >= 0.95


def test_quantiles_medians_and_student_s_t_are_those_of_the_tables() -> None:
    """A p99 takes five values beyond it; a block counts once, however many values it has."""
    assert stats.quantile([1.0] * 499, 0.99) is None
    assert stats.quantile([1.0] * 500, 0.99) == 1.0
    assert stats.quantile([float(i) for i in range(11)], 0.5) == 5.0
    assert stats.by_block([(1, 3.0), (0, 1.0), (1, 5.0), (1, 100.0)]) == {0: 1.0, 1: 5.0}
    found = [stats.student_t(*one) for one in ((4, 0.95), (9, 0.95), (4, 0.99), (300, 0.95))]
    assert found == pytest.approx([2.776445, 2.262157, 4.604095, 1.967903], abs=1e-5)
