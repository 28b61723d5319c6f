"""The statistics of benches, checked against simulations whose true value is known.

Each simulation has a fixed seed. The bounds allow for chance: in 2,000 runs, a coverage of 95% has a standard
deviation of 0.5 points.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from bench import load, stats
from bench.checks import Verdict, bounded
from bench.spec import Findings
from bench.stats import Estimate
from bench.turns import Turn

RUNS = 2000
BLOCKS = (5, 6, 8, 10, 20, 50)
RNG = np.random.Generator
#: The estimates of all runs, and the true value.
Simulated = tuple[list["Estimate | None"], float]


def means(numbers: np.ndarray, *, log: bool = True) -> list[Estimate | None]:
    return [stats.mean(run, log=log) for run in numbers.tolist()]


def compared(how: Callable[..., list[float]], base: np.ndarray, other: np.ndarray) -> np.ndarray:
    runs = zip(base.tolist(), other.tolist(), strict=True)
    return np.array([how(dict(enumerate(one)), dict(enumerate(two))) for one, two in runs])


def clustered(draw: RNG, blocks: int) -> Simulated:
    """Simulate blocks of twenty turns; the machine's speed varies more between blocks than within one."""
    mood = draw.normal(0, 0.3, (RUNS, blocks, 1))
    turns = 0.2 * np.exp(mood + draw.normal(0, 0.2, (RUNS, blocks, 20)))
    return means(np.median(turns, axis=2)), 0.2


def paired(draw: RNG, blocks: int, scatter: float = 0.1, hiccup: float = 1.0) -> Simulated:
    """Simulate two sides that share each block's speed; 10% of turns take `hiccup` times as long."""
    mood, size = draw.normal(0, 1.0, (RUNS, blocks)), (2, RUNS, blocks)
    sides = np.exp(mood + draw.normal(0, scatter, size)) * np.where(draw.random(size) < 0.1, hiccup, 1.0)
    return means(compared(stats.ratios, sides[0], 1.17 * sides[1])), 1.17


def hiccups(draw: RNG, blocks: int) -> Simulated:
    """Simulate `paired` with 10% of turns three times as long, for which Student's t is too wide."""
    return paired(draw, blocks, hiccup=3.0)


def differing(draw: RNG, blocks: int) -> Simulated:
    """Simulate two sides that share each block's speed, one of which takes 30 ms longer."""
    mood = draw.normal(0.5, 0.2, (RUNS, blocks))
    sides = [mood + more + draw.normal(0, 0.02, (RUNS, blocks)) for more in (0.0, 0.03)]
    return means(compared(stats.differences, *sides), log=False), 0.03


def skewed(draw: RNG, blocks: int) -> Simulated:
    """Simulate waits with a long tail: 100 ms, plus an exponential wait whose mean differs by block."""

    def medians(runs: int, blocks: int) -> np.ndarray:
        sizes = draw.exponential(0.1, (runs, blocks, 5)) * np.exp(draw.normal(0, 0.3, (runs, blocks, 1)))
        return np.median(0.1 + sizes, axis=2)

    return means(medians(RUNS, blocks)), math.exp(np.log(medians(200_000, 1)).mean())


def sloping(draw: RNG, blocks: int) -> Simulated:
    """Simulate sessions of different slopes, of time over length; the true value is the slopes' mean."""
    xs, found = np.arange(8.0), []
    for _ in range(500):
        slopes = draw.normal(0.25, 0.05, (blocks, 1))
        ys = draw.normal(1, 0.5, (blocks, 1)) + slopes * xs + draw.normal(0, 0.1, (blocks, 8))
        found.append(stats.slopes((block, x, y) for (block, x), y in np.ndenumerate(ys)))
    return means(np.array(found), log=False), 0.25


def growing(draw: RNG, blocks: int) -> Simulated:
    """Simulate growing memory with autocorrelated readings; a stretch of 60 readings is one block."""
    noise = draw.normal(0, 1.0, (1000, max(blocks, 10) * 60))
    for i in range(1, noise.shape[1]):
        noise[:, i] += 0.9 * noise[:, i - 1]
    numbers = np.median(noise.reshape(1000, -1, 60), axis=2)
    numbers += 0.5 * np.arange(numbers.shape[1])
    return [stats.trend(list(enumerate(run))) for run in numbers.tolist()], 0.5


@pytest.mark.parametrize("simulation", [clustered, paired, hiccups, differing, skewed, sloping, growing])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_a_95_percent_interval_contains_the_true_value_in_about_95_percent_of_runs(
    simulation: Callable[[RNG, int], Simulated], blocks: int
) -> None:
    found, truth = simulation(np.random.default_rng(blocks), blocks)
    coverage = np.mean([one.low <= truth <= one.high for one in found])
    low, high = {hiccups: (0.93, 0.995), growing: (0.915, 0.98)}.get(simulation, (0.92, 0.98))
    assert low <= coverage <= high, f"{coverage:.1%}"


@pytest.mark.parametrize("numbers", range(1, 5))
def test_fewer_than_five_blocks_give_no_interval_and_no_verdict(numbers: int) -> None:
    found = stats.mean([1.0, 1.1, 1.2, 1.3][:numbers], log=True)
    assert (found.low, found.high) == (0.0, math.inf)
    assert bounded("it is small", {"": [5.0] * numbers}, at_most=1.0).outcome is Verdict.CANNOT_TELL


@pytest.mark.parametrize("things", [1, 3, 10])
def test_a_check_of_several_measures_raises_false_alarms_in_at_most_7_percent_of_runs(things: int) -> None:
    """A false alarm is a failure although the true value is the bound; twice the bound must fail."""
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


def test_quantiles_medians_and_students_t_have_their_known_values() -> None:
    """A p99 needs five values above it; a block counts once, however many values it has."""
    assert stats.quantile([1.0] * 499, 0.99) is None
    assert stats.quantile([1.0] * 500, 0.99) == 1.0
    assert stats.quantile([float(i) for i in range(11)], 0.5) == 5.0
    assert stats.by_block([(1, 3.0), (0, 1.0), (1, 5.0), (1, 100.0)]) == {0: 1.0, 1: 5.0}
    found = [stats.student_t(*one) for one in ((4, 0.95), (9, 0.95), (4, 0.99), (300, 0.95))]
    assert found == pytest.approx([2.776445, 2.262157, 4.604095, 1.967903], abs=1e-5)


def make(number: int, at_s: float = 0.0, total_s: float = 1.0, **changes: object) -> Turn:
    fields = {"x": 4, "first_s": 0.5, "tokens": (1,) * 10, "facts": {"number": number, "late_s": 0.0}}
    return Turn(**({"at_s": at_s, "total_s": total_s, **fields} | changes))


def values(turns: list[Turn], measure: object) -> list[float]:
    return [sample.value for sample in load.follows(turns) if sample.measure == measure.name]


def test_a_session_whose_turns_fail_lowers_fairness_to_zero() -> None:
    """Such a session got no tokens, which makes the slowest session's share 0."""
    served = [make(number) for number in range(4)]
    failed = [replace(turn, error="internal", tokens=()) if i == 2 else turn for i, turn in enumerate(served)]
    short = [replace(turn, tokens=(1,), total_s=0.9) if i == 2 else turn for i, turn in enumerate(served)]
    assert [values(turns, load.FAIR) for turns in (served, failed, short)] == [[1.0], [0.0], [1.0]]


def test_token_gaps_count_as_alone_or_beside_a_prompt_only_after_all_answers_have_begun() -> None:
    """Earlier gaps include the prefill of other answers' prompts."""
    window = {"alone_s": 2.0, "sent_s": 4.0, "over_s": 7.0}
    gaps = (0.9, 0.6, 0.5, 0.5, 0.5, 0.0001, 0.5, 2.0, 0.5, 1.0)  # from 0.5 on
    found = list(load.follows([make(0, case=load.ANSWER, gaps_s=gaps, facts=window)]))
    alone, beside = ([one.value for one in found if one.case == case] for case in (load.ALONE, load.BESIDE))
    assert alone == pytest.approx([0.5, 0.5, 0.5])
    assert beside == pytest.approx([0.5, 2.0, 0.5, 1.0])


def test_a_load_levels_throughput_is_measured_only_while_its_whole_concurrency_is_in_use() -> None:
    turns = [make(i, at_s, 11.0, x=2, first_s=1.0, tokens=(1,) * 100) for i, at_s in enumerate((0, 0, 11))]
    assert values(turns, load.GENERATED) == pytest.approx([200 / 11])  # until a client found no session left


def test_the_interval_of_token_gaps_covers_the_truth_although_sessions_share_passes() -> None:
    """Four sessions share forward passes: an interval by block is right, one over all turns too narrow."""
    draw, runs, held, pooled = np.random.default_rng(7), 300, 0, 0
    for _ in range(runs):
        mood = np.repeat(draw.normal(0, 0.15, 40), 30)  # the machine's, for the time of thirty passes
        passes = np.exp(mood + draw.normal(0, 0.1, mood.size)).tolist()
        turns, at = [], [0, 7, 15, 22]
        while (begin := min(at)) + 30 <= len(passes):
            row, block = at.index(begin), len(turns) // (load.WAVES * 4)
            turns.append(make(row, total_s=30.0, gaps_s=tuple(passes[begin : begin + 30]), block=block))
            at[row] += 30
        found = Findings(load.BENCH, load.Plan(), turns)
        every = stats.mean([sample.value for sample in found.of(load.GAP)], log=True)
        by_block, every = (one.low <= 1.0 <= one.high for one in (found.estimate(load.GAP, "", 4), every))
        held, pooled = held + by_block, pooled + every
    assert 0.92 <= held / runs <= 0.98, f"{held / runs:.1%}"
    assert pooled / runs < 0.7


def test_arrivals_in_the_load_bench_are_a_poisson_process_and_the_same_seed_repeats_them() -> None:
    plans = [SimpleNamespace(plan=load.Plan(duration=100.0, seed=i)) for i in (0, 0, 1)]
    dues, again, other = (load._poisson(one, 50.0) for one in plans)
    assert dues == again != other
    assert (len(dues), all(one == sorted(one) for one in dues)) == (16, True)
    pauses = [b - a for a, b in pairwise(sorted(due for one in dues for due in one))]
    assert 4600 < len(pauses) < 5400
    assert statistics.stdev(pauses) == pytest.approx(statistics.fmean(pauses), rel=0.1)


def test_every_session_of_the_load_benchs_crowd_gets_requests_and_a_few_get_many() -> None:
    chosen = load.order(50, 2000, 3)
    counts = sorted((chosen.count(number) for number in range(50)), reverse=True)
    assert (sum(counts), len(chosen), len(set(load.order(50, 20, 3)))) == (2000, 2000, 20)
    assert counts[0] > 5 * counts[25] > 0 < counts[-1]
    assert load.order(50, 2000, 3) == chosen
