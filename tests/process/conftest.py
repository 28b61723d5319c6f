"""Fixtures for a worker's surroundings: free ports, a data directory, embedded and external NATS servers."""

import asyncio
import contextlib
import json
import subprocess

import pytest

from tests import parts
from worker.process.datadir import DataDir
from worker.process.settings import Settings
from worker.wire.broker import EmbeddedServer, find_server


@pytest.fixture
def free_port():
    return parts.free_port()


@pytest.fixture
def settings(tmp_path, free_port):
    return Settings(data_dir=tmp_path / "data", nats_port=free_port, log_max_bytes=2**26)


@pytest.fixture
def directory(settings):
    with DataDir.open(settings.data_dir, "test") as opened:
        yield opened


class Supervised(EmbeddedServer):
    """An embedded server, with the task in which a worker restarts it if it dies."""

    _task = None

    async def start(self):
        await super().start()
        self._task = self._task or asyncio.create_task(self.supervise())

    async def stop(self):
        while self._task not in {None, asyncio.current_task()} and not self._task.done():
            self._task.cancel()  # nats-py may lose one; a worker's group cancels again too
            await asyncio.wait([self._task], timeout=1)
        await super().stop()


@pytest.fixture
async def embed():
    """Yield a function that makes embedded servers, which are stopped after the test."""
    servers = []

    def make(directory, settings):
        servers.append(Supervised(directory, settings))
        return servers[-1]

    yield make
    for server in servers:
        await server.stop()


@pytest.fixture
def server(embed, directory, settings):
    return embed(directory, settings)


@pytest.fixture
async def foreign_server(tmp_path, free_port):
    """Yield a function that starts an external nats-server with a configuration, and returns its URL."""
    processes = []

    async def start(**config):
        file = tmp_path / "foreign.conf"
        file.write_text(json.dumps({"listen": f"127.0.0.1:{free_port}"} | config))
        processes.append(subprocess.Popen([find_server(), "-c", file], stderr=subprocess.DEVNULL))  # noqa: ASYNC220
        for _ in range(200):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", free_port)
                writer.close()
                return f"nats://127.0.0.1:{free_port}"
            await asyncio.sleep(0.05)
        raise AssertionError("the server did not start")

    start.processes = processes
    yield start
    for process in processes:
        process.kill()
        process.wait()
