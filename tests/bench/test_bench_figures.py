"""The statistics of benches, checked against simulations whose true value is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from msgspec.structs import replace

from bench import load, stats
from bench.checks import Verdict, bounded
from bench.turns import TimedTurn

RUNS = 2000


@pytest.mark.parametrize("blocks", [5, 6, 8, 9, 20, 50])
@pytest.mark.parametrize("skew", [0.1, 1.0])
def test_an_interval_contains_the_true_median_in_93_percent_of_runs_or_more(blocks: int, skew: float) -> None:
    """Blocks of twenty turns: the machine's speed varies more between blocks than within one."""
    draw = np.random.default_rng(blocks)
    mood = draw.normal(0, skew, (RUNS, blocks, 1))
    medians = np.median(np.exp(mood + draw.normal(0, 0.2, (RUNS, blocks, 20))), axis=2)
    found = [stats.estimate(run) for run in medians.tolist()]
    assert np.mean([one.low <= 1.0 <= one.high for one in found]) >= 0.92
    assert all(one.low <= one.value <= one.high for one in found)
    if blocks == 50:
        assert np.mean([one.high / one.low for one in found]) < math.exp(skew), "it narrows with more blocks"


@pytest.mark.parametrize("numbers", range(1, 5))
def test_fewer_than_five_blocks_give_no_interval_and_no_verdict(numbers: int) -> None:
    found = stats.estimate([1.0, 1.1, 1.2, 1.3][:numbers])
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert bounded("it is small", {"": [5.0] * numbers}, at_most=1.0).outcome is Verdict.CANNOT_TELL


def test_quantiles_medians_and_slopes_have_their_known_values() -> None:
    """A p99 needs five values above it; a block counts once, however many values it has."""
    assert stats.quantile([1.0] * 499, 0.99) is None
    assert stats.quantile([1.0] * 500, 0.99) == 1.0
    assert stats.quantile([float(i) for i in range(11)], 0.5) == 5.0
    assert stats.by_block([(1, 3.0), (0, 1.0), (1, 5.0), (1, 100.0)]) == {0: 1.0, 1: 5.0}
    assert stats.slopes([(0, 1, 1.0), (0, 2, 3.0), (1, 1, 1.0), (1, 1, 2.0)]) == [2.0]  # one x has no slope


def make(number: int, at_s: float = 0.0, total_s: float = 1.0, **changes: object) -> TimedTurn:
    fields = {"x": 4, "first_s": 0.5, "tokens": (1,) * 10, "facts": {"number": number}}
    return TimedTurn(**({"at_s": at_s, "total_s": total_s, **fields} | changes))


def values(turns: list[TimedTurn], measure: object) -> list[float]:
    return [sample.value for sample in load.follows(turns) if sample.measure == measure.name]


def test_a_session_whose_turns_fail_lowers_fairness_to_zero() -> None:
    """Such a session got no tokens, which makes the slowest session's share 0."""
    served = [make(number) for number in range(4)]
    failed = [replace(turn, error="internal", tokens=()) if i == 2 else turn for i, turn in enumerate(served)]
    short = [replace(turn, tokens=(1,), total_s=0.9) if i == 2 else turn for i, turn in enumerate(served)]
    assert [values(turns, load.FAIR) for turns in (served, failed, short)] == [[1.0], [0.0], [1.0]]


def test_a_load_levels_throughput_is_measured_only_while_its_whole_concurrency_is_in_use() -> None:
    turns = [make(i, at_s, 11.0, x=2, first_s=1.0, tokens=(1,) * 100) for i, at_s in enumerate((0, 0, 11))]
    assert values(turns, load.GENERATED) == pytest.approx([200 / 11])  # until a client found no session left
