"""Embeddings and ranks over HTTP, as clients of OpenAI, Ollama, Cohere and Jina request them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from parts import TINY_CONTEXT, until

from tests.commands.command_runs import installed

TEXTS = ["Is water wet?", "Why is the sky blue?"]


async def posted(served: Any, path: str, **body: Any) -> httpx2.Response:
    return await served.http.post(path, json={"model": "m", **body})


@pytest.mark.serves("embedding_model")
async def test_the_openai_client_gets_the_same_embedding_vectors_as_base64_and_as_floats(served: Any) -> None:
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
    ids = [40, 41, 42]  # to which no tokens are added
    one, several = await create(model="m", input=ids), await create(model="m", input=[ids, ids])
    assert (one.usage.prompt_tokens, several.usage.prompt_tokens) == (3, 6)
    assert np.dot(one.data[0].embedding, several.data[1].embedding) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.serves("embedding_model")
async def test_more_inputs_than_fit_one_request_to_the_worker_are_all_embedded_in_order(served: Any) -> None:
    texts = [f"text {number}" for number in range(70)]
    found = await served.openai.embeddings.create(model="m", input=texts)
    backwards = await served.openai.embeddings.create(model="m", input=texts[::-1])
    assert len(found.data) == len({tuple(np.round(one.embedding, 4)) for one in found.data}) == 70
    for one, other in zip(found.data, reversed(backwards.data), strict=True):
        assert np.dot(one.embedding, other.embedding) == pytest.approx(1.0, abs=1e-5)
    refused = await posted(served, "/v1/embeddings", input=[*texts, "word " * TINY_CONTEXT])
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "input[70]")
    assert error["message"].startswith("input[70] has ")


@pytest.mark.serves("embedding_model")
async def test_the_ollama_embed_endpoint_truncates_long_inputs_and_accepts_empty_inputs(
    served: Any,
) -> None:
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
    for given, num in (("", 0), ([], 0), (None, 0), (["", "a"], 2)):
        answer = await posted(served, "/api/embed", input=given, dimensions=0)
        assert (answer.status_code, len(answer.json()["embeddings"])) == (200, num), given
    assert (await posted(served, "/api/show")).json()["capabilities"] == ["embedding"]
    assert (await served.http.get("/v1/models")).json()["data"][0]["makes"] == ["embeddings"]
    assert (await served.http.get("/api/v0/models")).json()["data"][0]["type"] == "embeddings"


@pytest.mark.serves("embedding_model")
async def test_embedding_inputs_are_cut_to_the_option_truncate_prompt_tokens_or_if_minus_1_to_the_context(
    served: Any,
) -> None:
    """As vLLM has it; without it, OpenAI's API refuses an input that is too long."""
    long = "ab" * TINY_CONTEXT
    for most, num_tokens in ((3, 5), (-1, TINY_CONTEXT + 2)):
        answer = await posted(served, "/v1/embeddings", input=[long, "x"], truncate_prompt_tokens=most)
        assert answer.json()["usage"]["prompt_tokens"] == num_tokens
    for wrong in (0, None):
        answer = await posted(served, "/v1/embeddings", input=[long, "x"], truncate_prompt_tokens=wrong)
        assert answer.status_code == 400


@pytest.mark.serves("embedding_model")
async def test_the_gateway_stops_embedding_a_list_of_inputs_when_the_client_disconnects(
    worker: Any, served: Any
) -> None:
    asking = asyncio.create_task(posted(served, "/v1/embeddings", input=["Is water wet? " * 20] * 2048))
    calls = worker.app._telemetry.calls["ctl"]
    await until(lambda: calls.num >= 4)
    asking.cancel()
    await asyncio.sleep(1)
    num_asked = calls.num
    await asyncio.sleep(1)
    assert calls.num <= num_asked + 1
    assert num_asked < 100


QUERY = "Why is the sky blue?"
DOCUMENTS = ["no", "Air scatters blue light.", "Cats sleep for most of the day.", "yes"]


@pytest.mark.serves("reranker")
async def test_reranking_returns_documents_sorted_by_score_with_their_index_in_the_request(
    served: Any, http: httpx2.AsyncClient
) -> None:
    """In the format of Jina and of llama.cpp's server."""
    scores = (await served.worker.client.rerank(QUERY, DOCUMENTS)).scores
    best = sorted(range(4), key=lambda index: -scores[index])
    body = {"model": "m", "query": QUERY, "documents": DOCUMENTS}
    told, *same = [(await http.post(f"{at}/rerank", json=body)).json() for at in ("/v1", "/v2", "")]
    assert [one["results"] for one in same] == 2 * [told["results"]]
    assert [one["index"] for one in told["results"]] == best
    assert [one["relevance_score"] for one in told["results"]] == pytest.approx([scores[one] for one in best])
    assert told["model"] == "m"
    assert told["usage"]["total_tokens"] > sum(map(len, DOCUMENTS))
    asked = {"query": QUERY, "documents": [{"text": one} for one in DOCUMENTS], "top_n": 2}
    few = (
        await http.post("/rerank", json=asked | {"return_documents": True, "rank_fields": ["text"]})
    ).json()
    assert [(one["index"], one["document"]["text"]) for one in few["results"]] == [
        (index, DOCUMENTS[index]) for index in best[:2]
    ]


@pytest.mark.serves("reranker")
@pytest.mark.packaging
@pytest.mark.registry
@pytest.mark.timeout(300)
async def test_the_cohere_client_reranks_documents_through_both_versions_of_its_api(
    served: Any, tmp_path: Path
) -> None:
    python = installed(tmp_path / "venv", "cohere") / "python"
    program = f"""
import cohere, json
for kind in (cohere.Client, cohere.ClientV2):
    asked = {{"model": "m", "query": {QUERY!r}, "documents": {DOCUMENTS!r}, "top_n": 3}}
    client = kind(api_key="none", base_url={served.url!r})
    print(json.dumps([(one.index, one.relevance_score) for one in client.rerank(**asked).results]))
try:
    client.rerank(model="m", query="a", documents=[])
except cohere.BadRequestError as error:
    print(json.dumps(error.body["error"]["param"]))
"""
    process = await asyncio.create_subprocess_exec(python, "-c", program, stdout=asyncio.subprocess.PIPE)
    older, newer, param = map(json.loads, (await process.communicate())[0].splitlines())
    scores = (await served.worker.client.rerank(QUERY, DOCUMENTS)).scores
    assert older == newer
    assert dict(older) == pytest.approx(dict(sorted(enumerate(scores), key=lambda one: -one[1])[:3]))
    assert param == "documents"


@pytest.mark.serves("reranker")
async def test_the_instruction_of_a_rerank_request_reaches_the_reranker_and_changes_the_scores(
    served: Any, http: httpx2.AsyncClient
) -> None:
    asked = {"query": QUERY, "documents": DOCUMENTS[:1]}
    told = (await http.post("/v1/rerank", json=asked | {"instruction": "Find poems"})).json()
    (expected,) = (await served.worker.client.rerank(**asked, instruction="Find poems")).scores
    assert told["results"] == [{"index": 0, "relevance_score": pytest.approx(expected, abs=1e-6)}]


@pytest.mark.serves("reranker")
async def test_the_gateway_reranks_many_documents_and_truncates_a_long_document_only_if_requested(
    served: Any, http: httpx2.AsyncClient
) -> None:
    long = {"query": QUERY, "documents": ["words " * 2000, *DOCUMENTS * 10], "max_tokens_per_doc": 20}
    answer = await http.post("/v2/rerank", json=long)
    ranked = answer.json()["results"]
    assert sorted(one["index"] for one in ranked) == list(range(41))
    scores = [one["relevance_score"] for one in ranked]
    assert scores == sorted(scores, reverse=True)
    assert len({round(score, 6) for score in scores}) > 1
    fits = await http.post("/v1/rerank", json=long | {"max_tokens_per_doc": None, "truncation": True})
    assert sorted(one["index"] for one in fits.json()["results"]) == list(range(41))
    refused = await http.post("/v2/rerank", json=long | {"max_tokens_per_doc": None})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("documents[0] has 12")
