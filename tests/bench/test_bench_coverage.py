"""Whether the statistics say what they claim, held against simulations whose truth is known.

Each simulation has a seed, and bounds that leave room for its own scatter: a coverage of 95% in 2,000 runs
scatters by 0.5 points.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bench import stats
from bench.checks import Verdict, bounded
from bench.spec import Against, Bench, Findings, Measure, Sample

if TYPE_CHECKING:
    from collections.abc import Callable

RUNS = 2000
BLOCKS = (5, 6, 8, 10, 20, 50)
RNG = np.random.Generator

#: Each returns the blocks' numbers of all runs, and the truth, for `numbers(draw, runs, blocks)`.
Simulation = tuple[np.ndarray, float]


def clustered(draw: RNG, runs: int, blocks: int) -> Simulation:
    """Twenty turns a block; the machine's mood moves a whole block more than turns scatter within it."""
    mood = draw.normal(0, 0.3, (runs, blocks, 1))
    turns = 0.2 * np.exp(mood + draw.normal(0, 0.2, (runs, blocks, 20)))
    return np.median(turns, axis=2), 0.2


def paired(draw: RNG, runs: int, blocks: int) -> Simulation:
    """Sides that take turns: a block's mood is large and both have it; the truth is 1.17."""
    mood = draw.normal(0, 1.0, (runs, blocks))
    sides = [np.exp(mood + draw.normal(math.log(size), 0.1, (runs, blocks))) for size in (1.0, 1.17)]
    return sides[1] / sides[0], 1.17


def hiccups(draw: RNG, runs: int, blocks: int) -> Simulation:
    """One turn a block on each side, of which every tenth takes three times as long."""
    sides = [
        np.exp(draw.normal(math.log(size), 0.1, (runs, blocks)))
        * np.where(draw.random((runs, blocks)) < 0.1, 3.0, 1.0)
        for size in (1.0, 1.17)
    ]
    return sides[1] / sides[0], 1.17


def skewed(draw: RNG, runs: int, blocks: int) -> Simulation:
    """Waits with a long tail: 100 ms, and an exponential wait on top, whose size is the block's own."""

    def medians(runs: int, blocks: int) -> np.ndarray:
        sizes = draw.exponential(0.1, (runs, blocks, 5)) * np.exp(draw.normal(0, 0.3, (runs, blocks, 1)))
        return np.median(0.1 + sizes, axis=2)

    return medians(runs, blocks), math.exp(np.log(medians(200_000, 1)).mean())


@pytest.mark.parametrize("simulation", [clustered, paired, skewed])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_an_interval_of_95_percent_holds_the_truth_in_92_to_98(
    simulation: Callable[[RNG, int, int], Simulation], blocks: int
) -> None:
    coverage = covered(simulation, blocks)
    assert 0.92 <= coverage <= 0.98, f"{coverage:.1%}"


@pytest.mark.parametrize("blocks", BLOCKS)
def test_hiccups_make_an_interval_too_wide_and_never_too_narrow(blocks: int) -> None:
    """Student's t is careful where a few values are far out: 98.5% at six blocks, 95% at fifty."""
    coverage = covered(hiccups, blocks)
    assert 0.93 <= coverage <= 0.995, f"{coverage:.1%}"


def covered(simulation: Callable[[RNG, int, int], Simulation], blocks: int) -> float:
    numbers, truth = simulation(np.random.default_rng(blocks), RUNS, blocks)
    found = [stats.mean(run, log=True) for run in numbers.tolist()]
    return float(np.mean([one.low <= truth <= one.high for one in found]))


@pytest.mark.parametrize("blocks", BLOCKS)
def test_the_difference_of_paired_sides_holds_the_truth_too(blocks: int) -> None:
    draw = np.random.default_rng(blocks)
    mood = draw.normal(0.5, 0.2, (RUNS, blocks))
    sides = [mood + more + draw.normal(0, 0.02, (RUNS, blocks)) for more in (0.0, 0.03)]
    found = [
        stats.mean(stats.differences(dict(enumerate(base)), dict(enumerate(other))))
        for base, other in zip(sides[0].tolist(), sides[1].tolist(), strict=True)
    ]
    assert 0.92 <= np.mean([one.low <= 0.03 <= one.high for one in found]) <= 0.98


@pytest.mark.parametrize("blocks", BLOCKS)
def test_a_slope_within_blocks_holds_the_truth_too(blocks: int) -> None:
    """Each session has a speed of its own, and so a slope; the truth is their mean."""
    draw, xs = np.random.default_rng(blocks), np.arange(8.0)
    found = []
    for _ in range(400):
        slopes = draw.normal(0.25, 0.05, (blocks, 1))
        ys = draw.normal(1, 0.5, (blocks, 1)) + slopes * xs + draw.normal(0, 0.1, (blocks, 8))
        points = [
            (b, x, y) for b, row in enumerate(ys.tolist()) for x, y in zip(xs.tolist(), row, strict=True)
        ]
        found.append(stats.mean(stats.slopes(points)))
    coverage = np.mean([one.low <= 0.25 <= one.high for one in found])
    assert 0.92 <= coverage <= 0.98, f"{coverage:.1%}"


@pytest.mark.parametrize("blocks", [10, 20, 50])
def test_the_trend_of_a_long_run_holds_the_truth_though_neighbours_are_alike(blocks: int) -> None:
    """Memory, read 60 times a stretch, each reading much like the one before: stretches are the blocks."""
    draw, length, remembered = np.random.default_rng(blocks), 60, 0.9
    noise = draw.normal(0, 1.0, (1000, blocks * length))
    for i in range(1, noise.shape[1]):
        noise[:, i] += remembered * noise[:, i - 1]
    numbers = np.median(noise.reshape(1000, blocks, length), axis=2) + 0.5 * np.arange(blocks)
    found = [stats.trend(list(enumerate(run))) for run in numbers.tolist()]
    coverage = np.mean([one.low <= 0.5 <= one.high for one in found])
    assert 0.915 <= coverage <= 0.98, f"{coverage:.1%}"


@pytest.mark.parametrize("numbers", range(1, 5))
def test_below_five_blocks_there_is_no_interval_and_nothing_is_judged(numbers: int) -> None:
    found = stats.mean([1.0, 1.1, 1.2, 1.3][:numbers], log=True)
    assert (found.low, found.high) == (None, None)
    check = bounded("it is small", {"": [5.0] * numbers}, at_most=1.0)
    assert check.outcome is Verdict.CANNOT_TELL


def test_three_pairs_say_what_their_ratio_is_and_five_how_sure_that_is() -> None:
    """As if unpaired, these five had an interval from a half to two; paired they are 1.17 to 1.27."""
    base = {0: 1.0, 1: 2.0, 2: 4.0, 3: 0.5, 4: 3.0}
    other = {0: 1.17, 1: 2.5, 2: 4.8, 3: 0.61, 4: 3.7}
    found = stats.mean(stats.ratios(base, other), log=True)
    assert 1.16 < found.low < found.value < found.high < 1.28
    assert stats.mean(stats.ratios({k: base[k] for k in (0, 1, 2)}, other), log=True).low is None


GAP = Measure("gap", "s")
GAPS = Bench(
    name="gaps",
    title="",
    plan=object,
    cases=("alone", "beside"),
    measures=(GAP,),
    against=(),
    plots=(),
    checks=lambda _: (),
    measure=lambda _: None,
)


def test_gaps_of_rows_that_share_their_passes_are_not_so_many_gaps() -> None:
    """Eight rows wait for the same twenty passes of a block. Pooled, 31% of runs saw a difference."""
    draw, wrong, runs = np.random.default_rng(3), 0, 300
    for _ in range(runs):
        passes = np.exp(draw.normal(0, 0.15, (2, 8, 1)) + draw.normal(0, 0.2, (2, 8, 20))).tolist()
        samples = [
            Sample("gap", case, None, block, gap)
            for case, some in zip(GAPS.cases, passes, strict=True)
            for block, gaps in enumerate(some)
            for gap in gaps * 8
        ]
        ratios = Findings(GAPS, None, [], samples).compared(Against(GAP, "alone"), "beside")
        ratio = stats.mean(ratios, log=True)
        wrong += not ratio.low <= 1 <= ratio.high
    assert wrong / runs <= 0.07 + 2 * 0.0126, f"{wrong / runs:.1%}"


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


@pytest.mark.parametrize(
    ("degrees", "confidence", "t"),
    [(4, 0.95, 2.776445), (9, 0.95, 2.262157), (4, 0.99, 4.604095), (300, 0.95, 1.967903)],
)
def test_student_t_is_that_of_the_tables(degrees: int, confidence: float, t: float) -> None:
    assert stats.student_t(degrees, confidence) == pytest.approx(t, abs=1e-5)


def test_a_quantile_needs_five_values_beyond_it() -> None:
    assert stats.quantile([1.0] * 499, 0.99) is None
    assert stats.quantile([1.0] * 500, 0.99) == 1.0
    assert stats.quantile([1.0] * 99, 0.95) is None
    assert stats.quantile([float(i) for i in range(11)], 0.5) == 5.0


def test_a_block_counts_once_however_many_values_it_has() -> None:
    assert stats.by_block([(1, 3.0), (0, 1.0), (1, 5.0), (1, 100.0)]) == {0: 1.0, 1: 5.0}
