"""The program that `bench quality` runs reports the model's true losses, answers and sizes of KV."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_gguf import TinyLlama

from bench.programs.quality import Comparison, Plan, Side
from worker.models import gguf_model, model

PLAN = Plan(window=32, windows=3, answer=6, answers=2, block=8)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return gguf_model.convert(TinyLlama().write(folder / "tiny.gguf"), folder / "models", dtype="float32")


def tokens_of(num: int, vocabulary: int) -> list[int]:
    return [(i * i * 7 + 3 * i + 1) % vocabulary for i in range(num)]


@pytest.mark.parametrize(("kv_bits", "kv_bytes"), [(None, 1024), (8, 2 * 2 * 2 * 40), (4, 2 * 2 * 2 * 24)])
def test_the_sizes_of_kv_in_memory_and_on_disk_follow_from_the_requested_kv_bits(
    tiny: Path, kv_bits: int, kv_bytes: int
) -> None:
    loaded = model.load(tiny, dtype="float32", kv_bits=kv_bits)
    assert loaded.kv.bytes_per_token == kv_bytes
    sizes = Side(loaded, PLAN, kv_bits).sizes(tokens_of(32, loaded.vocab_size))
    assert sizes["a token's KV in memory"] == kv_bytes
    assert kv_bytes < sizes["a token's KV on disk"] < kv_bytes + 4096 / PLAN.block


@pytest.mark.parametrize("window", [32, 27])
def test_the_loss_of_the_second_half_of_a_window_equals_the_loss_of_a_single_forward_pass(
    tiny: Path, window: int
) -> None:
    """The expected loss is computed in float64; one of the windows does not end at a block's boundary."""
    loaded = model.load(tiny, dtype="float32")
    tokens = tokens_of(window, loaded.vocab_size)
    whole = loaded.model(mx.array([tokens]), cache=make_prompt_cache(loaded.model))[0]
    logits = np.array(whole).astype(np.float64)
    half = window // 2
    expected, best = 0.0, []
    for at in range(half, window):
        before = logits[at - 1]
        expected += math.log(np.exp(before - before.max()).sum()) + before.max() - before[tokens[at]]
        best.append(int(before.argmax()))
    plan = Plan(window=window, windows=1, answer=1, answers=1, block=8)
    loss, found = Side(loaded, plan, None).score(tokens)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert found == best


def test_an_answer_of_the_quality_bench_is_decoded_greedily(tiny: Path) -> None:
    loaded = model.load(tiny, dtype="float32", kv_bits=8)
    tokens = tokens_of(16, loaded.vocab_size)
    caches, expected = make_prompt_cache(loaded.model), []
    last = tokens
    for _ in range(PLAN.answer):
        logits = loaded.model(mx.array([last]), cache=caches)[0, -1]
        expected.append(int(mx.argmax(logits).item()))
        last = expected[-1:]
    assert Side(loaded, PLAN, 8).answer(tokens) == expected


def test_quantised_kv_is_reported_after_kv_in_full_precision_and_compared_with_it(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = Comparison("a b c d e f g " * 20, PLAN)
    for bits in (None, 8):
        comparison.add(model.load(tiny, dtype="float32", kv_bits=bits), bits)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(bits, window) for bits, window, _ in told] == [(None, i) for i in (None, 0, 1, 2)] + [
        (8, i) for i in (None, 0, 1, 2, 0, 1)
    ]
    full, fewer = ([figures for bits, _, figures in told if bits == kept] for kept in (None, 8))
    assert fewer[0]["a token's KV in memory"] < full[0]["a token's KV in memory"]
    assert [figures.keys() for figures in full[1:]] == [{"perplexity"}] * 3
    assert [len(figures) for figures in fewer] == [2] * 6
    assert all(0 <= value <= 1 for figures in fewer[4:] for value in figures.values())


def test_the_quality_bench_refuses_a_text_shorter_than_one_window(tiny: Path) -> None:
    with pytest.raises(SystemExit, match="fewer than a window of 32"):
        Comparison("a b", PLAN).add(model.load(tiny, dtype="float32"), None)
