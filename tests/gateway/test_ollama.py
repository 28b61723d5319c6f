"""Ollama's API, and the paths that LM Studio's clients use besides OpenAI's."""

import asyncio
import json
import re
from typing import Any

import httpx2
import pytest

from gateway.dialects.ollama import answers
from gateway.http import answer_response
from gateway.models import GatewayModel
from turnkeep_client.generation import Generation
from worker.metrics_collector import unloaded_metrics

HELLO = [{"role": "user", "content": "Hello."}]


def lines(answer: httpx2.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_the_ollama_generate_endpoint_returns_the_same_answer_whole_and_as_a_stream(
    http: httpx2.AsyncClient,
) -> None:
    body = {"model": "m", "prompt": "Once", "options": {"num_predict": 6, "temperature": 0}}
    whole = (await http.post("/api/generate", json={**body, "stream": False})).json()
    streamed = lines(await http.post("/api/generate", json=body))
    assert "".join(one["response"] for one in streamed) == whole["response"]
    system = (await http.post("/api/generate", json={**body, "system": "Hm.", "stream": False})).json()
    raw = (await http.post("/api/generate", json={**body, "raw": True, "stream": False})).json()
    assert raw["prompt_eval_count"] < whole["prompt_eval_count"] < system["prompt_eval_count"]


async def test_an_ollama_request_without_a_prompt_loads_its_model_and_unloading_needs_a_supervisor(
    http: httpx2.AsyncClient,
) -> None:
    for path, more in (("generate", {}), ("chat", {"messages": []})):
        loaded = (await http.post(f"/api/{path}", json={"model": "m", **more})).json()
        assert (loaded["done"], loaded["done_reason"]) == (True, "load")
        refused = await http.post(f"/api/{path}", json={"model": "m", "keep_alive": 0, **more})
        assert refused.status_code == 503, "this worker has no supervisor"


async def test_the_gateway_lists_its_models_in_the_formats_of_ollama_and_lm_studio(
    http: httpx2.AsyncClient,
) -> None:
    (listed,) = (await http.get("/api/tags")).json()["models"]
    (running,) = (await http.get("/api/ps")).json()["models"]
    assert listed["name"] == running["model"]
    assert running["context_length"] == 2048
    for one in (listed, running):
        assert re.fullmatch("[0-9a-f]{64}", one["digest"])
        assert one["size"] > 10_000
        assert one["modified_at"] > "2026"
    assert listed["digest"] == running["digest"]
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert (model["makes"], model["created_at"] > "2026") == (["answers"], True)
    shown = (await http.post("/api/show", json={"model": listed["name"]})).json()
    assert shown["model_info"]["mlx.context_length"] == 2048
    assert shown["capabilities"] == ["completion", "tools"]
    assert (await http.get("/api/version")).json()["version"]
    (studio,) = (await http.get("/api/v0/models")).json()["data"]
    assert (studio["id"], studio["state"], studio["max_context_length"]) == (listed["name"], "loaded", 2048)


def test_the_gateway_lists_an_unloaded_model_as_not_loaded_and_a_model_with_reasoning_as_thinking() -> None:
    more = {"worker": "w", "version": "1", "model": "m", "context_tokens": 2048, "reasoning": True}
    model = GatewayModel("m", unloaded_metrics(**more))
    (studio,) = answers.page_v0([model])["data"]
    assert (studio["state"], studio["max_context_length"]) == ("not-loaded", 2048)
    assert "loaded_context_length" not in studio
    assert answers.running([model]) == {"models": []}
    assert answers.description(model)["capabilities"] == ["completion", "tools", "thinking"]


async def test_unsupported_ollama_endpoints_return_501_and_name_the_alternative(
    http: httpx2.AsyncClient,
) -> None:
    for name, words in [("embeddings", "/api/embed"), ("pull", "turnkeep model")]:
        refused = await http.post(f"/api/{name}", json={"model": "m"})
        assert (refused.status_code, words in refused.json()["error"]) == (501, True)


async def test_an_ollama_stream_has_only_json_lines_even_while_its_request_is_not_yet_in_the_log(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_response, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(answer_response, "_HEARTBEAT_S", 0.1)
    send = Generation.send

    async def slowly(self: Generation) -> None:
        await asyncio.sleep(0.5)
        await send(self)

    monkeypatch.setattr(Generation, "send", slowly)
    body = {"model": "m", "messages": HELLO, "options": {"num_predict": 3}}
    answer = await served.http.post("/api/chat", json=body, headers={"idempotency-key": "slow"})
    assert [one["done"] for one in lines(answer)][-1]
