"""Fixtures: a real nats-server, a scripted worker connected to it, and a client."""

from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
from scripted_worker import FakeWorker

from tests.parts import NatsServer
from turnkeep_client.client import Client, connect


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer(tmp_path / "js")
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def client(server: NatsServer) -> AsyncIterator[Client]:
    async with connect(server.url) as client:
        yield client


@pytest.fixture
async def worker(server: NatsServer) -> AsyncIterator[FakeWorker]:
    async def ignore(error: Exception) -> None:
        """Ignore connection errors, since tests kill the server."""

    connection = await nats.connect(
        server.url, error_cb=ignore, reconnect_time_wait=0.1, max_reconnect_attempts=-1
    )
    worker = FakeWorker(connection)
    await worker.start()
    yield worker
    await worker.stop()
