"""Any bytes published on a session's subjects get one clear answer, and do not affect other requests."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from raw_wire import Start, Wire, append, generate
from structlog.testing import capture_logs

from ops.log.conversation import conversation
from tests.protocol.refusals import NAMES, refused
from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.messages import Failed, decode_request
from turnkeep_client.session_log import read
from turnkeep_client.subjects import SessionKey

pytestmark = pytest.mark.simulated


async def check_refused(
    wire: Wire, session: str, body: bytes | dict[str, Any], says: str, code: str = "invalid_request"
) -> dict[str, Any]:
    """Assert that a request is refused with `says` in the message, and the session's position stays."""
    before = await wire.position(session)
    seq = await wire.publish(session, body)
    result = await wire.result(seq)
    assert (result["type"], result.get("code"), result["seq"]) == ("failed", code, seq), (body, result)
    assert says in result["message"], body
    assert "\n" not in result["message"]
    assert len(result["message"]) < 400
    assert result["retryable"] == (code in {"overloaded", "expired", "internal"})
    assert result["position"] == before == await wire.position(session)
    return result


async def check_goes_on(wire: Wire, *sessions: str) -> None:
    """Assert that an ordinary generate still works in these sessions, and in a new session."""
    for session in (*sessions, f"other-{len(wire.results)}"):
        before = await wire.position(session)
        result = await wire.send(session, generate(f"ordinary-{len(wire.results)}", text="go on"))
        assert result["type"] == "generated"
        assert result["position"] == before + 5 + len(result["tokens"])


async def test_a_message_that_does_not_fit_the_request_schema_is_refused_with_the_reason(wire: Start) -> None:
    """The result names the body's stream sequence, and the body's id if that is valid.

    The corrected request may then use the same id.
    """
    w = await wire()
    position = (await w.send("s", append("first")))["position"]
    rows = refused("in")
    seqs = [await w.publish("s", body) for body, _ in rows]
    for seq, (body, says) in zip(seqs, rows, strict=True):
        result = await w.result(seq)
        assert (result["type"], result["code"], result["retryable"]) == ("failed", "invalid_request", False)
        assert (result["seq"], result["position"]) == (seq, position)
        assert says in result["message"]
        assert "\n" not in result["message"]
        with pytest.raises(InvalidMessageError) as caught:
            decode_request(body)
        assert result["id"] == caught.value.request_id, body
    assert (await w.send("s", append("a")))["type"] == "appended"
    await check_goes_on(w, "s")


@pytest.mark.parametrize("kind", ["ctl", "ask"])
async def test_a_request_on_the_ctl_or_ask_subject_that_breaks_its_schema_is_refused_and_not_stored(
    wire: Start, kind: str
) -> None:
    w = await wire()
    for body, says in refused(kind):
        reply = json.loads((await w.nc.request(w.subject("s", kind), body, timeout=20)).data)
        assert (reply["type"], reply["code"]) == ("failed", "invalid_request")
        assert says in reply["message"], body
    assert await w.entries() == []
    await w.nc.publish(w.subject("s", "ctl"), b'{"type":"info"}')  # without a reply subject
    empty = json.loads((await w.nc.request(w.subject("s", "ask"), b"{}", timeout=20)).data)
    assert "the session is empty" in empty["message"]
    await check_goes_on(w, "s")


async def test_a_request_id_with_forbidden_characters_is_refused_with_the_rule_for_ids(wire: Start) -> None:
    w = await wire()
    await w.send("s", append("first"))
    for bad in NAMES:
        result = await check_refused(w, "s", append(bad), "id must be 1 to 64 of the characters A-Z a-z 0-9")
        assert result["id"] is None
        reply = await w.control("s", {"type": "cancel", "id": bad})
        assert (reply["type"], reply["code"]) == ("failed", "invalid_request")
    await check_goes_on(w, "s")


@pytest.mark.real
async def test_a_generate_request_with_options_at_the_limits_of_their_ranges_is_answered(wire: Start) -> None:
    w = await wire(max_context=64)
    await w.send("s", append("first"))
    extremes = generate(
        "a", temperature=100, top_p=1e-9, top_k=2**31 - 1, min_p=1, repetition_penalty=1e-9, seed=2**63 - 1
    )
    extremes |= {"stop": ["\U0001f600" * 256] * 16, "max_tokens": 2**31 - 1}
    result = await w.send("s", extremes)
    assert result["type"] == "generated"
    assert result["position"] <= 64
    await check_goes_on(w)


BAD_TENANTS, BAD_SESSIONS = ("de$fault", "ü", "_metrics"), ("a$b", "-s", "s" * 65, "日本", "{s}")


async def test_a_tenant_or_session_name_with_forbidden_characters_is_refused_with_the_rule_for_names(
    wire: Start,
) -> None:
    w = await wire()
    keys = [(tenant, "s") for tenant in BAD_TENANTS] + [("default", session) for session in BAD_SESSIONS]
    for tenant, session in keys:
        result = await w.send(session, append("a"), tenant=tenant)
        assert (result["type"], result["code"], result["id"]) == ("failed", "invalid_request", "a")
        assert "is not valid: it must be 1 to 64 of the characters" in result["message"]
        reply = await w.control(session, {"type": "info"}, tenant=tenant)
        assert (reply["type"], reply["code"]) == ("failed", "invalid_request")
    await check_goes_on(w)


@pytest.mark.parametrize("session", ["*", "s" * 300])
async def test_a_request_under_a_wildcard_or_overlong_session_name_gets_exactly_one_refusal(
    quiet_wire: Start, session: str
) -> None:
    """The tenant's subject `_refused.out` has its result, even if the name is a wildcard for sessions."""
    w = await quiet_wire()
    await w.send("s", append("a"))
    seqs = [await w.publish(session, append(f"r{n}")) for n in range(10)]
    for seq in seqs:
        refused = await w.result(seq)
        assert (refused["type"], refused["code"], refused["id"]) == ("failed", "invalid_request", None)
        assert "1 to 64 of the characters" in refused["message"]
    answered = [
        (json.loads(body)["seq"], subject)
        for _, subject, body in await w.entries()
        if subject.endswith(".out") and json.loads(body)["seq"] in seqs
    ]
    assert answered == [(seq, w.subject("_refused", "out")) for seq in seqs]
    await check_goes_on(w, "s")


@pytest.mark.real
async def test_a_request_with_token_ids_outside_the_vocabulary_is_refused_with_the_allowed_range(
    wire: Start,
) -> None:
    """The vocabulary's last id is accepted, the next is not: the device would read beyond its embeddings."""
    w = await wire()
    assert (await w.send("s", {"type": "append", "id": "a", "tokens": [0, 258]}))["type"] == "appended"
    for request_id, token in (("b", 259), ("c", 2**31 - 1)):
        body = {"type": "append", "id": request_id, "tokens": [1, token]}
        result = await check_refused(
            w, "s", body, f"token id {token} is outside of the vocabulary: ids go from 0 to 258"
        )
        assert result["id"] == request_id
    await check_refused(w, "s", generate("d", tokens=[259]), "ids go from 0 to 258")
    await check_goes_on(w, "s")


async def test_a_generate_request_without_input_in_an_empty_session_is_refused(wire: Start) -> None:
    w = await wire()
    await check_refused(w, "s", generate("a"), "the session is empty: append something first")
    await w.send("opened", {"type": "open", "id": "a"})
    await check_refused(w, "opened", generate("b"), "the session is empty: append something first")
    await check_goes_on(w, "s", "opened")


async def test_a_request_that_exceeds_the_context_is_refused_and_adds_nothing_to_the_session(
    wire: Start,
) -> None:
    w = await wire(max_context=64)
    await w.send("s", append("a", "x" * 60))
    await check_refused(w, "s", append("b", "x" * 5), "would hold 65 tokens", "context_exceeded")
    await check_refused(
        w, "s", generate("c", text="x" * 4), "would hold 64 tokens and 1 new", "context_exceeded"
    )
    await check_refused(w, "new", append("d", "x" * 65), "the context is 64", "context_exceeded")
    full = await w.send("s", append("e", "x" * 4))
    assert full["position"] == 64
    await check_refused(w, "s", generate("f"), "would hold 64 tokens", "context_exceeded")
    assert (await w.send("s", {"type": "rewind", "id": "g", "position": 40}))["position"] == 40
    await check_goes_on(w, "s")


async def test_an_answer_that_reaches_the_context_limit_ends_with_finish_reason_length(wire: Start) -> None:
    w = await wire(max_context=64)
    result = await w.send("s", generate("a", text="x" * 60, max_tokens=100))
    assert (result["finish_reason"], len(result["tokens"]), result["position"]) == ("length", 4, 64)


@pytest.mark.real
async def test_a_prompt_that_can_never_fit_into_memory_is_refused_and_adds_nothing_to_the_session(
    wire: Start,
) -> None:
    w = await wire(kv_bytes=40 * 512)
    await check_refused(w, "s", append("a", "x" * 41), "the limit is 20480", "memory_exceeded")
    await check_refused(w, "s", generate("b", text="x" * 40), "room for 1 more", "memory_exceeded")
    assert (await w.send("s", append("c", "x" * 30)))["position"] == 30
    assert (await w.send("s", generate("d", max_tokens=10)))["type"] == "generated"
    await check_goes_on(w)


@pytest.mark.real
async def test_an_answer_that_fills_the_kv_memory_ends_with_the_finish_reason_length(wire: Start) -> None:
    """It has as many tokens as fit, whatever its max_tokens. After a rewind the session can continue."""
    w = await wire(kv_bytes=40 * 512)
    result = await w.send("s", generate("a", text="x" * 30, max_tokens=2**31 - 1))
    assert (result["finish_reason"], len(result["tokens"]), result["position"]) == ("length", 10, 40)
    await check_refused(w, "s", generate("b"), "40 tokens and room for 1 more", "memory_exceeded")
    assert (await w.send("s", {"type": "rewind", "id": "c", "position": 20}))["position"] == 20
    assert (await w.send("s", generate("d", max_tokens=10)))["finish_reason"] == "length"


@pytest.mark.parametrize("restart", [False, True])
async def test_a_request_repeated_under_the_same_id_gets_the_recorded_result_of_the_first_request(
    wire: Start, *, restart: bool
) -> None:
    """Each repeat's result has the repeat's sequence and names the first one's, also if that is a failure."""
    w = await wire(metrics_interval_s=60.0)
    first = await w.send("s", generate("a", text="once", temperature=1.0))
    refused = await w.send("s", {"type": "rewind", "id": "b", "position": 99})
    first, refused = ({name: one[name] for name in one if name != "asked"} for one in (first, refused))
    if restart:
        await w.worker.stop()
        w = await wire(metrics_interval_s=60.0)
    await asyncio.sleep(200)  # no memory of ids ends while the session exists
    # The same request with other bytes: the order of keys and the spacing do not matter.
    body = b'{ "temperature": 1, "text": "once",\n "max_tokens": 4, "id": "a", "type": "generate" }'
    for _ in range(2):
        seq = await w.publish("s", body)
        again = await w.result(seq)
        assert again.pop("asked")["request"] == json.loads(body)
        assert again == first | {"seq": seq, "repeat_of": first["seq"]}
    again = await w.send("s", {"type": "rewind", "id": "b", "position": 99})
    del again["asked"]
    assert again == refused | {"seq": again["seq"], "repeat_of": refused["seq"]}
    assert await w.position("s") == first["position"]
    await check_goes_on(w, "s")


async def test_the_result_of_an_undecodable_request_shows_the_requests_text_after_the_request_left_the_log(
    wire: Start,
) -> None:
    w = await wire()
    sent = [b"{no json", b'"\xff', b'"a"', b"x" * 5000, b"[" * 5000, b'{"type":"generate","id":"a","max":1}']
    seqs = [await w.publish("s", body) for body in sent]
    for seq in seqs:
        assert (await w.result(seq))["code"] == "invalid_request"
        await w.js.delete_msg(f"{w.prefix}_log", seq)
    turns = [*conversation(await read(w.worker.client.stored, SessionKey("default", "s")))]
    texts = [body[:1024].decode(errors="replace") for body in sent]
    assert [(turn.seq, turn.request, turn.sent) for turn in turns] == [
        (seq, None, text) for seq, text in zip(seqs, texts, strict=True)
    ]
    assert all(isinstance(turn.result, Failed) for turn in turns)
    await w.worker.stop()
    await check_goes_on(await wire(), "s")


async def test_a_request_whose_expect_position_is_not_the_sessions_position_is_refused(wire: Start) -> None:
    w = await wire()
    await check_refused(w, "s", append("a", expect_position=1), "at position 0, not at", "position_conflict")
    assert (await w.send("s", append("b", expect_position=0)))["position"] == 5
    for request in (
        append("c", expect_position=4),
        generate("d", expect_position=6),
        {"type": "rewind", "id": "e", "position": 0, "expect_position": 0},
        {"type": "close", "id": "f", "expect_position": 2**53},
    ):
        await check_refused(w, "s", request, "is at position 5, not at the expected", "position_conflict")
    assert (await w.send("s", append("g", expect_position=5)))["position"] == 10
    await check_goes_on(w, "s")


REWIND, CLOSE, OPEN = ({"type": kind} for kind in ("rewind", "close", "open"))
AFTER_A_CLOSE = "an open starts a new one"


#: What a session gets before, then a request, and why that is refused.
DISALLOWED: list[tuple[list[Any], dict[str, Any], str, str]] = [
    ([], REWIND | {"position": 0}, "no such session", "unknown_session"),
    ([], CLOSE, "no such session", "unknown_session"),
    (["hello"], REWIND | {"position": 6}, "cannot rewind to 6: the session is at", "invalid_request"),
    (["hello"], REWIND | {"position": 2**53 + 1}, "position must be", "invalid_request"),
    ([OPEN], OPEN, "the session is open already, at position 0", "invalid_request"),
    (["hello"], OPEN, "the session is open already, at position 5", "invalid_request"),
    (["hello", CLOSE], append("r"), AFTER_A_CLOSE, "unknown_session"),
    (["hello", CLOSE], generate("r", text="x"), AFTER_A_CLOSE, "unknown_session"),
    (["hello", CLOSE], REWIND | {"position": 0}, AFTER_A_CLOSE, "unknown_session"),
    (["hello", CLOSE], CLOSE, AFTER_A_CLOSE, "unknown_session"),
]


async def test_rewinding_or_closing_a_missing_session_or_opening_an_open_session_is_refused(
    wire: Start,
) -> None:
    w = await wire()
    for at, (before, request, says, code) in enumerate(DISALLOWED):
        session = f"s{at}"
        for number, one in enumerate(before):
            await w.send(session, append("a") if one == "hello" else one | {"id": f"b{number}"})
        await check_refused(w, session, request | {"id": "r"}, says, code)
        if CLOSE in before:
            assert (await w.control(session, {"type": "info"}))["code"] == "unknown_session"
            assert (await w.send(session, OPEN | {"id": "o"}))["position"] == 0
        await check_goes_on(w, session)


async def test_cancelling_an_answered_or_unknown_request_fails_with_the_reason(wire: Start) -> None:
    w = await wire()
    await w.send("s", append("a"))
    for request_id, says in (
        ("a", "it was answered already"),
        ("b", "the session has no request with this id"),
    ):
        reply = await w.control("s", {"type": "cancel", "id": request_id})
        assert (reply["type"], reply["code"], reply["id"]) == ("failed", "invalid_request", request_id)
        assert says in reply["message"]
    assert (await w.send("s", append("b")))["type"] == "appended"
    await check_goes_on(w, "s")


async def test_request_headers_with_names_that_the_nats_server_uses_are_ignored(wire: Start) -> None:
    """Neither the delivery of a request nor a read of the log takes them for headers of the server."""
    w = await wire()
    for number, status in enumerate(("100", "204", "404", "408", "409", "503", "nonsense")):
        result = await w.send("s", append(f"a{number}"), Status=status, Description="made up")
        assert (result["type"], result["position"]) == ("appended", 5 * (number + 1))
    for number, name in enumerate(("Sequence", "Subject", "Time_Stamp", "Num_Pending", "Stream")):
        result = await w.send("t", append(f"b{number}"), **{f"Nats_{name}": "x.out"})
        assert (result["type"], result["position"]) == ("appended", 5 * (number + 1))
    await w.worker.stop()
    again = await wire()
    assert await again.position("s") == 35
    assert await again.position("t") == 25
    await check_goes_on(again, "s", "t")


GARBAGE = [
    b"",
    b"hello",
    b"\xff",
    b"[]",
    b'{"type":"appended"}',
    b'{"type":"failed","id":null,"code":"no_such_code","message":"m","retryable":false,"seq":1}',
    b"{" * 10_000,
]


async def test_malformed_messages_on_the_subject_of_results_are_ignored(wire: Start) -> None:
    """Whether they come before a session's first request, between its turns, or before a restart."""
    w = await wire()
    for session in ("s", "t"):
        for garbage in GARBAGE:
            await w.forge(session, garbage)
    assert (await w.send("s", append("a")))["position"] == 5
    for number, garbage in enumerate(GARBAGE):
        await w.forge("s", garbage)
        assert (await w.send("s", append(f"b{number}")))["position"] == 5 * (number + 2)
    for garbage in GARBAGE:
        await w.forge("s", garbage)
    forged, position = w.forged, await w.position("s")
    await w.worker.stop()
    w = await wire()
    w.forged |= forged
    assert await w.position("s") == position == 40
    await check_goes_on(w, "s", "t")


async def test_subscribers_of_a_sessions_out_subject_get_exactly_the_results_that_the_log_stored(
    wire: Start,
) -> None:
    """A result that the log rejects must not reach subscribers: another result may be stored instead."""
    w = await wire()
    seq = await w.publish("s", generate("a", text="eee", max_tokens=300))
    await w.until("s", "running")
    await w.forge("s", b"garbage")
    await w.until("s", "idle")
    stored = [
        json.loads(body) for entry, _, body in await w.entries() if entry > seq and entry not in w.forged
    ]
    assert w.results[seq] == stored


NO_CHUNKS = [
    b"garbage",
    b'{"i":0,"tokens":[100000],"text":"x"}',
    b'{"i":0,"tokens":[-1],"text":"x"}',
    b'{"i":0,"tokens":[5,259,6],"text":"x"}',
    b'{"i":-3,"tokens":[1,2,3],"text":"x"}',
    b'{"i":7,"tokens":[5],"text":"x"}',
]


async def test_malformed_messages_on_the_subject_of_token_chunks_add_nothing_to_answers(wire: Start) -> None:
    """A worker that resumes an answer from the token stream accepts only tokens of the model's vocabulary."""
    w = await wire()
    expected = await w.send("clean", generate("g", text="abc", max_tokens=8))
    for number, garbage in enumerate(NO_CHUNKS):
        await w.js.publish(f"{w.prefix}.default.s{number}.chunk.g", garbage)
        result = await w.send(f"s{number}", generate("g", text="abc", max_tokens=8))
        assert result["type"] == "generated"
        assert all(0 <= token < 259 for token in result["tokens"])
        if garbage[:12] != b'{"i":0,"toke':
            assert result["tokens"] == expected["tokens"]
        await check_goes_on(w, f"s{number}")


async def test_a_request_on_the_ask_subject_above_the_message_limit_of_the_log_is_refused_and_not_stored(
    wire: Start,
) -> None:
    """An ask that fits into a NATS message but not into the log fails at once."""
    w = await wire(max_message_bytes=64 * 1024)
    body = json.dumps({"text": "x" * 200_000}).encode()
    reply = json.loads((await w.nc.request(w.subject("s", "ask"), body, timeout=20)).data)
    assert reply["type"] == "failed"
    assert await w.entries() == []
    heard = [one.subject for one in w.worker.app._nc._subs.values()]
    assert w.subject("s", "out") not in heard, "no result will come"
    await check_goes_on(w)


SECRET = "xylophone-7431"


@pytest.mark.real
async def test_a_workers_log_lines_contain_no_text_of_answered_or_refused_requests(
    wire: Start, strict_model: Path
) -> None:
    said = {"role": "user", "content": SECRET}
    requests: list[dict[str, Any] | bytes] = [
        append("a1", SECRET),
        generate("g1", messages=[said], stop=[SECRET], temperature=1.0),
        generate("g2", messages=[said | {"role": "stranger"}]),
        append("a2", SECRET, unknown=SECRET),
        append("a3", SECRET * 1000),
        append("a1", SECRET + " and more"),
        {"type": SECRET, "id": "x1"},
        SECRET.encode(),
        json.dumps(append("a4", SECRET)).encode()[:-3],
    ]
    with capture_logs() as lines:
        one = await wire(model=str(strict_model))
        results = [await one.send("s1", request) for request in requests]
        await one.worker.stop()
    assert [result["type"] for result in results] == ["appended", "generated", *["failed"] * 7]
    assert [line["event"] for line in lines].count("answered") >= 2
    assert [line for line in lines if SECRET in repr(line)] == []
