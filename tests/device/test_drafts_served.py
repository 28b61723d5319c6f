"""A worker with a draft model gives the same answers as one without."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

from cache.names.policy import FULL
from tests.parts import CHAT_TEMPLATE
from worker.batch import speculation
from worker.batch.draft_model import MOST_HELD, MOST_SHADOWS
from worker.models import model
from worker.models.model_files import ModelError
from worker.weighing import measure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from turnkeep_client.client import Client

NUMBER = {"type": "integer", "minimum": 0, "maximum": 200}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "ages": {"type": "array", "items": NUMBER}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "person", "description": "Tell", "parameters": PERSON}}
#: Describes tools and calls as the chat templates of Qwen's models do.
TOOLS = (
    "{% for tool in tools or [] %}<tools>{{ tool | tojson }}</tools>{% endfor %}"
    "{% for m in messages %}{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}{% endfor %}"
)
QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me about somebody."}]}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"min_tokens": 60},
    "sampled": {"min_tokens": 60, "temperature": 0.9, "top_p": 0.9, "seed": 5},
    "penalised": {
        "min_tokens": 60,
        "temperature": 0.7,
        "seed": 6,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
    },
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}},
    "tool": {"tools": [TOOL], "tool_choice": "required", "temperature": 0.8, "seed": 7},
}


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a model of 14 layers, 12 of which change little, and of a draft model with the other two."""
    small, large = (tmp_path_factory.mktemp("pair") / name for name in ("small", "large"))
    shutil.copytree(tiny_model, small)
    (small / "chat_template.jinja").write_text(TOOLS + CHAT_TEMPLATE)
    shutil.copytree(small, large)
    config = json.loads((large / "config.json").read_text()) | {"num_hidden_layers": 14}
    (large / "config.json").write_text(json.dumps(config))
    weights: dict[str, Any] = dict(mx.load(str(small / "model.safetensors")))
    more = {
        name.replace(".1.", f".{layer}."): array * (0.03 if "o_proj" in name or "down_proj" in name else 1.0)
        for layer in range(2, 14)
        for name, array in weights.items()
        if ".layers.1." in name
    }
    mx.save_safetensors(str(large / "model.safetensors"), weights | more, metadata={"format": "mlx"})
    return large, small


async def answer(client: Client, session: str, kind: str) -> tuple[int, ...]:
    """Return the tokens of an answer."""
    result = await client.session(session).generate(**QUESTION, max_tokens=100, **KINDS[kind])
    return result.tokens


async def test_answers_with_a_draft_model_equal_those_without_one(
    local_worker: Callable[..., Awaitable[Any]], pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers run two at a time, and in a second turn. The draft model is forced to draft."""
    large, small = pair
    plain = (await local_worker(model=str(large), max_draft=0, prefix="plain")).client
    monkeypatch.setattr(speculation, "best", lambda *_: (9.0, 4))
    worker = await local_worker(model=str(large), draft_model=str(small), data_dir=tmp_path / "drafts")
    for session, kind, other in (("a", "penalised", "schema"), ("b", "tool", "schema"), ("a", "sampled", "")):
        expected = await answer(plain, session, kind)
        beside = [answer(worker.client, f"{other}-{session}", other)] if other else []
        found, *_ = await asyncio.gather(answer(worker.client, session, kind), *beside)
        assert found == expected, kind
    metrics = (await worker.client.session("a").info()).worker
    assert 0 < metrics.accepted_draft_tokens < metrics.draft_tokens


@pytest.mark.parametrize(
    ("draft", "told"),
    [
        ("other tokens", r"has other tokens than large; take one with the same tokenizer"),
        ("no head", r"has no output head: it is made for embeddings"),
        ("absent", r"there is no model"),
    ],
)
async def test_a_worker_refuses_a_missing_draft_model_or_one_with_another_vocabulary(
    local_worker: Callable[..., Awaitable[Any]],
    pair: tuple[Path, Path],
    embedding_model: Path,
    tmp_path: Path,
    draft: str,
    told: str,
) -> None:
    large, small = pair
    folder = tmp_path / "other"
    if draft == "other tokens":
        shutil.copytree(small, folder)
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        names = tokenizer["model"]["vocab"]
        names["A"], names["B"] = names["B"], names["A"]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    elif draft == "no head":
        folder = embedding_model
    with pytest.raises(ModelError, match=told):
        await local_worker(model=str(large), draft_model=str(folder))


async def test_a_workers_memory_and_its_estimate_include_the_draft_models_weights_and_kv(
    local_worker: Callable[..., Awaitable[Any]], pair: Any, tmp_path: Path
) -> None:
    """Draft KV counts for the most sessions that may have drafts. The supervisor uses the estimate, too."""
    large, small = pair
    room = []
    for draft in (None, str(small)):
        folder = tmp_path / f"drafts-{draft is not None}"
        worker = await local_worker(model=str(large), draft_model=draft, device_memory=2**28, data_dir=folder)
        await worker.client.session("s").append(text="x")
        room.append((await worker.client.session("s").info()).worker.kv_limit_bytes)
        await worker.stop()
    loaded, draft_model = (model.load(one, dtype="float32", lazy=True) for one in pair)
    sizes: dict[str, Any] = {"block": 32, "max_context": 512, "limit_bytes": 2**28}
    alone, both = (measure(loaded, FULL, draft=one, **sizes) for one in (None, draft_model))
    taken = both.estimator.weight_bytes - alone.estimator.weight_bytes
    assert taken > draft_model.weight_bytes + MOST_SHADOWS * draft_model.kv.held(MOST_HELD)
    assert 0.9 * taken < room[0] - room[1] < 1.5 * taken
