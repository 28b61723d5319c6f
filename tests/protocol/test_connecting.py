"""Clients connect to slow servers, leave silent ones, and stop reconnecting when they are closed."""

import asyncio
import contextlib
import errno
import gc
import json
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import anyio
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from nats.aio.client import Client
from scripted_worker import TEXTS, FakeWorker

from tests.parts import NatsServer, free_port, until
from turnkeep_client import nats_client, wire
from turnkeep_client.client import connect
from turnkeep_client.errors import ClientClosedError, NoServerError, ResultTimeoutError
from turnkeep_client.nats_client import Nats

INFO = b'INFO {"server_id":"A","version":"2.15.0","headers":true,"max_payload":1048576}\r\n'


class SlowServer:
    """A server that knows just enough of the NATS protocol to accept a connection.

    It sends `before` before each PONG.
    """

    def __init__(self) -> None:
        self.before = b""
        self.got: list[bytes] = []
        self.url = ""
        self.ended = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(INFO)
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self.got.append(line)
                if line == b"PING\r\n":
                    writer.write(self.before + b"PONG\r\n")
            writer.close()
            await writer.wait_closed()
        self.ended.set()


@pytest.fixture
async def slow_server() -> AsyncIterator[SlowServer]:
    server = SlowServer()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        server.url = f"nats://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        yield server


_PIECES = st.sampled_from([b"Name", b"a", b":", b" ", b"\r\n", b"\n", b"\t", b"\x1c", b"\xff", b"\xc3\xa4"])


@given(st.lists(_PIECES).map(b"".join))
@example(b"a: \xff\r\n")
def test_nats_message_headers_are_parsed_as_by_nats_py(raw: bytes) -> None:
    assert Nats._parse_header_lines(raw) == Client._parse_header_lines(raw)


@pytest.mark.parametrize("before", [b"PING\r\n", INFO, INFO + b"PING\r\nPING\r\n"])
async def test_a_client_still_sends_after_the_nats_server_sent_ping_or_info_before_its_first_pong(
    slow_server: SlowServer, before: bytes
) -> None:
    """A server may send INFO at any time, and PING one second after the connection began."""
    slow_server.before = before
    nc = Nats()
    await nc.connect(slow_server.url, allow_reconnect=False)
    is_connected = nc.is_connected
    await nc.publish("subject", b"body")
    await nc.close()
    assert is_connected
    async with asyncio.timeout(20):
        await slow_server.ended.wait()
    assert b"body\r\n" in slow_server.got
    assert slow_server.got.count(b"PONG\r\n") == before.count(b"PING")


async def test_closing_a_client_while_it_reconnects_ends_its_reconnection_task(
    slow_server: SlowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wait_for` of Python 3.11 loses a cancel if the awaited call fails at the same moment."""

    async def refused_just_then(self: Client, server: object) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ConnectionRefusedError from None

    nc = Nats()
    await nc.connect(slow_server.url, reconnect_time_wait=0.01, max_reconnect_attempts=-1)
    monkeypatch.setattr(Client, "_connect_to_server", refused_just_then)
    transport: Any = nc._transport
    transport.close()
    await asyncio.sleep(0.1)
    task = nc._reconnection_task
    assert task is not None
    await nc.close()
    done, _ = await asyncio.wait([task], timeout=5)
    assert done


async def test_a_client_call_to_a_worker_fails_soon_after_nats_is_lost_even_with_a_long_timeout(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands and gateways give a worker a minute, as it may have to load its model first."""
    monkeypatch.setattr(wire, "_LOST_S", 0.5)
    async with connect(server.url, control_timeout_s=600.0) as client:
        server.kill()
        async with asyncio.timeout(60):
            with pytest.raises(NoServerError):
                await client.session("s").info()
            with pytest.raises(NoServerError):
                await client.embed(["text"], timeout_s=600.0)


async def test_using_a_client_in_another_event_loop_raises_an_error_at_once_and_does_not_disturb_its_own_loop(
    server: NatsServer, worker: FakeWorker
) -> None:
    """Programs without asyncio call `asyncio.run` more than once, or in several threads."""

    def in_another_loop(call: Callable[[], Coroutine[Any, Any, object]]) -> None:
        with pytest.raises(RuntimeError, match="another event loop: connect in this one too"):
            asyncio.run(call())

    async with connect(server.url) as client:
        session = client.session("s1")

        async def generated() -> str:
            return (await session.generate(text="x", timeout_s=60)).text

        for call in (generated, session.info, session.history, client.sessions):
            await asyncio.to_thread(in_another_loop, call)
        assert await generated() == "".join(TEXTS)


async def test_a_connection_that_failed_or_was_closed_opens_when_it_is_awaited_or_entered_again(
    server: NatsServer, worker: FakeWorker
) -> None:
    server.kill()
    connection = connect(server.url)
    with pytest.raises(NoServerError):
        await connection
    server.start()
    for _ in range(2):
        async with connection as client:
            assert (await client.session("s1").generate(text="x", timeout_s=60)).text == "".join(TEXTS)


async def test_a_client_is_closed_when_a_cancelled_anyio_scope_leaves_the_clients_async_with_block(
    server: NatsServer, worker: FakeWorker
) -> None:
    with anyio.CancelScope() as scope:
        async with connect(server.url) as client:
            await client.session("s1").generate(text="x", timeout_s=60)
            scope.cancel()
            await asyncio.sleep(60)
    assert scope.cancelled_caught
    assert client.closed


async def test_a_program_that_ends_without_closing_its_client_leaves_no_pending_task(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def program() -> None:
        assert (await connect(server.url)).connected

    with warnings.catch_warnings(action="ignore", category=ResourceWarning):  # its socket is not closed
        await asyncio.to_thread(lambda: asyncio.run(program()))
        gc.collect()
    assert [one.getMessage() for one in caplog.records if one.levelname == "ERROR"] == []


async def test_connecting_to_a_nats_server_at_its_connection_limit_raises_an_error_that_says_so(
    tmp_path: Path,
) -> None:
    """The server says so behind its greeting and hangs up: what the client sends then fails, by EPIPE."""
    (tmp_path / "full.conf").write_text("max_connections: 1")
    server = NatsServer(tmp_path / "store", ("-c", str(tmp_path / "full.conf")))
    server.start()
    try:
        async with connect(server.url):
            for _ in range(10):
                with pytest.raises(NoServerError, match=r"maximum connections exceeded|has none left"):
                    await connect(server.url, connect_timeout_s=0.3)
    finally:
        server.stop()


async def test_client_calls_that_end_during_a_nats_outage_leave_no_subscription_after_the_reconnect(
    tmp_path: Path,
) -> None:
    """Each would get a copy of all that comes later, and counts towards the account's limit."""
    port = free_port()
    server = NatsServer(tmp_path, ("-m", str(port)))

    def subscribed() -> list[str]:
        with urlopen(f"http://127.0.0.1:{port}/connz?subs=1") as answer:
            (one,) = json.load(answer)["connections"]
        return [subject for subject in one.get("subscriptions_list", []) if subject.startswith("turnkeep")]

    server.start()
    async with connect(server.url) as client:
        server.kill()
        for _ in range(3):
            with pytest.raises(ResultTimeoutError):
                async for _ in client.session("s1").generate(text="a", timeout_s=0.1):
                    pass
        kept = await client._wire.listen("turnkeep.kept", lambda _: None)
        server.start()
        await until(lambda: client.connected)
        await client._wire._nats.flush()
        assert await asyncio.to_thread(subscribed) == ["turnkeep.kept"]
        await kept()
    server.kill()


@pytest.mark.parametrize("url", ["nats://127.0.0.1:69983", "nats://"])
async def test_connecting_to_a_nats_url_without_a_valid_host_and_port_raises_an_error_with_the_url(
    url: str,
) -> None:
    with pytest.raises(NoServerError, match=f"no NATS server at {url}"):
        await connect(url)


@pytest.mark.parametrize(("platform", "is_named"), [("darwin", True), ("linux", False)])
def test_the_error_for_an_unreachable_host_names_the_local_network_permission_only_on_macos(
    monkeypatch: pytest.MonkeyPatch, platform: str, is_named: bool
) -> None:
    monkeypatch.setattr(nats_client.sys, "platform", platform)
    why = nats_client.unreachable(OSError(errno.EHOSTUNREACH, ""))
    assert why is not None
    assert why.startswith("no route to host")
    assert ("Local Network" in why) == is_named


class SilentServer(SlowServer):
    """A server that greets its first connection, and says nothing to later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.num_begun = 0
        self.num_open = 0
        self.num_left = 0  # connections that the client has left open

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_begun += 1
        self.num_open += 1
        if self.num_begun == 1:
            await super().serve(reader, writer)
        else:
            try:
                async with asyncio.timeout(5):
                    await reader.read()
            except TimeoutError:
                self.num_left += 1
            except ConnectionError:
                pass
            writer.close()
        self.num_open -= 1


@pytest.fixture
async def silent_server() -> AsyncIterator[SilentServer]:
    server = SilentServer()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        server.url = f"nats://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        yield server


async def test_a_client_that_reconnects_closes_each_connection_on_which_the_server_says_nothing(
    silent_server: SilentServer,
) -> None:
    """As to a server that is suspended: its system accepts connections, and nobody reads them."""
    nc = Nats()
    await nc.connect(silent_server.url, connect_timeout=0.1, reconnect_time_wait=0.01)
    transport: Any = nc._transport
    transport.close()
    await until(lambda: silent_server.num_begun > 4)
    await nc.abandon()
    await until(lambda: silent_server.num_open == 0)
    assert silent_server.num_left == 0


class Passage:
    """Passes connections' bytes on to a server. After `fall_silent` only later connections are passed on."""

    def __init__(self, port: int) -> None:
        self.url = ""
        self._port = port
        self._open: list[asyncio.Event] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._port)
        passes = asyncio.Event()
        passes.set()
        self._open.append(passes)
        self._writers += [writer, other_writer]
        for source, target in ((reader, other_writer), (other_reader, writer)):
            self._tasks.append(asyncio.create_task(self._pass(source, target, passes)))

    async def _pass(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, passes: asyncio.Event
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while body := await source.read(2**16):
                await passes.wait()
                target.write(body)
                await target.drain()
        await passes.wait()
        target.close()

    def fall_silent(self) -> None:
        for one in self._open:
            one.clear()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(
            *self._tasks, *(one.wait_closed() for one in self._writers), return_exceptions=True
        )


@pytest.fixture
async def passage(server: NatsServer) -> AsyncIterator[Passage]:
    made = Passage(server.port)
    async with await asyncio.start_server(made.serve, "127.0.0.1", 0) as listening:
        made.url = f"nats://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        yield made
        await made.end()


@pytest.mark.parametrize("size", [10, 500_000])
async def test_a_client_opens_a_new_connection_soon_after_its_nats_server_stops_responding(
    passage: Passage, worker: FakeWorker, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the connection still has bytes to write."""
    monkeypatch.setattr(nats_client, "PING_S", 0.3)
    async with connect(passage.url) as client:
        session = client.session("s1")
        await session.append(text="a")
        passage.fall_silent()
        async with asyncio.timeout(20):
            await asyncio.gather(*(session.append(text="b" * size) for _ in range(20)))


async def test_a_client_can_be_closed_while_its_nats_server_does_not_respond(
    passage: Passage, worker: FakeWorker
) -> None:
    client = await connect(passage.url)
    await client.session("s1").append(text="a")
    passage.fall_silent()
    asking = [asyncio.create_task(client.session("s1").append(text="b" * 500_000)) for _ in range(20)]
    await asyncio.sleep(0.5)
    async with asyncio.timeout(20):
        await client.close()
    for one in asking:
        with pytest.raises(ClientClosedError):
            await one
