"""Tool calls over HTTP, from a model that has one token with the text of a whole call."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.serves("calling_model")

#: The ids of the tokens that are a call, and the end of a turn.
CALL, END = 259, 2
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
