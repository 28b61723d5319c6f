"""Embeddings over HTTP, as clients of OpenAI and of Ollama request them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx2
import numpy as np
import pytest
from parts import TINY_CONTEXT

if TYPE_CHECKING:
    pass

pytestmark = pytest.mark.serves("embedding_model")

TEXTS = ["Is water wet?", "Why is the sky blue?"]


async def posted(served: Any, path: str, **body: Any) -> httpx2.Response:
    async with httpx2.AsyncClient(base_url=served.url, timeout=60) as http:
        return await http.post(path, json={"model": "m", **body})


async def test_openais_client_gets_the_same_vectors_as_base64_and_as_floats(served: Any) -> None:
    """By default the library requests base64, and returns floats to its caller."""
    create = served.openai.embeddings.create
    listed = await create(model="m", input=TEXTS)
    assert [(one.object, one.index) for one in listed.data] == [("embedding", 0), ("embedding", 1)]
    assert (listed.object, listed.model) == ("list", "m")
    assert listed.usage.prompt_tokens == listed.usage.total_tokens > 10
    as_floats = await create(model="m", input=TEXTS, encoding_format="float")
    for one, other in zip(listed.data, as_floats.data, strict=True):
        assert np.dot(one.embedding, other.embedding) == pytest.approx(1.0, abs=1e-5)
    alone = await create(model="m", input=TEXTS[1], dimensions=4)
    cut = np.array(listed.data[1].embedding[:4])
    assert np.dot(alone.data[0].embedding, cut / np.linalg.norm(cut)) == pytest.approx(1.0, abs=1e-5)


async def test_token_ids_are_embedded_without_adding_tokens(served: Any) -> None:
    create = served.openai.embeddings.create
    ids = [40, 41, 42]
    one, several = await create(model="m", input=ids), await create(model="m", input=[ids, ids])
    assert (one.usage.prompt_tokens, several.usage.prompt_tokens) == (3, 6)
    assert np.dot(one.data[0].embedding, several.data[1].embedding) == pytest.approx(1.0, abs=1e-5)


async def test_texts_that_exceed_one_request_to_the_worker_are_all_embedded_in_order(served: Any) -> None:
    texts = [f"text {number}" for number in range(70)]
    found = await served.openai.embeddings.create(model="m", input=texts)
    backwards = await served.openai.embeddings.create(model="m", input=texts[::-1])
    assert len(found.data) == len({tuple(np.round(one.embedding, 4)) for one in found.data}) == 70
    for one, other in zip(found.data, reversed(backwards.data), strict=True):
        assert np.dot(one.embedding, other.embedding) == pytest.approx(1.0, abs=1e-5)


async def test_ollamas_embed_endpoint_returns_unit_vectors_and_a_token_count(served: Any) -> None:
    answer = await posted(served, "/api/embed", input=TEXTS)
    assert answer.status_code == 200
    told = answer.json()
    assert (told["model"], len(told["embeddings"])) == ("m", 2)
    assert told["prompt_eval_count"] > 10
    assert told["total_duration"] > 0
    assert np.linalg.norm(told["embeddings"][0]) == pytest.approx(1.0, abs=1e-5)


async def test_ollamas_embed_endpoint_cuts_long_inputs_unless_told_otherwise(served: Any) -> None:
    long = "word " * TINY_CONTEXT
    cut = await posted(served, "/api/embed", input=[*TEXTS, long])
    whole = await posted(served, "/api/embed", input=TEXTS)
    assert cut.json()["embeddings"][:2] == [
        pytest.approx(one, abs=1e-5) for one in whole.json()["embeddings"]
    ]
    assert cut.json()["prompt_eval_count"] == whole.json()["prompt_eval_count"] + TINY_CONTEXT
    for truncate, status in ((False, 400), (True, 200), (None, 200)):
        answer = await posted(served, "/api/embed", input=[long, "a"], truncate=truncate)
        assert answer.status_code == status


async def test_an_empty_input_of_ollamas_embed_endpoint_is_no_error(served: Any) -> None:
    for given, num in (("", 0), ([], 0), (None, 0), (["", "a"], 2)):
        answer = await posted(served, "/api/embed", input=given, dimensions=0)
        assert (answer.status_code, len(answer.json()["embeddings"])) == (200, num), given


async def test_truncate_prompt_tokens_cuts_each_input_also_to_what_fits(served: Any) -> None:
    """As vLLM has it; without it, OpenAI's API refuses an input that is too long."""
    long = "ab" * TINY_CONTEXT
    for most, num_tokens in ((3, 5), (-1, TINY_CONTEXT + 2)):
        answer = await posted(served, "/v1/embeddings", input=[long, "x"], truncate_prompt_tokens=most)
        assert answer.json()["usage"]["prompt_tokens"] == num_tokens
    for wrong in (0, None):
        answer = await posted(served, "/v1/embeddings", input=[long, "x"], truncate_prompt_tokens=wrong)
        assert answer.status_code == 400


async def test_an_embedding_model_says_what_it_is(served: Any) -> None:
    assert (await posted(served, "/api/show")).json()["capabilities"] == ["embedding"]
    async with httpx2.AsyncClient(base_url=served.url) as http:
        assert (await http.get("/v1/models")).json()["data"][0]["makes"] == ["embeddings"]
        assert (await http.get("/api/v0/models")).json()["data"][0]["type"] == "embeddings"


async def test_a_list_whose_client_has_disconnected_is_not_embedded_any_further(
    worker: Any, served: Any
) -> None:
    asking = asyncio.create_task(posted(served, "/v1/embeddings", input=["Is water wet? " * 20] * 2048))
    calls = worker.app._telemetry.calls["ctl"]
    async with asyncio.timeout(20):
        while calls.num < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.sleep(1)
    num_asked = calls.num
    await asyncio.sleep(1)
    assert calls.num <= num_asked + 1
    assert num_asked < 100
