"""Embeddings over NATS: the model's own hidden states; they leave no log entries and no KV."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from parts import TINY_CONTEXT

from turnkeep_client.errors import RequestFailedError
from worker.models.model import load

Start = Any
TEXTS = ["Is water wet?", "Why is the sky blue? " * 40, "x"]


def expected(folder: Path, text: str) -> np.ndarray[Any, Any]:
    """Return a text's vector by one call of mlx-lm's model over all its tokens."""
    loaded = load(folder, dtype="float32")
    model: Any = loaded.model
    hidden = model.model(mx.array([loaded.tokenizer.encode_whole(text)]))[0, -1]
    return np.array(hidden / mx.linalg.norm(hidden))


async def test_an_embedding_is_the_last_tokens_hidden_state_also_for_texts_of_many_blocks(
    local_worker: Start, embedding_model: Path
) -> None:
    worker = await local_worker(model=str(embedding_model))
    found = await worker.client.embed(TEXTS * 20)
    for text, vector in zip(TEXTS * 20, found.floats, strict=True):
        assert np.dot(expected(embedding_model, text), vector) > 0.99999
    assert found.tokens[:3] == found.tokens[3:6]
    ids = load(embedding_model, dtype="float32").tokenizer.encode_whole(TEXTS[0])
    assert ids[-1] == 0, "the tokenizer's own end of a text"
    assert np.dot((await worker.client.embed([ids])).floats[0], found.floats[0]) > 0.99999


async def test_an_embedding_truncated_to_fewer_dimensions_has_length_1(
    local_worker: Start, embedding_model: Path
) -> None:
    worker = await local_worker(model=str(embedding_model))
    (whole,) = (await worker.client.embed(TEXTS[:1])).floats
    (cut,) = (await worker.client.embed(TEXTS[:1], dimensions=4)).floats
    assert np.linalg.norm(cut) == pytest.approx(1.0)
    assert np.dot(cut, whole[:4]) == pytest.approx(np.linalg.norm(whole[:4]))


async def test_an_embedding_leaves_neither_log_entries_nor_kv(
    local_worker: Start, embedding_model: Path
) -> None:
    worker = await local_worker(model=str(embedding_model))
    await worker.client.embed(TEXTS)
    metrics = await worker.client.worker_metrics()
    assert (metrics.resident_sessions, metrics.running, metrics.snapshots.accepted) == (0, 0, 0)
    assert not await worker.client.log()


@pytest.mark.parametrize("kind", ["vectors", "scores"])
async def test_an_embedding_or_scoring_request_at_a_worker_that_stops_is_told_so_at_once(
    local_worker: Start, embedding_model: Path, reranker: Path, kind: str
) -> None:
    worker = await local_worker(model=str(embedding_model if kind == "vectors" else reranker))
    texts = ["hello " * 280] * 200
    asked = worker.client.embed(texts) if kind == "vectors" else worker.client.rerank("x", texts)
    listed = asyncio.create_task(asked)
    async with asyncio.timeout(20):
        while not (await worker.client.worker_metrics()).running:
            pass
    worker.app.stop()
    with pytest.raises(RequestFailedError, match="the worker stops: ask again") as refusal:
        await listed
    assert refusal.value.code == "overloaded"


@pytest.mark.parametrize(
    ("inputs", "more", "why"),
    [
        ([[]], {}, "has 0 tokens"),
        ([[258], [259]], {}, r"inputs\[1\] has a token id outside of the model's vocabulary of 259"),
        (["a " * 50_000], {}, "it must have 1 to"),
        (["a"], {"dimensions": 10**6}, "dimensions, not 1000000"),
    ],
)
async def test_an_input_that_cannot_be_embedded_is_refused_with_the_reason(
    local_worker: Start, embedding_model: Path, inputs: Any, more: Any, why: str
) -> None:
    worker = await local_worker(model=str(embedding_model))
    with pytest.raises(RequestFailedError, match=why) as refusal:
        await worker.client.embed(inputs, **more)
    assert refusal.value.code == "invalid_request"


async def test_a_text_as_long_as_the_context_is_embedded_and_one_beyond_the_memory_is_refused(
    local_worker: Start, embedding_model: Path
) -> None:
    worker = await local_worker(model=str(embedding_model))
    assert (await worker.client.embed([[40] * TINY_CONTEXT])).tokens == (TINY_CONTEXT,)
    await worker.stop()
    small = await local_worker(model=str(embedding_model), kv_bytes=2**20)
    with pytest.raises(RequestFailedError, match=r"it must have 1 to [0-9]{3,4}$"):
        await small.client.embed([[40] * TINY_CONTEXT])


async def test_a_chat_model_embeds_no_texts(local_worker: Start, tiny_model: Path) -> None:
    worker = await local_worker(model=str(tiny_model))
    with pytest.raises(RequestFailedError, match=r"or give this one the modules.json of the repository"):
        await worker.client.embed(["a"])


async def test_with_input_tokens_an_input_is_cut_to_them_or_to_what_fits_and_keeps_its_end_token(
    local_worker: Start, embedding_model: Path
) -> None:
    """This model's tokens are bytes, and each text ends with a token for its end."""
    client = (await local_worker(model=str(embedding_model))).client
    inputs = ["ab" * TINY_CONTEXT, "x", "", [40] * (TINY_CONTEXT + 1)]
    found = await client.embed(inputs, input_tokens=2**31 - 1)
    assert found.tokens == (TINY_CONTEXT, 2, 1, TINY_CONTEXT)
    fitting = await client.embed(["ab" * (TINY_CONTEXT // 2)], input_tokens=TINY_CONTEXT)
    assert np.dot(found.floats[0], fitting.floats[0]) == pytest.approx(1.0, abs=1e-5)
    assert (await client.embed(["abcd"], input_tokens=3)).vectors == (await client.embed(["ab"])).vectors


@pytest.mark.parametrize("kind", ["embeddings", "scores"])
async def test_a_model_trained_for_something_else_makes_no_answers_and_says_what_it_makes(
    local_worker: Start, embedding_model: Path, reranker: Path, kind: str
) -> None:
    worker = await local_worker(model=str(embedding_model if kind == "embeddings" else reranker))
    assert (await worker.client.worker_metrics()).makes == (kind,)
    with pytest.raises(RequestFailedError, match=f"makes {kind} of texts, and no answers") as refusal:
        await worker.client.session("a").generate(text="x", max_tokens=1)
    assert refusal.value.code == "invalid_request"
