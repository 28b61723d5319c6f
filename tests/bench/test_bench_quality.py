"""`bench quality`: what is made of what the program says, and a run of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from bench_runs import check_one_line, turnkeep

from bench.old import report
from bench.old.page import render
from bench.old.quality.page import page_of
from bench.old.quality.summary import Answer, Kept, QualityReport, Window, checks, series, summarise

if TYPE_CHECKING:
    from pathlib import Path

KEPT = [
    Kept(kv_bits=None, caches="30*KVCache", kv_bytes_per_token=400, disk_bytes_per_token=404.0),
    Kept(kv_bits=8, caches="30*QuantizedKVCache(64,8)", kv_bytes_per_token=112, disk_bytes_per_token=116.0),
]
WINDOWS = [
    Window(kv_bits=None, tokens=10, loss=20.0, same=10),
    Window(kv_bits=None, tokens=10, loss=30.0, same=10),
    Window(kv_bits=8, tokens=10, loss=21.0, same=9),
    Window(kv_bits=8, tokens=10, loss=31.0, same=7),
]
ANSWERS = [
    Answer(kv_bits=None, tokens=8, same=8),
    Answer(kv_bits=None, tokens=8, same=8),
    Answer(kv_bits=8, tokens=8, same=8),
    Answer(kv_bits=8, tokens=8, same=2),
]


def test_perplexity_is_over_all_tokens_and_its_ratio_window_by_window() -> None:
    full, fewer = summarise(KEPT, WINDOWS, ANSWERS).sides
    assert full.perplexity == pytest.approx(math.exp(50 / 20))
    assert fewer.perplexity == pytest.approx(math.exp(52 / 20))
    assert full.perplexity_ratio is None
    assert fewer.perplexity_ratio is not None
    assert fewer.perplexity_ratio.median == pytest.approx(math.exp(0.1))
    assert (full.likeliest_equal, fewer.likeliest_equal) == (1.0, 0.8)


def test_an_answer_counts_up_to_its_first_difference() -> None:
    full, fewer = summarise(KEPT, WINDOWS, ANSWERS).sides
    assert (full.answers_equal, full.whole_answers_equal) == (1.0, 2)
    assert (fewer.answers_equal, fewer.whole_answers_equal) == (10 / 16, 1)


def test_a_partial_run_tells_what_it_knows() -> None:
    nothing = summarise([], [], [])
    assert (nothing.tokens, nothing.sides) == (0, ())
    assert [check.passed for check in checks(nothing)] == [None]
    begun = summarise(KEPT, WINDOWS[:3], ANSWERS[:1])
    assert [side.kv_bits for side in begun.sides] == [None, 8]
    assert begun.sides[1].answers_equal is None
    assert [side.kv_bits for side in summarise(KEPT[:1], WINDOWS[:1], []).sides] == [None]


def test_fewer_bits_that_take_no_less_are_a_fault() -> None:
    assert [check.passed for check in checks(summarise(KEPT, WINDOWS, ANSWERS))] == [True]
    grown = [KEPT[0], Kept(kv_bits=8, caches="", kv_bytes_per_token=112, disk_bytes_per_token=404.0)]
    found = checks(summarise(grown, WINDOWS, ANSWERS))
    assert [(check.passed, check.exact) for check in found] == [(False, True)]


def test_reports_are_compared_by_losses_and_by_equal_beginnings() -> None:
    found = series(WINDOWS, ANSWERS)
    assert found["loss per token: 8 bits"].values == (2.1, 3.1)
    assert found["equal beginnings of answers: 8 bits"].values == (1.0, 0.25)
    assert "equal beginnings of answers: full precision" not in found


@pytest.mark.process
@pytest.mark.model
def test_a_smoke_run_of_the_quality_bench_ends_well(tmp_path: Path, packaged_folder: Path) -> None:
    process = turnkeep("quality", "--smoke", "--model", packaged_folder, "--out", tmp_path)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, out + err
    found = report.read(next(tmp_path.glob("quality-*.json")), QualityReport)
    assert found.complete
    full, eight, four = found.summary.sides
    assert [side.kv_bytes_per_token for side in found.summary.sides] == [46_080, 12_960, 7_200]
    assert (full.likeliest_equal, full.answers_equal) == (1.0, 1.0)
    assert 0.99 < eight.perplexity / full.perplexity < 1.01
    assert eight.likeliest_equal > four.likeliest_equal > 0.5
    assert next(tmp_path.glob("quality-*.html")).read_text().count("<svg") == 2
    page = render(page_of(found), warn=print)
    assert page is not None
    assert "30*QuantizedKVCache(64,4)" in page


@pytest.mark.process
def test_a_model_that_cannot_be_measured_is_one_line(tiny_model: Path) -> None:
    process = turnkeep("quality", "--smoke", "--model", tiny_model)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.splitlines()[-1] == (
        "turnkeep: the measuring process ended: heads of layer 0 have a size of 16, and kv_bits needs a"
        " multiple of 32; leave kv_bits at full"
    )


@pytest.mark.process
def test_a_text_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "picture"
    path.write_bytes(b"\xff\xfe\xff")
    check_one_line(turnkeep("quality", "--text", path), "cannot be read")
