"""The constants that `bench device` suggests from its measurements, and the token rate of a batch."""

from __future__ import annotations

import pytest

from bench import device
from bench.device import BENCH, Plan, kept_layers, prompt_blocks, rows_together
from bench.programs.in_process import rate_of
from bench.spec import Findings
from bench.turns import Measure, Sample

BLOCK = 128


def test_the_suggested_prompt_blocks_are_the_fewest_within_5_percent_of_the_best_rate():
    assert prompt_blocks({128: 0.949, 256: 0.951, 512: 1}, BLOCK) == 2
    assert prompt_blocks({2048: 1, 1024: 0.96}, BLOCK) == 8
    assert prompt_blocks({}, BLOCK) is None


@pytest.mark.parametrize(
    ("ratios", "rows"),
    [
        ({1: 0.5, 2: 1.0, 4: 1.3}, 2),
        ({2: 0.9, 3: 1.01, 4: 1.3}, 3),
        ({2: 1.2, 3: 0.99, 4: 1.3}, 4),  # a gain below a loss does not count
        ({2: 1.2, 4: 0.9}, None),
        ({1: 2.0}, 1),
    ],
)
def test_decoding_together_is_suggested_from_the_row_count_on_where_it_is_no_longer_slower(
    ratios: dict[int, float], rows: int | None
):
    assert rows_together(ratios) == rows


@pytest.mark.parametrize(
    ("kept", "layers"),
    [({64: 30, 128: 0.7, 256: 0.9}, 1), ({128: 2.04, 256: 1.5}, 2), ({128: 2.06}, 3), ({128: -4}, 1)],
)
def test_kept_layers_is_the_highest_value_measured_in_pieces_of_a_block_or_more_rounded_up(
    kept: dict[int, float], layers: int
):
    assert kept_layers(kept, BLOCK) == layers
    assert kept_layers({64: 3}, BLOCK) is None


def test_the_batch_rate_counts_tokens_after_all_answers_have_begun_until_the_first_ends():
    early, late = [1, 2, 3, 4, 5], [2.5, 3.5, 4.5, 5.5, 6.5]
    assert rate_of([early, late]) == (3 + 2) / 2.5  # at 3, 4 and 5; at 3.5 and 4.5
    assert rate_of([early]) == 1
    assert rate_of([early, [6, 7]]) is None


def test_the_closing_table_shows_each_constants_value_in_use_and_the_suggested_value():
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
