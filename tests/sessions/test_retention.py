"""Closed sessions are removed from the log after a time, forgotten sessions at once, open sessions never."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from nats.js.errors import NotFoundError
from raw_wire import LONG, Start, Wire, append, generate

from cache.names.marks import ErasureProgress
from tests.parts import fall_asleep, until
from tests.simulation import device
from tests.simulation.world import Server
from turnkeep_client.checkpoints import CheckpointMessage, Link, digest
from turnkeep_client.log import PARTS_HEADER
from turnkeep_client.messages import (
    Append,
    Asked,
    Close,
    Closed,
    Generated,
    Seconds,
    Usage,
    encode,
    encode_answer,
    failure,
)
from turnkeep_client.subjects import SessionKey
from worker.sessions import record, sessions
from worker.sessions.dead_letters import RequestAttempts
from worker.sessions.session import ServedSession
from worker.wire import chunks, consistent_reads, erasures, journal, overwriting, retention
from worker.wire.consistent_reads import StoredMessage
from worker.wire.fence import FencedError
from worker.wire.journal import Journal, Queue
from worker.wire.retention import Retention
from worker.wire.synced import SyncedEntries

pytestmark = pytest.mark.simulated

CLOSE = {"type": "close", "id": "c"}
FORGET = {"type": "close", "id": "c", "forget": True}


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_PERIOD_S", 0.05)
    monkeypatch.setattr(retention, "_LAST_S", 0.0)


@pytest.fixture
def filling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let answered requests leave the log."""
    monkeypatch.setattr(retention, "_FILLING", 0.0)


@pytest.fixture
def late_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a second pass between the note of a close and its result."""
    note_close = Retention.note_close

    async def slowly(keeper: Retention, key: SessionKey, seq: int, *, forget: bool) -> int | None:
        number = await note_close(keeper, key, seq, forget=forget)
        await asyncio.sleep(1)
        return number

    monkeypatch.setattr(Retention, "note_close", slowly)


async def bodies(w: Wire, session: str) -> dict[str, list[bytes]]:
    """Return the bodies of a session's entries in the log, by kind."""
    found: dict[str, list[bytes]] = {}
    info = await w.js.stream_info(f"{w.prefix}_log")
    for seq in range(max(info.state.first_seq, 1), info.state.last_seq + 1):
        try:
            message = await w.js.get_msg(f"{w.prefix}_log", seq)
        except NotFoundError:
            continue
        *_, name, kind = str(message.subject).split(".")
        if name == session:
            found.setdefault(kind, []).append(message.data or b"")
    return found


async def streamed(w: Wire) -> dict[str, set[int]]:
    """Return the sequences of the requests whose chunks the token stream has, by their ids."""
    found: dict[str, set[int]] = {}
    stream = f"{w.prefix}_tok"
    for seq in range(1, (await w.js.stream_info(stream)).state.last_seq + 1):
        with contextlib.suppress(NotFoundError):
            message = await w.js.get_msg(stream, seq)
            if message.data:
                name = str(message.subject).rpartition(".")[2]
                found.setdefault(name, set()).add(json.loads(message.data)["seq"])
    return found


async def until_streamed(w: Wire, wanted: dict[str, set[int]]) -> None:
    """Wait until the token stream has the chunks of these requests, and no others."""
    for _ in range(400):
        if (found := await streamed(w)) == wanted:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(found)


async def until_gone(w: Wire, session: str, *, text: bytes) -> dict[str, list[bytes]]:
    async with asyncio.timeout(20):
        while True:
            found = await bodies(w, session)
            if not any(text in body for kind in found.values() for body in kind):
                return found
            await asyncio.sleep(0.05)


async def until_left(
    w: Wire, session: str, requests: list[str], results: list[str]
) -> dict[str, list[bytes]]:
    """Wait until the log has only these requests and results of a session; return its entries by kind."""
    left = {"in": requests, "out": results}
    for _ in range(400):
        found = await bodies(w, session)
        ids = {kind: [json.loads(body)["id"] for body in found.get(kind, ())] for kind in left}
        if ids == left and "checkpoint" not in found:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError((ids, sorted(found)))


async def test_a_closed_session_is_removed_from_the_log_after_its_time_to_live_and_an_open_session_stays(
    quiet_wire: Start,
) -> None:
    w = await quiet_wire(closed_ttl_s=0.5)
    for name in ("closed", "open"):
        await w.send(name, append("a", "hello"))
    await w.send("closed", CLOSE)
    assert "in" in await bodies(w, "closed")
    assert await until_gone(w, "closed", text=b"") == {}
    assert len((await bodies(w, "open"))["in"]) == 1
    assert (await w.send("open", append("b")))["position"] == 10
    assert (await w.send("closed", {"type": "open", "id": "a"}))["type"] == "opened"
    assert (await w.send("closed", append("b")))["position"] == 5


async def test_a_worker_that_missed_a_close_cannot_store_a_result_after_the_removal_of_the_session(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the close's result, the last result that the worker knows would be the log's last again."""
    monkeypatch.setattr(retention, "_LAST_S", 900.0)
    w = await quiet_wire(closed_ttl_s=0.0)
    await w.publish("s", append("a", "a secret"))
    running = await w.publish("s", generate("g", **LONG))
    closing = await w.publish("s", CLOSE)
    waiting = await w.publish("s", append("b", "second life"))
    for name, seq in (("b", waiting), ("g", running)):
        await w.control("s", {"type": "cancel", "id": name})
        await w.result(seq)
    assert (await w.result(closing))["type"] == "closed"
    await until_left(w, "s", ["c", "b"], ["b", "c"])
    assert b"a secret" not in b"".join((await bodies(w, "s"))["in"])
    other = Journal(w.nc, w.worker.app._subjects)
    late = encode(failure("c", "internal", "a worker that was stopped since", seq=closing))
    for known in range(closing + 3):
        with pytest.raises(FencedError):
            await other.commit(SessionKey("default", "s"), late, known, {}, server=other.server)
    monkeypatch.setattr(retention, "_LAST_S", 0.0)
    assert await until_gone(w, "s", text=b"") == {}


async def test_a_closed_session_stays_in_the_log_for_its_time_to_live_even_if_the_workers_clock_is_ahead(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How old an entry is, the server's clock says."""
    w = await quiet_wire(closed_ttl_s=86400.0)
    await w.send("s", append("a", "hello"))
    await w.send("s", CLOSE)
    fall_asleep(monkeypatch, 100 * 86400.0)
    await asyncio.sleep(2.0)
    assert "in" in await bodies(w, "s")


@pytest.mark.parametrize("last_seq", [7, 11])
async def test_entries_at_the_new_end_of_a_shortened_log_are_no_longer_treated_as_synced_to_disk(
    last_seq: int,
) -> None:
    """Also if the worker is connected to another node of a cluster than the one that was restarted."""

    class Log:
        server, last_seq = "a", 10

        async def end(self) -> tuple[int, int]:
            return 0, self.last_seq

    log: Any = Log()
    synced = SyncedEntries(log, 0.01)
    await synced.look()
    await asyncio.sleep(0.02)
    log.last_seq = 12
    await synced.look()
    assert synced.has(10)
    log.last_seq = last_seq
    await synced.look()
    assert not synced.has(10)


async def test_close_with_forget_removes_a_session_from_the_log_by_exactly_one_deletion(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its note stays as long as that of any closed session, and is the log's first one."""
    remove, removed = Retention._remove_before, list[str]()

    async def counted(keeper: Retention, key: SessionKey, *note: Any) -> None:
        removed.append(key.session)
        await remove(keeper, key, *note)

    monkeypatch.setattr(Retention, "_remove_before", counted)
    w = await quiet_wire()
    for name in ("first", "second"):
        await w.send(name, append("a"))
        assert (await w.send(name, FORGET))["removed_entries"] == 2
    await asyncio.sleep(1)
    assert removed == ["first", "second"]


async def test_close_with_forget_removes_the_requests_of_a_session_even_if_all_those_requests_had_failed(
    quiet_wire: Start,
) -> None:
    w = await quiet_wire()
    assert (await w.send("s", {"type": "rewind", "id": "a secret", "position": 0}))["type"] == "failed"
    assert (await w.send("s", FORGET))["type"] == "closed"
    await until_left(w, "s", ["c"], ["c"])


async def test_a_failed_deletion_after_close_with_forget_is_repeated_later_and_delays_no_other_session(
    quiet_wire: Start, server: Server
) -> None:
    """A delete that fails, as on a full disk, has the error code of one that finds no message."""
    server.faults.undeletable = ".bad."
    w = await quiet_wire()
    for name in ("bad", "s"):
        await w.send(name, append("a", "a secret"))
        await w.send(name, FORGET)
    await until_gone(w, "s", text=b"secret")
    assert b"secret" in b"".join((await bodies(w, "bad"))["in"])
    server.faults.undeletable = ""
    await until_gone(w, "bad", text=b"secret")


@pytest.mark.usefixtures("late_results")
async def test_a_session_is_removed_even_if_the_result_of_its_close_with_forget_is_stored_an_hour_late(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the log was full for so long, or the worker's clock was ahead."""
    monkeypatch.setattr(retention, "_STALE_S", 0.0)
    w = await quiet_wire()
    await w.send("s", append("a", "a secret"))
    await w.send("s", FORGET)
    await until_gone(w, "s", text=b"secret")


@pytest.mark.parametrize("num_deleted", [0, 1, 2, 4, 8])
async def test_forgetting_a_session_that_a_kill_interrupts_at_any_point_is_completed_by_the_next_worker(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch, num_deleted: int
) -> None:
    """Until then the next worker serves the next session of this name, and reuses an id."""
    with monkeypatch.context() as patched:
        patched.setattr(record, "_CHECKPOINT_EVERY", 2)
        patched.setattr(Retention, "wake", lambda _: None)
        patched.setattr(retention, "_PERIOD_S", 60.0)
        w = await quiet_wire()
        for name in "abxy":
            await w.send("s", append(name, "a secret"))
        await w.send("s", generate("g", text="a secret"))
        await w.send("s", FORGET)
        w.worker.process.kill()
    delete, deleted, crashed = overwriting.overwrite, list[int](), asyncio.Event()

    async def crashes(js: Any, stream: str, seq: int) -> None:
        if len(deleted) == num_deleted:
            crashed.set()
            await asyncio.Event().wait()
        deleted.append(seq)
        await delete(js, stream, seq)

    with monkeypatch.context() as patched:
        for module in (journal, chunks):
            patched.setattr(module, "overwrite", crashes)
        w = await quiet_wire()
        await asyncio.wait_for(crashed.wait(), 20)
        w.worker.process.kill()
        w = await quiet_wire()
        assert (await w.send("s", append("z")))["code"] == "unknown_session"
        await w.send("s", {"type": "open", "id": "o"})
        again = await w.send("s", append("b", "second life"))
        assert (again["type"], again["position"]) == ("appended", 11)
        w.worker.process.kill()
        w = await quiet_wire()
        assert (await w.send("s", append("e")))["position"] == 16
        w.worker.process.kill()
    w = await quiet_wire()
    left = ["c", "z", "o", "b", "e"]
    assert b"secret" not in b"".join(itertools.chain(*(await until_left(w, "s", left, left)).values()))
    await until_streamed(w, {})


@pytest.mark.parametrize("num_removed", range(7))
async def test_a_closed_session_whose_removal_was_interrupted_by_a_kill_at_any_point_stays_closed(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch, num_removed: int
) -> None:
    """Results that were stored behind the request of the close leave the log later than those before it."""
    monkeypatch.setattr(retention, "_LAST_S", 900.0)
    w = await quiet_wire(closed_ttl_s=None)
    await w.send("s", append("a"))
    await w.publish("s", generate("g", **LONG))
    await w.publish("s", append("b"))
    closing = await w.publish("s", CLOSE)
    await w.control("s", {"type": "cancel", "id": "g"})
    await w.result(closing)
    w.worker.process.kill()
    num, crashed = 0, asyncio.Event()

    async def crashes(log: Journal, remove: Any, *what: Any, **how: Any) -> None:
        nonlocal num
        if num == num_removed:
            crashed.set()
            await asyncio.Event().wait()
        num += 1
        await remove(log, *what, **how)

    with monkeypatch.context() as patched:
        for removal in (Journal.remove, Journal.delete):
            patched.setattr(Journal, removal.__name__, partialmethod(crashes, removal))
        w = await quiet_wire(closed_ttl_s=0.0)
        await asyncio.wait_for(crashed.wait(), 20)
        w.worker.process.kill()
    w = await quiet_wire(closed_ttl_s=None)
    assert (await w.send("s", append("late")))["code"] == "unknown_session"
    assert (await w.send("s", {"type": "open", "id": "o"}))["type"] == "opened"


@pytest.mark.parametrize("forged", [b"forget", b""])
async def test_a_forged_log_entry_of_a_close_removes_no_session_from_the_log(
    quiet_wire: Start, forged: bytes
) -> None:
    """An open session, and one that was closed without `forget`, keep their entries."""
    w = await quiet_wire(closed_ttl_s=None if forged else 0)
    for name in ("open", "closed"):
        await w.send(name, append("a", "hello"))
        await w.js.publish(w.subject(name, "closed"), forged)
        await w.send(name, append("b", "more"))
    if forged:
        await w.js.publish(w.subject("closed", "closed"), forged)
        await w.send("closed", CLOSE)
    await asyncio.sleep(0.5)
    for name in ("open", "closed"):
        assert b"hello" in b"".join((await bodies(w, name))["in"])


@pytest.mark.parametrize("closed_ttl_s", [None, 0.0])
async def test_a_close_logged_twice_because_of_a_crash_removes_only_images_older_than_its_first_log_entry(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch, closed_ttl_s: float | None
) -> None:
    """Images that were stored behind it are of the next session, and no note is left over."""
    note_close = Retention.note_close

    async def noted_twice(keeper: Retention, key: SessionKey, seq: int, *, forget: bool) -> int | None:
        await note_close(keeper, key, seq, forget=forget)
        await w.js.publish(w.subject("s", "image.later"), b"later")
        await w.publish("s", {"type": "open", "id": "o"})
        return await note_close(keeper, key, seq, forget=forget)

    monkeypatch.setattr(Retention, "note_close", noted_twice)
    w = await quiet_wire(closed_ttl_s=closed_ttl_s)
    await w.js.publish(w.subject("s", "image.earlier"), b"earlier")
    await w.send("s", append("a"))
    assert (await w.send("s", FORGET))["type"] == "closed"
    subjects: set[str] = set()
    async with asyncio.timeout(20):
        while w.subject("s", "image.earlier") in subjects or not subjects:
            await asyncio.sleep(1)
            subjects = set((await w.js.stream_info("turnkeep_log", subjects_filter=">")).state.subjects or {})
    assert w.subject("s", "image.later") in subjects
    assert (w.subject("s", "closed") in subjects) == (closed_ttl_s is None)


async def test_a_forged_log_entry_of_a_close_and_a_repeated_close_remove_nothing_of_a_reopened_session(
    quiet_wire: Start,
) -> None:
    w = await quiet_wire(closed_ttl_s=None)
    await w.send("s", append("a", "hello"))
    await w.send("s", FORGET)
    await w.send("s", {"type": "open", "id": "o"})
    await w.send("s", append("b", "second life"))
    await w.js.publish(w.subject("s", "closed"), b"forget")
    assert (await w.send("s", FORGET))["repeat_of"]
    await asyncio.sleep(0.5)
    assert b"second life" in b"".join((await bodies(w, "s"))["in"])


async def test_an_info_or_cancel_request_for_an_unknown_session_leaves_no_session_object_in_memory(
    quiet_wire: Start,
) -> None:
    w = await quiet_wire()
    await w.send("s", append("a"))
    for n in range(20):
        assert (await w.control(f"u{n}", {"type": "cancel", "id": "a"}))["code"] == "invalid_request"
        assert (await w.control(f"v{n}", {"type": "info"}))["code"] == "unknown_session"
    assert (await w.control("s", {"type": "info"}))["worker"]["sessions"] == 1


async def test_an_info_request_for_a_closed_session_whose_reopening_is_queued_returns_position_0(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = await quiet_wire()
    await w.send("s", append("a", "hello"))
    await w.send("s", CLOSE)
    there, go_on, attempt = asyncio.Event(), asyncio.Event(), RequestAttempts.attempt

    async def waits(attempts: RequestAttempts, *given: Any) -> Any:
        there.set()
        await go_on.wait()
        return await attempt(attempts, *given)

    monkeypatch.setattr(RequestAttempts, "attempt", waits)
    waiting = await w.publish("s", {"type": "open", "id": "o"})
    await there.wait()
    info = await w.control("s", {"type": "info"})
    assert (info["position"], info["active"]) == (0, "o")
    go_on.set()
    assert (await w.result(waiting))["type"] == "opened"


async def test_a_session_is_not_unloaded_from_memory_while_an_info_request_reads_it(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its next request would read it again, and could run beside a cancel of itself."""
    w = await quiet_wire()
    await w.send("s", append("a"))
    monkeypatch.setattr(sessions, "_MAX_IDLE_BYTES", 0)
    monkeypatch.setattr(sessions, "_NUM_KEPT", 0)
    held = w.worker.app._parts.sessions
    there, go_on, look = asyncio.Event(), asyncio.Event(), ServedSession.refresh

    async def waits(session: ServedSession) -> None:
        there.set()
        await go_on.wait()
        await look(session)

    monkeypatch.setattr(ServedSession, "refresh", waits)
    asked = asyncio.create_task(w.control("s", {"type": "info"}))
    await there.wait()
    await w.send("other", append("a"))
    await until(lambda: SessionKey("default", "other") not in held._sessions)
    assert list(held._sessions) == [SessionKey("default", "s")]
    go_on.set()
    assert (await asked)["position"] == 5


async def test_the_most_recently_used_idle_session_stays_loaded_even_if_it_exceeds_the_memory_limit(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = await quiet_wire()
    monkeypatch.setattr(sessions, "_MAX_IDLE_BYTES", 0)
    parts = w.worker.app._parts
    held = parts.sessions._sessions
    for name in ("a", "b"):
        await w.send(name, append("1"))
        await until(lambda name=name: list(held) == [SessionKey("default", name)])
    session = held[SessionKey("default", "b")]
    await w.send("b", append("2"))
    assert held == {SessionKey("default", "b"): session}
    await until(lambda: parts.sessions._size_bytes == session.log.record.size_bytes)


async def test_a_closed_session_is_not_removed_from_the_log_while_its_log_is_being_read(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its first results would be read without its close."""
    w = await quiet_wire(closed_ttl_s=None)
    await w.send("s", append("a"))
    await w.send("s", CLOSE)
    await w.worker.stop()
    sweep, page, tasks = Retention.sweep, Journal.page, list[asyncio.Task[None]]()

    async def nothing(_: Retention) -> None:
        pass

    async def removes(journal: Journal, key: SessionKey, kind: Any, *args: Any, **more: Any) -> Any:
        found = await page(journal, key, kind, *args, **more)
        if kind == "out" and not tasks:
            tasks.append(asyncio.create_task(sweep(w.worker.app._parts.retention)))
            await asyncio.wait(tasks, timeout=0.5)
        return found

    monkeypatch.setattr(Retention, "sweep", nothing)
    w = await quiet_wire(closed_ttl_s=0)
    monkeypatch.setattr(Journal, "page", removes)
    monkeypatch.setattr(consistent_reads, "_BATCH", 1)
    assert "was closed" in (await w.control("s", {"type": "info"}))["message"]
    await asyncio.gather(*tasks)
    assert await bodies(w, "s") == {}


@pytest.mark.parametrize(("waiting", "removed_below"), [((1, 0), []), ((0, 1), []), ((0, 0), [7])])
async def test_removing_a_closed_session_from_the_log_removes_no_unanswered_request(
    waiting: tuple[int, int], removed_below: list[int]
) -> None:
    """It is between the close at 4 and its result at 6, the last one, on a first page of the log or later."""
    removed: list[int] = []

    class Log:
        async def page(self, _: SessionKey, kind: str, __: int) -> tuple[list[StoredMessage], int]:
            asked = StoredMessage(5, datetime.now(UTC), encode(Append(id="r", text="unanswered")), {})
            return ([asked] * waiting[0], waiting[1]) if kind == "in" else ([], 0)

        async def last_seq(self, *_: Any) -> int:
            return 6

        def age_s(self, _: StoredMessage) -> float:
            return 1.0

        async def remove(self, _: SessionKey, before: int) -> None:
            removed.append(before)

        async def delete(self, seq: int) -> None:
            removed.append(seq)

    result = StoredMessage(6, datetime.now(UTC), b"", {})
    closed = retention._Closing(result, Closed(id="c", seq=4, position=0), forgets=False)
    note = StoredMessage(3, datetime.now(UTC), b"", {})
    await Retention(Log(), closed_ttl_s=0, max_bytes=1, sync_s=0)._remove(SessionKey("t", "s"), note, closed)  # type: ignore[arg-type]
    assert removed == removed_below


async def test_removing_a_closed_session_keeps_the_checkpoint_values_that_later_results_refer_to() -> None:
    """The close at 4 has its result at 10, after those of two later requests."""
    now, removed = datetime.now(UTC), dict[str, Any]()
    values = {seq: CheckpointMessage(b"long", before="").pack() for seq in (6, 8)}
    parts, whole = (str(Link(seq, digest(value))) for seq, value in values.items())
    late, asked = failure("r", "expired", "late", seq=5), Asked(stored=now, request=msgspec.Raw(b"{}"))
    results = [
        StoredMessage(7, now, encode_answer(late, asked), {PARTS_HEADER: parts}),
        StoredMessage(9, now, encode_answer(late, Asked(stored=now, link=whole)), {}),
    ]

    class Log:
        async def page(self, *_: Any) -> tuple[list[StoredMessage], int]:
            return [], 0

        async def every(self, *_: Any) -> AsyncIterator[StoredMessage]:
            for one in results:
                yield one

        async def entry(self, seq: int) -> StoredMessage:
            return StoredMessage(seq, now, values[seq], {})

        async def remove(self, _: SessionKey, before: int, kind: str = "", **options: Any) -> None:
            removed[kind] = before, options.get("kept")

    result = StoredMessage(10, now, b"", {})
    closed = retention._Closing(result, Closed(id="c", seq=4, position=0), forgets=False)
    keeper = Retention(Log(), closed_ttl_s=0, max_bytes=1, sync_s=0)  # type: ignore[arg-type]
    await keeper._remove_before(SessionKey("t", "s"), StoredMessage(3, now, b"", {}), closed)
    assert removed["checkpoint"] == (10, {6, 8})
    assert (removed["in"], removed["dead"]) == ((4, None), (10, None)), (
        "an earlier request may be given up late"
    )


USAGE = Usage(prompt_tokens=1, cached_tokens=0, prefilled_tokens=1, completion_tokens=0)
EMPTY = Generated(
    id="r",
    seq=5,
    position=0,
    text="",
    tokens=(),
    finish_reason="cancelled",
    usage=USAGE,
    kv_live_bytes=0,
    seconds=Seconds(queued=0, prefill=0, first_token=0, total=0),
)


@pytest.mark.parametrize("cancelled", [failure("r", "expired", "cancelled", seq=5), EMPTY])
async def test_the_result_of_a_close_is_found_even_if_a_cancelled_requests_result_is_stored_before_it(
    cancelled: Any,
) -> None:
    """Otherwise the note of the close would never have an effect."""
    now = datetime.now(UTC)
    asked = Asked(stored=now, request=msgspec.Raw(encode(Close(id="c", forget=True))))
    closed = encode_answer(Closed(id="c", seq=4, position=0), asked)
    told = [encode(cancelled), closed]
    entries = [StoredMessage(6 + n, now, body, {}) for n, body in enumerate(told)]

    class Log:
        async def every(self, *_: Any) -> AsyncIterator[StoredMessage]:
            for entry in entries:
                yield entry

    keeper = Retention(Log(), closed_ttl_s=0, max_bytes=1, sync_s=0)  # type: ignore[arg-type]
    found = await keeper._find_close(SessionKey("t", "s"), 3)
    assert found is not None
    assert (found.entry.seq, found.forgets) == (7, True)


async def test_closed_sessions_in_a_log_full_to_95_percent_are_removed_until_80_percent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the log would be nearly full again soon. Each session here is a twentieth of the log."""
    at_once: list[bool] = []

    class Log:
        server = "s"

        async def end(self) -> tuple[int, int]:
            return 95 - 5 * len(at_once), 6

        async def close_notes(self, _: int) -> tuple[list[StoredMessage], int]:
            return [StoredMessage(n, datetime.now(UTC), b"", {}) for n in range(1, 7)], 0

    async def follow(_: Retention, __: StoredMessage, **how: bool) -> bool:
        at_once.append(how["at_once"])
        return True

    monkeypatch.setattr(Retention, "_follow", follow)
    await Retention(Log(), closed_ttl_s=None, max_bytes=100, sync_s=0).sweep()  # type: ignore[arg-type]
    assert at_once == [True] * 3 + [False] * 3


async def test_closed_sessions_whose_removal_was_lost_in_a_restart_of_the_nats_server_are_removed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server may have lost its last entries, and another note may have the sequence of a known one."""
    removed: list[int] = []

    class Chunks:
        async def remove(self, *_: Any) -> None:
            pass

    class Log:
        server, chunks = "a", Chunks()

        def age_s(self, _: StoredMessage) -> float:
            return 1.0

        async def end(self) -> tuple[int, int]:
            return 0, 6

        async def close_notes(self, after: int) -> tuple[list[StoredMessage], int]:
            subject, bodies = {"Nats-Subject": "turnkeep.t.s.closed"}, {3: b"", 5: b"forget"}
            notes = [StoredMessage(n, datetime.now(UTC), body, subject) for n, body in bodies.items()]
            return [note for note in notes if note.seq > after], 0

        async def page(self, *_: Any) -> tuple[list[StoredMessage], int]:
            return [], 0

    async def found(*_: Any) -> retention._Closing:
        result = StoredMessage(6, datetime.now(UTC), b"", {})
        return retention._Closing(result, Closed(id="c", seq=4, position=0), forgets=True)

    async def removes(_: Retention, __: SessionKey, ___: StoredMessage, closed: retention._Closing) -> None:
        removed.append(closed.result.seq or 0)

    monkeypatch.setattr(Retention, "_find_close", found)
    monkeypatch.setattr(Retention, "_remove_before", removes)
    keeper = Retention(Log(), closed_ttl_s=None, max_bytes=100, sync_s=0)  # type: ignore[arg-type]
    for server, times in (("a", 1), ("a", 1), ("b", 2)):
        monkeypatch.setattr(Log, "server", server)
        await keeper.sweep()
        assert removed == [4] * times


@pytest.mark.parametrize(("history_idle_timeout_s", "has_store"), [(0.2, True), (300.0, False)])
async def test_a_worker_that_missed_the_forgetting_of_a_session_drops_the_sessions_kv_from_the_device(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch, history_idle_timeout_s: float, has_store: bool
) -> None:
    """Also if it has evicted the session from its own memory, and if it stores no snapshots."""
    if not has_store:
        monkeypatch.setattr(device.Worker, "stores", False)
    w = await quiet_wire(history_idle_timeout_s=history_idle_timeout_s)
    await w.send("s", append("a"))
    app, key = w.worker.app, SessionKey("default", "s")
    await asyncio.sleep(1)
    assert (key in app._parts.sessions._sessions) == (history_idle_timeout_s > 1)
    tokens = app.device_of_hashes.resident[key]
    await app._parts.erasures.note(key, tokens, 0, ())  # as the worker does that forgets the session
    await asyncio.sleep(erasures._PERIOD_S + 1)
    assert key not in app.device_of_hashes.resident


async def test_a_worker_that_was_away_for_91_days_drops_its_kv_as_soon_as_its_running_turns_have_ended(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It erases its copies last, and again if this failed, since a running turn may add some."""
    monkeypatch.setattr(erasures, "_PERIOD_S", 0.5)
    w = await quiet_wire()
    await w.send("idle", append("a"))
    app = w.worker.app
    disk, kv, running = app._disk, app.device_of_hashes, list[set[SessionKey]]()

    async def clear() -> bool:
        running.append({*kv.runs})
        return len(running) > 1

    monkeypatch.setattr(disk, "clear", clear)
    await disk.note_erased(ErasureProgress(app._parts.erasures._log, 0, erasures.time() - 91 * 86400.0))
    asked = await w.publish("busy", generate("g", **LONG))
    await app._parts.erasures.note(
        SessionKey("default", "another"), disk[SessionKey("default", "idle")], 0, (app._members.me.boot,)
    )
    await asyncio.sleep(1)
    assert (asked in w.results, *kv.resident) == (False,), "only the running turn has KV"
    assert (await disk.erased_up_to(app._parts.erasures._log)).seq == 0
    await w.send("new", append("b"))
    await w.result(asked)
    await asyncio.sleep(2)
    assert running == [set(), set()]
    assert [*kv.resident] == [SessionKey("default", "new")], "which has begun since"
    assert (await disk.erased_up_to(app._parts.erasures._log)).seq > asked


async def test_a_logged_erase_order_is_retried_until_it_succeeds_and_stays_in_the_log_for_90_days(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that are away meanwhile read it later; only the last note stays for longer."""
    monkeypatch.setattr(erasures, "_PERIOD_S", 0.2)
    monkeypatch.setattr(erasures, "_OFTEN_S", 0.5)
    w = await quiet_wire()
    await w.send("s", append("a"))
    app, tried = w.worker.app, list[str]()
    tokens = app.device_of_hashes.resident[SessionKey("default", "s")]

    async def erase_marked(_: str, __: Any) -> bool:
        tried.append("again" if tried else "first")
        return len(tried) > 1

    monkeypatch.setattr(app._disk, "erase_marked", erase_marked)
    for name in ("one", "two"):
        await app._parts.erasures.note(SessionKey("default", name), tokens, 0, ())
    await asyncio.sleep(2)
    assert tried == ["first", "again", "again"]
    notes, _ = await app._parts.retention._journal.erasure_notes(0)
    assert (await app._disk.erased_up_to(app._parts.erasures._log)).seq == notes[-1].seq
    assert len(notes) == 2
    monkeypatch.setattr(Journal, "age_s", lambda *_: 91 * 86400.0)
    await app._parts.erasures._clean()
    assert [note.seq for note in (await app._parts.retention._journal.erasure_notes(0))[0]] == [notes[-1].seq]


@pytest.mark.parametrize(("boot", "num_erased"), [("an empty directory's", 0), (erasures.TIER, 1)])
async def test_a_starting_worker_with_an_empty_cache_skips_old_erase_orders_unless_its_remote_tier_is_new(
    quiet_wire: Start, boot: str, num_erased: int
) -> None:
    """Each takes milliseconds, and a log may have 100,000. A tier of which nothing is known may have KV."""
    w = await quiet_wire()
    await w.send("s", append("a"))
    app, erased, noted = w.worker.app, list[str](), list[ErasureProgress]()

    class Copies:
        put_back: frozenset[bytes] = frozenset()

        async def erase_marked(self, tenant: str, _: Any) -> bool:
            erased.append(tenant)
            return True

        async def erased_up_to(self, _: str) -> ErasureProgress | None:
            return noted[-1] if noted else None

        async def note_erased(self, progress: ErasureProgress) -> None:
            noted.append(progress)

    tokens = app.device_of_hashes.resident[SessionKey("default", "s")]
    starting: Any = erasures.Erasures(app._parts.retention._journal, boot, Copies())  # type: ignore[arg-type]
    for num_notes in (1, 2):
        await starting.note(SessionKey("default", "another"), tokens, 0, ())
        await starting._look(lambda _: set())
        assert len(erased) == num_erased + num_notes - 1
        assert len(noted) == num_notes


async def test_a_logged_erase_order_is_carried_out_only_after_the_running_turn_of_its_session_has_ended(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = await quiet_wire()
    await w.send("s", append("a"))
    app, key, tried = w.worker.app, SessionKey("default", "s"), list[str]()

    async def erase_marked(tenant: str, _: Any) -> bool:
        tried.append(tenant)
        return True

    monkeypatch.setattr(app._disk, "erase_marked", erase_marked)
    await app._parts.erasures.note(key, app.device_of_hashes.resident[key], 0, ())
    await app._parts.erasures._look(lambda _: {key})
    assert not tried
    await app._parts.erasures._look(lambda _: set())
    assert tried == ["default"]


async def until_queued(w: Wire, session: str, wanted: list[str]) -> None:
    """Wait until `in` has the requests with these ids."""
    ids: list[str] = []
    for _ in range(400):
        ids = [json.loads(body)["id"] for body in (await bodies(w, session)).get("in", [])]
        if ids == wanted:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(ids)


@pytest.mark.usefixtures("filling")
async def test_a_repeat_of_a_request_already_removed_from_the_log_gets_the_recorded_result(
    quiet_wire: Start,
) -> None:
    """Also at a worker that has read the session without it: repeats and conflicts are answered as before."""
    w = await quiet_wire(sync_interval="0.1s")
    first = await w.send("s", append("a", "hello"))
    await until_queued(w, "s", [])
    for again in range(2):
        repeated = await w.send("s", append("a", "hello"))
        assert (repeated["repeat_of"], repeated["position"]) == (first["seq"], first["position"])
        assert (await w.send("s", append("a", "other")))["code"] == "id_conflict"
        assert (await w.send("s", append(f"b{again}", "hello")))["position"] == 5 * (again + 2)
        await until_queued(w, "s", [])
        await w.worker.stop()
        w = await quiet_wire()


@pytest.mark.usefixtures("filling")
async def test_a_cancelled_request_stays_in_the_log_until_the_waiting_request_before_it_is_answered(
    quiet_wire: Start,
) -> None:
    """The server redelivers only the newest request of a session: it must still be there."""
    w = await quiet_wire()
    await w.publish("s", generate("long", **LONG))
    await w.publish("s", append("late"))
    assert (await w.control("s", {"type": "cancel", "id": "late"}))["type"] == "cancelled"
    await asyncio.sleep(0.3)
    await until_queued(w, "s", ["long", "late"])
    await w.control("s", {"type": "cancel", "id": "long"})
    await until_queued(w, "s", [])


@pytest.mark.usefixtures("filling")
async def test_a_worker_removes_the_answered_requests_of_a_worker_that_has_ended(quiet_wire: Start) -> None:
    w = await quiet_wire(sync_interval="120s")
    await w.send("s", append("a"))
    await w.worker.stop()
    await w.publish("s", append("b"))
    await until_queued(await quiet_wire(sync_interval="0.1s"), "s", [])


@pytest.mark.usefixtures("filling")
@pytest.mark.parametrize("last", [append("b"), CLOSE, FORGET])
async def test_no_request_or_session_leaves_the_log_before_its_result_is_safe_from_a_power_cut(
    quiet_wire: Start, server: Server, last: dict[str, Any]
) -> None:
    """A restarted server may have lost it, and another entry may have its sequence: then it takes as long."""
    w = await quiet_wire(closed_ttl_s=0.0, sync_interval="4s")
    await w.send("s", append("a"))
    asked = await w.publish("s", last)
    await w.result(asked)
    for name in "bcd":
        await w.send("other", append(name))
    await asyncio.sleep(4.5)
    assert len((await bodies(w, "s"))["in"]) == 2
    server.crash()
    server.jetstream.streams[f"{w.prefix}_log"].lose(asked)
    server.start()
    await asyncio.sleep(0.1)
    while len((await bodies(w, "s"))["out"]) < 2:  # noqa: ASYNC110  # it is answered again
        await asyncio.sleep(0.05)
    await asyncio.sleep(4.5)
    left = await bodies(w, "s")
    assert (json.loads(left["in"][-1])["id"], len(left["out"])) == (last["id"], 2)
    if last in (CLOSE, FORGET):
        assert await until_gone(w, "s", text=b"") == {}
    else:
        await until_queued(w, "s", [])


async def test_an_answered_request_is_removed_from_the_log_only_after_its_result_is_synced_to_disk() -> None:
    removed, results = list[int](), {1: 2, 3: 9, 8: 4}

    async def queues(counts: Callable[[int], bool] = lambda _: True) -> list[Queue]:
        return [Queue(SessionKey("t", "s"), [one for one, at in results.items() if counts(at)], False)]

    async def delete(seq: int) -> None:
        removed.append(seq)

    log: Any = SimpleNamespace(server="one", queues=queues, delete=delete)
    kept = Retention(log, closed_ttl_s=None, max_bytes=8, sync_s=0)
    kept._synced, kept.num_bytes = SimpleNamespace(has=lambda seq: seq < 5), 8  # type: ignore[assignment]
    await kept.remove_answered()
    assert removed == [1]


async def test_answered_requests_are_not_removed_while_the_log_is_less_than_half_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retention, "_FILLING", 0.5)
    looked: list[bool] = []

    async def queues(_: Any) -> list[Queue]:
        looked.append(True)
        return []

    log: Any = SimpleNamespace(server="one", queues=queues)
    kept = Retention(log, closed_ttl_s=None, max_bytes=8, sync_s=0)
    for kept.num_bytes in (0, 4, 5):
        await kept.remove_answered()
    assert looked == [True]
