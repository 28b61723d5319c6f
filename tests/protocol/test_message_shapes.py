"""Messages as OpenAI's clients write them: which forms are accepted, and which are refused."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.images import files_of, image
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
        ("image_url", {"file_id": "i"}),
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


PNG = b"\x89PNG and more"
DIGEST = hashlib.sha256(PNG).hexdigest()
DATA = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    "part",
    [
        image(PNG),
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}},
        {"type": "input_image", "image_url": f"data:image/png;base64,{DATA}"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
    ],
)
def test_an_image_is_named_by_its_digest_however_its_file_was_sent(part: dict[str, Any]) -> None:
    named = {"type": "image", "digest": DIGEST}
    text = {"type": "text", "text": "what is this?"}
    audio = {"type": "input_audio", "input_audio": {}}
    (message,) = append({"role": "user", "content": [text, part, audio]}).messages or ()
    heard = "[audio: this model cannot hear audio]"
    assert message.content == (text, named, {"type": "text", "text": heard})
    assert message.files == {DIGEST: PNG}
    again = build(Append, "b", messages=[message])
    assert json.loads(encode(again))["messages"][0]["content"] == [text, named, audio]
    assert again.messages == append({"role": "user", "content": [text, named, audio]}).messages
    assert files_of(again) == {DIGEST: PNG}


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "image", "data": "no base64!"}, "an image's data must be base64"),
        ({"type": "image", "data": "QUJD"}, "the image is of no known format; send a PNG"),
        ({"type": "image", "digest": "12"}, "must be the SHA-256 of its file, as 64 hex digits"),
        ({"type": "image_url", "image_url": {"url": "http://x/y.png"}}, "images are not fetched; send the"),
        ({"type": "image", "data": "/9j/" * 6_666_667}, "the image has 20000001 bytes; the most are"),
    ],
)
def test_an_image_that_cannot_be_one_is_refused(part: dict[str, Any], why: str) -> None:
    said = refusal({"role": "user", "content": [{"type": "text", "text": ""}, part]})
    assert said.startswith("messages[0] has no valid content[1]: ")
    assert why in said


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
