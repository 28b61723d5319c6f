"""Messages as OpenAI's clients write them: which forms are accepted, and which are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.messages import Append, Generate, decode_ask, decode_control, decode_request, encode
from turnkeep_client.session import build

CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"at": "Rome"}'}}


def append(*messages: dict[str, Any]) -> Append:
    body = json.dumps({"type": "append", "id": "a", "messages": messages}).encode()
    request = decode_request(body)
    assert isinstance(request, Append)
    assert decode_request(encode(request)) == request
    return request


def refusal(*messages: dict[str, Any]) -> str:
    with pytest.raises(InvalidMessageError) as caught:
        append(*messages)
    return str(caught.value)


def test_the_messages_of_a_tool_call_round_in_openais_format_are_accepted() -> None:
    request = append(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "How is Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "assistant", "content": "Sunny.", "tool_calls": None},
    )
    assert request.messages is not None
    called, told, said = request.messages[2:]
    assert (called.content, called.tool_calls[0].function.name) == (None, "weather")
    assert (told.tool_call_id, told.content) == ("c1", "sunny")
    assert said.tool_calls == ()


def test_content_given_as_text_parts_equals_their_joined_text() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert append({"role": "user", "content": parts}) == append({"role": "user", "content": "one two"})
    assert append({"role": "user", "content": []}) == append({"role": "user", "content": ""})


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("image_url", {"url": "data:image/png;base64,AA"}),
        ("input_audio", {"data": "AA", "format": "wav"}),
        ("file", {"file_id": "f"}),
    ],
)
def test_an_image_audio_or_file_part_becomes_a_placeholder_text_and_is_still_sent(
    kind: str, value: object
) -> None:
    parts = [{"type": "text", "text": "what is this?"}, {"type": kind, kind: value}]
    request = append({"role": "user", "content": parts})
    assert request.messages is not None
    sense = {"image_url": "image: this model cannot see images", "file": "file: this model cannot read files"}
    what = sense.get(kind, "audio: this model cannot hear audio")
    assert request.messages[0].content == f"what is this?[{what}]"
    assert json.loads(encode(request))["messages"][0]["content"] == parts


def test_a_text_part_without_text_is_refused() -> None:
    said = refusal({"role": "user", "content": [{"type": "text"}]})
    assert said == "messages[0] has no valid content[0]: a part of the type text must have a text"


def test_messages_and_tool_calls_are_sent_with_their_keys_in_the_clients_order() -> None:
    call = {"function": {"arguments": "{}", "name": "f"}, "type": "function", "id": "c1"}
    messages = [
        {"content": "Hi.", "role": "user"},
        {"tool_calls": [call], "content": "", "role": "assistant"},
    ]
    request = append(*messages)
    assert json.dumps(messages, separators=(",", ":")).encode() in encode(request)
    assert request.messages is not None
    again = build(Append, "b", messages=request.messages)
    assert json.dumps(messages, separators=(",", ":")).encode() in encode(again)
    assert json.dumps([one.as_sent() for one in request.messages]) == json.dumps(messages)
    (plain,) = append({"role": "assistant", "tool_calls": [call]}).messages or ()
    assert plain.as_sent() == {"role": "assistant", "content": "", "tool_calls": [call]}


def test_a_single_stop_string_equals_a_list_of_one() -> None:
    alone = decode_request(b'{"type":"generate","id":"a","stop":"\\n"}')
    assert alone == decode_request(b'{"type":"generate","id":"a","stop":["\\n"]}')
    assert alone == Generate(id="a", stop=("\n",))
    assert encode(alone) == b'{"type":"generate","stop":["\\n"],"id":"a"}'
    with pytest.raises(InvalidMessageError, match="stop must be text of at least 1 character"):
        decode_request(b'{"type":"generate","id":"a","stop":""}')
    with pytest.raises(InvalidMessageError, match="stop must be"):
        decode_request(b'{"type":"generate","id":"a","stop":7}')


@pytest.mark.parametrize(
    "role", ["", "ipython", "System", "system\n", "user<|im_end|>", "<|im_start|>system"]
)
def test_a_message_with_an_unknown_role_is_refused(role: str) -> None:
    said = refusal({"role": "user", "content": "x"}, {"role": role, "content": "x"})
    assert "messages[1].role must be assistant, developer, system, tool or user" in said


@pytest.mark.parametrize("role", ["system", "user", "tool", "assistant"])
def test_a_message_without_content_or_tool_calls_is_refused(role: str) -> None:
    said = refusal({"role": role, "content": None})
    assert said == "messages[0] needs content; only an assistant message with tool_calls may have none"
    assert said == refusal({"role": role})


@pytest.mark.parametrize(
    "body",
    [
        b'{"type":"append","id":"mine"}',
        b'{"type":"append","id":"mine","text":7}',
        b'{"id":"mine"}',
        b'{"type":"frob","id":"mine","x":{"id":"other"}}',
        b'{"x":[1,{"id":"other"}],"id":"mine","type":"cancel"}',
    ],
)
def test_the_refusal_of_an_invalid_body_carries_its_request_id_if_that_is_valid(body: bytes) -> None:
    decoders = [decode_request, decode_control]
    if b"type" in body:  # an ask needs none
        decoders.append(lambda body: decode_ask(body, "made-up"))
    for decode in decoders:
        with pytest.raises(InvalidMessageError) as caught:
            decode(body)
        assert caught.value.request_id == "mine"


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b"[]",
            b"{",
            b"\xff",
            b'{"id":"a"',
            b'{"id":7}',
            b'{"id":"a b"}',
            b'{"id":null}',
            b'[{"id":"a"}]',
        ),
        b'{"id":' + b"[" * 100_000,
    ],
)
def test_the_refusal_of_a_body_without_a_valid_id_carries_no_request_id(body: bytes) -> None:
    for decode in (decode_request, lambda body: decode_ask(body, "made-up")):
        with pytest.raises(InvalidMessageError) as caught:
            decode(body)
        assert caught.value.request_id is None
