"""Reranking over HTTP, as Cohere's and Jina's clients request it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytestmark = pytest.mark.serves("reranker")

QUERY = "Why is the sky blue?"
DOCUMENTS = ["no", "Air scatters blue light.", "Cats sleep for most of the day.", "yes"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_are_ranked_by_score_and_named_by_their_index_in_the_request(
    served: Any, http: httpx2.AsyncClient, path: str
) -> None:
    """In the format of Jina and of llama.cpp's server."""
    scores = (await served.worker.client.rerank(QUERY, DOCUMENTS)).scores
    best = sorted(range(4), key=lambda index: -scores[index])
    answer = await http.post(path, json={"model": "m", "query": QUERY, "documents": DOCUMENTS})
    told = answer.json()
    assert [one["index"] for one in told["results"]] == best
    assert [one["relevance_score"] for one in told["results"]] == pytest.approx([scores[one] for one in best])
    assert told["model"] == "m"
    assert told["usage"]["total_tokens"] > sum(map(len, DOCUMENTS))
    asked = {"query": QUERY, "documents": [{"text": one} for one in DOCUMENTS], "top_n": 2}
    few = (await http.post(path, json=asked | {"return_documents": True, "rank_fields": ["text"]})).json()
    assert [(one["index"], one["document"]["text"]) for one in few["results"]] == [
        (index, DOCUMENTS[index]) for index in best[:2]
    ]


@pytest.mark.packaging
@pytest.mark.registry
@pytest.mark.timeout(300)
async def test_coheres_client_ranks_documents_with_both_versions_of_its_api(
    served: Any, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "pip", "install", "-q", "--python", python, "cohere"], check=True)  # noqa: ASYNC221
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


async def test_an_instruction_is_passed_to_the_reranker(served: Any, http: httpx2.AsyncClient) -> None:
    asked = {"query": QUERY, "documents": DOCUMENTS[:1]}
    told = (await http.post("/v1/rerank", json=asked | {"instruction": "Find poems"})).json()
    (expected,) = (await served.worker.client.rerank(**asked, instruction="Find poems")).scores
    assert told["results"] == [{"index": 0, "relevance_score": pytest.approx(expected, abs=1e-6)}]


async def test_many_documents_are_ranked_and_a_long_one_is_truncated_only_if_requested(
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
