"""Real clients send a picture as the result of a tool, and a model that was taught digits names it."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic

from tests import taught

Start = Any
LOOK: dict[str, Any] = {"type": "object", "properties": {}}


def url(picture: taught.Picture) -> str:
    return f"data:image/png;base64,{b64encode(picture.file).decode()}"


async def of_messages(door: Any, picture: taught.Picture) -> str:
    """Ask as Claude Code does after its tool `Read` has read a picture."""
    data = {"type": "base64", "media_type": "image/png", "data": b64encode(picture.file).decode()}
    told: Any = [
        {"role": "user", "content": "What is this?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "Read", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": data}]}]},
    ]  # fmt: skip
    tools: Any = [{"name": "Read", "description": "Reads a file.", "input_schema": LOOK}]
    async with AsyncAnthropic(base_url=door.url, api_key="none", max_retries=0) as client:
        answer = await client.messages.create(
            model="m", messages=told, tools=tools, max_tokens=12, extra_body={"temperature": 0}
        )
    return "".join(block.text for block in answer.content if block.type == "text")


async def of_responses(door: Any, picture: taught.Picture) -> str:
    items: Any = [
        {"role": "user", "content": "What is this?"},
        {"type": "function_call", "call_id": "a", "name": "view_image", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [
            {"type": "input_image", "image_url": url(picture), "detail": "auto"}]},
    ]  # fmt: skip
    tools: Any = [{"type": "function", "name": "view_image", "parameters": LOOK, "strict": False}]
    answer = await door.openai.responses.create(
        model="m", input=items, tools=tools, max_output_tokens=16, temperature=0
    )
    return str(answer.output_text)


async def of_chat(door: Any, picture: taught.Picture) -> str:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    told: Any = [
        {"role": "user", "content": "What is this?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [
            {"type": "image_url", "image_url": {"url": url(picture)}}]},
    ]  # fmt: skip
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": LOOK}}]
    answer = await door.openai.chat.completions.create(
        model="m", messages=told, tools=tools, max_tokens=12, temperature=0
    )
    return str(answer.choices[0].message.content)


@pytest.mark.parametrize("ask", [of_messages, of_responses, of_chat])
async def test_a_picture_in_the_result_of_a_tool_is_named(
    ask: Any, local_worker: Start, door: Start, taught_model: Path
) -> None:
    worker = await local_worker(model=str(taught_model))
    started = await door(worker.settings.nats, worker.settings.prefix)
    for seed in range(0, 60, 10):
        picture = taught.picture(seed + seed // 10)
        assert await ask(started, picture) == picture.answer
