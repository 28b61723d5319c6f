"""The statistics of benches against simulations of known values, and what `bench device` suggests."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from bench import device, load, stats
from bench.checks import Verdict, bounded
from bench.device import BENCH, MEASURES, Plan
from bench.programs.device import DeviceMeter
from bench.programs.in_process import rate_of
from bench.spec import Findings
from bench.turns import Measure, Sample, TimedTurn
from worker.models import model
from worker.process import setting_sources
from worker.process.datadir import DataDir

RUNS = 2000


@pytest.mark.parametrize("blocks", [5, 6, 8, 9, 20, 50])
@pytest.mark.parametrize("skew", [0.1, 1.0])
def test_a_bench_confidence_interval_contains_the_true_median_in_at_least_92_percent_of_runs(
    blocks: int, skew: float
) -> None:
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
def test_a_bench_figure_with_fewer_than_five_samples_has_no_confidence_interval_and_no_verdict(
    numbers: int,
) -> None:
    found = stats.estimate([1.0, 1.1, 1.2, 1.3][:numbers])
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert bounded("it is small", {"": [5.0] * numbers}, at_most=1.0).outcome is Verdict.CANNOT_TELL


def test_bench_quantiles_medians_and_slopes_of_small_samples_equal_values_computed_by_hand() -> None:
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


def test_the_load_bench_reports_a_fairness_of_zero_if_the_turns_of_one_session_fail() -> None:
    """Such a session got no tokens, which makes the slowest session's share 0."""
    served = [make(number) for number in range(4)]
    failed = [replace(turn, error="internal", tokens=()) if i == 2 else turn for i, turn in enumerate(served)]
    short = [replace(turn, tokens=(1,), total_s=0.9) if i == 2 else turn for i, turn in enumerate(served)]
    assert [values(turns, load.FAIR) for turns in (served, failed, short)] == [[1.0], [0.0], [1.0]]


def test_the_load_bench_measures_throughput_only_while_all_concurrent_clients_have_a_request_running() -> (
    None
):
    turns = [make(i, at_s, 11.0, x=2, first_s=1.0, tokens=(1,) * 100) for i, at_s in enumerate((0, 0, 11))]
    assert values(turns, load.GENERATED) == pytest.approx([200 / 11])  # until a client found no session left


BLOCK = 128


def test_the_load_bench_measures_decode_speed_only_while_all_answers_of_the_batch_are_running():
    early, late = [1, 2, 3, 4, 5], [2.5, 3.5, 4.5, 5.5, 6.5]
    assert rate_of([early, late]) == (3 + 2) / 2.5  # at 3, 4 and 5; at 3.5 and 4.5
    assert rate_of([early]) == 1
    assert rate_of([early, [6, 7]]) is None


def test_the_device_bench_ends_with_a_table_of_each_tuning_constant_its_value_and_the_suggested_value():
    samples = []

    def add(measure: Measure, case: str, x: int, value: float) -> None:
        samples.extend(Sample(measure.name, case, x, block, value * (1 + block)) for block in range(2))

    for x, rate, kept in ((64, 900, 30), (128, 100, 0.4), (512, 200, 1.4), (2048, 201, 1.2)):
        add(device.PREFILL, device.WORKER, x, rate)
        add(device.KEPT, device.WORKER, x, kept)
    add(device.PREFILL, device.MLX, 2048, 1000)  # mlx-lm's rate is not the worker's
    for x, both, apart in ((1, 5, 9), (2, 20, 19), (4, 40, 30)):
        add(device.DECODING, device.TOGETHER, x, both)
        add(device.DECODING, device.APART, x, apart)
    in_use = {"prompt_blocks": 8, "pooled_rows": 3, "merged_rows": 1, "kept_layers": 10}
    facts = {"device": "metal", "block": BLOCK, "least": "pooled_rows", "freed_bytes": 1024, **in_use}
    head, *rows = BENCH.closing(Findings(BENCH, Plan(rows=(1, 2, 4)), (), samples, facts))
    assert head == ("constants of metal", "in use", "suggested")
    shown = {name: (used, value) for name, used, value in rows}
    assert shown["prompt_blocks"] == ("8", "4")
    assert shown["pooled_rows"] == ("3", "2")
    assert shown["kept_layers"] == ("10", "3")
    assert [shown[name][1] for name in ("merged_rows", "freed_bytes")] == ["not measured"] * 2
    facts["least"] = "merged_rows"
    _, *rows = BENCH.closing(Findings(BENCH, Plan(rows=(1, 2, 4)), (), samples, facts))
    assert ("merged_rows", "1", "2") in rows


TOKENS = [(7 * i + 3) % 250 for i in range(96)]
PROMPTS = [TOKENS[:40], TOKENS[20:60], TOKENS[30:70]]


@pytest.fixture
def measuring(tiny_model: Path, tmp_path: Path) -> Iterator[DeviceMeter]:
    flags = {"data_dir": str(tmp_path)}
    directory = DataDir.open(tmp_path)
    loaded = model.load(tiny_model, dtype="float32")
    yield DeviceMeter(loaded, directory, setting_sources.load(flags, {}), block_tokens=16)
    directory.close()


def test_the_device_bench_measures_every_figure_that_its_report_lists(measuring: DeviceMeter):
    found = measuring.prefill(32, TOKENS) | measuring.decode(True, 3, PROMPTS)
    assert found.keys() == MEASURES.keys()
    assert all(value > 0 for value in found.values())
    # MLX's threads free a layer's arrays a moment sooner or later, so a tiny model's figures vary.
    again = [measuring.prefill(32, TOKENS) for _ in range(8)]
    assert min(figures["scratch memory"] for figures in again) < 1
    assert min(figures["layers kept"] for figures in again) < 1
    assert measuring.description["constants"].keys() >= {"prompt_blocks", "pooled_rows", "kept_layers"}
