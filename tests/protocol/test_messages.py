"""Messages and subjects survive encoding, and invalid ones are refused with a sentence that helps."""

import base64
import hashlib
import json
import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import NAMES, refused
from scripted_worker import generated, session_info

from turnkeep_client.errors import (
    ERROR_CODES,
    InvalidMessageError,
    RequestFailedError,
    StreamError,
    TokenLimit,
)
from turnkeep_client.images import files_of, image
from turnkeep_client.messages import (
    Append,
    Appended,
    CachePolicy,
    Chunk,
    Close,
    Closed,
    Failed,
    Function,
    Generate,
    Message,
    Open,
    Opened,
    Rewind,
    Rewound,
    SessionCache,
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
from turnkeep_client.session import build
from turnkeep_client.subjects import Subjects, session_key

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
policies = st.sampled_from(
    [
        CachePolicy(),
        CachePolicy(policy="sink_window"),
        CachePolicy(policy="sink_window", sink=1, window=32),
        CachePolicy(policy="paged"),
        CachePolicy(policy="paged", resident=2048, pin=((0, 200),)),
    ]
)
found = st.none() | st.sampled_from(
    [SessionCache(policy="lru"), SessionCache(policy="sink_window", sink=4, window=64)]
)
requests = st.one_of(
    st.builds(Open, cache=policies, **base),
    st.builds(lambda given, **fields: Append(**given, **fields), inputs, **base),
    st.builds(lambda given, **fields: Generate(**given, **fields), inputs | st.just({}), **base, **sampling),
    st.builds(Rewind, position=positions, **base),
    st.builds(Close, **base),
)
done = {"id": ids, "seq": counts, "position": positions, "repeat_of": st.none() | counts}
results = st.one_of(
    st.builds(Opened, cache=found, visible_from=st.none() | counts, **done),
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
@given(requests, results, st.builds(Chunk, i=counts, tokens=token_ids, text=texts))
def test_any_request_result_or_chunk_is_unchanged_after_encoding_and_decoding(request, result, chunk) -> None:
    assert decode_request(encode(request)) == request
    assert decode_result(encode(result)) == result
    assert decode_chunk(encode(chunk)) == chunk


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


@pytest.mark.parametrize("kind", ["in", "ctl", "ask"])
def test_the_error_for_a_message_that_breaks_its_schema_says_in_one_line_what_is_allowed(kind: str) -> None:
    decode: Any = {"in": decode_request, "ctl": decode_control, "ask": lambda body: decode_ask(body, "a1")}[
        kind
    ]
    for body, says in refused(kind):
        with pytest.raises(InvalidMessageError) as caught:
            decode(body)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_request_with_more_than_900_json_levels_is_refused_with_an_error_that_has_the_request_id() -> None:
    """Its result has it, and must be read where more calls run. Without its id its sender would wait."""
    for text in ("x", '"]}' * 500, "[{" * 500):
        for of in ('{"a":%s}', "[%s]"):
            opening, closing = of.split("%s")
            for levels, is_deep in ((898, False), (899, True)):
                nested = f'{{"a":{opening * levels}1{closing * levels}}}'
                body = (
                    f'{{"type":"append","text":{json.dumps(text)},"chat_template_kwargs":{nested},"id":"a1"}}'
                )
                if is_deep:
                    with pytest.raises(InvalidMessageError, match="nested too deeply") as caught:
                        decode_request(body.encode())
                    assert caught.value.request_id == "a1"
                else:
                    assert decode_request(body.encode()).id == "a1"


def test_the_error_for_an_unknown_request_field_lists_every_field_of_that_request_type() -> None:
    for kind in (Open, Append, Generate, Rewind, Close):
        tag = kind.__struct_config__.tag
        with pytest.raises(InvalidMessageError) as caught:
            decode_request(b'{"type": "%s", "zzz": 1}' % str(tag).encode())
        allowed = str(caught.value).partition("it takes ")[2].split(", ")
        assert allowed == ["type", *(field.encode_name for field in msgspec.structs.fields(kind))]


def test_refusing_many_malformed_requests_inspects_the_schema_of_each_message_type_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An inspection blocks the event loop for milliseconds, and thousands of invalid messages may arrive."""
    inspected = []
    whole = msgspec.inspect.type_info
    monkeypatch.setattr(msgspec.inspect, "type_info", lambda kind: inspected.append(kind) or whole(kind))
    for number in range(20):
        for decode in (decode_request, decode_control):
            with pytest.raises(InvalidMessageError):
                decode(b'{"type": "append", "id": "a", "field%d": 1}' % number)
    assert len(inspected) <= 2


def test_an_error_of_a_failed_request_is_unchanged_after_pickling_as_in_a_process_pool() -> None:
    limit = TokenLimit(asked=9, allowed=8)
    failed = RequestFailedError("overloaded", "busy", retryable=True, field="text", limit=limit)
    for error in (failed, InvalidMessageError("no", field="text"), StreamError("no", 10059)):
        got = pickle.loads(pickle.dumps(error))  # what the pool does
        assert (type(got), str(got), vars(got)) == (type(error), str(error), vars(error))


def test_a_client_decodes_a_result_of_a_newer_worker_that_has_an_unknown_field() -> None:
    """Clients ignore unknown fields of results; workers refuse unknown fields of requests."""
    body = b'{"type": "opened", "id": "a", "seq": 1, "position": 0, "new": {"x": [1]}}'
    assert decode_result(body) == Opened(id="a", seq=1, position=0)


@pytest.mark.parametrize("kind", ["append", "generate"])
def test_a_request_that_is_decoded_and_encoded_again_has_the_json_keys_of_its_tools_in_the_order_sent(
    kind: str,
) -> None:
    tools = b'[{"function":{"parameters":{"b":1,"a":2},"name":"f"},"type":"function"}]'
    request = decode_request(b'{"type":"%s","id":"a","text":"x","tools":%s}' % (kind.encode(), tools))
    assert tools in encode(msgspec.structs.replace(request, priority=1))
    with pytest.raises(InvalidMessageError, match="two tools of the name f"):
        decode_request(
            b'{"type":"%s","id":"a","text":"x","tools":%s}'
            % (kind.encode(), tools.replace(b"}]", b"}," + tools[1:]))
        )


def test_messages_of_sessions_under_the_full_cache_policy_are_encoded_without_cache_fields() -> None:
    """The bytes are those of versions without cache policies, which old clients and recorded results need."""
    assert encode(Open(id="a")) == b'{"type":"open","id":"a"}'
    assert encode(Opened(id="a", seq=1, position=0)) == b'{"type":"opened","id":"a","seq":1,"position":0}'
    assert encode(generated(4, Generate(id="g"))) == (
        b'{"type":"generated","text":"Hello, w\xc3\xb6rld!","tokens":[11,12,13,14,15,16],'
        b'"finish_reason":"stop","usage":{"prompt_tokens":3,"cached_tokens":1,"prefilled_tokens":2,"completion_tokens":6},'
        b'"seconds":{"queued":0.0,"prefill":0.1,"first_token":0.2,"total":0.5},"kv_live_bytes":1024,'
        b'"id":"g","seq":4,"position":9}'
    )
    info = encode(session_info())
    assert b'"kv_live_bytes":1024,"policy":"full","model":"tiny","worker":' in info
    assert decode_control_reply(info) == session_info()


def test_decoding_a_result_keeps_a_cache_policy_that_the_client_does_not_know() -> None:
    body = b'{"type":"opened","id":"a","seq":1,"position":0,"cache":{"policy":"lru","most":4096}}'
    assert decode_result(body) == Opened(id="a", seq=1, position=0, cache=SessionCache(policy="lru"))


prefixes = st.sampled_from(["turnkeep", "a.b", "x-1._y"])


@given(prefixes, ids, ids, st.sampled_from(["in", "out", "ctl", "ask"]), ids)
def test_every_nats_subject_built_from_tenant_session_and_kind_is_parsed_back_to_the_same_parts(
    prefix: str, tenant: str, session: str, kind, request_id: str
) -> None:
    subjects, key = Subjects(prefix), session_key(tenant, session)
    assert subjects.parse(subjects.of(key, kind)) == (key, kind, None)
    assert subjects.parse(subjects.tokens(key, request_id)) == (key, "tok", request_id)
    assert subjects.parse(subjects.tokens(key, request_id, "chunk")) == (key, "chunk", request_id)


@pytest.mark.parametrize("bad", NAMES)
def test_building_a_nats_subject_from_an_id_with_forbidden_characters_raises_an_error_naming_the_id(
    bad: str,
) -> None:
    with pytest.raises(InvalidMessageError, match=r"tenant .* is not valid: it must be 1 to 64"):
        session_key(bad, "s1")
    with pytest.raises(InvalidMessageError, match=r"session .* is not valid"):
        session_key("t1", bad)


@pytest.mark.parametrize(
    "subject",
    [
        "turnkeep.t.s",
        "turnkeep.t.s.in.x",
        "turnkeep.t.s.tok",
        "turnkeep.t.s.tok.a.b",
        "turnkeep.t.s.other",
        "turnkeep._metrics.w",
        "turnkeep._t.s.in",
        "turnkeep.t.s\n.in",
        "other.t.s.in",
        "turnkeepx.t.s.in",
        "",
    ],
)
def test_parsing_a_nats_subject_of_another_form_or_prefix_raises_an_error(subject: str) -> None:
    with pytest.raises(InvalidMessageError):
        Subjects().parse(subject)


@pytest.mark.parametrize("prefix", ["", ".", "a.", ".a", "a..b", "a b", "*", "a.>", "ä", "a\n"])
def test_a_subject_prefix_that_cannot_begin_a_nats_subject_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidMessageError, match="subject prefix"):
        Subjects(prefix)


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"at": "Rome"}'}}


def append(*messages: dict[str, Any]) -> Append:
    body = json.dumps({"type": "append", "id": "a", "messages": messages}).encode()
    request = decode_request(body)
    assert isinstance(request, Append)
    assert decode_request(encode(request)) == request
    return request


def test_the_messages_of_a_tool_call_and_its_result_in_openais_format_are_decoded() -> None:
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


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("image_url", {"file_id": "i"}),
        ("input_audio", {"data": "AA", "format": "wav"}),
        ("file", {"file_id": "f"}),
    ],
)
def test_a_media_part_of_a_message_becomes_placeholder_text_for_the_model_but_is_encoded_unchanged(
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
def test_an_image_is_named_by_the_digest_of_its_file_in_whatever_message_format_it_was_sent(
    part: dict[str, Any],
) -> None:
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


def test_a_stop_string_given_alone_equals_a_list_with_that_stop_string() -> None:
    alone = decode_request(b'{"type":"generate","id":"a","stop":"\\n"}')
    assert alone == decode_request(b'{"type":"generate","id":"a","stop":["\\n"]}')
    assert alone == Generate(id="a", stop=("\n",))
    assert encode(alone) == b'{"type":"generate","stop":["\\n"],"id":"a"}'


@pytest.mark.parametrize(
    "body",
    [
        b'{"type":"append","id":"mine","text":7}',
        b'{"type":"frob","id":"mine","x":{"id":"other"}}',
        b'{"x":[1,{"id":"other"}],"id":"mine","type":"cancel"}',
        *(b"", b"[]", b"{", b"\xff", b'{"id":"a"', b'{"id":7}', b'{"id":"a b"}', b'[{"id":"a"}]'),
        b'{"id":' + b"[" * 100_000,
    ],
)
def test_the_error_for_an_undecodable_request_has_its_request_id_if_that_id_is_valid(body: bytes) -> None:
    for decode in (decode_request, decode_control, lambda body: decode_ask(body, "made-up")):
        with pytest.raises(InvalidMessageError) as caught:
            decode(body)
        assert caught.value.request_id == ("mine" if b'"mine"' in body else None)
