"""A gateway with several models, each with a subject prefix and a worker of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.gateway.test_launch import launched

if TYPE_CHECKING:
    from pathlib import Path

    import httpx2


@pytest.fixture
async def served(local_worker: Any, door: Any, tmp_path: Path) -> Any:
    """A gateway with the models `one` and `two`, which have workers, and `gone`, which has none."""
    one = await local_worker()
    prefixes = {"one": one.settings.prefix, "two": f"{one.settings.prefix}-two", "gone": "no-worker-here"}
    await local_worker(prefix=prefixes["two"], data_dir=tmp_path / "two")
    return await door(one.settings.nats, prefixes=prefixes)


async def ask(served: Any, model: str, said: str, **more: Any) -> Any:
    made = served.openai.responses.with_raw_response.create
    return await made(model=model, input=said, max_output_tokens=2, **more)


async def test_a_model_without_a_worker_is_listed_without_context_length_and_refuses_with_503(
    served: Any, http: httpx2.AsyncClient
) -> None:
    listed = (await http.get("/v1/models")).json()["data"]
    contexts = [(one["id"], one.get("context_window")) for one in listed]
    assert contexts == [("one", 2048), ("two", 2048), ("gone", None)]
    refused = await http.post("/v1/responses", json={"model": "gone", "input": "Hello."})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")
    assert (await http.get("/v1/models/two")).json() == listed[1]
    unknown = await http.post("/v1/responses", json={"model": "three", "input": "Hello."})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_models_share_no_sessions_but_a_model_can_continue_another_models_answer_by_id(
    served: Any,
) -> None:
    first = await ask(served, "one", "Hello.")
    answer = first.parse()
    assert answer.model == "one"
    same = await ask(served, "two", "Hello.")
    assert same.headers["x-turnkeep-session"].endswith(" begun")
    more = await ask(served, "two", "More.", previous_response_id=answer.id)
    both = same.parse().usage.input_tokens + answer.usage.output_tokens
    assert more.parse().usage.input_tokens > both, "the conversation goes on with another model"
    assert await served.openai.responses.retrieve(answer.id) == answer
    assert await served.openai.responses.cancel(more.parse().id) == more.parse()


async def test_launch_names_the_model_that_has_no_worker(served: Any, tmp_path: Path) -> None:
    code, said, complained = await launched(tmp_path, "--gateway", served.url, "--of", "gone", "other")
    assert (code, said) == (1, "")
    assert complained == f"turnkeep: no worker of the model gone answers the gateway at {served.url}\n"
