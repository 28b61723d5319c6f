"""The program that `bench device` runs measures all figures that the bench lists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from bench.device import MEASURES
from bench.programs.device import DeviceMeter
from worker.batch.rows import Row
from worker.models import model
from worker.process import setting_sources
from worker.process.datadir import DataDir

TOKENS = [(7 * i + 3) % 250 for i in range(96)]
PROMPTS = [TOKENS[:40], TOKENS[20:60], TOKENS[30:70]]


@pytest.fixture
def measuring(tiny_model: Path, tmp_path: Path) -> Iterator[DeviceMeter]:
    flags = {"data_dir": str(tmp_path)}
    directory = DataDir.open(tmp_path)
    loaded = model.load(tiny_model, dtype="float32")
    yield DeviceMeter(loaded, directory, setting_sources.load(flags, {}), block_tokens=16)
    directory.close()


def test_the_device_program_measures_every_figure_that_the_bench_lists(measuring: DeviceMeter):
    found = measuring.prefill(32, TOKENS) | measuring.decode(True, 3, PROMPTS)
    assert found.keys() == MEASURES.keys()
    assert all(value > 0 for value in found.values())
    # MLX's threads free a layer's arrays a moment sooner or later, so a tiny model's figures vary.
    again = [measuring.prefill(32, TOKENS) for _ in range(8)]
    assert min(figures["scratch memory"] for figures in again) < 1
    assert min(figures["layers kept"] for figures in again) < 1
    assert measuring.description["constants"].keys() >= {"prompt_blocks", "pooled_rows", "kept_layers"}


@pytest.mark.parametrize("together", [True, False])
def test_decoding_batched_or_not_gives_the_models_own_tokens(
    measuring: DeviceMeter, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, together: bool
):
    rows: list[Row] = []
    begin = measuring._begin
    monkeypatch.setattr(measuring, "_begin", lambda *given: rows.extend(begin(*given)) or rows[:])
    measuring.decode(together, 5, PROMPTS)
    own: Any = model.load(tiny_model, dtype="float32").model
    for row, prompt in zip(rows, PROMPTS, strict=True):
        caches, last, expected = make_prompt_cache(own), prompt, []
        for _ in range(6):
            last = [int(mx.argmax(own(mx.array([last]), cache=caches)[0, -1]).item())]
            expected += last
        assert row.known[len(prompt) :].tolist() == expected
        assert (row.num_cached, row.num_left) == (len(prompt) + 5, 0)
