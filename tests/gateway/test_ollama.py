"""Ollama's API, and the paths that LM Studio's clients use besides OpenAI's."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx2
import pytest

from gateway.dialects.ollama import answers, requests
from gateway.http import answer_response
from gateway.models import GatewayModel
from gateway.turn import Fault
from turnkeep_client.generation import Generation
from worker.metrics_message import unloaded

HELLO = [{"role": "user", "content": "Hello."}]


def read(**more: Any) -> Any:
    return requests.chat(json.dumps({"model": "m", "messages": HELLO, **more}).encode())


def lines(answer: httpx2.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def test_ollamas_options_are_mapped_to_turnkeeps_options() -> None:
    given = {
        "num_predict": 5,
        "repeat_penalty": 1.5,
        "temperature": 0.5,
        "seed": -1,
        "stop": ["a"],
        "num_ctx": 9,
    }
    turn = read(options=given)
    assert turn.stream, "streams are the default"
    wanted = {"max_tokens": 5, "repetition_penalty": 1.5, "temperature": 0.5, "stop": ["a"]}
    assert {name: turn.options[name] for name in wanted} == wanted
    assert "seed" not in turn.options
    assert [one.where for one in turn.warnings] == ["options.num_ctx"]
    assert read(options={"num_predict": -2}).options["max_tokens"] > 2**30
    for wrong, param in [({"temperature": "hot"}, "options"), ({"top_p": 3}, "options.top_p")]:
        with pytest.raises(Fault) as refused:
            read(options=wrong)
        assert refused.value.param == param


def test_ollamas_format_and_think_fields_set_response_format_and_reasoning_budget() -> None:
    schema = {"type": "object"}
    assert read(format="json").options["response_format"] == {"type": "json_object"}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema, "strict": False}}
    assert read(format=schema).options["response_format"] == wanted
    assert read(think=False).options["reasoning"] == {"budget": 0}
    assert read(think="low").options["reasoning"] == {"budget": 512}
    assert "reasoning" not in read(think=True).options
    assert "response_format" not in read(format="").options
    assert not read(keep_alive="5m").warnings


def test_ollamas_tool_results_are_matched_to_calls_by_tool_name() -> None:
    calls = [{"function": {"name": name, "arguments": {"x": 1}}} for name in ("a", "b")]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in ("b", "a")]
    turn = read(messages=[*HELLO, {"role": "assistant", "tool_calls": calls}, *results])
    asked, *answered = turn.messages[1:]
    ids = {call.function.name: call.id for call in asked.tool_calls}
    assert [one.tool_call_id for one in answered] == [ids["b"], ids["a"]]
    with pytest.raises(Fault, match="role"):
        read(messages=[{"role": "judge", "content": "a"}])


async def test_ollamas_generate_endpoint_answers_a_prompt_whole_and_streamed(
    http: httpx2.AsyncClient,
) -> None:
    body = {"model": "m", "prompt": "Once", "options": {"num_predict": 6, "temperature": 0}}
    whole = (await http.post("/api/generate", json={**body, "stream": False})).json()
    streamed = lines(await http.post("/api/generate", json=body))
    assert "".join(one["response"] for one in streamed) == whole["response"]
    system = (await http.post("/api/generate", json={**body, "system": "Hm.", "stream": False})).json()
    raw = (await http.post("/api/generate", json={**body, "raw": True, "stream": False})).json()
    assert raw["prompt_eval_count"] < whole["prompt_eval_count"] < system["prompt_eval_count"]


async def test_an_ollama_request_without_a_prompt_loads_or_unloads(http: httpx2.AsyncClient) -> None:
    for path, more in (("generate", {}), ("chat", {"messages": []})):
        loaded = (await http.post(f"/api/{path}", json={"model": "m", **more})).json()
        assert (loaded["done"], loaded["done_reason"]) == (True, "load")
        refused = await http.post(f"/api/{path}", json={"model": "m", "keep_alive": 0, **more})
        assert refused.status_code == 503, "this worker has no supervisor"


async def test_models_are_listed_in_the_shapes_of_ollama_and_lm_studio(http: httpx2.AsyncClient) -> None:
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


def test_an_unloaded_model_is_listed_as_such_and_a_reasoning_model_as_a_thinking_one() -> None:
    more = {"worker": "w", "version": "1", "model": "m", "context_tokens": 2048, "reasoning": True}
    model = GatewayModel("m", unloaded(**more))
    (studio,) = answers.page_v0([model])["data"]
    assert (studio["state"], studio["max_context_length"]) == ("not-loaded", 2048)
    assert "loaded_context_length" not in studio
    assert answers.running([model]) == {"models": []}
    assert answers.shown(model)["capabilities"] == ["completion", "tools", "thinking"]


async def test_ollama_requests_that_cannot_be_served_are_refused_with_the_reason(
    http: httpx2.AsyncClient,
) -> None:
    for name, words in [("embeddings", "/api/embed"), ("pull", "turnkeep model")]:
        refused = await http.post(f"/api/{name}", json={"model": "m"})
        assert (refused.status_code, words in refused.json()["error"]) == (501, True)


async def test_a_stream_has_only_lines_of_json_also_while_the_log_does_not_have_its_request_yet(
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
    async with httpx2.AsyncClient(base_url=served.url, timeout=60) as http:
        answer = await http.post("/api/chat", json=body, headers={"idempotency-key": "slow"})
    assert [one["done"] for one in lines(answer)][-1]


def test_options_beside_the_field_options_count_too_as_vercels_provider_sends_them() -> None:
    options = read(max_output_tokens=3, temperature=0, top_p=0.5, options={"temperature": 1}).options
    assert (options["max_tokens"], options["temperature"], options["top_p"]) == (3, 1, 0.5)
    assert read(max_tokens=4, seed=5).options["seed"] == 5
    assert not read(max_output_tokens=3).warnings
