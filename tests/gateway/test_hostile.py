"""Malformed, slow and oversized requests over raw sockets: after each the gateway serves others as before."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from parts import until

from gateway import boundaries
from gateway.dialects.ollama import requests as ollama
from gateway.dialects.openai import chat
from gateway.dialects.responses import requests as responses

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
BODY = json.dumps(HELLO).encode()
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n"


@pytest.fixture
async def served(gateway: Any) -> AsyncIterator[Any]:
    """A gateway; after the test, assert that it answers a request, and that no connection or task is left."""
    started = await gateway()
    yield started
    async with httpx2.AsyncClient(base_url=started.url, timeout=20) as http:
        assert (await http.post(CHAT, json=HELLO)).status_code == 200
    state = started.server.server_state
    await until(
        lambda: not (state.connections or state.tasks or any(one.num_running for one in sessions(started)))
    )


def sessions(served: Any) -> list[Any]:
    return [*served.index.sessions.values()]


class Wire:
    """A raw TCP connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def rest(self, within_s: float = 20) -> bytes:
        """Read until the gateway closes the connection."""
        received = b""
        async with asyncio.timeout(within_s):
            with contextlib.suppress(ConnectionError):  # it closes without having read all
                while piece := await self.reader.read(65536):
                    received += piece
        return received

    async def head(self) -> bytes:
        """Read the next response; return its head without the body."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 20)
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await self.reader.readexactly(int(length.partition(b":")[2]))
        return head


@contextlib.asynccontextmanager
async def connected(served: Any) -> AsyncIterator[Wire]:
    host, _, port = served.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


async def test_the_gateway_refuses_a_body_of_100_mib_before_the_client_has_sent_all_of_it(
    served: Any,
) -> None:
    async with connected(served) as wire:
        await wire.send(POST + b"content-length: 104857600\r\n\r\n" + b" " * 1000)
        answer = await wire.rest(5)
        assert (status(answer), b"connection: close" in answer) == (413, True)
    async with connected(served) as wire:
        num_sent = 0
        await wire.send(POST + b"transfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while num_sent < 100:
                await wire.send(b"100000\r\n" + b" " * 2**20 + b"\r\n")
                num_sent += 1
        assert num_sent < 60, "32 MiB and what the sockets hold"


MALFORMED = [
    b"content-length: -5\r\n",
    b"content-length: 5\r\ncontent-length: 6\r\n",
    b"content-length: 0x10\r\n",
    b"content-length: 99\r\ntransfer-encoding: chunked\r\n",
    b"transfer-encoding: gzip, chunked\r\n",
    b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
    b"x" * 70_000 + b": a\r\n",
    b"a: b\r\n" * 20_000,
    b"a\x00b: c\r\n",
    b" folded: at the start\r\n",
]


async def test_the_gateway_refuses_malformed_or_endless_request_heads_and_does_not_log_them(
    served: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for header in MALFORMED:
        async with connected(served) as wire:
            with contextlib.suppress(ConnectionError):
                await wire.send(POST + header)
                await wire.send(b"\r\n" + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
            answer = await wire.rest()
            assert answer == b"" or status(answer) in {400, 431, 501}, (header[:40], answer[:200])
        assert not served.gateway.connections._conversations or not sessions(served), header[:40]
    assert not caplog.records, "a client cannot fill the log"


async def test_the_gateway_accepts_a_trailing_slash_and_percent_escapes_in_paths_but_no_dot_segments(
    served: Any,
) -> None:
    for target in (b"/v1/../v1/models", b"//v1/models", b"/v1/models%00", b"/v1/%6dodels/"):
        async with connected(served) as wire:
            await wire.send(b"GET " + target + b" HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            assert status(await wire.rest()) in ({200} if target.endswith(b"/") else {400, 404}), target


async def test_a_body_shorter_than_its_content_length_times_out_and_surplus_bytes_are_refused(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.bodies._BODY_S", 0.3)
    async with connected(served) as wire:
        await wire.send(POST + b"content-length: %d\r\n\r\n" % (len(BODY) + 10) + BODY)
        answer = await wire.rest(5)
        assert (status(answer), b"connection: close" in answer) == (408, True)
    async with connected(served) as wire:
        await wire.send(POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY + b"and more\r\n\r\n")
        answer = await wire.rest(20)
        assert (status(answer), answer.count(b"HTTP/1.1 ")) == (200, 2)
        assert status(answer[answer.rindex(b"HTTP/1.1 ") :]) == 400
    async with connected(served) as wire:  # and goes away in the middle
        await wire.send(POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY[:10])


async def test_the_gateway_closes_a_connection_whose_first_or_second_request_head_arrives_too_slowly(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.http_server._HEAD_S", 0.4)
    get = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"

    async def drip(wire: Wire) -> None:
        with contextlib.suppress(ConnectionError):
            for byte in b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100:
                await wire.send(bytes([byte]))
                await asyncio.sleep(0.05)

    for first in (b"", get):
        async with connected(served) as wire:
            if first:
                await wire.send(first)
                assert status(await wire.head()) == 200
            dripping = asyncio.create_task(drip(wire))
            begun_s = time.monotonic()
            assert await wire.rest(10) == b""
            assert time.monotonic() - begun_s < 3
            await dripping
    async with connected(served) as wire:  # says nothing at all
        assert await wire.rest(10) == b""
    async with connected(served) as wire:  # is idle between two requests
        await wire.send(get)
        await wire.head()
        await asyncio.sleep(0.8)
        await wire.send(get)
        assert status(await wire.head()) == 200


async def test_pipelined_http_requests_are_answered_in_order_even_behind_a_refused_request(
    served: Any,
) -> None:
    one = POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    async with connected(served) as wire:
        await wire.send(one + b"GET /nothing HTTP/1.1\r\nhost: a\r\n\r\n" + one)
        heads = [status(await wire.head()) for _ in range(3)]
        assert heads == [200, 404, 200]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/nothing", b""),
        ("POST", "/v1/nothing", BODY),
        ("DELETE", CHAT, b""),
        ("POST", CHAT, b"{"),
        ("POST", "/v1/messages", b"{}"),
        ("POST", "/api/pull", BODY),
        ("GET", "/v1/responses/resp_0", b""),
    ],
)
async def test_after_refusing_a_request_whose_body_was_read_the_gateway_leaves_the_connection_open(
    served: Any, method: str, path: str, body: bytes
) -> None:
    async with connected(served) as wire:
        for _ in range(2):
            await wire.send(f"{method} {path} HTTP/1.1\r\nhost: a\r\n".encode())
            await wire.send(b"content-length: %d\r\n\r\n" % len(body))
            await asyncio.sleep(0.02)  # most clients send the body apart
            await wire.send(body)
            head = await wire.head()
            assert (400 <= status(head) < 502, b"connection: close" in head) == (True, False), head


async def test_a_client_that_waits_for_status_100_before_sending_its_body_gets_the_refusal_instead(
    served: Any,
) -> None:
    async with connected(served) as wire:
        head = POST.replace(CHAT.encode(), b"/v1/nothing") + b"content-length: 10\r\nexpect: 100-continue\r\n"
        await wire.send(head + b"\r\n")
        assert status(await wire.rest(5)) == 404


NAMES = [f"{number:07}" for number in range(10_000)]
SAID = {"role": "user", "content": "x"}
CALLS = {"role": "assistant", "tool_calls": [{"id": one, "function": {"name": one}} for one in NAMES]}
NAMELESS = [{"role": "tool", "tool_name": "other", "content": ""} for _ in NAMES]
RESULTS = [{"role": "tool", "tool_call_id": one, "content": ""} for one in NAMES]
ITEMS = [{"type": "function_call", "name": one} for one in NAMES] * 2


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (chat.read, {"messages": [SAID, CALLS, *RESULTS]}),
        (ollama.chat, {"model": "m", "messages": [SAID, CALLS, *NAMELESS]}),
        (responses.read, {"input": [SAID, *ITEMS]}),
    ],
    ids=["chat", "ollama", "responses"],
)
def test_parsing_ten_thousand_tool_calls_takes_under_1_5_s_of_cpu_time(read: Any, body: Any) -> None:
    """The event loop does nothing else meanwhile: no call may be compared or copied once for each other."""
    begun_s = time.thread_time()
    turn = read(json.dumps(body).encode())
    boundaries.chain(turn.messages, turn.options)
    assert time.thread_time() - begun_s < 1.5
