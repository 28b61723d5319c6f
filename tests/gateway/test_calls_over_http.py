"""Tool calls over HTTP, from a model that has one token with the text of a whole call."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from crafted import TEXT

pytestmark = pytest.mark.serves("calling_model")

#: The ids of the tokens that are a call, half a call, and the end of a turn.
CALL, HALF, END = 259, 260, 2
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
QUESTION = {"role": "user", "content": "Weather in Rome?"}


def options(*tokens: int, **more: Any) -> dict[str, Any]:
    """Return request options that force an answer of these tokens; it can end early only if END is one."""
    bias = {str(token): 100 for token in tokens} | ({} if END in tokens else {str(END): -100})
    return {"model": "m", "tools": TOOLS, "logit_bias": bias, "temperature": 0, "max_tokens": 1, **more}


async def test_a_tool_call_sent_back_with_other_spacing_and_key_order_continues_its_session(
    served: Any,
) -> None:
    create = served.openai.chat.completions.with_raw_response.create
    first = await create(messages=[QUESTION], **options(CALL, parallel_tool_calls=False))
    session, how = first.headers["x-turnkeep-session"].split()
    (choice,) = first.parse().choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Rome", "days": 2}
    # As other clients would send it: other spacing and order, no content, a result in parts, reasoning.
    said = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": "weather", "arguments": '{ "days":2, "city":"Rome" }'},
            }
        ],
    }
    result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    second = await create(messages=[QUESTION, said, result], **options(100))
    assert second.headers["x-turnkeep-session"] == f"{session} continued"
    before = first.parse().usage
    details = second.parse().usage.prompt_tokens_details
    assert details.cached_tokens == before.total_tokens - 1
    other = [{**QUESTION, "content": "Weather?"}, said, result]
    third = await create(messages=other, **options(100))
    assert how == third.headers["x-turnkeep-session"].split()[1] == "begun"
    without = await create(messages=[QUESTION, said, result], **options(100) | {"tools": []})
    assert without.headers["x-turnkeep-session"].split()[1] == "begun", "the tools are part of the prompt"


async def test_a_malformed_tool_call_is_returned_as_text_with_finish_reason_stop(served: Any) -> None:
    create = served.openai.chat.completions.create
    bias = {str(HALF): 50, str(END): 100}
    half = options() | {"max_tokens": 9, "logit_bias": bias, "extra_body": {"min_tokens": 1}}
    answer = await create(messages=[QUESTION], **half)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.tool_calls) == (TEXT[:40], None)
    assert choice.finish_reason == "stop"
    stream = await create(messages=[QUESTION], stream=True, **half)
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(texts) == TEXT[:40]
    none = await create(messages=[QUESTION], **options(CALL, tool_choice="none"))
    assert none.choices[0].message.content == TEXT


async def test_openais_client_gets_structured_output_and_a_required_tool_call(served: Any) -> None:
    """The model is random, so only the grammar can make it answer like this."""
    create = served.openai.chat.completions.create
    schema = {
        "type": "object",
        "properties": {"sky": {"enum": ["blue", "grey"]}},
        "required": ["sky"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "sky", "strict": True, "schema": schema}}
    answer = await create(model="m", messages=[QUESTION], response_format=form, max_tokens=60)
    assert json.loads(answer.choices[0].message.content)["sky"] in ("blue", "grey")
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    answer = await create(
        model="m", messages=[QUESTION], tools=[tool], tool_choice="required", max_tokens=200
    )
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "look"
    assert json.loads(call.function.arguments)["sky"] in ("blue", "grey")


async def test_a_stream_sends_heartbeats_while_a_long_call_is_written(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is told when it is complete: chunks have no text until then, perhaps for minutes."""
    monkeypatch.setattr("gateway.http.answer_response._HEARTBEAT_S", 0.01)
    monkeypatch.setattr("gateway.http.answer_response._PATIENCE_S", 0.0)
    text = {"type": "string", "minLength": 400, "maxLength": 400}
    schema = {"type": "object", "properties": {"text": text}, "required": ["text"]}
    tool = {"type": "function", "function": {"name": "write", "parameters": schema}}
    body = {"messages": [QUESTION], "tools": [tool], "tool_choice": "required", "max_tokens": 1000}
    async with httpx2.AsyncClient(base_url=served.url, timeout=60) as http:
        answer = await http.post("/v1/chat/completions", json={**body, "stream": True})
    assert answer.text.count("\n: waiting\n") >= 3
