"""Workers on models whose layers have states: the KV outlives them, or they say that it does not."""

from __future__ import annotations

import importlib
import json
import shutil
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
import structlog
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "falcon_h1": {
        "mamba_d_conv": 3,
        "mamba_d_head": 8,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 8,
    },
    "gemma3_text": {"sliding_window": 24, "sliding_window_pattern": 2},
}


@pytest.fixture
def make_folder(tiny_model: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Make the folder of a random model of an architecture, with the tiny model's tokenizer."""

    def make(kind: str) -> Path:
        folder = tmp_path / kind
        shutil.copytree(tiny_model, folder)
        vocabulary = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
        config = {"model_type": kind, "vocab_size": vocabulary, **_SHAPE, **ARCHITECTURES[kind]}
        (folder / "config.json").write_text(json.dumps(config))
        architecture = importlib.import_module(f"mlx_lm.models.{kind}")
        mx.random.seed(3)
        model = architecture.Model(architecture.ModelArgs.from_dict(config))
        weights = {name: array + 0.1 * mx.random.normal(array.shape) for name, array in _parameters(model)}
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
        return folder

    return make


def _parameters(model: Any) -> list[tuple[str, mx.array]]:
    parameters: Any = tree_flatten(model.parameters())
    return parameters


@pytest.mark.parametrize("kind", ARCHITECTURES)
async def test_after_a_restart_a_session_with_states_costs_what_is_new(
    local_worker, make_folder, tmp_path, kind
) -> None:
    folder = str(make_folder(kind))
    worker = await local_worker(model=folder)
    session = worker.client.session("s")
    await session.append(text="Once upon a time " * 8)
    first = await session.generate(max_tokens=41)
    await worker.stop()
    worker = await local_worker(model=folder)
    session = worker.client.session("s")
    second = await session.generate(text=" and then", max_tokens=20)
    assert second.usage.cached_tokens == first.position - 1
    assert second.usage.prefilled_tokens == len(" and then") + 1
    await worker.stop()

    other = await local_worker(
        model=folder, data_dir=tmp_path / "other", prefix=f"whole-{kind}", snapshots="off"
    )
    session = other.client.session("s")
    await session.append(text="Once upon a time " * 8)
    assert (await session.generate(max_tokens=41)).tokens == first.tokens
    assert (await session.generate(text=" and then", max_tokens=20)).tokens == second.tokens


async def test_a_model_with_a_cache_that_is_not_known_is_served_without_snapshots(
    local_worker, tmp_path, monkeypatch
) -> None:
    class NovelCache(KVCache):
        pass

    monkeypatch.setattr(llama.Model, "make_cache", lambda self: [NovelCache() for _ in self.layers])
    with structlog.testing.capture_logs() as lines:
        worker = await local_worker()
    said = [line for line in lines if "without snapshots" in line["event"]]
    assert [(line["cache_class"], line["log_level"]) for line in said] == [("NovelCache", "warning")]
    session = worker.client.session("s")
    await session.append(text="hello world")
    answer = await session.generate(max_tokens=8)
    assert (len(answer.tokens), answer.usage.cached_tokens) == (8, 10)
    assert not list((tmp_path / "data").rglob("*.safetensors"))
