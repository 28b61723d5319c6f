"""Anthropic's API over HTTP: conversations, streams and errors in its format."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from anthropic.types import beta
from crafted import events, user

from gateway.dialects.anthropic import messages

pytestmark = pytest.mark.serves("calling_model")

PATH = "/v1/messages"
#: The ids of the tokens that are a call and the end of a turn.
CALL, END = 259, 2
#: So that answers are text that comes back as it was.
LETTERS = {str(token): 100 for token in range(68, 90)} | {str(END): -100, str(CALL): -100}
MEMORY_COMMANDS = [
    getattr(beta, f"BetaMemoryTool20250818{name}Command")
    for name in ("View", "Create", "StrReplace", "Insert", "Delete", "Rename")
]
TOOL = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
SYSTEM = [{"type": "text", "text": "Answer in rhymes."}]


def body(*said: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 8, "messages": said, "logit_bias": LETTERS, **more}


async def ask(http: httpx2.AsyncClient, *said: dict[str, Any], **more: Any) -> tuple[dict[str, Any], str]:
    """Send a request; return the answer, and how its session was found (`begun`, `continued`, ...)."""
    answer = await http.post(f"{PATH}?beta=true", json=body(*said, **more))
    assert answer.status_code == 200, answer.text
    return answer.json(), answer.headers["x-turnkeep-session"].split()[1]


async def test_count_tokens_equals_the_usage_of_an_answer_and_opens_no_session(
    served: Any, http: httpx2.AsyncClient
) -> None:
    answer, _ = await ask(http, user("Hello."), system=SYSTEM)
    asked = {"model": "m", "messages": [user("Hello.")], "system": SYSTEM}
    counted = await http.post(f"{PATH}/count_tokens", json=asked)
    used = answer["usage"]
    assert counted.json() == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}
    assert (await http.post(PATH, json=asked)).json()["error"]["message"] == "max_tokens: Field required"
    more = await http.post(f"{PATH}/count_tokens", json={**asked, "tools": [TOOL]})
    called, _ = await ask(http, user("Hello."), system=SYSTEM, tools=[TOOL])
    used = called["usage"]
    assert more.json() == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}
    assert len(served.index.sessions) == 2


def test_the_memory_tool_has_the_commands_and_arguments_of_anthropics_library() -> None:
    asked = {
        "messages": [user("a")],
        "max_tokens": 5,
        "tools": [{"type": "memory_20250818", "name": "memory"}],
    }
    (tool,) = messages.read(json.dumps(asked).encode()).options["tools"]
    given = tool["function"]["parameters"]["properties"]
    assert {*given["command"]["enum"]} == {
        one.model_fields["command"].annotation.__args__[0] for one in MEMORY_COMMANDS
    }
    assert given.keys() == {name for one in MEMORY_COMMANDS for name in one.model_fields}


async def test_the_stop_sequence_that_ended_an_answer_is_named(http: httpx2.AsyncClient) -> None:
    drawn = {"max_tokens": 30, "temperature": 0.9, "seed": 5}
    whole, _ = await ask(http, user("Hello."), **drawn)
    said = whole["content"][0]["text"]
    more = {**drawn, "stop_sequences": ["no such", said[3:5]]}
    cut, _ = await ask(http, user("Hello."), **more)
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", said[3:5])
    assert cut["content"][0]["text"] == said.partition(said[3:5])[0]
    streamed = await http.post(PATH, json=body(user("Hello."), stream=True, **more))
    last = next(event for event in events(streamed.text) if event["type"] == "message_delta")
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": said[3:5]}
