"""Answers as each API writes them are those of `answers.txt`, to the byte; how the Responses API is read.

`TURNKEEP_TEST_RECORD=1 pytest tests/gateway/test_recorded.py` writes the file anew: read what has changed.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from crafted import events, generated

from gateway import boundaries
from gateway.dialects.anthropic import messages
from gateway.dialects.ollama import answers as ollama
from gateway.dialects.ollama import requests as ollama_requests
from gateway.dialects.openai import chat, completions
from gateway.dialects.responses import answers
from gateway.dialects.responses import requests as responses
from gateway.turn import Fault, fault_of
from turnkeep_client.chunks import Assembly
from turnkeep_client.errors import NoServerError
from turnkeep_client.messages import CallPart, Chunk, Generated, LikelyToken, TokenLogprob

FILE = Path(__file__).with_name("answers.txt")
SAID = [{"role": "user", "content": "a"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "parameters": PARAMETERS}
PATCH = {"type": "custom", "name": "patch", "description": "Change files."}
CLOSE = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "close"}]}
#: How each API reads requests, writes whole answers and streams, and the fields of a request.
APIS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "chat": (
        chat.read,
        chat.whole,
        chat.ChatEvents,
        {"messages": SAID, "logprobs": True, "top_logprobs": 1, "stream_options": {"include_usage": True}},
    ),
    "completion": (
        completions.read,
        completions.whole,
        completions.CompletionEvents,
        {"prompt": "a", "logprobs": 1},
    ),
    "message": (messages.read, messages.whole, messages.MessageEvents, {"messages": SAID, "max_tokens": 5}),
    "response": (
        responses.read,
        answers.whole,
        answers.ResponseEvents,
        {"input": "a", "tools": [WEATHER, PATCH, CLOSE], "include": ["message.output_text.logprobs"]},
    ),
    "ollama chat": (
        ollama_requests.chat,
        ollama.CHAT.whole,
        ollama.CHAT.events,
        {"messages": SAID},
    ),
    "ollama generate": (
        ollama_requests.generate,
        ollama.GENERATE.whole,
        ollama.GENERATE.events,
        {"prompt": "a"},
    ),
}
CALLED = generated(
    "tool_calls",
    ("c1", "weather", '{"city": "Rome"}'),
    ("c2", "patch", '{"input": "*** a"}'),
    ("c3", "agents__close", "{}"),
    text="\n\nSo.\n",
    reasoning="Hm.",
)
TOKENS = (
    TokenLogprob(1, "a", -0.5, top=(LikelyToken(2, "\ufffd", -1.0, bytes=(0xE2, 0x82)),)),
    TokenLogprob(2, "b", -0.25),
)
#: Answers, and the chunks in which they come.
ANSWERS: dict[str, tuple[Generated, list[Chunk]]] = {
    "reasoning, text and calls": (
        CALLED,
        [
            Chunk(0, (1,), "", reasoning="H"),
            Chunk(1, (1,), "\n\n", reasoning="m."),
            Chunk(2, (1,), "So."),
            Chunk(3, (1,), "", tool_calls=(CallPart(0, "c1", "weather"), CallPart(0, arguments='{"city": '))),
            Chunk(4, (1,), "\n", tool_calls=(CallPart(0, arguments='"Rome"}'), CallPart(1, "c2", "patch"))),
            Chunk(5, (1,), "", tool_calls=(CallPart(1, arguments='{"input": "*** a"}'),)),
            Chunk(6, (1,), "", tool_calls=(CallPart(2, "c3", "agents__close", "{}"),)),
        ],
    ),
    "text with log probabilities": (
        generated(text="ab", logprobs=TOKENS),
        [Chunk(number, (1,), one.token, logprobs=(one,)) for number, one in enumerate(TOKENS)],
    ),
    "no text": (generated("length", text=""), [Chunk(0, (1,), "")]),
}


def written(api: str, name: str) -> str:
    """Write an answer whole, and as the stream of its chunks, with a sign of life and an error after it."""
    read, whole, writer, asked = APIS[api]
    turn = read(json.dumps({"model": "m", **asked}).encode())
    done, chunks = ANSWERS[name]
    stream = writer(turn, "x", 5)
    parts = [stream.start(0), *(stream.chunk(0, chunk) for chunk in chunks)]
    parts += [stream.finish(0, done), stream.end([done]), stream.heartbeat]
    parts += [writer(turn, "y", 5).error(Fault(500, "broken", kind="server_error"))]
    body = json.dumps(whole(turn, "x", 5, [done]))
    return f"{body}\n\n{b''.join(parts).decode()}"


def recorded() -> dict[str, str]:
    """Return the parts of the file by their headings."""
    found = re.split(r"^### (.*)\n", FILE.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("api", APIS)
def test_an_answer_and_its_stream_are_written_as_recorded(api: str, name: str) -> None:
    if "TURNKEEP_TEST_RECORD" in os.environ:
        parts = [f"### {one}: {name_}\n{written(one, name_)}\n" for one in APIS for name_ in ANSWERS]
        FILE.write_text("".join(parts))
    assert f"{written(api, name)}\n" == recorded()[f"{api}: {name}"]


@pytest.mark.parametrize("name", ANSWERS)
def test_a_replayed_stream_of_the_responses_api_has_the_events_of_the_first_one(name: str) -> None:
    """They follow from the answer alone, however its chunks were cut. The last one has the whole response."""
    read, whole, writer, asked = APIS["response"]
    turn, (done, chunks) = read(json.dumps(asked).encode()), ANSWERS[name]
    first, again = writer(turn, "x", 5), writer(turn, "x", 5)
    written = first.start(0) + b"".join(first.chunk(0, chunk) for chunk in chunks) + first.finish(0, done)
    at_once = Assembly().finish(done)
    replay = again.start(0) + (again.chunk(0, at_once) if at_once else b"") + again.finish(0, done)
    found = events(written)
    assert events(replay) == found
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    assert found[-1]["response"] == whole(turn, "x", 5, [done])


def asked(**more: Any) -> Any:
    return chat.read(json.dumps({"messages": [{"role": "user", "content": "a"}], **more}).encode())


def test_a_chat_with_allowed_tools_offers_only_these_and_one_without_any_of_them_is_refused() -> None:
    one, two = [{"type": "function", "function": {"name": name}} for name in ("one", "two")]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [two]}}
    options = asked(tools=[one, two], tool_choice=allowed).options
    assert (options["tools"], options["tool_choice"]) == ([two], "required")
    with pytest.raises(Fault, match="none of the allowed tools"):
        asked(tools=[one], tool_choice=allowed)


CUT = ("incomplete", {"reason": "max_output_tokens"})


@pytest.mark.parametrize(
    ("reason", "in_chat", "in_messages", "in_responses"),
    [
        ("stop", "stop", "end_turn", ("completed", None)),
        ("length", "length", "max_tokens", CUT),
        ("tool_calls_malformed", "stop", "end_turn", ("completed", None)),
        ("cancelled", "stop", "end_turn", ("cancelled", None)),
        ("expired", "length", "max_tokens", CUT),
        ("model_changed", "length", "max_tokens", CUT),
        ("given_up", "length", "max_tokens", CUT),
    ],
)
def test_each_finish_reason_maps_to_one_of_each_api(
    reason: str, in_chat: str, in_messages: str, in_responses: tuple[str, Any]
) -> None:
    (choice,) = chat.whole(asked(), "x", 5, [generated(reason)])["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == (in_chat, "Yes.")
    (last,) = events(chat.ChatEvents(asked(), "x", 5).finish(0, generated(reason)))
    assert last["choices"][0]["finish_reason"] == in_chat
    turn = messages.read(b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}')
    assert messages.whole(turn, "x", 5, [generated(reason)])["stop_reason"] == in_messages
    body = answers.whole(responses.read(b'{"input": "a"}'), "x", 5, [generated(reason)])
    assert (body["status"], body["incomplete_details"]) == in_responses
    assert body["output"][0]["status"] == ("completed" if body["status"] == "completed" else "incomplete")


FUNCTION = {"type": "function", "name": "weather", "parameters": PARAMETERS}
CUSTOM = {
    "type": "custom",
    "name": "patch",
    "description": "Change files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
NAMESPACE = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "close"}]}
HOSTED = [{"type": "web_search"}, {"type": "mcp", "server_label": "a"}, {"type": "code_interpreter"}]
USER = {"role": "user", "content": "Weather?"}


def read(*items: Any, **more: Any) -> Any:
    return responses.read(json.dumps({"input": items or "a", "model": "m", **more}).encode())


def call(name: str, arguments: str = "{}", call_id: str = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": arguments, "call_id": call_id, **more}


def output(text: Any, call_id: str = "c1", kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": call_id, "output": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part], **more}


def test_text_and_tool_calls_of_one_turn_are_read_as_one_assistant_message() -> None:
    thought = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x", "content": None}
    turn = read(
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be short."}]},
        USER,
        thought,
        said("One"),
        call("weather", '{"city": "Rome"}'),
        thought,
        call("close", call_id="c2", namespace="agents"),
        output("sunny"),
        output([{"type": "input_text", "text": "clo"}, {"type": "input_text", "text": "sed"}], "c2"),
        {"type": "custom_tool_call", "name": "patch", "input": "*** a", "call_id": "c3"},
        output("done", "c3", "custom_tool_call_output"),
        {"type": "local_shell_call", "call_id": "c4", "action": {"type": "exec", "command": ["ls"]}},
        output("a.txt", "c4", "local_shell_call_output"),
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": "Yes."},
        instructions="A",
    )
    found = [(one.role, one.content, one.tool_call_id) for one in turn.messages]
    assert found == [
        ("system", "A", None),
        ("developer", "Be short.", None),
        ("user", "Weather?", None),
        ("assistant", "One", None),
        ("tool", "sunny", "c1"),
        ("tool", "closed", "c2"),
        ("assistant", None, None),
        ("tool", "done", "c3"),
        ("assistant", None, None),
        ("tool", "a.txt", "c4"),
        ("assistant", "No.", None),
        ("assistant", "Yes.", None),
    ]
    functions = [one.function for message in turn.messages for one in message.tool_calls]
    assert [(one.name, json.loads(one.arguments)) for one in functions] == [
        ("weather", {"city": "Rome"}),
        ("agents__close", {}),
        ("patch", {"input": "*** a"}),
        ("local_shell", {"type": "exec", "command": ["ls"]}),
    ]


def test_an_answer_sent_back_as_items_matches_the_conversation_of_its_session() -> None:
    """Also if a client changes the order of the items, or strips the white space around the text."""
    tools = [FUNCTION, CUSTOM, NAMESPACE]
    done = generated(
        "tool_calls",
        ("c1", "weather", '{"a": 1, "b": 2}'),
        ("c2", "agents__close", "{}"),
        ("c3", "patch", '{"input": "*** a"}'),
        text="\nSo.\n",
        reasoning="Hm.",
    )
    turn = read(USER, tools=tools)
    prompt = boundaries.chain(turn.messages, turn.options)[-1]
    items = answers.whole(turn, "x", 5, [done])["output"]
    assert [item["type"] for item in items] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "custom_tool_call",
    ]
    assert (items[3]["name"], items[3]["namespace"]) == ("close", "agents")
    assert (items[4]["name"], items[4]["input"]) == ("patch", "*** a")
    stripped = [*items[:1], said("So."), *items[2:]]
    swapped = [items[0], items[2], items[1], *items[3:]]
    for sent in (items, stripped, swapped):
        again = read(USER, *sent, tools=tools)
        assert boundaries.chain(again.messages, again.options)[-1] in boundaries.answered(prompt, done)


def test_tools_are_mapped_to_functions_and_tools_hosted_by_openai_are_left_out() -> None:
    turn = read(tools=[FUNCTION, CUSTOM, NAMESPACE, *HOSTED])
    functions = [tool["function"] for tool in turn.options["tools"]]
    assert [one["name"] for one in functions] == ["weather", "patch", "agents__close"]
    assert functions[1]["description"] == "Change files.\n\nstart: /.+/"
    assert functions[1]["parameters"]["required"] == ["input"]
    assert not read(tools=HOSTED, tool_choice="auto").options.keys() & {"tools", "tool_choice"}
    assert [one.what.split()[0] for one in turn.warnings] == [one["type"] for one in HOSTED]
    for choice, expected in [
        ("required", "required"),
        ({"type": "function", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
        ({"type": "custom", "name": "patch"}, {"type": "function", "function": {"name": "patch"}}),
    ]:
        asked = read(tools=[FUNCTION, CUSTOM], tool_choice=choice, parallel_tool_calls=False).options
        assert (asked["tool_choice"], asked["parallel_tool_calls"]) == (expected, False)
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "weather"}],
    }
    asked = read(tools=[FUNCTION, CUSTOM], tool_choice=allowed).options
    assert ([tool["function"]["name"] for tool in asked["tools"]], asked["tool_choice"]) == (
        ["weather"],
        "required",
    )


def test_options_of_the_responses_api_are_mapped_and_repeated_in_the_response() -> None:
    form = {"type": "json_schema", "name": "City", "schema": PARAMETERS}
    turn = read(
        tools=[FUNCTION],
        tool_choice={"type": "function", "name": "weather"},
        text={"format": form, "verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"},
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_logprobs=3,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        truncation="auto",
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        stream_options={"include_obfuscation": False},
        background=False,
        metadata={"a": "b"},
    )
    assert turn.is_kept
    assert {name: value for name, value in turn.options.items() if name != "tools"} == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "logprobs": True,
        "top_logprobs": 3,
        "own_sampling": True,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "reasoning": {"budget": 512},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": PARAMETERS, "strict": False, "name": "City"},
        },
    }
    body = answers.whole(turn, "x", 5, [generated(reasoning="Hm.")])
    told = {
        name: body[name] for name in ("id", "created_at", "metadata", "top_logprobs", "max_output_tokens")
    }
    assert told == {
        "id": "resp_x",
        "created_at": 5,
        "metadata": {"a": "b"},
        "top_logprobs": 3,
        "max_output_tokens": 9,
    }
    assert body["tools"] == [{**FUNCTION, "strict": False}]
    assert body["tool_choice"] == {"type": "function", "name": "weather"}
    assert body["text"]["format"] == {**form, "strict": False}
    assert body["reasoning"]["effort"] == "low"
    thought = body["output"][0]
    assert (thought["content"], len(thought["encrypted_content"])) == (
        [{"type": "reasoning_text", "text": "Hm."}],
        64,
    )
    assert body["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 7, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 15,
    }
    assert not read(store=False).is_kept
    assert "encrypted_content" not in answers.whole(read(), "x", 5, [generated(reasoning="Hm.")])["output"][0]


def test_a_stream_of_the_responses_api_does_not_say_failed_if_no_worker_can_be_reached() -> None:
    """The log may have the request; then a worker answers it later."""
    writer = answers.ResponseEvents(read(), "x", 5)
    writer.start(0)
    (error,) = events(writer.error(fault_of(NoServerError("the connection is lost"))))
    assert (error["type"], error["error"]["code"]) == ("error", "no_worker")
