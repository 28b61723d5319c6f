"""The store on a real directory: saved snapshots are found and restored, and limits of space are kept."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from itertools import pairwise

import pytest
from made_kv import assert_sum_rule, cut, extended, identity, num_restored, put, save_all, stored
from structlog.testing import capture_logs

from cache.disk import format as snapshot_format
from cache.disk.chain_reader import num_shared
from cache.disk.folder import Folder
from cache.index import stored_kv
from cache.index.quota import EVICT_LIMIT
from cache.names.blocks import Span
from cache.names.marks import ErasureProgress, Marks
from cache.names.tokens import pack

TOKENS = list(range(10))


def files(tmp_path) -> int:
    return len(list((tmp_path / "cache" / "snapshots").iterdir()))


async def test_queued_snapshots_are_dropped_to_free_memory_while_the_disk_hangs(open_store, gate) -> None:
    store = await open_store()
    spans = store.kv.wanted(store.kv.chain("a"), TOKENS)
    tensors = [cut(TOKENS, span) for span in spans]
    held = [weakref.ref(part[0].data) for part in tensors]
    for span in spans:
        assert store.kv.save(store.kv.chain("a"), TOKENS, span, tensors.pop(0))
    await asyncio.sleep(0.1)
    store.queue.free_memory()
    await asyncio.sleep(0.1)
    assert [alive() is None for alive in held] == [False, True, True], "the first is being written"
    assert_sum_rule(store)
    gate.set()
    assert await store.queue.drained(10)
    assert [alive() for alive in held] == [None] * 3, "an idle writer keeps none either"
    assert_sum_rule(store)
    assert (store.stats().durable, store.stats().dropped) == (1, {"memory": 2})
    assert save_all(store, "a", TOKENS) == [True, True], "and are saved when they come again"
    assert await store.queue.drained(10)
    assert await num_restored(store, TOKENS) == 10


async def test_a_snapshot_erased_while_its_header_is_read_is_not_added_to_the_matched_prefix(
    open_store, monkeypatch
) -> None:
    store, begun, go_on = await open_store(), threading.Event(), threading.Event()
    await put(store, TOKENS[:4])

    def reading(*args) -> list[int]:
        begun.set()
        assert go_on.wait(10)
        return num_shared(*args)

    monkeypatch.setattr(stored_kv, "num_shared", reading)
    extending = asyncio.create_task(extended(store, [0, 1, 2, 99]))
    await asyncio.to_thread(begun.wait, 10)
    assert store.eraser.forget("a", pack(TOKENS[:4])) == 1
    go_on.set()
    assert (await extending).num_tokens == 0
    await store.queue.drained(5)
    assert store.stats().stored == store.stats().held_bytes == 0


async def test_a_snapshot_that_a_turn_uses_while_the_snapshot_is_written_is_counted_once_in_the_disk_usage(
    open_store, gate
) -> None:
    store = await open_store()
    save_all(store, "a", TOKENS[:8])
    held = store.kv.hold(store.kv.chain("a"), TOKENS[:8])
    gate.set()
    await store.queue.drained(5)
    assert_sum_rule(store)
    store.kv.release(held)
    assert_sum_rule(store)
    assert store.stats().held_bytes == 0


async def test_a_block_is_not_restored_if_fewer_than_a_quarter_of_its_tokens_match_the_prompt(
    open_store,
) -> None:
    store = await open_store(identity=identity(block_tokens=16))
    await put(store, list(range(16)))
    assert (await extended(store, [0, 1, 2, 99])).num_tokens == 0
    assert (await extended(store, [0, 1, 2, 3, 99])).num_tokens == 4


async def test_a_new_snapshot_is_dropped_if_only_snapshots_of_its_own_prefix_could_be_evicted(
    open_store,
) -> None:
    store = await stored(open_store, TOKENS[:4])
    size = store.stats().stored_bytes
    await store.close()
    store = await open_store(max_bytes=size + 100)
    assert not store.kv.save(store.kv.chain("a"), TOKENS, Span(4, 8), cut(TOKENS, Span(4, 8)))
    assert store.stats().dropped == {"disk_limit": 1}
    assert await num_restored(store, TOKENS) == 4


async def test_a_snapshot_larger_than_the_disk_limit_or_the_write_queue_is_not_saved(open_store) -> None:
    store = await open_store(max_bytes=100)
    assert save_all(store, "a", [1, 2]) == [False]
    store = await open_store(directory=store._folder.directory.with_name("other"), queue_bytes=100)
    assert save_all(store, "a", [1, 2]) == [False]
    assert store.stats().dropped == {"too_large": 1}


async def test_the_write_queue_takes_no_more_bytes_than_the_disk_limit_even_after_that_limit_was_changed(
    open_store,
) -> None:
    """Snapshots of tokens that are not published wait there too, and would find no room later."""
    store = await open_store(max_bytes=1000, queue_bytes=3000)
    assert store.queue.vacant_bytes() == 1000
    store.quota.set_limits(max_bytes=2000, min_free_bytes=0)
    assert store.queue.vacant_bytes() == 2000
    store.quota.set_limits(max_bytes=5000, min_free_bytes=0)
    assert store.queue.vacant_bytes() == 3000


async def test_a_full_write_queue_drops_new_snapshots(open_store, gate) -> None:
    """The queue's limit is in bytes, and `room` is what is left of it."""
    store = await open_store(queue_bytes=3000)
    sizes = []
    for session in range(3):
        before = store.queue.vacant_bytes()
        store.kv.save(store.kv.chain("a"), [session] * 4, Span(0, 4), cut([session] * 4, Span(0, 4)))
        sizes.append(before - store.queue.vacant_bytes())
    assert sizes[0] > 1000, "the test wants a queue of two"
    assert sizes[2] == 0
    assert store.queue.vacant_bytes() < sizes[0]
    assert save_all(store, "a", [2] * 10) == [False, False, False]
    assert store.stats().dropped == {"queue_full": 4}
    store.queue.skip(2)
    assert store.stats().dropped == {"queue_full": 6}
    assert_sum_rule(store)
    gate.set()
    assert await store.queue.drained(5)
    assert store.queue.vacant_bytes() == 3000
    assert_sum_rule(store)
    assert save_all(store, "a", [2] * 4) == [True]


@pytest.mark.parametrize(("length", "shared"), [(300, 0), (256, 128), (300, 200)])
async def test_erasing_by_hashes_removes_a_token_sequence_but_keeps_longer_and_branching_sequences(
    open_store, length, shared
) -> None:
    tokens = list(range(1000, 1000 + length))
    branch, longer = [*tokens[:100], *range(100)], [*tokens, *range(200)]
    store = await open_store(identity=identity(block_tokens=16))
    for one in (tokens[: length - 5], tokens, branch, longer):
        save_all(store, "a", one)
    save_all(store, "b", tokens)
    assert await store.eraser.erase_marked("a", Marks.of("a", pack(tokens), shared))
    assert await num_restored(store, longer) == len(longer)
    assert await store.eraser.erase_marked("a", Marks.of("a", pack(longer), shared))
    assert await store.close()
    store = await open_store(identity=identity(block_tokens=16))
    assert await num_restored(store, tokens) == max(shared // 16 * 16, 100)
    assert await num_restored(store, branch) == len(branch)
    assert await num_restored(store, tokens, "b") == length


async def test_a_reopened_cache_directory_reports_up_to_which_log_position_its_erasures_are_done(
    open_store,
) -> None:
    store = await open_store()
    assert await store.eraser.erased_up_to("log") is None
    await store.eraser.note_erased(ErasureProgress("log", 5, 1.5))
    await store.eraser.note_erased(ErasureProgress("log", 7, 2.5, 2.125))
    assert await store.close()
    assert await (await open_store()).eraser.erased_up_to("log") == ErasureProgress("log", 7, 2.5, 2.125)


async def test_a_cache_that_lost_its_index_reports_erasures_as_done_only_up_to_its_last_use(
    open_store, tmp_path
) -> None:
    """Else a worker that was away while notes expired would keep what they were to erase."""
    store = await open_store()
    save_all(store, "a", TOKENS)
    await store.eraser.note_erased(ErasureProgress("log", 7, 2e9))
    assert await store.close()
    (tmp_path / "cache" / "index.sqlite").unlink()
    for path in (tmp_path / "cache" / "snapshots").iterdir():
        os.utime(path, (1000, 1000))
    store = await open_store()
    assert await store.eraser.erased_up_to("log") == ErasureProgress("log", 0, 1000.0)


async def test_a_snapshot_erased_during_the_rename_of_its_file_and_then_saved_again_is_stored_once(
    open_store, tmp_path, monkeypatch
) -> None:
    """The writer has made its last check for a cancel, so the event loop must remove the first file."""
    store = await open_store()
    renaming, go_on, place = threading.Event(), threading.Event(), Folder.place

    def held(folder, path, digest) -> None:
        renaming.set()
        assert go_on.wait(10)
        place(folder, path, digest)

    monkeypatch.setattr(Folder, "place", held)
    save_all(store, "a", [1, 2])
    await asyncio.to_thread(renaming.wait, 10)
    assert store.eraser.forget("a", pack([1, 2])) == 1
    assert save_all(store, "a", [1, 2]) == [True]
    go_on.set()
    assert await store.queue.drained(5)
    assert store.stats().cancelled == 1
    assert files(tmp_path) == store.stats().stored == store.stats().durable == 1
    assert await num_restored(store, [1, 2]) == 2
    assert_sum_rule(store)


async def test_an_erased_block_still_in_use_by_a_turn_stays_if_the_turn_saves_the_next_block(
    open_store,
) -> None:
    store = await stored(open_store, TOKENS[:4])
    match = store.kv.match(store.kv.chain("a"), TOKENS[:4])
    store.eraser.forget("a", pack(TOKENS[:4]))
    assert store.kv.save(store.kv.chain("a"), TOKENS, Span(4, 8), cut(TOKENS, Span(4, 8)))
    store.kv.release(match)
    await store.queue.drained(5)
    assert await num_restored(store, TOKENS) == 8


async def test_closing_a_store_with_a_short_timeout_cancels_queued_snapshots(open_store, gate) -> None:
    store = await open_store()
    save_all(store, "a", TOKENS)
    assert not await store.close(timeout_s=0.2)
    gate.set()
    await asyncio.sleep(0.2)
    stats = store.stats()
    assert (stats.in_flight, stats.durable, stats.cancelled) == (0, 0, 3)
    assert_sum_rule(store)
    store._opened.close()  # as the end of the process does


async def test_a_snapshot_erased_during_its_write_and_then_saved_again_but_dropped_leaves_no_file(
    open_store, tmp_path, monkeypatch
) -> None:
    """The first write is cancelled after its last check; the second, dropped, would replace its file."""
    gate, entered, place = threading.Event(), threading.Event(), Folder.place

    def held(folder, path, digest) -> None:
        place(folder, path, digest)
        entered.set()
        assert gate.wait(10)

    monkeypatch.setattr(Folder, "place", held)
    store = await open_store()
    save_all(store, "a", [1, 2])
    assert await asyncio.to_thread(entered.wait, 10)
    assert store.eraser.forget("a", pack([1, 2])) == 1
    save_all(store, "a", [1, 2])
    store.queue.free_memory()
    gate.set()
    assert await store.queue.drained(10)
    assert store.stats().stored == 0
    assert list((tmp_path / "cache" / "snapshots").iterdir()) == []
    assert_sum_rule(store)


async def test_a_closed_store_restores_nothing_and_counts_each_save_as_dropped(open_store) -> None:
    store = await stored(open_store, [3, 4])
    assert await store.close()
    assert await store.close()
    assert save_all(store, "a", [1, 2]) == [False]
    assert store.stats().dropped == {"closing": 1}
    assert await asyncio.wait_for(store.kv.load(store.kv.match(store.kv.chain("a"), [3, 4])), 10) is None


async def fill(store, num_sessions, first=100) -> None:
    for session in range(first, first + num_sessions):
        await put(store, [session, *range(7)], tenant="z")


async def size_of_a_block(open_store) -> int:
    store = await open_store()
    await put(store, TOKENS[:4], tenant="size")
    size = store.stats().stored_bytes
    store.eraser.forget("size", pack(TOKENS[:4]))
    await store.close()
    return size


async def test_new_snapshots_are_dropped_and_counted_when_snapshots_in_use_fill_the_disk_limit(
    open_store,
) -> None:
    size = await size_of_a_block(open_store)
    store = await stored(open_store, TOKENS[:8], max_bytes=4 * size)
    store.kv.hold(store.kv.chain("a"), TOKENS[:8])
    store.quota.set_limits(max_bytes=int(1.5 * size), min_free_bytes=0)
    assert save_all(store, "b", TOKENS[:4]) == [False]
    stats = store.stats()
    assert stats.dropped == {"disk_limit": 1}
    assert (stats.free_bytes, stats.evictable_bytes) == (stats.capacity_bytes - stats.stored_bytes, 0)
    assert await num_restored(store, TOKENS[:8]) == 8
    assert_sum_rule(store)


@pytest.mark.parametrize("use", ["held", "begun with"])
async def test_snapshots_that_a_turn_pinned_or_restored_are_evicted_later_than_snapshots_not_used_since(
    open_store, use: str
) -> None:
    """Sessions in memory do not read their snapshots, but hold them; these must not be evicted first.

    Neither must those of which forks and rewound sessions use only the beginning.
    """
    store = await open_store()
    for session in range(3):
        save_all(store, "a", [session, 1])
    await store.queue.drained(5)
    if use == "held":
        store.kv.release(store.kv.hold(store.kv.chain("a"), [0, 1, 5]))
    else:
        store.kv.release(await extended(store, [0, 5]))
    size = store.stats().stored_bytes // 3
    await store.close()
    store = await open_store(max_bytes=2 * size + size // 2)
    assert [await num_restored(store, [session, 1]) for session in range(3)] == [2, 0, 2]


async def test_quarantined_files_of_an_earlier_process_count_against_the_disk_limit_of_a_store(
    open_store, tmp_path
) -> None:
    store = await stored(open_store, [0, 1])
    size = store.stats().stored_bytes
    await store.close()
    (tmp_path / "cache" / "quarantine" / "damaged").write_bytes(bytes(size))
    assert (await open_store(max_bytes=size + size // 2)).stats().stored == 0


async def test_lowering_the_disk_limit_of_a_store_evicts_snapshots_in_small_steps_down_to_the_limit(
    open_store, tmp_path
) -> None:
    store = await open_store()
    for session in range(100):
        save_all(store, "a", [session, 1])
    await store.queue.drained(5)
    size = store.stats().stored_bytes // 100
    store.quota.set_limits(max_bytes=5 * size + 50, min_free_bytes=0)
    assert store.stats().stored == 100, "the caller does not wait for it"
    assert store.stats().free_bytes < 0
    seen = [100]
    while store.stats().free_bytes < 0:
        await asyncio.sleep(0)
        if store.stats().stored != seen[-1]:
            seen.append(store.stats().stored)
        assert_sum_rule(store)
    assert [a - b for a, b in pairwise(seen)] == [
        EVICT_LIMIT,
        EVICT_LIMIT,
        95 - 2 * EVICT_LIMIT,
    ]
    await store.queue.drained(5)
    assert files(tmp_path) == 5
    assert store.kv.match(store.kv.chain("a"), [99, 1]).num_tokens == 2

    store.quota.set_limits(max_bytes=50 * size, min_free_bytes=0)
    await put(store, [1, 1], tenant="b")
    assert files(tmp_path) == 6, "raised, it holds more again"


async def test_raising_the_required_free_disk_space_of_a_running_store_removes_and_refuses_snapshots(
    open_store, tmp_path
) -> None:
    store = await open_store()
    for session in range(5):
        save_all(store, "a", [session, 1])
    await store.queue.drained(5)
    store.quota.set_limits(max_bytes=1 << 30, min_free_bytes=1 << 60)
    await asyncio.sleep(0.05)
    await store.queue.drained(5)
    assert files(tmp_path) == store.stats().stored == 0
    assert save_all(store, "a", [1, 1]) == [False]
    store.quota.set_limits(max_bytes=1 << 30, min_free_bytes=0)
    assert save_all(store, "a", [1, 1]) == [True]


async def test_evictions_that_free_no_disk_space_stop_until_space_is_free_again(
    open_store, monkeypatch
) -> None:
    """APFS and btrfs keep the blocks of removed files while a snapshot of the file system has them."""
    free = 1 << 30
    monkeypatch.setattr(Folder, "free_bytes", lambda _: free)
    store = await open_store(min_free_bytes=free - (1 << 20))
    await fill(store, 60)
    before = store.stats().stored
    with capture_logs() as logs:
        store.quota.set_limits(max_bytes=1 << 30, min_free_bytes=free + 1)
        for session in range(100):
            assert save_all(store, "a", [session, *range(7)])[0] is False or session == 0
            await store.queue.drained(5)
    assert [log["event"] for log in logs if log["log_level"] == "warning"] == ["eviction_freed_nothing"]
    assert 0 < before - store.stats().stored <= EVICT_LIMIT
    assert_sum_rule(store)

    free += 1 << 21  # the file system has dropped its snapshot
    await put(store, TOKENS, tenant="b")
    assert save_all(store, "b", TOKENS)[0]
    assert_sum_rule(store)


async def test_disk_space_needed_by_queued_snapshots_does_not_count_as_free(open_store, gate) -> None:
    store = await open_store()
    assert save_all(store, "a", TOKENS[:4]) == [True]
    size = store.stats().in_flight_bytes
    min_free_bytes = store.queue.free_bytes - int(1.5 * size)
    store.quota.set_limits(max_bytes=1 << 30, min_free_bytes=min_free_bytes)
    assert save_all(store, "b", TOKENS[:4]) == [False]
    gate.set()


@pytest.mark.parametrize(
    ("stuck_at", "what", "deadline_s"),
    [("write", "erase", 2.0), ("place", "erase", 0.2), ("write", "clear", 0.2), ("place", "clear", 5.0)],
)
async def test_erase_and_clear_return_by_their_deadline_on_a_hung_disk_and_late_writes_are_discarded(
    open_store, tmp_path, monkeypatch, stuck_at, what, deadline_s
) -> None:
    """The writer thread hangs in a write of these snapshots, before or after its last check for a cancel."""
    store = await open_store()
    busy, go_on = threading.Event(), threading.Event()
    where, name = (snapshot_format, "write") if stuck_at == "write" else (Folder, "place")
    do = getattr(where, name)

    def stuck(*arguments) -> None:
        busy.set()
        assert go_on.wait(20)
        do(*arguments)

    monkeypatch.setattr(where, name, stuck)
    save_all(store, "a", TOKENS)
    await asyncio.to_thread(busy.wait, 10)
    started = time.monotonic()
    asked = () if deadline_s > 1 else (deadline_s,)  # the longer deadlines are the defaults
    if what == "erase":
        settled = (await store.eraser.erase("a", pack(TOKENS), *asked)).settled
    else:
        settled = await store.eraser.clear(*asked)
    took_s = time.monotonic() - started
    assert not settled
    assert deadline_s <= took_s < deadline_s + 0.5
    assert store.kv.match(store.kv.chain("a"), TOKENS).num_tokens == 0
    assert_sum_rule(store)
    save_all(store, "b", TOKENS)  # queued after it, and not to be removed
    go_on.set()
    assert await store.queue.drained(5)
    assert store.stats().cancelled == 3
    assert await num_restored(store, TOKENS) == 0
    assert await num_restored(store, TOKENS, "b") == 10
    assert files(tmp_path) == store.stats().stored == 3
    assert_sum_rule(store)
    await store.close()
    assert (await open_store()).stats().stored == 3
