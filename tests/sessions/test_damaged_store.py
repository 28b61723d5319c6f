"""The disk flips or loses bytes in the NATS server's files, and the server reports this to no client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from ops.log.verifying import verify
from tests.sessions.test_restored_server import Server
from turnkeep_client.calls import expect
from turnkeep_client.client import Client, connect
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.messages import Close, Closed
from turnkeep_client.subjects import SessionKey
from worker.wire import streams

Start = Callable[..., Awaitable[Any]]

TURNS: Final = 12
ALL: Final = SessionKey("*", "*")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    one = Server(tmp_path / "nats")
    one.start()
    yield one
    one.stop()


class Damaged:
    """A log whose file can be damaged. Session `other` has its first and last entries, `hit` all others."""

    def __init__(self, server: Server, prefix: str) -> None:
        self.server = server
        self.prefix = prefix
        self.positions: list[int] = []
        self.stored: dict[int, bytes] = {}
        folder = server._store / "jetstream" / "$G" / "streams" / f"{prefix}_log" / "msgs"
        self.file = folder / "1.blk"

    async def read(self) -> dict[int, bytes]:
        async with await connect(self.server.url, prefix=self.prefix) as client:
            return {one.seq: one.body async for _, one in client.stored.every(ALL)}

    def damage(self, change: Callable[[bytearray], None]) -> None:
        """Change the file while the server is stopped."""
        self.server.stop()
        content = bytearray(self.file.read_bytes())
        change(content)
        self.file.write_bytes(content)
        self.server.start()

    async def check(self, start: Start) -> str:
        """Return the fate of the session `hit`: "diverged", or after which turn it continues.

        Asserts that the server returns no changed entry, and that other sessions are answered rightly.
        """
        left = await self.read()
        assert all(self.stored[seq] == body for seq, body in left.items()), "the server's checksums hold"
        assert len(left) < len(self.stored)
        async with await connect(self.server.url, prefix=self.prefix) as client:
            report = await verify(client)
        worker = await start(nats=self.server.url, prefix=self.prefix, ack_wait_s=1.0)
        client: Client = worker.client
        for name in ("other", "new"):
            answer = await client.session(name).append(text="more", timeout_s=15)
            assert answer.position == {"other": 14, "new": 4}[name]
        damaged = {one.session: one.faults for one in report.damaged}
        assert damaged.keys() <= {"hit"}
        if "hit" in damaged:
            assert {one.seq for one in damaged["hit"]} & (self.stored.keys() - left.keys())
            with pytest.raises(RequestFailedError, match="history_diverged"):
                await client.session("hit").append(text="more", timeout_s=15)
            return "diverged"
        answer = await client.session("hit").append(text="more", timeout_s=15)
        assert answer.position - len("more") in self.positions, "where the session was after one of its turns"
        return f"begins again after {self.positions.index(answer.position - len('more'))} turns"


@pytest.fixture
async def log(server: Server, local_worker: Start) -> Damaged:
    worker = await local_worker(nats=server.url, ack_wait_s=1.0)
    one = Damaged(server, worker.settings.prefix)
    await worker.client.session("other").append(text="first five")
    one.positions = [0]
    for number in range(TURNS):
        text = f"turn {number:03d} " + "x" * 40
        one.positions.append((await worker.client.session("hit").append(text=text)).position)
    one.stored = await one.read()
    await worker.stop()
    return one


@pytest.mark.parametrize("turn", [3, 8])
async def test_a_flipped_bit_in_a_result_stops_only_its_session(
    log: Damaged, local_worker: Start, turn: int
) -> None:
    """The server drops the entry. The session's next request fails, and `--verify` names the entry."""
    mark = b'"position":%d' % log.positions[turn]

    def flip(content: bytearray) -> None:
        assert content.count(mark) >= 1
        content[content.index(mark) + 9] ^= 0x10

    log.damage(flip)
    assert await log.check(local_worker) == "diverged"


async def test_a_damaged_session_can_be_removed_and_its_name_used_again(
    log: Damaged, local_worker: Start
) -> None:
    """The worker does not know all tokens whose KV is to be erased, and says so."""

    def flip(content: bytearray) -> None:
        mark = b'"text":"turn 003'
        content[content.index(mark, content.index(mark) + 1) + 9] ^= 0x10  # that in the result

    log.damage(flip)
    assert await log.check(local_worker) == "diverged"
    async with await connect(log.server.url, prefix=log.prefix) as client:
        session = client.session("hit")
        conflicting = await client.submit(session.key, Close(id="c", forget=True, expect_position=1))
        with pytest.raises(RequestFailedError, match="position_conflict"):
            expect(Closed, await conflicting)
        closed = await session.close(forget=True, timeout_s=15)
        assert (closed.settled, closed.position) == (False, log.positions[-1])
        async with asyncio.timeout(20):
            while any(b"turn 0" in body for body in (await log.read()).values()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await session.open(timeout_s=15)
        assert (await session.append(text="more", timeout_s=15)).position == 4


@pytest.mark.parametrize("how", ["cut", "zeros", "taken out"])
async def test_a_session_continues_after_its_last_turn_before_the_damage_in_the_log_file(
    log: Damaged, local_worker: Start, how: str
) -> None:
    """The server drops the entries after the damage, so its consumer may have passed the next sequences."""

    def change(content: bytearray) -> None:
        middle = content.index(b'"text":"turn 006')
        if how == "cut":
            del content[middle:]
        elif how == "zeros":
            content[middle : middle + 512] = bytes(512)
        else:
            del content[middle : middle + 512]

    log.damage(change)
    assert await log.check(local_worker) == "begins again after 6 turns"


async def test_a_worker_that_is_running_when_the_log_loses_entries_answers_new_requests(
    log: Damaged, local_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_KEEP_S", 0.2)
    worker = await local_worker(nats=log.server.url, prefix=log.prefix, ack_wait_s=1.0)

    def change(content: bytearray) -> None:
        middle = content.index(b'"text":"turn 006')
        del content[middle : middle + 512]

    log.damage(change)
    for name in ("new", "newer", "newest"):
        assert (await worker.client.session(name).append(text="more", timeout_s=15)).position == 4
