"""The NATS server has older or damaged files, or lost a stream: after backups, power cuts, deletions."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import pytest
from parts import NatsServer, until
from raw_wire import Start, append, generate

from cache.names.marks import ErasureNote, Marks, digest_of_name
from ops.log.verifying import verify
from tests.simulation.world import Server as World
from turnkeep_client.calls import expect
from turnkeep_client.client import Client, connect
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.messages import Close, Closed
from turnkeep_client.subjects import CONSUMER, SessionKey, Subjects
from worker.app import WorkerError
from worker.cluster.owners import Owners
from worker.process.concurrency import background
from worker.wire import consistent_reads, streams
from worker.wire.consistent_reads import StoredMessage
from worker.wire.fence import FencedError
from worker.wire.journal import Journal
from worker.wire.undelivered import UndeliveredRequests


@pytest.fixture
def real_server(tmp_path: Path) -> Iterator[NatsServer]:
    one = NatsServer(tmp_path / "nats" / "store")
    one.start()
    yield one
    one.stop()


def lose(world: World, kept: int) -> None:
    """Crash and restart the server, without the log's entries after `kept` but with all acknowledgements."""
    world.crash()
    log = world.jetstream.streams["turnkeep_log"]
    acked = [(one, {**one.pending}) for one in log.consumers.values()]
    log.lose(kept)
    for consumer, pending in acked:
        consumer._next_seq, consumer._again = kept + 1, []
        consumer.pending = {seq: one for seq, one in pending.items() if seq <= kept}
    world.start()


@pytest.mark.simulated
async def test_a_request_that_nats_stored_but_no_longer_delivers_after_a_restart_is_found_and_answered(
    quiet_wire: Start, server: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has lost a result and kept the ack; the session's worker was away when it was looked for."""
    found, is_back, is_elsewhere = asyncio.Event(), asyncio.Event(), Owners.is_elsewhere

    async def late(owners: Owners, key: SessionKey) -> bool:
        found.set()
        await is_back.wait()
        return await is_elsewhere(owners, key)

    monkeypatch.setattr(Owners, "is_elsewhere", late)
    first = await quiet_wire(worker="first", ack_wait_s=1.0)
    await first.send("s", append("a"))
    second = await quiet_wire(worker="second", ack_wait_s=1.0)
    await first.worker.stop()
    asked = await second.publish("s", append("b"))
    await second.result(asked)
    await asyncio.sleep(1.0)  # until the ack is there
    lose(server, asked)
    await asyncio.wait_for(found.wait(), 20)
    await quiet_wire(worker="first", ack_wait_s=1.0)
    await asyncio.sleep(5.0)  # it has taken over all sessions that no worker is at work on
    is_back.set()
    await until(lambda: len(server.jetstream.streams["turnkeep_log"].matching("turnkeep.default.s.out")) >= 2)


@pytest.mark.simulated
@pytest.mark.parametrize("when", ["while it runs", "before it starts", "between two reads"])
async def test_a_logged_erase_order_is_carried_out_even_if_it_reuses_the_log_sequence_of_a_lost_order(
    quiet_wire: Start, server: World, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A worker, or its directory, had carried out the lost one."""
    w = await quiet_wire()
    await w.send("s", append("a"))
    disk, log = w.worker.app._disk, server.jetstream.streams["turnkeep_log"]
    kept, key, look = log.last_seq, SessionKey("default", "s"), w.worker.app._parts.erasures._look

    def forgotten(*tenants: str) -> None:  # by another worker
        for tenant in tenants:
            note = ErasureNote(digest_of_name(f"{tenant}/s"), Marks.of(tenant, disk[key].packed()))
            server.handle(Subjects().erased(tenant), "", msgspec.json.encode(note), None)

    async def loses() -> None:
        lose(server, kept)
        forgotten("default", "another", "another")
        await asyncio.sleep(1.0)  # until the worker is connected again

    async def reads(journal: Journal, after: int) -> tuple[list[StoredMessage], int]:
        found = await read(journal, after)
        if found[1] and not server.life:
            await loses()
        return found

    forgotten("another", "another")
    if when == "between two reads":
        read = Journal.erasure_notes
        monkeypatch.setattr(Journal, "erasure_notes", reads)
        monkeypatch.setattr(consistent_reads, "_BATCH", 1)
        await look(lambda _: set())
    else:
        await look(lambda _: set())
        if when == "before it starts":
            await w.worker.stop()
        await loses()
        await (quiet_wire() if when == "before it starts" else look(lambda _: set()))
    assert server.life == 1
    assert key not in disk


async def test_after_each_nats_restart_undelivered_requests_are_searched_for_until_a_search_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, searched = SimpleNamespace(server="S"), list[str]()

    async def look(_: UndeliveredRequests, server: str) -> str:
        searched.append(server)
        if len(searched) == 1:
            raise OSError
        return server if len(searched) in (3, 4) else ""

    monkeypatch.setattr(UndeliveredRequests, "_look", look)
    parts: Any = log, None, None, lambda: True
    async with background(UndeliveredRequests(*parts, ack_wait_s=-0.99).run):
        await asyncio.sleep(0.2)
        log.server = "T"
        await asyncio.sleep(0.2)
    assert searched == ["S", "S", "S", "T"]


@pytest.mark.parametrize(
    ("after", "comes_back", "is_stored"),
    [(0, "same", True), (0, "other", False), (0, "same, without the request", False), (1, "other", False)],
    ids=["same server", "other server", "without the request", "other server after a result"],
)
async def test_a_result_computed_during_a_nats_outage_is_stored_only_if_the_log_still_has_its_request(
    after: int, comes_back: str, is_stored: bool
) -> None:
    """Another worker may have removed the session meanwhile, and the server may have lost its end."""
    stored: list[bytes] = []

    async def publish(_: str, body: bytes, **__: Any) -> Any:
        stored.append(body)
        return SimpleNamespace(seq=2)

    async def entry(_: int) -> Any:
        return None if nc.is_connected and "without" in comes_back else SimpleNamespace()

    js = SimpleNamespace(publish=publish)
    nc: Any = SimpleNamespace(is_connected=False, _server_info={"server_id": "S"}, jetstream=lambda: js)
    journal = Journal(nc, Subjects())
    journal.entry = entry  # type: ignore[method-assign]
    body = b'{"type":"failed","id":"a","seq":1,"code":"internal","message":"","retryable":false}'
    commit = asyncio.create_task(journal.commit(SessionKey("t", "s"), body, after, {}, server="S"))
    await asyncio.sleep(0.05)
    nc.is_connected, nc._server_info = True, {"server_id": "T" if comes_back == "other" else "S"}
    with contextlib.nullcontext() if is_stored else pytest.raises(FencedError):
        await commit
    assert len(stored) == is_stored


async def test_a_worker_exits_with_an_error_if_the_nats_server_returns_with_a_smaller_message_limit(
    local_worker: Callable[..., Awaitable[Any]], real_server: NatsServer, tmp_path: Path
) -> None:
    """Otherwise the result of a long answer could not be stored, and the answer would be lost."""
    worker = await local_worker(nats=real_server.url)
    real_server.stop()
    (tmp_path / "small.conf").write_text("max_payload: 16KB")
    real_server.options = ("-c", str(tmp_path / "small.conf"))
    real_server.start()
    async with asyncio.timeout(20):
        with pytest.raises(WorkerError, match=r"at most 16384 bytes; set its max_payload to 262144 or lower"):
            await worker.task


@pytest.mark.simulated
async def test_a_worker_starts_although_jetstream_does_not_answer_for_12_seconds_at_any_step_of_the_start(
    quiet_wire: Start, server: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NATS server that was killed first reads its files. The silence begins later in each start."""
    num_left, is_out = 0, server._is_out

    def counted(reply: str) -> bool:
        nonlocal num_left
        num_left -= 1
        if not num_left:
            server.faults.silent_until_s = server.loop.time() + 12.0
        return is_out(reply)

    monkeypatch.setattr(server, "_is_out", counted)
    for step in range(1, 40):
        num_left = step
        w = await quiet_wire(prefix=f"p{step}")
        if num_left > 0:
            break
        await asyncio.sleep(12.0)
        await w.send("s", append("a"))
        await w.worker.stop()
    assert step > 10


TURNS: Final = 12
ALL: Final = SessionKey("*", "*")


class Damaged:
    """A log whose file can be damaged. Session `other` has its first and last entries, `hit` all others."""

    def __init__(self, server: NatsServer, prefix: str) -> None:
        self.server = server
        self.prefix = prefix
        self.positions: list[int] = []
        self.stored: dict[int, bytes] = {}
        folder = server.store / "jetstream" / "$G" / "streams" / f"{prefix}_log" / "msgs"
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
async def log(real_server: NatsServer, local_worker: Start) -> Damaged:
    worker = await local_worker(nats=real_server.url, ack_wait_s=1.0)
    one = Damaged(real_server, worker.settings.prefix)
    await worker.client.session("other").append(text="first five")
    one.positions = [0]
    for number in range(TURNS):
        text = f"turn {number:03d} " + "x" * 40
        one.positions.append((await worker.client.session("hit").append(text=text)).position)
    one.stored = await one.read()
    await worker.stop()
    return one


async def test_a_session_damaged_in_the_log_can_be_removed_and_its_name_used_again(
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


async def test_after_damage_to_the_log_file_a_session_has_exactly_its_turns_before_the_damage(
    log: Damaged, local_worker: Start
) -> None:
    """The server drops the entries after the damage, so its consumer may have passed the next sequences."""

    def change(content: bytearray) -> None:
        middle = content.index(b'"text":"turn 006')
        content[middle : middle + 512] = bytes(512)

    log.damage(change)
    assert await log.check(local_worker) == "begins again after 6 turns"


async def test_a_worker_that_runs_while_the_log_loses_entries_still_answers_new_requests(
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


@pytest.mark.parametrize("what", ["consumer", "token stream"])
async def test_a_worker_creates_a_deleted_nats_consumer_or_token_stream_again(
    wire: Start, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(streams, "_KEEP_S", 0.1)
    w = await wire()
    first = await w.send("s", generate("a", text="one", max_tokens=2))
    if what == "consumer":
        await w.js.delete_consumer(f"{w.prefix}_log", CONSUMER)
    else:
        await w.js.delete_stream(f"{w.prefix}_tok")
    await asyncio.sleep(0.5)
    second = await w.send("s", generate("b", text="two", max_tokens=2))
    assert second["position"] == first["position"] + 5
