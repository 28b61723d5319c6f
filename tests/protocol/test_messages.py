"""Messages survive encoding, and invalid ones are refused with a sentence that helps."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_worker import generated, metrics, session_info

from turnkeep_client.errors import ERROR_CODES, InvalidMessageError
from turnkeep_client.messages import (
    Append,
    Appended,
    CachePolicy,
    Cancelled,
    CancelRequest,
    Chunk,
    Close,
    Closed,
    Failed,
    Function,
    Generate,
    InfoRequest,
    Message,
    MetricsRequest,
    Open,
    Opened,
    Rewind,
    Rewound,
    ToolCall,
    decode_ask,
    decode_chunk,
    decode_control,
    decode_control_reply,
    decode_metrics,
    decode_request,
    decode_result,
    encode,
)

UNTIMED = settings(deadline=None)

DECODERS = (
    decode_request,
    decode_result,
    decode_chunk,
    decode_control,
    decode_control_reply,
    decode_metrics,
    lambda body: decode_ask(body, "a1"),
)

ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", fullmatch=True)
positions = st.integers(0, 2**53)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple)
seconds = st.floats(0, 1e6)
counts = st.integers(0, 2**53)
tool_calls = st.builds(ToolCall, id=texts, function=st.builds(Function, name=texts, arguments=texts))
said = st.builds(
    Message,
    role=st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
    content=texts,
    name=st.none() | texts,
    tool_calls=st.lists(tool_calls, max_size=2).map(tuple),
    tool_call_id=st.none() | texts,
)
called = st.builds(
    Message,
    role=st.just("assistant"),
    content=st.none(),
    tool_calls=st.lists(tool_calls, min_size=1, max_size=2).map(tuple),
)
chat = st.lists(said | called, max_size=3).map(tuple)
inputs = st.one_of(
    st.fixed_dictionaries({"messages": chat}),
    st.fixed_dictionaries({"text": texts}),
    st.fixed_dictionaries({"tokens": token_ids}),
)
base = {"id": ids, "expect_position": st.none() | positions}
sampling = {
    "max_tokens": st.integers(1, 2**31 - 1),
    "temperature": st.floats(0, 100),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(0, 2**31 - 1),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0, 100, exclude_min=True),
    "seed": st.none() | st.integers(0, 2**63 - 1),
    "stop": st.lists(texts.filter(bool), max_size=3).map(tuple),
    "raw": st.booleans(),
}
requests = st.one_of(
    st.builds(Open, cache=st.just(CachePolicy()), **base),
    st.builds(lambda given, **fields: Append(**given, **fields), inputs, **base),
    st.builds(lambda given, **fields: Generate(**given, **fields), inputs | st.just({}), **base, **sampling),
    st.builds(Rewind, position=positions, **base),
    st.builds(Close, **base),
)
done = {"id": ids, "seq": counts, "position": positions, "repeat_of": st.none() | counts}
results = st.one_of(
    st.builds(Opened, **done),
    st.builds(Rewound, **done),
    st.builds(Closed, **done),
    st.builds(
        Appended,
        tokens=counts,
        cached_tokens=counts,
        prefilled_tokens=counts,
        kv_live_bytes=counts,
        seconds=seconds,
        rewritten_from=st.none() | counts,
        **done,
    ),
    st.builds(
        lambda text, tokens, reason: generated(
            1, Generate(id="g1"), text=text, tokens=tokens, finish_reason=reason
        ),
        texts,
        token_ids,
        st.sampled_from(["stop", "length", "cancelled", "tool_calls"]),
    ),
    st.builds(
        Failed,
        id=st.none() | ids,
        code=st.sampled_from(ERROR_CODES),
        message=texts,
        retryable=st.booleans(),
        seq=st.none() | counts,
        position=st.none() | positions,
    ),
)


@UNTIMED
@given(requests)
def test_any_request_survives_encoding_and_decoding(request) -> None:
    assert decode_request(encode(request)) == request


@UNTIMED
@given(results)
def test_any_result_survives_encoding_and_decoding(result) -> None:
    assert decode_result(encode(result)) == result


@UNTIMED
@given(st.builds(Chunk, i=counts, tokens=token_ids, text=texts))
def test_any_chunk_survives_encoding_and_decoding(chunk) -> None:
    assert decode_chunk(encode(chunk)) == chunk


def test_control_messages_and_metrics_survive_encoding_and_decoding() -> None:
    for control in (InfoRequest(), MetricsRequest(), CancelRequest(id="g1")):
        assert decode_control(encode(control)) == control
    for reply in (session_info(), metrics("w1"), Cancelled(id="g1", was="running")):
        assert decode_control_reply(encode(reply)) == reply
    assert decode_metrics(encode(metrics("w1"))) == metrics("w1")


@UNTIMED
@given(requests, st.integers(0, 10_000), st.binary(max_size=4))
def test_a_damaged_request_is_decoded_or_refused_but_never_crashes_the_decoder(
    request, at: int, junk: bytes
) -> None:
    body = encode(request)
    at %= len(body) + 1
    read_or_refuse(body[:at] + junk + body[at + len(junk) :])


@UNTIMED
@given(
    st.binary()
    | st.text().map(lambda text: text.encode("utf-8", "surrogatepass"))
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text() | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["type", "id", "text", "x"]), inner),
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_are_decoded_or_refused_but_never_crash_the_decoder(body: bytes) -> None:
    read_or_refuse(body)


def read_or_refuse(body: bytes) -> None:
    """Decode a body with each decoder: it decodes and encodes again, or is refused in one short line."""
    for decode in DECODERS:
        refusal = ""
        try:
            encode(decode(body))
        except InvalidMessageError as error:
            refusal = str(error)
        assert "\n" not in refusal
        assert len(refusal) < 700


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"type":' * 100_000,
        b'{"x":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"type": "generate", "id": "a", "stop": ' + b"[" * 100_000,
        b'{"type": "opened", "id": "a", "seq": 1, "position": 1, "x": ' + b"[" * 100_000,
    ],
)
def test_deeply_nested_json_is_refused(body: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(InvalidMessageError):
            decode(body)


RULE = "1 to 64 of the characters A-Z a-z 0-9 _ -, the first one a letter or a digit"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "the body is empty: a request must be one JSON object"),
        (b" \n", "the body is empty: a request must be one JSON object"),
        (b"[1]", "a request must be `object`, not `array`"),
        (b"\xff", "the body is not UTF-8: byte 0 is 0xff"),
        (b'{"type":"close","id":"\xc3\x28"}', "the body is not UTF-8: byte 22 is 0xc3"),
        (b'{"type":"generate","id":"a","top_p":NaN}', "the body is not JSON"),
        (b'{"type":"append","id":"a","text":"\\ud800"}', "it holds half of a surrogate pair"),
        (b'{"type":"close","id":"a"} x', "the body is not JSON"),
        (b"{}", "a request needs the field 'type': open, append, generate, rewind or close"),
        (b'{"type":"close"}', f"close needs the field 'id': {RULE}"),
        (b'{"type":"close","id":"a.b"}', f"id must be {RULE}"),
        (b'{"type":"close","id":"a\\n"}', f"id must be {RULE}"),
        (
            b'{"type":"genrate"}',
            (
                "the type of a request must be open, append, generate, rewind or close, not 'genrate'"
                " (did you mean 'generate'?)"
            ),
        ),
        (
            b'{"type":"rewind","id":"a","postion":1}',
            (
                "rewind has no field 'postion' (did you mean 'position'?);"
                " it takes type, position, id, expect_position"
            ),
        ),
        (
            b'{"type":"append","id":"a","messages":[{"role":"user","content":""},{"role":"user","contnt":"x"}]}',
            (
                "messages[1] has no field 'contnt' (did you mean 'content'?);"
                " it takes role, content, name, tool_calls, tool_call_id"
            ),
        ),
        (b'{"type":"append","id":"a","messages":[{}]}', "messages[0] needs the field 'role'"),
        (b'{"type":"append","id":"a"}', "append takes exactly one of messages, text, tokens; it has 0"),
        (
            b'{"type":"generate","id":"a","text":"","tokens":[]}',
            "generate takes at most one of messages, text, tokens; it has 2",
        ),
        (b'{"type":"generate","id":"a","max_tokens":"9"}', "max_tokens must be `int`, not `str`"),
        (b'{"type":"generate","id":"a","stop":["x",""]}', "stop[1] must be text of at least 1 character"),
        (
            b'{"type":"open","id":"a","cache":{"policy":"half"}}',
            "cache.policy must be full, paged or sink_window, not 'half'",
        ),
        (b'{"type":"rewind","id":"a","position":1e99}', "position must be `int`"),
        (
            b'{"type":"generate","id":"a","tool_choice":"any"}',
            "tool_choice must be auto, none, required or an object, not 'any'",
        ),
        (
            b'{"type":"generate","id":"a","tools":[],"tool_choice":{"type":"function","function":{"name":"f"}}}',
            "generate has a tool_choice of f, which is none of its tools",
        ),
    ],
)
def test_the_refusal_of_a_request_says_what_is_wrong_and_what_is_allowed(body: bytes, sentence: str) -> None:
    with pytest.raises(InvalidMessageError) as caught:
        decode_request(body)
    assert sentence in str(caught.value)


def test_the_refusal_of_an_unknown_field_lists_every_field_of_that_request() -> None:
    for kind in (Open, Append, Generate, Rewind, Close):
        tag = kind.__struct_config__.tag
        with pytest.raises(InvalidMessageError) as caught:
            decode_request(b'{"type": "%s", "zzz": 1}' % str(tag).encode())
        allowed = str(caught.value).partition("it takes ")[2].split(", ")
        assert allowed == ["type", *(field.encode_name for field in msgspec.structs.fields(kind))]


def test_refusing_many_requests_inspects_each_message_type_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An inspection blocks the event loop for milliseconds, and thousands of invalid messages may arrive."""
    inspected = []
    whole = msgspec.inspect.type_info
    monkeypatch.setattr(msgspec.inspect, "type_info", lambda kind: inspected.append(kind) or whole(kind))
    for number in range(20):
        for decode in (decode_request, decode_control):
            with pytest.raises(InvalidMessageError):
                decode(b'{"type": "append", "id": "a", "field%d": 1}' % number)
    assert len(inspected) <= 2


def test_the_refusal_of_a_very_long_field_name_stays_short() -> None:
    with pytest.raises(InvalidMessageError) as caught:
        decode_control(b'{"type": "info", "%s": 1}' % (b"x" * 10_000))
    assert len(str(caught.value)) < 200


def test_decoding_an_ask_fills_in_a_missing_type_and_id() -> None:
    assert decode_ask(b'{"text": "hi"}', "a1") == Generate(id="a1", text="hi")
    assert decode_ask(b'{"type": "generate", "id": "own"}', "a1") == Generate(id="own")
    with pytest.raises(InvalidMessageError, match="ask takes a generate, not close"):
        decode_ask(b'{"type": "close"}', "a1")
    with pytest.raises(InvalidMessageError, match="generate has no field 'prompt'"):
        decode_ask(b'{"prompt": "hi"}', "a1")


def test_a_client_reads_a_result_of_a_newer_worker_that_has_an_unknown_field() -> None:
    """Clients ignore unknown fields of results; workers refuse unknown fields of requests."""
    body = b'{"type": "opened", "id": "a", "seq": 1, "position": 0, "new": {"x": [1]}}'
    assert decode_result(body) == Opened(id="a", seq=1, position=0)


def test_encoding_text_or_objects_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(InvalidMessageError, match="whole Unicode characters"):
        encode(Append(id="a", text="\ud83d"))
    with pytest.raises(InvalidMessageError, match="cannot be written as JSON"):
        encode({"x": object()})


def test_fields_with_default_values_are_left_out_when_encoding() -> None:
    assert encode(Generate(id="g1", text="hi")) == b'{"type":"generate","text":"hi","id":"g1"}'


@pytest.mark.parametrize("kind", ["append", "generate"])
def test_a_copy_of_a_decoded_request_encodes_the_keys_of_its_tools_in_the_sent_order(kind: str) -> None:
    tools = b'[{"function":{"parameters":{"b":1,"a":2},"name":"f"},"type":"function"}]'
    request = decode_request(b'{"type":"%s","id":"a","text":"x","tools":%s}' % (kind.encode(), tools))
    assert tools in encode(msgspec.structs.replace(request, priority=1))
    with pytest.raises(InvalidMessageError, match="two tools of the name f"):
        decode_request(
            b'{"type":"%s","id":"a","text":"x","tools":%s}'
            % (kind.encode(), tools.replace(b"}]", b"}," + tools[1:]))
        )


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_a_request_may_not_set_template_variables_that_the_worker_sets(name: str) -> None:
    body = b'{"type":"generate","id":"a","text":"x","chat_template_kwargs":{"%s":1}}' % name.encode()
    with pytest.raises(InvalidMessageError, match=f"has {name} in chat_template_kwargs"):
        decode_request(body)
