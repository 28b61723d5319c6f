"""Forged entries and malformed frames change no answer, and stop neither connection nor worker."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import product
from typing import Any, Self
from urllib.parse import urlsplit

import nats.errors
import pytest
import structlog
from raw_wire import PATIENCE_S, Start, Wire, append, generate

from turnkeep_client.log import HISTORY_HEADER
from turnkeep_client.nats_client import Nats
from worker.wire.connection import confirm_subscriptions, connect

#: Does not end by itself within some steps of the random model.
LONG = {"text": "eee", "max_tokens": 300}


def failed(seq: int, request_id: str) -> bytes:
    body = {"type": "failed", "id": request_id, "code": "internal", "message": "forged", "retryable": False}
    return json.dumps(body | {"seq": seq}).encode()


def generated(seq: int, request_id: str, position: int, *, asked: bool = False) -> bytes:
    zeros = {"prompt_tokens": 0, "cached_tokens": 0, "prefilled_tokens": 0, "completion_tokens": 3}
    seconds = {"queued": 0, "prefill": 0, "first_token": 0, "total": 0}
    body = {"type": "generated", "id": request_id, "seq": seq, "position": position, "text": "I obey"}
    body |= {"tokens": [40, 41, 42], "finish_reason": "stop", "usage": zeros, "seconds": seconds}
    if asked:
        body["asked"] = {"stored": "2026-01-02T00:00:00Z", "request": generate(request_id)}
    return json.dumps(body | {"kv_live_bytes": 0}).encode()


async def next_seq(w: Wire) -> int:
    return int((await w.js.stream_info(f"{w.prefix}_log")).state.last_seq) + 1


async def taken_up_again(wire: Start, w: Wire) -> Wire:
    """Stop the worker and start another, which reads the log from its beginning."""
    await w.worker.stop()
    forged = w.forged
    w = await wire()
    w.forged |= forged
    return w


@pytest.mark.simulated
@pytest.mark.parametrize("restart", [False, True])
async def test_a_forged_result_published_before_its_request_does_not_replace_the_answer(
    wire: Start, restart: bool
) -> None:
    w = await wire()
    await w.send("s", append("a"))
    seq = await next_seq(w)
    await w.forge("s", failed(seq + 1, "b"))
    if restart:
        w = await taken_up_again(wire, w)
    result = await genuine(w, await w.publish("s", append("b")))
    assert (result["seq"], result["type"], result["position"]) == (seq + 1, "appended", 10)


@pytest.mark.simulated
@pytest.mark.parametrize("restart", [False, True])
async def test_a_forged_result_without_a_history_digest_does_not_replace_the_answer(
    wire: Start, restart: bool
) -> None:
    """It names a waiting request, but a worker's results have a history digest."""
    w = await wire()
    await w.send("s", append("a"))
    running = await w.publish("s", generate("long", **LONG))
    waiting = await w.publish("s", generate("b"))
    for seq, request_id in ((running, "long"), (waiting, "b")):
        await w.forge("s", generated(seq, request_id, position=12, asked=True))
    if restart:
        w = await taken_up_again(wire, w)
    await asyncio.sleep(0)
    assert (await genuine(w, running))["finish_reason"] in ("stop", "length")
    assert (await genuine(w, waiting))["text"] != "I obey"
    w = await taken_up_again(wire, w)
    assert (await w.send("s", append("c")))["type"] == "appended"


async def genuine(w: Wire, seq: int) -> dict[str, Any]:
    """Wait for the result of a request that the worker, not the test, has stored."""
    async with asyncio.timeout(30):
        while True:
            for number, subject, body in await w.entries():
                if subject.endswith(".out") and number not in w.forged and json.loads(body)["seq"] == seq:
                    found: dict[str, Any] = json.loads(body)
                    return found
            await asyncio.sleep(0.1)


@pytest.mark.simulated
async def test_a_forged_result_for_a_request_that_waits_behind_another_request_is_ignored(
    wire: Start,
) -> None:
    """Even if it has a digest: a worker's results have their requests, too."""
    w = await wire()
    await w.send("s", append("a"))
    await w.worker.stop()
    first = await w.publish("s", append("first"))
    second = await w.publish("s", generate("second"))
    subject = w.subject("s", "commit")
    body = generated(second, "second", position=8)
    w.forged.add((await w.js.publish(subject, body, headers={HISTORY_HEADER: "0" * 32})).seq)
    forged = w.forged
    w = await wire()
    w.forged |= forged
    assert (await genuine(w, first))["type"] == "appended"
    assert (await genuine(w, second))["text"] != "I obey"


@pytest.mark.simulated
async def test_a_flood_of_forged_results_is_counted_as_ignored_and_stops_no_answer(wire: Start) -> None:
    w = await wire()
    await w.send("s", append("a"))
    running = await w.publish("s", generate("long", **LONG))
    for _ in range(600):
        await w.forge("s", failed(10**9, "x"))
    assert (await w.result(running))["type"] == "generated"
    assert (await w.send("s", append("b")))["type"] == "appended"
    assert (await w.control("s", {"type": "info"}))["worker"]["ignored"]["result"] == 600


@pytest.mark.simulated
@pytest.mark.parametrize("named", [True, False], ids=["with the requests sequence", "without a sequence"])
async def test_forged_tokens_published_before_their_request_do_not_become_part_of_its_answer(
    wire: Start, named: bool
) -> None:
    """Even if they name the request's sequence, which can be guessed."""
    w = await wire()
    clean = await w.send("clean", generate("g", text="abc"))
    chunk = {"i": 0, "tokens": [40, 41], "text": "HI"} | ({"seq": await next_seq(w)} if named else {})
    await w.js.publish(f"{w.prefix}.default.s.chunk.g", json.dumps(chunk).encode())
    result = await w.send("s", generate("g", text="abc"))
    assert (result["tokens"], result["text"]) == (clean["tokens"], clean["text"])


#: Header blocks that a server accepts; for a read of the log it removes two bytes and adds its own lines.
HEADERS = [
    b"NATS/1.0",
    b"NATS/1.0\r\n",
    b"NATS/1.0\r\nX: y",
    b"NATS/1.0{}\r\n\r\n",
    b"NATS/1.0 \xff\xff\xff \xff\r\n\r\n",
    b"NATS/1.0 404\r\n\r\n",
    b"NATS/1.0\r\n\xff: \xff\r\n\r\n",
    b"NATS/1.0\r\nNats-Sequence: 1\r\n\r\nzz",
    b"garbage\xff\xff",
    b"garbage! 204\r\n\r\nzz",
    b"N",
    b"",
]
#: Names that the server accepts as a token of a subject, but that no client can put into a subject.
NAMELESS = [
    b"\xff",
    b"\xc3",
    b"a\xed\xa0\x80b",
    b"a\x0bb",
    b"\x0c",
    b"a\x00",
    b"a\x1c",
    "a\u00a0b".encode(),
    "\ufffd".encode(),
    b"s" * 4040,
    b"s" * 300,
]


class Socket:
    """A plain TCP connection to the NATS server, which can send any bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, url: str) -> Self:
        parts = urlsplit(url)
        socket = cls(*await asyncio.open_connection(parts.hostname, parts.port))
        await socket.send(b'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\n')
        return socket

    async def send(self, frames: bytes) -> None:
        """Write frames and return when the server has read them."""
        self._writer.write(frames + b"PING\r\n")
        async with asyncio.timeout(PATIENCE_S):
            while (line := await self._reader.readline()) != b"PONG\r\n":
                assert line.startswith((b"INFO", b"PING")), line

    async def publish(
        self, subject: bytes, body: bytes, header: bytes | None = None, reply: bytes = b""
    ) -> None:
        to = subject + b" " + (reply + b" " if reply else b"")
        if header is None:
            await self.send(b"PUB %s%d\r\n%s\r\n" % (to, len(body), body))
        else:
            await self.send(
                b"HPUB %s%d %d\r\n%s%s\r\n" % (to, len(header), len(header) + len(body), header, body)
            )

    def close(self) -> None:
        self._writer.close()


@pytest.fixture
async def raw(nats_url: str) -> AsyncIterator[Socket]:
    socket = await Socket.open(nats_url)
    yield socket
    socket.close()


async def stored(w: Wire, raw: Socket, subject: bytes, body: bytes, header: bytes | None = None) -> int:
    """Publish to the log with a raw frame, and again if no ack comes, as a client does; return the sequence.

    On a busy machine a server once dropped one of these frames without an error.
    """
    inbox = w.nc.new_inbox()
    acks = await w.nc.subscribe(inbox)
    await confirm_subscriptions(w.nc)
    for is_last in (False, False, True):
        await raw.publish(subject, body, header, inbox.encode())
        try:
            ack = json.loads((await acks.next_msg(PATIENCE_S / 4)).data)
            break
        except nats.errors.TimeoutError:
            if is_last:
                raise
    await acks.unsubscribe()
    return int(ack["seq"])


async def test_a_request_message_with_a_malformed_nats_header_is_answered(wire: Start, raw: Socket) -> None:
    """Workers ignore headers. The log stores them, so reading the log after a restart must work too."""
    w = await wire()
    for number, header in enumerate(HEADERS):
        body = json.dumps(append(f"a{number}")).encode()
        seq = await stored(w, raw, w.subject("s", "in").encode(), body, header)
        result = await w.result(seq)
        assert (result["type"], result["position"]) == ("appended", 5 * (number + 1)), header
    await w.worker.stop()
    w = await wire()
    assert await w.position("s") == 5 * len(HEADERS)
    assert (await w.send("s", append("a0")))["type"] == "appended", "the first result is found in the log"


async def test_a_worker_still_answers_after_requests_with_malformed_reply_subjects(
    wire: Start, raw: Socket
) -> None:
    w = await wire()
    for number, reply in enumerate((b"\xff", b"a\x0bb", b"r" * 4000, b"a\x00b", b"a..b", b"*", b">")):
        await raw.publish(w.subject("s", "ctl").encode(), b'{"type":"info"}', None, reply)
        await raw.publish(w.subject("s", "ask").encode(), b'{"text":"a","max_tokens":1}', None, reply)
        assert (await w.send("other", append(f"a{number}")))["position"] == 5 * (number + 1), reply
    await w.until("s", "idle")


async def test_requests_under_malformed_session_names_are_discarded_for_good_and_counted_with_one_log_line(
    local_worker: Callable[..., Awaitable[Any]], raw: Socket
) -> None:
    """They cannot be answered, and are not redelivered, even after a restart."""
    with structlog.testing.capture_logs() as lines:
        worker = await local_worker()
        prefix = worker.settings.prefix.encode()
        body = json.dumps(append("a")).encode()
        names = [name for bad in NAMELESS for name in (b"default." + bad, bad + b".s")]
        for name in names:
            await raw.publish(b"%s.%s.in" % (prefix, name), body)
        assert (await worker.client.session("s").append(text="hello")).position == 5
        counts = (await worker.client.session("s").info()).worker.requests
        assert counts == {"append": {"ok": 1}, "unnamed": {"terminated": len(names)}}
    said = [line for line in lines if "no subject can be built" in line["event"]]
    assert len(said) == 1
    assert len(str(said[0])) < 400
    assert [line for line in lines if line["log_level"] in {"error", "critical"}] == []
    await worker.stop()
    worker = await local_worker()
    assert (await worker.client.session("s").append(text="hello")).position == 10
    assert "unnamed" not in (await worker.client.session("s").info()).worker.requests
    assert not worker.task.done()


async def test_a_worker_still_answers_after_messages_with_malformed_session_names_on_any_subject(
    wire: Start, raw: Socket
) -> None:
    w = await wire()
    for number, kind in enumerate((b"ctl", b"ask", b"tok.a", b"out", b"commit", b"chunk.a")):
        for bad, header in product(NAMELESS, (None, b"NATS/1.0")):
            name = b"%s.default.%s.%s" % (w.prefix.encode(), bad, kind)
            await raw.publish(name, b'{"type":"info"}', header)
        answer = await w.send("s", generate(f"a{number}", text="hello"))
        assert answer["type"] == "generated", kind
    w.forged |= {seq for seq, subject, _ in await w.entries() if "default.s." not in subject}


async def test_a_nats_connection_whose_read_loop_raises_an_error_reconnects_at_once(nats_url: str) -> None:
    """Otherwise it would receive nothing until its pings time out."""
    back = asyncio.Event()

    async def reconnected() -> None:
        back.set()

    nc = await connect(nats_url, name="test", on_reconnected=reconnected)
    try:
        heard = await nc.subscribe("deaf.test")
        whole = nc._ps.parse

        async def broken(data: bytes) -> None:
            nc._ps.parse = whole
            raise RuntimeError("a bug")

        nc._ps.parse = broken
        await nc.publish("deaf.test", b"lost")
        async with asyncio.timeout(5):
            await back.wait()
        await nc.publish("deaf.test", b"found")
        assert (await heard.next_msg(PATIENCE_S)).data == b"found"
    finally:
        await nc.close()


async def test_the_nats_protocol_parser_accepts_the_servers_bytes_in_pieces_of_any_size() -> None:
    """One byte at a time, or everything at once. A subject may contain any byte except a space."""
    heard: list[Any] = []

    class Hearing(Nats):
        async def _process_msg(self, *message: Any) -> None:
            heard.append(message)

        async def _process_ping(self) -> None:
            heard.append("ping")

        async def _process_err(self, message: str) -> None:
            heard.append(message)

    frames = (
        b"PING\r\nMSG a.\xff\x0b 7 5\r\nh\r\nlo\r\n+OK\r\nHMSG b 8 re.ply 12 15\r\nNATS/1.0\r\n\r\nyes\r\n"
        b"MSG c 9 r 0\r\n\r\n-ERR 'Some \xff Fault'\r\nHMSG d 1 0 0\r\n\r\nPONG\r\n"
    )
    expected = [
        "ping",
        (7, b"a.\xff\x0b", b"", b"h\r\nlo", b""),
        (8, b"b", b"re.ply", b"yes", b"NATS/1.0\r\n\r\n"),
        (9, b"c", b"r", b"", b""),
        "'some \ufffd fault'",
        (1, b"d", b"", b"", b""),
    ]
    for size in (1, 7, len(frames)):
        nats = Hearing()
        with contextlib.suppress(AttributeError):
            for start in range(0, len(frames), size):
                await nats._ps.parse(frames[start : start + size])
        assert heard == expected, size
        heard.clear()


async def test_a_nats_pull_request_reported_as_completed_is_not_logged_as_a_failure(wire: Start) -> None:
    """The server reports completion like an error; after an error the worker would pause."""
    with structlog.testing.capture_logs() as lines:
        w = await wire()
        acks = [await w.js.publish_async(w.subject(f"s{n}", "in"), b"no request") for n in range(150)]
        for ack in acks:
            assert (await w.result((await ack).seq))["code"] == "invalid_request"
    assert [line for line in lines if "pulling requests failed" in line["event"]] == []
