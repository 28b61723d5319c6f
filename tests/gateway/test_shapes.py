"""The pure functions that encode answers in OpenAI's formats, with crafted results."""

from __future__ import annotations

import json
from typing import Any

import pytest
from crafted import events, generated

from gateway.anthropic import messages
from gateway.openai import chat, completions
from gateway.responses import answers
from gateway.responses import requests as responses
from gateway.turn import Fault
from turnkeep_client.messages import (
    CallPart,
    Chunk,
    LikelyToken,
    TokenLogprob,
)

TOKEN = TokenLogprob(1, "a", -0.5, top=(LikelyToken(2, "\ufffd", -1.0, bytes=(0xE2, 0x82)),))


def asked(**more: Any) -> Any:
    return chat.read(json.dumps({"messages": [{"role": "user", "content": "a"}], **more}).encode())


def test_a_chat_with_allowed_tools_offers_only_these_and_one_without_any_of_them_is_refused() -> None:
    one, two = [{"type": "function", "function": {"name": name}} for name in ("one", "two")]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [two]}}
    options = asked(tools=[one, two], tool_choice=allowed).options
    assert (options["tools"], options["tool_choice"]) == ([two], "required")
    with pytest.raises(Fault, match="none of the allowed tools"):
        asked(tools=[one], tool_choice=allowed)


def test_a_chat_completion_has_reasoning_tool_calls_and_usage_in_openais_fields() -> None:
    result = generated("tool_calls", ("c1", "weather", '{"city": "Rome"}'), text="", reasoning="Hm.")
    body = chat.whole(asked(model="any"), "x", 5, [result])
    assert (body["id"], body["created"], body["model"]) == ("chatcmpl-x", 5, "any")
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "Hm.",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
            }
        ],
    }
    assert body["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 7},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }


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


def test_chat_stream_events_carry_reasoning_tool_call_parts_and_usage() -> None:
    writer = chat.ChatEvents(asked(stream=True), "x", 5)
    parts = (CallPart(0, "c1", "weather"), CallPart(0, arguments='{"city"'))
    (event,) = events(writer.chunk(1, Chunk(0, (1,), "", reasoning="Hm.", tool_calls=parts)))
    (choice,) = event["choices"]
    assert choice["index"] == 1
    assert choice["delta"] == {
        "reasoning_content": "Hm.",
        "tool_calls": [
            {
                "index": 0,
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": ""},
            },
            {"index": 0, "function": {"arguments": '{"city"'}},
        ],
    }
    assert writer.chunk(0, Chunk(0, (1,), "")) == b""
    assert writer.end([generated()]) == b"data: [DONE]\n\n"
    counted = chat.ChatEvents(asked(stream_options={"include_usage": True}), "x", 5)
    assert events(counted.start(0))[0]["usage"] is None
    (last,) = events(counted.end([generated(), generated()]))
    assert (last["choices"], last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (
        [],
        10,
        10,
    )


def test_log_probabilities_are_written_in_the_shapes_of_chat_and_completions() -> None:
    body = chat.whole(asked(logprobs=True, top_logprobs=1), "x", 5, [generated(logprobs=(TOKEN,))])
    assert body["choices"][0]["logprobs"]["content"] == [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [{"token": "\ufffd", "logprob": -1.0, "bytes": [0xE2, 0x82]}],
        }
    ]
    turn = completions.read(b'{"prompt": ["a"], "logprobs": 1, "n": 2}')
    assert turn.text == "a"
    said = completions.whole(turn, "x", 5, [generated(logprobs=(TOKEN, TOKEN))])["choices"][0]["logprobs"]
    assert said["text_offset"] == [0, 1]
    writer = completions.CompletionEvents(turn, "x", 5)
    offsets = [
        events(writer.chunk(index, Chunk(0, (1,), "a", logprobs=(TOKEN,))))[0]["choices"][0]["logprobs"][
            "text_offset"
        ]
        for index in (0, 0, 1)
    ]
    assert offsets == [[0], [1], [0]]
