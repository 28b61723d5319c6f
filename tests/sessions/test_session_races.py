"""Races within a session: deliveries, cancels, other workers and failed reads between two of its steps."""

import asyncio
import threading
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest
from msgspec import structs
from session_world import STORED, World
from structlog.testing import capture_logs

from cache.names.policy import FULL
from turnkeep_client.log import EXPECT_HEADER
from turnkeep_client.messages import (
    Append,
    Appended,
    Cancelled,
    Chunk,
    Close,
    Closed,
    Failed,
    ForkPoint,
    Generate,
    Generated,
    Message,
    Open,
    decode_result,
    encode,
    failure,
)
from worker.engine.port import DeviceFaultError
from worker.models.vision.image_file import ImageError
from worker.process.concurrency import SharedLock
from worker.sessions import answered_ids
from worker.sessions.cancelling import cancel
from worker.sessions.dead_letters import excuse
from worker.sessions.pending import PendingRequest
from worker.wire.chunks import PublishedChunks
from worker.wire.consistent_reads import StoredMessage
from worker.wire.fence import FencedError


def beside(world: World) -> World:
    """Make another worker that reads and writes the same log."""
    other = World(world._tokenizer)
    other.log = world.log
    other.crash()
    return other


def appended_to(world: World, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list that gets the notes and dead letters that the world's worker stores from now on."""
    stored: list[bytes] = []
    append = world.log.append

    async def note(key: Any, kind: str, body: bytes, *_: Any) -> None:
        stored.append(body)
        await append(key, kind, body)

    monkeypatch.setattr(world.log, "append", note)
    return stored


def held_up(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Make turns wait on the device; return an event that one has begun, and an event that releases it."""
    there, go_on = asyncio.Event(), asyncio.Event()
    run = world.engine.run

    async def waits(*args: Any, **more: Any) -> Any:
        there.set()
        await go_on.wait()
        return await run(*args, **more)

    monkeypatch.setattr(world.engine, "run", waits)
    return there, go_on


async def test_a_request_that_arrives_as_its_session_is_about_to_ack_a_delivery_is_answered_before_the_ack(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It arrives while notes of attempts are removed, just before the session's delivery is acknowledged."""
    await world.ask(Append(id="a", text="one"))
    released: list[int] = []

    async def purge(*_: Any) -> None:
        if len(world.results) == 1:
            world.publish(Append(id="b", text="two"))

    async def release(_: Any) -> None:
        released.append(len(world.results))

    monkeypatch.setattr(world.log, "purge", purge)
    monkeypatch.setattr(world, "_release", release)
    world.crash()
    world.ring(1, again=True)
    await world.session.run()
    assert released == [2]


@pytest.mark.parametrize("asked", [True, False])
async def test_a_request_whose_result_a_restarted_nats_server_lost_is_acknowledged_only_after_a_new_result(
    world: World, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """The restart comes before the acknowledgement; if `asked`, an info waits to read the log anew."""
    released: list[int] = []
    infos: list[asyncio.Task[None]] = []

    async def read() -> None:
        async with world.session.services.reading.enter("other"):
            await asyncio.sleep(0.05)

    async def purge(*_: Any) -> None:
        if world.log.server == "two":
            return
        monkeypatch.setattr(world.log, "server", "two")
        world.log.entries.pop()
        if not asked:
            return
        infos.extend(asyncio.create_task(read()) for _ in range(2))
        await asyncio.sleep(0)
        infos.append(asyncio.create_task(world.session.refresh()))
        await asyncio.sleep(0.01)

    async def release(_: Any) -> None:
        released.append(len(world.results))

    monkeypatch.setattr(world.log, "purge", purge)
    monkeypatch.setattr(world, "_release", release)
    world.crash()
    seq = world.log.add("in", encode(Append(id="a", text="one")))
    world.ring(seq, again=True)
    await world.session.run()
    await asyncio.gather(*infos)
    assert released == [1]


@pytest.mark.parametrize("look", ["info", "cancel"])
async def test_a_session_that_reads_another_workers_result_during_its_own_run_stores_no_second_result(
    world: World, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    """Otherwise the session's task would also commit one, and the request would have two results."""
    await world.ask(Append(id="a", text="one"))
    there, go_on = held_up(world, monkeypatch)
    monkeypatch.setattr(world.engine, "cancel", lambda _: None, raising=False)
    seq = world.publish(Append(id="b", text="two"))
    running = asyncio.create_task(world.session.run())
    await there.wait()
    other = beside(world)
    other.ring(seq)
    await other.session.run()
    with pytest.raises(FencedError):
        await (cancel(world.session, "b") if look == "cancel" else world.session.refresh())
    go_on.set()
    await running
    assert [result.seq for result in world.results] == [1, seq]
    await world.assert_fold_is_life()


@pytest.mark.parametrize("request_", [Generate(id="a", text="a", max_tokens=2), Append(id="a", text="a")])
async def test_a_cancel_that_arrives_as_its_request_completes_is_refused_as_answered_already(
    world: World, monkeypatch: pytest.MonkeyPatch, request_: Append | Generate
) -> None:
    run = world.engine.run
    told: list[asyncio.Task[Any]] = []

    async def ends(*args: Any, **more: Any) -> Any:
        turn = await run(*args, **more)
        told.append(asyncio.create_task(cancel(world.session, "a")))
        await asyncio.sleep(0.01)
        assert world.session.active is not None
        assert world.session.active.cancelled
        return turn

    monkeypatch.setattr(world.engine, "run", ends)
    monkeypatch.setattr(world.engine, "cancel", lambda _: None, raising=False)
    result = await world.ask(request_)
    assert getattr(result, "finish_reason", "appended") != "cancelled"
    assert "it was answered already" in getattr(await told[0], "message", "")


@pytest.mark.parametrize("is_forged", [True, False])
async def test_cancelling_a_waiting_request_keeps_published_tokens_only_if_they_name_the_sessions_history(
    world: World, monkeypatch: pytest.MonkeyPatch, is_forged: bool
) -> None:
    """Those of a worker do, if the server has lost a result since: the request was the first one then."""
    there, go_on = held_up(world, monkeypatch)
    seqs = [world.publish(Generate(id=f"r{n}", text="a", max_tokens=2)) for n in range(2)]
    running = asyncio.create_task(world.session.run())
    await there.wait()

    async def read(_: Any, request_id: str, seq: int, __: Any) -> PublishedChunks:
        known = [Chunk(0, (97,), "a", seq)] if request_id == "r1" else []
        return PublishedChunks(known, seq, base="" if is_forged else world.session.history.digest())

    monkeypatch.setattr(world.log.chunks, "read", read)
    cancelling = asyncio.create_task(cancel(world.session, "r1"))
    await asyncio.sleep(0.01)
    assert cancelling.done() == is_forged
    go_on.set()
    await running
    assert isinstance(await cancelling, Cancelled)
    result = world.result(seqs[1])
    assert (result.finish_reason, result.tokens) == ("cancelled", () if is_forged else (97,))


async def test_after_a_failed_read_of_the_log_no_request_is_answered_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(3):
        await world.ask(Append(id=f"r{n}", text="a"))
    world.crash()
    replay, failures = world.fold.replay, [MemoryError("no more")]

    def fails(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return replay(*args)

    monkeypatch.setattr(world.fold, "replay", fails)
    with pytest.raises(MemoryError):
        await world.session.refresh()  # as `info` does
    assert (await world.ask(Append(id="new", text="b"))).position == 4
    assert len(world.results) == 4


async def test_the_lock_for_removing_closed_sessions_is_held_while_the_result_of_a_close_is_stored(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the worker, if the acknowledgement is late, could store the result a second time."""
    commit, held = world.log.commit, list[bool]()

    async def noting(key: Any, *args: Any, **more: Any) -> int:
        held.append(world.session.services.retention.lock(key).locked())
        return await commit(key, *args, **more)

    monkeypatch.setattr(world.log, "commit", noting)
    await world.ask(Append(id="a", text="one"))
    await world.ask(Close(id="c"))
    assert held == [False, True]


async def test_checkpoints_of_a_session_are_still_stored_after_a_refused_close(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.sessions.record._CHECKPOINT_EVERY", 64)
    for n in range(40):
        await world.ask(Append(id=f"a{n}", text="a"))
    assert (await world.ask(Close(id="c", expect_position=7))).code == "position_conflict"
    for n in range(40):
        await world.ask(Append(id=f"b{n}", text="a"))
    await asyncio.gather(*world.tasks.started)
    assert any(entry.kind == "checkpoint" for entry in world.log.entries)


@pytest.mark.parametrize("way", ["cancelled", "expired"])
async def test_a_requests_last_attempt_stops_waiting_for_the_exclusive_device_lock_if_cancelled_or_expired(
    world: World, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Otherwise it would wait until the longest answer ends, and all other requests would wait for it."""
    device_lock = world.session.services.device_lock
    monkeypatch.setattr(world.engine, "cancel", lambda _: None, raising=False)
    request = Append(id="a", text="one", deadline_s=0.3 if way == "expired" else None)
    seq = world.log.add("in", encode(request))
    world.log.notes.append(b'{"seq":%d,"attempts":2}' % seq)
    if way == "expired":
        since = STORED.timestamp() - monotonic()
        monkeypatch.setattr("worker.sessions.session.time", lambda: since + monotonic())
    async with asyncio.timeout(5), device_lock.enter(lambda: False):
        world.ring(seq, again=True)
        running = asyncio.create_task(world.session.run())
        while world.session.active is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not world.results
        if way == "cancelled":
            await cancel(world.session, "a")
        await running
        assert world.result(seq).code == "expired"
        async with device_lock.enter(lambda: False):
            pass


async def test_no_other_turn_runs_while_a_requests_last_attempt_holds_the_device_lock_exclusively() -> None:
    device_lock, seen = SharedLock(), []

    async def one(name: int, *, alone: bool) -> None:
        async with device_lock.enter(lambda: False, alone=alone):
            seen.append((name, "in", alone))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            seen.append((name, "out", alone))

    async with asyncio.timeout(5):
        await asyncio.gather(*(one(n, alone=n % 3 == 0) for n in range(12)))
    assert len(seen) == 24
    for at, (name, way, alone) in enumerate(seen):
        if alone and way == "in":
            assert seen[at + 1] == (name, "out", True)


async def test_a_request_that_crashes_workers_is_given_up_even_if_newer_requests_are_delivered_before_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would be retried for ever if a client sends a new request after each crash."""
    poison = world.log.add("in", encode(Append(id="poison", text="one")))
    monkeypatch.setattr(world.log, "purge", lambda *_: asyncio.sleep(0))
    lives = 0

    async def ends_the_worker(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    while not world.results:
        lives += 1
        world.crash()
        monkeypatch.setattr(world.engine, "run", ends_the_worker)
        body = encode(Append(id=f"fresh{lives}", text="two"))
        seq = world.log.add("in", body)
        world.ring(seq, body, first_seq=seq if lives > 1 else poison)
        try:
            await world.session.log.catch_up()
            await world.session._attempts.attempt(world.session.pending[0], world.session._result)
        except KeyboardInterrupt:
            assert lives < 6
            continue
        monkeypatch.undo()
        monkeypatch.setattr(world.log, "purge", lambda *_: asyncio.sleep(0))
        await world.session.run()
    assert world.result(poison).code == "internal"
    assert lives == 4


async def test_a_repeated_request_gets_its_recorded_result_even_if_an_erased_session_had_used_its_id(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id's first result was removed from the log; the index of ids still has it before the second."""
    await world.ask(Append(id="a", text="one"))
    entry = world.log.entry

    async def leader(seq: int) -> StoredMessage | None:
        return await entry(seq) if seq > 2 else None

    monkeypatch.setattr(world.log, "entry", leader)
    again = Append(id="a", text="two")
    second = await world.ask(again)
    assert (second.seq, second.repeat_of) == (3, None)
    assert (await world.ask(again)).repeat_of == 3


@pytest.mark.parametrize(
    "given", [{"messages": (Message(role="user", content="hi"),)}, {}, {"text": "a" * 999}]
)
async def test_messages_and_long_texts_are_rendered_and_tokenised_outside_the_event_loop_thread(
    world: World, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    """Also for a generate without input, since a template may then render the whole conversation."""
    await world.ask(Append(id="a", messages=(Message(role="user", content="hello"),)))
    extend, threads = world.fold.extend, []

    def noting(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return extend(*args)

    monkeypatch.setattr(world.fold, "extend", noting)
    assert isinstance(await world.ask(Generate(id="g", max_tokens=2, **given)), Generated)
    assert threads
    assert threading.main_thread() not in threads


def streamed(world: World, monkeypatch: pytest.MonkeyPatch, seq: int) -> Chunk:
    """Let the token stream have a chunk of the answer to the request at `seq`; return the chunk."""
    chunk = Chunk(0, tuple(world._tokenizer.encode("ab", at_start=False)), "ab", seq)
    monkeypatch.setattr(world.log.chunks, "stored", [chunk])
    return chunk


async def test_a_worker_wrongly_taken_for_crashed_while_asleep_does_not_count_its_own_attempt_as_failed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asleep, and seemed to have ended; of the workers that took the request then, two crashed."""
    run = world.engine.run
    seq = world.log.add("in", encode(Append(id="a", text="one")))

    async def sleeps(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(world.engine, "run", run)
        world.log.notes.append(b'{"seq":%d,"attempts":3}' % seq)
        world.ring(seq, again=True)
        raise FencedError("it was changed elsewhere")

    monkeypatch.setattr(world.engine, "run", sleeps)
    world.ring(seq)
    await world.session.run()
    assert isinstance(world.result(seq), Appended)


@pytest.mark.parametrize(
    ("num_busy", "noted", "is_tried"),
    [(0, 3, False), (1, 3, True), (1, 4, False)],
    ids=["nobody at work", "a worker at work", "an attempt too many"],
)
async def test_the_attempt_of_a_worker_that_is_still_running_the_request_is_not_counted_as_failed(
    world: World, monkeypatch: pytest.MonkeyPatch, num_busy: int, noted: int, *, is_tried: bool
) -> None:
    """As after the sleep of a laptop with two workers. The attempts of others still add up."""

    async def busy(_: Any) -> int:
        return num_busy

    object.__setattr__(world.session.services, "num_busy", busy)
    seq = world.log.add("in", encode(Append(id="a", text="one")))
    world.log.notes.append(b'{"seq":%d,"attempts":%d}' % (seq, noted))
    stored = appended_to(world, monkeypatch)
    world.ring(seq, again=True)
    await world.session.run()
    assert isinstance(world.result(seq), Appended if is_tried else Failed)
    assert b'"attempts":%d' % (noted + 1) in stored[0], "for the next worker, if this one crashes"


@pytest.mark.parametrize("attempts", [3, 4])
async def test_an_answer_given_up_after_worker_crashes_ends_with_the_tokens_already_streamed(
    world: World, monkeypatch: pytest.MonkeyPatch, attempts: int
) -> None:
    """If storing this result crashes a worker too, the request fails."""
    seq = world.log.add("in", encode(Generate(id="g", text="x", max_tokens=9)))
    chunk = streamed(world, monkeypatch, seq)
    monkeypatch.setattr(world.engine, "run", None)
    world.log.notes.append(b'{"seq":%d,"attempts":%d,"tokens":2}' % (seq, attempts))
    stored = appended_to(world, monkeypatch)
    world.ring(seq, again=True)
    await world.session.run()
    result = world.result(seq)
    assert b'"attempts":%d' % (attempts + 1) in stored[0]
    assert b'"attempts":%d' % attempts in stored[1]  # the dead letter
    if attempts == 4:
        assert result.code == "internal"
        return
    assert (result.tokens, result.text, result.finish_reason) == (chunk.tokens, "ab", "given_up")
    assert "it has ended every worker" in result.warnings[-1]
    await world.assert_fold_is_life()


@pytest.mark.parametrize("num_copies", [1, 2])
async def test_a_cancel_searches_the_log_again_if_nats_lost_entries_during_the_search(
    world: World, monkeypatch: pytest.MonkeyPatch, num_copies: int
) -> None:
    """Of two copies of a request it cancels the first, since the second is only a repeat of that."""
    await world.ask(Append(id="a", text="one"))
    page, calls = world.log.page, []

    async def restarted(key: Any, kind: str, after: int) -> Any:
        calls.append(kind)
        if calls.count("in") == 2 and world.log.server == "one":  # after the cancel's first read of the log
            monkeypatch.setattr(world.log, "server", "two")
            world.log.entries.clear()
            for _ in range(num_copies):
                world.log.add("in", encode(Generate(id="g", text="x", max_tokens=4)))
            world.session.forget()  # as the session's task does
        return await page(key, kind, after)

    monkeypatch.setattr(world.log, "page", restarted)
    cancelled = await cancel(world.session, "g")
    assert (cancelled.id, cancelled.was) == ("g", "waiting")
    (result,) = [decode_result(entry.body) for entry in world.log.entries if entry.kind == "out"]
    assert result.seq == 1


async def test_a_cancel_stores_no_second_result_if_another_worker_answers_and_the_session_is_read_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for the request's chunks meanwhile, before it stores the result."""
    await world.ask(Append(id="a", text="one"))
    seq = world.publish(Generate(id="g", text="x", max_tokens=4))
    read = world.log.chunks.read

    async def overtaken(*asked: Any) -> Any:
        if len(world.results) == 1:
            refused = structs.replace(failure("g", "overloaded", "too many"), seq=seq)
            world.log.add("out", encode(refused), {EXPECT_HEADER: "2"})
            world.session.forget()  # as the session's task does
        return await read(*asked)

    monkeypatch.setattr(world.log.chunks, "read", overtaken)
    cancelled = await cancel(world.session, "g")
    assert isinstance(cancelled, Failed)
    assert [result.seq for result in world.results] == [1, seq]


@pytest.mark.parametrize("late", ["page", "read"])
async def test_a_cancel_ends_a_request_that_starts_to_run_while_the_cancel_reads_the_log(
    world: World, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """The log's reply with the request, or with its chunks, comes after the session's task has begun it."""
    there, go_on = held_up(world, monkeypatch)
    world.publish(Append(id="r1", text="a"))
    running = asyncio.create_task(world.session.run())
    await there.wait()
    seq = world.publish(Generate(id="r2", text="b", max_tokens=4))

    def end(_: Any) -> None:
        world.engine.cancel_after = 1
        go_on.set()

    monkeypatch.setattr(world.engine, "cancel", end, raising=False)

    page, read = world.log.page, world.log.chunks.read

    async def until_begun() -> None:
        await there.wait()
        streamed(world, monkeypatch, seq)

    async def slow_page(key: Any, kind: str, after: int) -> Any:
        if (
            kind == "in"
            and asyncio.current_task() is task
            and getattr(world.session.active, "id", "") == "r1"
        ):
            there.clear()
            go_on.set()
            go_on.clear()  # for the next request
            if late == "page":
                await until_begun()
            while world.session.pending and late == "read":  # noqa: ASYNC110
                await asyncio.sleep(0)
        return await page(key, kind, after)

    async def slow_read(*args: Any) -> Any:
        if asyncio.current_task() is task and not there.is_set():
            await until_begun()
        return await read(*args)

    monkeypatch.setattr(world.log, "page", slow_page)
    monkeypatch.setattr(world.log.chunks, "read", slow_read)
    task = asyncio.create_task(cancel(world.session, "r2"))
    async with asyncio.timeout(5):
        cancelled = await task
        await running
    assert (cancelled.id, cancelled.was) == ("r2", "running")
    assert world.result(seq).finish_reason == "cancelled"


async def test_an_answer_ends_with_the_tokens_streamed_before_the_device_failed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    seq = world.publish(Generate(id="g", text="x", max_tokens=9))

    async def fails(*_: Any, **__: Any) -> None:
        streamed(world, monkeypatch, seq)
        raise DeviceFaultError("it burns")

    monkeypatch.setattr(world.engine, "run", fails)
    await world.session.run()
    result = world.result(seq)
    assert (result.text, result.finish_reason) == ("ab", "given_up")
    assert "it burns" in result.warnings[-1]
    await world.assert_fold_is_life()


async def test_a_fork_that_waits_for_its_parent_records_no_failed_attempt_and_holds_no_device_lock(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs nothing on the device, so it cannot be the cause of a crash."""
    there, go_on = asyncio.Event(), asyncio.Event()

    async def parent(*_: Any) -> Any:
        there.set()
        await go_on.wait()
        return world.fold.open(world.session.history, FULL, {})

    monkeypatch.setattr(world.session, "_parent", parent)
    seq = world.log.add("in", encode(Open(id="o", from_=ForkPoint(session="p"))))
    world.log.notes.append(b'{"seq":%d,"attempts":2}' % seq)
    world.ring(seq, again=True)
    running = asyncio.create_task(world.session.run())
    await there.wait()
    assert len(world.log.notes) == 1
    async with asyncio.timeout(5), world.session.services.device_lock.enter(lambda: False):
        pass
    go_on.set()
    await running
    assert world.result(seq).parent.session == "p"


@pytest.mark.parametrize(("deadline_s", "reason"), [(None, "cancelled"), (1.0, "expired")])
async def test_an_answer_whose_token_stream_another_worker_has_ended_stops_with_the_streamed_tokens(
    world: World, monkeypatch: pytest.MonkeyPatch, deadline_s: float | None, reason: str
) -> None:
    """The other worker may have crashed after that, and clients must get no chunks after the seal."""
    request = Generate(id="g", text="x", max_tokens=9, deadline_s=deadline_s)
    seq = world.log.add("in", encode(request))
    chunk = streamed(world, monkeypatch, seq)

    async def sealed(*_: Any) -> PublishedChunks:
        return PublishedChunks([chunk], is_sealed=True)

    monkeypatch.setattr(world.log.chunks, "read", sealed)
    world.ring(seq)
    await world.session.run()
    assert (world.result(seq).tokens, world.result(seq).finish_reason) == (chunk.tokens, reason)


@pytest.mark.parametrize(
    ("noted", "attempts", "asked", "is_noted"),
    [
        (1, 2, 2, False),
        (1, 0, 2, True),
        (3, 2, 2, True),
        (2, 0, 2, False),
        (2, 1, 2, False),
        (0, 0, 3, False),
    ],
)
async def test_a_stopping_worker_does_not_overwrite_the_failed_attempts_recorded_for_an_earlier_request(
    world: World, noted: int, attempts: int, asked: int, is_noted: bool
) -> None:
    """Otherwise a request that crashes workers would be begun for ever, if some are stopped in between."""
    assert [world.log.add("in", encode(Append(id=id_, text="x"))) for id_ in "ab"] == [1, 2]
    world.log.add("dead", b"")  # at 3, where the log has no request
    world.log.notes.append(b'{"seq":%d,"attempts":%d}' % (noted, attempts))
    await excuse(world.session.services, {world.session.key: asked})
    assert len(world.log.notes) == 1 + is_noted


async def test_no_checkpoint_covers_the_log_beyond_a_waiting_or_unread_request(world: World) -> None:
    """A worker that opens the session from such a checkpoint would never answer the request."""
    await world.ask(Append(id="a", text="one"))
    record = world.session.log.record
    record.in_seq = 9
    record.pending.append(PendingRequest(3, None, "", STORED))
    for in_seq, is_due in ((5, False), (3, True), (12, False)):
        record._num_since_checkpoint = 10**6
        if in_seq == 12:
            record.pending.clear()
        assert (record.next_checkpoint(in_seq) is not None) == is_due


async def test_an_answer_begun_from_log_entries_that_nats_lost_ends_with_its_streamed_tokens(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next tokens would continue another history than the tokens that clients have."""
    await world.ask(Append(id="a", text="one"))
    chunks = [Chunk(0, (5,), "x", seq=3)]

    async def published(*_: Any) -> PublishedChunks:
        return PublishedChunks(chunks, 1, base="of another history")

    monkeypatch.setattr(world.log.chunks, "read", published)
    answer = await world.ask(Generate(id="g", max_tokens=8))
    assert (answer.finish_reason, answer.tokens) == ("given_up", (5,))
    assert "lost" in answer.warnings[-1]


async def test_a_worker_does_not_start_an_answer_that_another_worker_has_stored_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two requests that both workers know, the other one answers the second behind the first's result."""
    other, begun = beside(world), []
    run, end = world.engine.run, world.outbox.end

    async def counted(*args: Any, **more: Any) -> Any:
        begun.append(args)
        return await run(*args, **more)

    async def ended(key: Any, request_id: str, *args: Any) -> None:
        await end(key, request_id, *args)
        other.ring(second)
        await other.session.run()

    monkeypatch.setattr(world.engine, "run", counted)
    monkeypatch.setattr(world.outbox, "end", ended)
    first, second = [world.publish(Generate(id=name, text=name, max_tokens=3)) for name in ("a", "b")]
    await world.session.run()
    assert [result.seq for result in world.results] == [first, second]
    assert len(begun) == 1


async def test_a_failing_turn_stores_no_result_if_another_worker_answered_its_request_and_erased_the_session(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This worker was stalled: another one has answered the request meanwhile, and forgotten the session."""
    other = beside(world)

    async def fails(*_: Any, **__: Any) -> Any:
        other.ring(asked)
        await other.session.run()
        await other.ask(Close(id="c", forget=True))
        raise ImageError("an image of the session is gone from the log")

    monkeypatch.setattr(world.engine, "run", fails)
    asked = world.publish(Generate(id="g", text="one", max_tokens=3))
    with capture_logs() as logged:
        await world.session.run()
    assert not [one for one in logged if one["log_level"] == "error"]
    assert [type(result) for result in world.results] == [Generated, Closed]


async def test_a_request_whose_id_has_the_same_hash_as_an_answered_id_is_executed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answered_ids, "_hash", lambda _: 7)
    await world.ask(Append(id="a", text="one"))
    assert isinstance(await world.ask(Append(id="b", text="two")), Appended)


async def test_a_close_with_cancel_ends_the_running_and_the_waiting_requests_before_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = held_up(world, monkeypatch)
    monkeypatch.setattr(world.engine, "cancel", lambda _: go_on.set(), raising=False)
    first = world.publish(Generate(id="a", text="one", max_tokens=9))
    second = world.publish(Append(id="b", text="two"))
    answering = asyncio.create_task(world.session.run())
    await begun.wait()
    world.publish(Close(id="c", cancel=True))
    await asyncio.wait_for(answering, 10)
    assert world.result(first).finish_reason == "cancelled"
    assert "cancelled before" in world.result(second).message


@pytest.mark.parametrize("is_read", [True, False], ids=["log read before", "log not read before"])
async def test_a_close_with_cancel_also_ends_a_request_that_the_worker_is_just_reading_from_the_log(
    world: World, monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    """With `is_read` the session's log was read before."""
    if is_read:
        await world.ask(Append(id="before", text="one"))
    seq, page = world.publish(Generate(id="a", text="one", max_tokens=9)), world.log.page

    async def closed_behind_it(key: Any, kind: str, after: int) -> Any:
        found = await page(key, kind, after)
        if kind == "in":
            monkeypatch.setattr(world.log, "page", page)
            world.publish(Close(id="c", cancel=True))
        return found

    monkeypatch.setattr(world.log, "page", closed_behind_it)
    await world.session.run()
    assert world.result(seq).finish_reason == "cancelled"


@pytest.mark.parametrize("was_read", [False, True], ids=["log not read before", "log read before"])
async def test_reading_the_log_includes_a_result_whose_request_is_removed_between_two_reads(
    world: World, monkeypatch: pytest.MonkeyPatch, was_read: bool
) -> None:
    """Another worker answers the request, and a later one comes, while this worker reads the log."""
    if was_read:
        await world.ask(Append(id="first", text="first"))
    other, page, log = beside(world), world.log.page, world.log

    async def overtaken(*args: Any) -> Any:
        found = await page(*args)
        monkeypatch.setattr(log, "page", page)
        other.ring(seq)
        await other.session.run()
        log.entries[seq - 1] = replace(log.entries[seq - 1], kind="checkpoint")
        world.publish(Append(id="b", text="two"))
        return found

    seq = world.publish(Append(id="a", text="one"))
    monkeypatch.setattr(log, "page", overtaken)
    await world.session.run()
    one, two = world.results[-2:]
    assert isinstance(one, Appended)
    assert isinstance(two, Appended)
    assert (one.id, two.id) == ("a", "b")
    assert two.position > one.position
    repeat = await world.ask(Append(id="a", text="one"))
    assert repeat.repeat_of == seq
    assert world.session.services.telemetry.ignored["result"] == 0
