"""What the disk lacks of a session is saved once there is room: a kill costs at most one block of prefill."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from engine_process import Process
from tiny_models import BLOCK, answer, key

from cache.disk import format as snapshot_format
from cache.index import write_queue as writer
from cache.kv import layers
from cache.names.policy import Policy
from cache.names.tokens import as_tokens
from tests.parts import until
from turnkeep_client.messages import Chunk
from worker.device import machine
from worker.device.request import TurnRequest
from worker.device.turn import DeviceTurn, Starvation
from worker.engine import unsaved_kv

PROMPT = [1 + i % 90 for i in range(12 * BLOCK + 3)]


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A slow disk, which takes nothing while the event is not set; saving looks often whether it has room."""
    monkeypatch.setattr(unsaved_kv, "_POLL_S", 0.01)
    write, disk = snapshot_format.write, threading.Event()
    disk.set()

    def slow(*args: Any) -> None:
        disk.wait()
        time.sleep(0.02)
        write(*args)

    monkeypatch.setattr(snapshot_format, "write", slow)
    return disk


async def answered(process: Process, disk: threading.Event) -> list[int]:
    """Answer `PROMPT` while the disk takes nothing; return the answer's tokens."""
    disk.clear()
    _, said, _ = await process.generate(PROMPT, 4)
    assert process.store.stats().dropped.get("queue_full", 0) > 0, "the queue was not too small"
    disk.set()
    return said


@asynccontextmanager
async def small_queue(open_process: Callable[..., Any], model: Any) -> AsyncIterator[Process]:
    """Run a `Process` whose write queue has room for about four blocks."""
    async with open_process(model, "measured") as process:
        await process.generate(PROMPT, 2)
        await process.store.queue.drained(5)
        stats = process.store.stats()
        block_bytes = stats.stored_bytes // stats.stored
    async with open_process(model, queue_bytes=4 * block_bytes) as process:
        yield process


async def quiet(process: Process) -> None:
    """Wait until the write queue is empty and nothing is being copied for it."""
    for _ in range(3):
        await asyncio.sleep(0.05)  # saving looks at least once
        await until(lambda: process.engine._saving._copied is None)
        assert await process.store.queue.drained(5)


@pytest.mark.parametrize("kind", ["exaone4", "qwen3_next"])
async def test_snapshots_dropped_because_the_write_queue_was_full_are_stored_once_the_session_is_idle(
    make_model, open_process, disk, kind
) -> None:
    model = make_model(kind)
    async with small_queue(open_process, model) as process:
        saving = asyncio.create_task(process.engine.chores["saving"]())
        said = await answered(process, disk)
        await process.append(PROMPT[::-1], name="private", policy=Policy(has_snapshots=False))
        await until(lambda: process.engine._saving.unstored() == [])  # what is never stored does not count
        await process.store.queue.drained(5)
        saving.cancel()
    async with open_process(model) as process:
        found, again, _ = await process.generate([*PROMPT, *said, 5], 4)
        assert found.num_prefilled <= 2, "only the last token and the new one are prefilled"
        assert len(again) == 4


@pytest.mark.parametrize("kind", ["llama", "mamba2"])
@pytest.mark.parametrize("end", ["published", "fenced", "refused", "starved"])
async def test_snapshots_of_an_answer_are_stored_only_after_its_tokens_are_published(
    make_model, open_process, kind, end
) -> None:
    """Also those that are just being published, while another turn lets snapshots be saved."""
    growing, drawn, goes_on = answer(24 * BLOCK), asyncio.Event(), asyncio.Event()
    published: list[int] = []

    async def publish(chunk: Chunk) -> bool:
        if not drawn.is_set():
            await drawn.wait()
            published.extend(chunk.tokens)
            return True
        await goes_on.wait()
        if end == "fenced":
            raise ZeroDivisionError
        return end != "refused"

    async with open_process(make_model(kind)) as process:
        engine, store = process.engine, process.store
        saving = asyncio.create_task(engine.chores["saving"]())
        asked = TurnRequest(key("s"), as_tokens(PROMPT), answer=growing)
        running = asyncio.create_task(engine.run(asked, lambda: False, publish))
        while key("s") not in engine._kv_on_device:  # noqa: ASYNC110  # it has drawn all
            await asyncio.sleep(0.01)
        drawn.set()
        await process.generate([*reversed(PROMPT)], 2, name="other")
        await quiet(process)
        whole = asked.tokens(len(PROMPT) + 24 * BLOCK - 1)
        chain = store.kv.chain(key("s").tenant, of=whole)
        assert 0 < store.kv.find(chain, whole).num_tokens <= len(PROMPT) + len(published)
        assert store.queue.vacant_bytes() < store.queue.queue_bytes
        if end == "starved":
            engine._handle_event(Starvation())
            assert store.queue.vacant_bytes() == store.queue.queue_bytes
        goes_on.set()
        if end == "published":
            saving.cancel()  # nothing is left for it
        with contextlib.suppress(ZeroDivisionError):
            await running
        await quiet(process)
        is_logged = end in ("published", "starved")
        assert (store.kv.find(chain, whole).num_tokens == len(whole)) == is_logged
        assert (engine.live_bytes(key("s"), whole) > 0) == is_logged
        assert store.queue.vacant_bytes() == store.queue.queue_bytes
        saving.cancel()


async def test_a_stopping_worker_stores_the_snapshots_that_a_full_write_queue_had_dropped(
    make_model, open_process, disk
) -> None:
    model = make_model("llama")
    async with small_queue(open_process, model) as process:
        said = await answered(process, disk)
        process.engine.stop()
        await process.engine.save_all(5)
    async with open_process(model) as process:
        found, _, _ = await process.generate([*PROMPT, *said, 5], 1)
        assert found.num_prefilled <= 2


@pytest.mark.parametrize("fault", ["hangs", "died"])
async def test_a_worker_whose_device_thread_hangs_or_died_stops_without_storing_missing_snapshots(
    make_model, open_process, disk, fault
) -> None:
    async with small_queue(open_process, make_model("llama")) as process:
        await answered(process, disk)
        process.engine.stop()
        device = process.engine._device
        if fault == "hangs":
            device.submit = lambda turn: None  # type: ignore[method-assign]
        else:
            device.commands.put(lambda runner: 1 / 0)
            await asyncio.to_thread(device._thread.join, 5)
        await asyncio.wait_for(process.engine.save_all(0.2 if fault == "hangs" else 30), 5)


@pytest.mark.parametrize("num_passes", [0, 2, 8])
async def test_a_session_erased_while_its_missing_snapshots_are_being_stored_leaves_no_snapshot(
    make_model, open_process, disk, num_passes
) -> None:
    model = make_model("llama")
    async with small_queue(open_process, model) as process:
        said = await answered(process, disk)
        saving = asyncio.create_task(process.engine.chores["saving"]())
        while process.engine._saving._copied is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(num_passes):  # erased at different points of its copies
            await asyncio.sleep(0)
        erased = await process.engine.erase(key("s"), as_tokens([*PROMPT, *said]), 0)
        assert erased.settled
        await quiet(process)
        assert process.store.stats().stored == 0
        assert process.engine.live_bytes(key("s"), as_tokens([*PROMPT, *said])) == 0
        saving.cancel()


@asynccontextmanager
async def saved(process: Process) -> AsyncIterator[None]:
    """Save what the disk lacks beside the block and after it, until the process is quiet."""
    saving = asyncio.create_task(process.engine.chores["saving"]())
    yield
    await quiet(process)
    assert not saving.done()
    saving.cancel()


async def test_snapshots_removed_from_the_write_queue_by_a_disk_error_are_stored_once_the_disk_recovers(
    make_model, open_process, monkeypatch
) -> None:
    monkeypatch.setattr(writer, "FIRST_PAUSE_S", 3.0)
    model, slow, fails = make_model("llama"), snapshot_format.write, True

    def write(*args: Any) -> None:
        if fails:
            time.sleep(0.2)  # until all is queued
            raise OSError(errno.EIO, "Input/output error")
        slow(*args)

    monkeypatch.setattr(snapshot_format, "write", write)
    async with open_process(model) as process, saved(process):
        await process.append(PROMPT)
        while not process.store.queue.paused:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        late = [*reversed(PROMPT)]
        await process.append(late, "late")
        assert process.store.queue.paused
        fails = False
        while process.engine._saving.unstored():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert sum(process.store.stats().dropped.values()) > 2, "there was no fault"
    async with open_process(model) as process:
        for tokens in (PROMPT, late):  # of the latter nothing was queued
            found, _, _ = await process.generate(tokens, 1)
            assert found.num_prefilled <= 2


async def test_a_gpu_failure_while_the_kv_of_an_idle_session_is_copied_ends_neither_the_worker_nor_saving(
    make_model: Callable[..., Any], open_process: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is that of an earlier evaluation, which the copy is the first to report."""
    cut, failed = layers.cut, threading.Event()

    def fail(*args: Any, **options: Any) -> Any:
        if failed.is_set():
            return cut(*args, **options)
        failed.set()
        raise RuntimeError("[METAL] Command buffer execution failed")

    monkeypatch.setattr(machine, "fails_late", lambda: True)
    async with open_process(make_model("llama")) as process, saved(process):
        for name in ("lost", "s"):
            process.engine._device.cut_snapshots(lambda: 0)  # its turn finds no room
            await process.append(PROMPT, name)
            process.engine._device.cut_snapshots(process.store.queue.vacant_bytes)
            if name == "lost":
                monkeypatch.setattr(layers, "cut", fail)
            await quiet(process)
            assert failed.is_set()
            assert process.engine._device.is_alive
        assert [*process.engine._kv_on_device] == [key("s")]
        assert process.engine._saving.unstored() == []


@pytest.mark.parametrize("kind", ["llama", "exaone4", "qwen3_next"])
async def test_kv_of_idle_sessions_is_not_copied_for_saving_until_a_full_disk_has_room_again(
    kind: str,
    make_model: Callable[..., Any],
    open_process: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unsaved_kv, "_RETRY_S", 0.2)
    async with open_process(make_model(kind)) as process, saved(process):
        engine, quota = process.engine, process.store.quota
        quota.set_limits(max_bytes=2**30, min_free_bytes=2**60)
        copy, copied = engine._saving._copy_spans, list[DeviceTurn]()

        def counted(turn: DeviceTurn) -> None:
            copied.append(turn)
            copy(turn)

        monkeypatch.setattr(engine._saving, "_copy_spans", counted)
        await process.append(PROMPT)
        await asyncio.sleep(0.6)
        assert not copied
        quota.set_limits(max_bytes=2**30, min_free_bytes=0)
        while engine._saving.unstored():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert len(copied) == 1


async def test_saving_kv_that_an_idle_session_lacks_on_disk_evicts_only_snapshots_that_were_used_earlier(
    make_model, open_process
) -> None:
    """The disk has room for two of four idle sessions: each would evict another's KV without end."""
    prompts = {name: [number, *PROMPT] for number, name in enumerate("abcd", 1)}
    async with open_process(make_model("llama")) as process, saved(process):
        for name, prompt in prompts.items():
            await process.append(prompt, name)
            await quiet(process)
        store, num_bytes = process.store, process.store.stats().stored_bytes
        store.quota.set_limits(max_bytes=num_bytes // 2 + num_bytes // 20, min_free_bytes=0)
        await quiet(process)
        num_durable = store.stats().durable
        process.engine._saving._lost()
        await quiet(process)
        chain = store.kv.chain(key("a").tenant)
        found = {name: store.kv.find(chain, prompt).num_tokens for name, prompt in prompts.items()}
        assert min(found["c"], found["d"]) > len(PROMPT) - BLOCK, found
        assert store.stats().durable - num_durable < 3, "sessions that were used earlier were saved again"


async def test_the_task_that_saves_snapshots_survives_a_session_whose_early_kv_has_left_the_device(
    make_model, open_process
) -> None:
    policy, long = Policy(4, 128 * BLOCK), as_tokens(1 + i % 90 for i in range(3 * 4096))
    async with open_process(make_model("llama"), num_blocks=64) as process:
        await process.engine.run(TurnRequest(key("s"), long, policy=policy), lambda: False)
        longer = long + as_tokens([1, 2, 3])
        await process.engine.run(TurnRequest(key("s"), longer, policy=policy), lambda: False)
        await process.store.eraser.clear()  # as if it were evicted
        process.engine._saving._note(key("s"))
        async with saved(process):
            pass
        assert process.engine._saving.unstored() == [len(longer) - 1]
