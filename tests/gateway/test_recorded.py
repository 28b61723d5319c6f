"""Answers as each API writes them are those of `answers.txt`, to the byte; how the Responses API is read.

`TURNKEEP_TEST_RECORD=1 pytest tests/gateway/test_recorded.py` writes the file anew: read what has changed.
"""

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
#: How each API reads requests, writes whole answers and, unless None, streams, and the fields of a request.
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
    "response with options": (
        responses.read,
        answers.whole,
        None,
        {
            "input": "a",
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "name": "weather"},
            "text": {"format": {"type": "json_schema", "name": "City", "schema": PARAMETERS}},
            "reasoning": {"effort": "low", "summary": "auto"},
            "max_output_tokens": 9,
            "top_logprobs": 3,
            "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
            "metadata": {"a": "b"},
        },
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
    "text before a stop sequence": (generated(stop="END"), [Chunk(0, (1,), "Yes.")]),
}


def written(api: str, name: str) -> str:
    """Write an answer whole, and as the stream of its chunks, with a sign of life and an error after it."""
    read, whole, writer, asked = APIS[api]
    turn = read(json.dumps({"model": "m", **asked}).encode())
    done, chunks = ANSWERS[name]
    body = json.dumps(whole(turn, "x", 5, [done]))
    if writer is None:
        return body
    stream = writer(turn, "x", 5)
    parts = [stream.start(0), *(stream.chunk(0, chunk) for chunk in chunks)]
    parts += [stream.finish(0, done), stream.end([done]), stream.heartbeat]
    parts += [writer(turn, "y", 5).error(Fault(500, "broken", kind="server_error"))]
    return f"{body}\n\n{b''.join(parts).decode()}"


def recorded() -> dict[str, str]:
    """Return the parts of the file by their headings."""
    found = re.split(r"^### (.*)\n", FILE.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("api", APIS)
def test_the_gateway_writes_each_example_answer_and_its_stream_as_recorded_for_each_api(
    api: str, name: str
) -> None:
    if "TURNKEEP_TEST_RECORD" in os.environ:
        parts = [f"### {one}: {name_}\n{written(one, name_)}\n" for one in APIS for name_ in ANSWERS]
        FILE.write_text("".join(parts))
    assert f"{written(api, name)}\n" == recorded()[f"{api}: {name}"]


@pytest.mark.parametrize("name", ANSWERS)
def test_a_replayed_stream_of_the_responses_api_has_the_same_events_as_the_live_stream(name: str) -> None:
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


#: An emoji of two tokens behind a letter, and a token without text.
EMOJI = (
    TokenLogprob(1, "a", -0.5),
    TokenLogprob(2, "\ufffd", -0.25, bytes=(0xF0, 0x9F)),
    TokenLogprob(3, "\ufffd", -0.75, bytes=(0x98, 0x80)),
    TokenLogprob(4, "", -1.0),
)


@pytest.mark.parametrize("text", ["a\N{GRINNING FACE}", ""])
def test_the_deltas_of_a_responses_api_stream_have_the_log_probabilities_of_all_tokens(text: str) -> None:
    read, whole, writer, asked = APIS["response"]
    turn, done = read(json.dumps(asked).encode()), generated(text=text, logprobs=EMOJI)
    stream = writer(turn, "x", 5)
    parts = [
        stream.start(0),
        *(stream.chunk(0, Chunk(at, (1,), "", logprobs=(one,))) for at, one in enumerate(EMOJI)),
    ]
    found = events(b"".join([*parts, stream.chunk(0, Chunk(4, (), text)), stream.finish(0, done)]))
    (part,) = whole(turn, "x", 5, [done])["output"][0]["content"]
    deltas = [one for one in found if one["type"] == "response.output_text.delta"]
    assert [token for one in deltas for token in one["logprobs"]] == part["logprobs"] != []
    assert "".join(one["delta"] for one in deltas) == text
    assert [one["part"] for one in found if one["type"] == "response.content_part.done"] == [part]


def asked(**more: Any) -> Any:
    return chat.read(json.dumps({"messages": [{"role": "user", "content": "a"}], **more}).encode())


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
def test_each_finish_reason_maps_to_the_finish_reason_or_status_of_each_api(
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


USER = {"role": "user", "content": "Weather?"}


def read(*items: Any, **more: Any) -> Any:
    return responses.read(json.dumps({"input": items or "a", "model": "m", **more}).encode())


def test_responses_api_output_items_sent_back_in_any_order_match_the_known_conversation() -> None:
    """Also if a client changes the order of the items, or strips the white space around the text."""
    tools, (done, _) = [WEATHER, PATCH, CLOSE], ANSWERS["reasoning, text and calls"]
    turn = read(USER, tools=tools)
    prompt = boundaries.chain(turn.messages, turn.options)[-1]
    items = answers.whole(turn, "x", 5, [done])["output"]
    bare = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]}
    stripped = [items[0], bare, *items[2:]]
    swapped = [items[0], items[2], items[1], *items[3:]]
    for sent in (items, stripped, swapped):
        again = read(USER, *sent, tools=tools)
        assert boundaries.chain(again.messages, again.options)[-1] in boundaries.after_answer(prompt, done)


def test_a_responses_api_stream_ends_with_an_error_event_if_no_worker_can_be_reached() -> None:
    """The log may have the request; then a worker answers it later."""
    writer = answers.ResponseEvents(read(), "x", 5)
    writer.start(0)
    (error,) = events(writer.error(fault_of(NoServerError("the connection is lost"))))
    assert (error["type"], error["error"]["code"]) == ("error", "no_worker")
