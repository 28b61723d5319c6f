"""The NATS server comes back with an older copy of its files, from a backup or after a power cut."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nats
import pytest
from parts import free_port, nats_server_program

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import decode_result
from turnkeep_client.subjects import SessionKey
from worker.app import WorkerError
from worker.sessions.attempts import Doubt
from worker.wire.consistent_reads import Entry
from worker.wire.intake import Delivery
from worker.wire.undelivered import Undelivered


class Server:
    """A NATS server that can go back in time."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self.options: tuple[str, ...] = ()
        self._store = folder / "store"
        self._copy = folder / "copy"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [nats_server_program(), "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd"]
        self._process = subprocess.Popen(
            [*command, str(self._store), *self.options], stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)

    def copy(self) -> None:
        self.stop()
        shutil.copytree(self._store, self._copy)
        self.start()

    def restore(self, *parts: str) -> None:
        """Put back what was copied: all of it, or these folders of each stream."""
        self.stop()
        streams = sorted((self._copy / "jetstream" / "$G" / "streams").iterdir())
        for source in [one / part for one in streams for part in parts] or [self._copy / "jetstream"]:
            target = self._store / source.relative_to(self._copy)
            shutil.rmtree(target)
            shutil.copytree(source, target)
        self.start()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    one = Server(tmp_path / "nats")
    one.start()
    yield one
    one.stop()


async def asked(client: Any, session: str, text: str) -> Any:
    """Append; what was not answered in time is asked again under the same id."""
    for _ in range(3):
        with contextlib.suppress(TurnkeepError):
            name = text.replace(" ", "-")
            return await client.session(session).append(text=text, request_id=name, timeout_s=8)
    raise AssertionError(f"{text} is not answered")


async def test_a_worker_that_outlives_the_servers_last_entries_answers_from_what_is_left(
    server: Server, local_worker: Callable[..., Awaitable[Any]]
) -> None:
    """New requests get sequences that the worker has read before, and the lost ones are as never asked."""
    worker = await local_worker(nats=server.url, ack_wait_s=1.0)
    first = await asked(worker.client, "s", "kept")
    server.copy()
    for number in range(5):
        lost = await asked(worker.client, "s", f"lost {number}")
    assert lost.position > first.position
    server.restore()
    again = await asked(worker.client, "s", "new")
    assert again.position == first.position + len("new")
    assert (await asked(worker.client, "s", "lost 1")).repeat_of is None
    assert (await worker.client.session("s").info()).position == again.position + len("lost 1")


async def with_a_request(server: Server, local_worker: Callable[..., Awaitable[Any]]) -> str:
    """Copy the server's files while its log has a request that no worker has seen; return the prefix."""
    worker = await local_worker(nats=server.url, ack_wait_s=1.0)
    await asked(worker.client, "other", "first")
    await worker.stop()
    prefix: str = worker.settings.prefix
    nc = await nats.connect(server.url)
    request = b'{"type":"append","id":"a","text":"x"}'
    await nc.jetstream().publish(f"{prefix}.default.s.in", request)
    await nc.close()
    server.copy()
    return prefix


async def test_a_request_whose_result_the_server_lost_is_answered_again(
    server: Server, local_worker: Callable[..., Awaitable[Any]]
) -> None:
    """The consumer's files have its ack, and nothing else is asked of the session."""
    prefix = await with_a_request(server, local_worker)
    worker = await local_worker(nats=server.url, ack_wait_s=1.0, prefix=prefix)
    while not (await worker.client.session("s").info()).position:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)  # until the ack is there
    server.restore("msgs")
    nc = await nats.connect(server.url)
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(nats.js.errors.NotFoundError):
                found = await nc.jetstream().get_last_msg(f"{prefix}_log", f"{prefix}.default.s.out")
                break
            await asyncio.sleep(0.1)
    assert decode_result(found.data or b"").id == "a"
    await nc.close()


async def test_a_result_that_the_server_loses_before_the_request_is_acknowledged_is_stored_again(
    server: Server, local_worker: Callable[..., Awaitable[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's late ack would be the server's last word of the request."""
    prefix = await with_a_request(server, local_worker)
    clear, lost = Doubt.clear, list[Doubt]()

    async def loses(doubt: Doubt) -> None:
        await clear(doubt)
        if not lost and (await worker.client.session("s").info()).position:
            lost.append(doubt)
            server.restore("msgs")
            await asyncio.sleep(3.0)

    async def overlooks(_: Undelivered, server: str) -> str:
        return server

    monkeypatch.setattr(Doubt, "clear", loses)
    monkeypatch.setattr(Undelivered, "_look", overlooks)
    worker = await local_worker(nats=server.url, prefix=prefix)
    async with asyncio.timeout(20):
        while not lost:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        nc = await nats.connect(server.url)
        found = None
        while found is None:
            await asyncio.sleep(0.1)
            with contextlib.suppress(nats.js.errors.NotFoundError):
                found = await nc.jetstream().get_last_msg(f"{prefix}_log", f"{prefix}.default.s.out")
    assert decode_result(found.data or b"").id == "a"
    await nc.close()


async def test_a_returned_delivery_that_never_comes_again_is_looked_for_again() -> None:
    """Another worker may have got it, and died after the only look at what the server has lost."""
    key, rung = SessionKey("t", "s"), list[int]()
    entry = Entry(5, "in", datetime.now(UTC), b"", {})
    returned = [True, False]

    class Log:
        server = "S"

        async def unanswered(self) -> list[SessionKey]:
            return [key]

        async def last(self, *_: Any) -> Entry:
            return entry

    class Returned:
        def expects(self, _: SessionKey, seq: int = 0) -> bool:
            return bool(seq) and (len(returned) > 1 or returned[0])

    class Alone:
        is_first = True

    class All:
        async def wake(self, delivery: Delivery) -> None:
            rung.append(delivery.seq)

    looks = Undelivered(Log(), Returned(), Alone(), All(), ack_wait_s=-1.0)  # type: ignore[arg-type]
    assert await looks._look("S") == ""
    assert not rung
    del returned[0]
    assert await looks._look("S") == "S"
    assert rung == [5]


async def test_a_server_that_comes_back_with_a_smaller_limit_ends_the_worker_with_a_line(
    local_worker: Callable[..., Awaitable[Any]], server: Server, tmp_path: Path
) -> None:
    """Else a long answer would fail at its end, and its tokens be lost."""
    worker = await local_worker(nats=server.url)
    server.stop()
    (tmp_path / "small.conf").write_text("max_payload: 16KB")
    server.options = ("-c", str(tmp_path / "small.conf"))
    server.start()
    async with asyncio.timeout(20):
        with pytest.raises(WorkerError, match=r"at most 16384 bytes; set its max_payload to 262144 or lower"):
            await worker.task
