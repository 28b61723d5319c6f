"""Anthropic's own client, unchanged, with a random model, which a grammar forces to call tools."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

import anthropic
import pytest
from anthropic import AsyncAnthropic, beta_async_tool

from tests.parts import TINY_CONTEXT

Start = Any
SKY = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "grey"]}},
    "required": ["sky"],
    "additionalProperties": False,
}
TOOL = {"name": "look", "description": "Look at the sky.", "input_schema": SKY}
LETTERS = {"extra_body": {"logit_bias": {str(token): 100 for token in range(68, 90)}}}
#: The only tool must be called, and its argument is short.
FORCED: Any = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}


@pytest.fixture
async def client(local_worker: Start, door: Start) -> AsyncIterator[AsyncAnthropic]:
    worker = await local_worker()
    started = await door(worker.settings.nats, worker.settings.prefix)
    async with AsyncAnthropic(base_url=started.url, api_key="none", max_retries=0) as client:
        yield client


async def test_anthropics_client_gets_a_tool_call_sends_its_result_and_streams_the_answer(
    client: AsyncAnthropic,
) -> None:
    given: dict[str, Any] = {"model": "m", "max_tokens": 400, "system": "Look first.", "tools": [TOOL]}
    messages: list[Any] = [{"role": "user", "content": "How is the sky?"}]
    only_one: Any = {"type": "any", "disable_parallel_tool_use": True}
    called = await client.messages.create(**given, messages=messages, tool_choice=only_one)
    call = called.content[-1]
    assert (called.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "look")
    assert call.input["sky"] in {"blue", "grey"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is blue."}
    messages += [
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    async with client.messages.stream(**given | {"max_tokens": 8}, messages=messages, **LETTERS) as stream:
        texts = [text async for text in stream.text_stream]
        answer = await stream.get_final_message()
    assert "".join(texts) == answer.content[0].text != ""
    assert answer.usage.cache_read_input_tokens >= called.usage.input_tokens + called.usage.output_tokens - 1


async def test_anthropics_client_assembles_a_streamed_tool_call(client: AsyncAnthropic) -> None:
    async with client.messages.stream(
        model="m",
        max_tokens=400,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "look", "disable_parallel_tool_use": True},
        messages=[{"role": "user", "content": "How is the sky?"}],
    ) as stream:
        kinds = [event.type async for event in stream]
        message = await stream.get_final_message()
    assert "input_json" in kinds
    assert message.content[-1].input["sky"] in {"blue", "grey"}


async def test_anthropics_client_lists_models_counts_tokens_and_understands_errors(
    client: AsyncAnthropic,
) -> None:
    (model,) = [model async for model in client.models.list()]
    assert (model.id, model.type, model.lifecycle) == ("tiny", "model", "active")
    assert (await client.models.retrieve("tiny")).max_input_tokens == TINY_CONTEXT
    counted = await client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "a"}])
    long = {"role": "user", "content": "a" * TINY_CONTEXT}
    assert 0 < counted.input_tokens < TINY_CONTEXT
    with pytest.raises(anthropic.BadRequestError, match=rf"prompt is too long: \d+ tokens > {TINY_CONTEXT}"):
        await client.messages.create(model="m", max_tokens=1, messages=[long])
    assert (await client.models.retrieve("other")).id == "other", "a request may use this name"
    with pytest.raises(anthropic.NotFoundError, match="is not served") as refused:
        await client.get("/v1/nothing", cast_to=object)
    assert refused.value.body["type"] == "error", "in this API's shape"


async def test_anthropics_tool_runner_continues_the_conversation_without_a_thread_kept_here(
    client: AsyncAnthropic,
) -> None:
    """The library sends only new messages of a thread, and all of them once it hears that there is none."""

    @beta_async_tool
    async def look(sky: Literal["blue", "grey"]) -> str:
        """Look at the sky.

        Args:
            sky: which one
        """
        return sky * 3

    runner = client.beta.messages.tool_runner(
        model="m",
        max_tokens=400,
        max_iterations=2,
        tools=[look],
        messages=[{"role": "user", "content": "How is the sky?"}],
        **FORCED,
    )
    first, second = [answer async for answer in runner]
    assert first.stop_reason == "tool_use"
    assert second.usage.cache_read_input_tokens >= first.usage.input_tokens + first.usage.output_tokens - 1


async def test_a_continued_thread_of_anthropics_api_is_not_found_as_the_library_expects(
    client: AsyncAnthropic,
) -> None:
    given: Any = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi."}], **LETTERS}
    begun = await client.beta.messages.with_raw_response.create(**given, thread={"type": "create"})
    answer = await begun.parse()
    assert "x-turnkeep-warnings" not in begun.headers
    assert begun.headers["request-id"] == begun.headers["x-request-id"]
    assert answer.id.endswith(begun.headers["request-id"])
    thread: Any = {"type": "continue", "previous_message_id": answer.id}
    with pytest.raises(anthropic.NotFoundError) as refused:
        await client.beta.messages.create(**given, thread=thread)
    assert refused.value.body["error"]["details"] == {"error_code": "thread_not_found"}
