"""Models with windows, recurrent states or quantised KV: their snapshots, log lines, and refusals."""

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import structlog
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

from cache.names.policy import Policy
from turnkeep_client.errors import RequestFailedError
from worker.app import WorkerError

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
#: Heads of a size that can be quantised.
WIDE = {"llama": {"head_dim": 32}}
#: A model with its own attention code, which cannot be given relative positions.
ALONE: dict[str, dict[str, Any]] = {"gemma2": {}}


@pytest.fixture
def make_folder(tiny_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """Make the folder of a random model of an architecture, with the tiny model's tokenizer."""

    def make(kind: str, **more: int) -> Path:
        folder = tmp_path / kind
        shutil.copytree(tiny_model, folder)
        vocabulary = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
        config = {
            "model_type": kind,
            "vocab_size": vocabulary,
            **_SHAPE,
            **(ARCHITECTURES | WIDE | ALONE)[kind],
            **more,
        }
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


async def test_stored_snapshots_are_restored_after_a_change_of_the_chat_template_but_not_of_the_model_code(
    local_worker, tiny_model, tmp_path, monkeypatch
) -> None:
    folder, text = tmp_path / "model", "Once upon a time " * 8
    shutil.copytree(tiny_model, folder)

    async def cached(session: str) -> int:
        worker = await local_worker(model=str(folder))
        appended = await worker.client.session(session).append(text=text)
        await worker.stop()
        return int(appended.cached_tokens)

    assert await cached("a") == 0
    assert await cached("b") == len(text) - 1
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    assert await cached("c") == len(text) - 1
    monkeypatch.setattr("worker.model_start.code_digest", lambda _: "of another release")
    assert await cached("d") == 0


OF_WINDOW = "RingCache(sink_window(0,24))"


async def test_a_model_with_an_unknown_cache_class_is_served_without_snapshots(
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


@pytest.mark.parametrize(
    ("kind", "kv_bits", "caches"),
    [
        ("gemma3_text", 8, f"3*{OF_WINDOW} QuantizedKVCache(32,8) {OF_WINDOW}"),
        ("gemma3_text", None, f"3*{OF_WINDOW} KVCache {OF_WINDOW}"),
        ("llama", 4, "5*QuantizedKVCache(32,4)"),
        ("falcon_h1", None, "5*[ArraysCache(2) KVCache]"),
    ],
)
async def test_a_worker_logs_the_cache_class_of_each_layer_and_warns_if_kv_bits_applies_only_to_some_layers(
    local_worker, make_folder, tmp_path, kind, kv_bits, caches
) -> None:
    """The results of its batching trials are stored, so that the next start does not repeat them."""
    sizes = {"head_dim": 32, "sliding_window_pattern": 4} if kind != "falcon_h1" else {}
    with structlog.testing.capture_logs() as logged:
        await local_worker(model=str(make_folder(kind, num_hidden_layers=5, **sizes)), kv_bits=kv_bits)
    said = [line["caches"] for line in logged if "caches" in line]
    assert said == [caches] * (2 if kind == "gemma3_text" and kv_bits is not None else 1)
    assert json.loads((tmp_path / "data" / "models" / "trials.json").read_text())


async def test_a_worker_warns_once_at_its_start_that_kv_stored_with_other_kv_bits_is_not_used(
    local_worker, make_folder
) -> None:
    model = str(make_folder("llama", head_dim=32))
    said, cached = [], []
    for bits in (None, 8, 8, None):
        with structlog.testing.capture_logs() as logged:
            worker = await local_worker(model=model, kv_bits=bits)
        said.append([line for line in logged if line["event"] == "kv_of_other_settings_is_not_used"])
        answer = await worker.client.ask("s", text="hello " * 20, max_tokens=1)
        cached.append(answer.usage.cached_tokens > 0)
        await worker.stop()
    assert [len(lines) for lines in said] == [0, 1, 0, 0]
    assert said[1][0]["log_level"] == "warning"
    assert said[1][0]["snapshots"] > 0
    assert cached == [False, False, True, True]


async def test_sink_window_is_refused_for_an_unsuitable_model_by_open_requests_and_at_the_worker_start(
    local_worker, make_folder
) -> None:
    """At the start only if the policy is the worker's default."""
    folder = str(make_folder("gemma2"))
    worker = await local_worker(model=folder)
    session = worker.client.session("s", cache={"policy": "sink_window", "sink": 4, "window": 64})
    with pytest.raises(RequestFailedError) as refused:
        await session.append(text="hello")
    assert refused.value.code == "invalid_request"
    assert refused.value.message.endswith("be told how far away a token is; use the policy full")
    assert (await worker.client.session("s").append(text="hello")).cache is None
    await worker.stop()
    with pytest.raises(WorkerError) as stopped:
        await local_worker(model=folder, cache_policy=Policy(4, 64))
    assert str(stopped.value) == f"cache_policy cannot be the default here: {refused.value.message}"
