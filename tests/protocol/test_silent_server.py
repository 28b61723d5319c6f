"""A NATS server whose machine or network fails: the connection stays, and nothing comes or goes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from scripted_worker import FakeWorker, NatsServer

from turnkeep_client import nats_client
from turnkeep_client.client import connect
from turnkeep_client.errors import ClientClosedError


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
async def test_requests_go_another_way_soon_after_a_server_has_fallen_silent(
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


async def test_a_client_closes_although_its_server_has_fallen_silent(
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
