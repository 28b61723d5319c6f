"""Anthropic's API over HTTP: conversations, streams and errors in its format."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from anthropic.types import beta
from crafted import assistant, events, user

from gateway import boundaries
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
BILLING = "x-anthropic-billing-header: cc_version=2.1.{}; cc_entrypoint=cli;"
SYSTEM = [{"type": "text", "text": "Answer in rhymes."}]


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c1", "content": content, **more}


def read(*said: dict[str, Any], **more: Any) -> Any:
    return messages.read(json.dumps({"messages": said or [user("a")], "max_tokens": 5, **more}).encode())


def end_of(*said: dict[str, Any], **more: Any) -> bytes:
    turn = read(*said, **more)
    return boundaries.chain(turn.messages, turn.options)[-1]


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


def test_anthropic_messages_are_read_into_system_user_assistant_and_tool_messages() -> None:
    turn = read(
        user("Weather?"),
        assistant(
            [text("One"), text(" moment."), {"type": "tool_use", "id": "c1", "name": "f", "input": {}}]
        ),
        user([result("sunny"), result([text("no"), text("pe")], is_error=True), text("Well?")]),
        {"role": "system", "content": [text("Be short.")]},
        user("Go on."),
        system=[text(BILLING.format(1)), text("A"), text("B")],
    )
    found = [(one.role, one.content, one.tool_call_id) for one in turn.messages]
    assert found == [
        ("system", "AB", None),
        ("user", "Weather?", None),
        ("assistant", "One moment.", None),
        ("tool", "sunny", "c1"),
        ("tool", "Error: nope", "c1"),
        ("user", "Well?", None),
        ("system", "Be short.", None),
        ("user", "Go on.", None),
    ]
    assert turn.messages[2].tool_calls[0].function.arguments == "{}"
    assert read(system=BILLING.format(1) + "\n\nA").messages[0].content == "A"
    assert [one.role for one in read(system=[text(BILLING.format(1))]).messages] == ["user"]


def test_anthropic_options_are_mapped_to_turnkeeps_options() -> None:
    turn = read(
        max_tokens=2**40,
        stop_sequences=["a"],
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 99},
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        metadata={"user_id": "u"},
        service_tier="auto",
        context_management={"edits": []},
        betas=["x"],
    )
    expected = {
        "max_tokens": 2**31 - 1,
        "stop": ["a"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "reasoning": {"budget": 99},
        "own_sampling": True,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {"type": "object"}, "strict": False},
        },
    }
    (tool,) = turn.options["tools"]
    assert tool["function"]["parameters"] == TOOL["input_schema"]
    assert {name: value for name, value in turn.options.items() if name != "tools"} == expected
    assert read(thinking={"type": "disabled"}).options["reasoning"] == {"budget": 0}
    assert "reasoning" not in read(thinking={"type": "adaptive"}).options
    named = read(tools=[TOOL], tool_choice={"type": "tool", "name": "weather"})
    assert named.options["tool_choice"] == {"type": "function", "function": {"name": "weather"}}


def test_tools_of_anthropics_servers_are_left_out_with_a_warning_and_those_that_clients_run_are_kept() -> (
    None
):
    turn = read(
        tools=[
            {"type": "web_search_20250305", "name": "web_search"},
            {"type": "memory_20250818", "name": "memory"},
            {"type": "bash_20250124", "name": "bash"},
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
            {"type": "bash_code_execution_20250825", "name": "run"},
        ],
        tool_choice={"type": "tool", "name": "bash"},
    )
    functions = {one["function"]["name"]: one["function"] for one in turn.options["tools"]}
    assert [*functions] == ["memory", "bash", "str_replace_based_edit_tool"]
    assert functions["bash"]["parameters"]["properties"].keys() == {"command", "restart"}
    commands = functions["memory"]["parameters"]["properties"]["command"]["enum"]
    assert {*commands} == {one.model_fields["command"].annotation.__args__[0] for one in MEMORY_COMMANDS}
    given = functions["memory"]["parameters"]["properties"].keys()
    assert given == {name for one in MEMORY_COMMANDS for name in one.model_fields}
    assert [str(one.where) for one in turn.warnings] == ["tools[0]", "tools[4]"]
    assert "tools" not in read(tools=[{"type": "web_search_20250305", "name": "web_search"}]).options


def test_cache_markers_billing_lines_and_thinking_do_not_change_a_conversations_digest() -> None:
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    plain = end_of(user("Hello."), assistant("Yes."), user("Well?"), system="A")
    marked = text("Hello.", cache_control={"type": "ephemeral"})
    system = [text(BILLING.format(7)), text("A", cache_control={"type": "ephemeral"})]
    same = end_of(user([marked]), assistant([thinking, text("Yes.")]), user("Well?"), system=system)
    assert plain == same
    assert plain != end_of(user("Hello."), assistant("Yes."), user("Well!"), system="A")


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
