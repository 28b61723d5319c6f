"""Disk space: limits can change at any time, and `clear` removes all."""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import pairwise

import pytest
from made_kv import assert_sum_rule, extended, identity, num_restored, save_all
from structlog.testing import capture_logs

from cache.disk import format as snapshot_format
from cache.disk.folder import Folder
from cache.index.quota import EVICT_LIMIT
from cache.names.tokens import pack

TOKENS = list(range(10))


def files(tmp_path) -> int:
    return len(list((tmp_path / "cache" / "snapshots").iterdir()))


async def fill(store, num_sessions, first=100) -> None:
    for session in range(first, first + num_sessions):
        save_all(store, "z", [session, *range(7)])
        await store.queue.drained(5)


async def size_of_a_block(open_store) -> int:
    store = await open_store()
    save_all(store, "size", TOKENS[:4])
    await store.queue.drained(5)
    size = store.stats().stored_bytes
    store.eraser.forget("size", pack(TOKENS[:4]))
    await store.close()
    return size


async def test_saves_are_dropped_and_counted_when_snapshots_in_use_fill_the_disk_limit(open_store) -> None:
    size = await size_of_a_block(open_store)
    store = await open_store(max_bytes=4 * size)
    save_all(store, "a", TOKENS[:8])
    await store.queue.drained(5)
    store.kv.hold(store.kv.chain("a"), TOKENS[:8])
    store.quota.set_limits(max_bytes=int(1.5 * size), min_free_bytes=0)
    assert save_all(store, "b", TOKENS[:4]) == [False]
    stats = store.stats()
    assert stats.dropped == {"disk_limit": 1}
    assert (stats.free_bytes, stats.evictable_bytes) == (stats.capacity_bytes - stats.stored_bytes, 0)
    assert await num_restored(store, TOKENS[:8]) == 8
    assert_sum_rule(store)


@pytest.mark.parametrize("use", ["held", "begun with"])
async def test_snapshots_that_a_turn_held_or_began_with_are_evicted_after_snapshots_not_used_since(
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


async def test_a_lowered_disk_limit_is_reached_by_evicting_in_small_steps(open_store, tmp_path) -> None:
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
    save_all(store, "b", [1, 1])
    await store.queue.drained(5)
    assert files(tmp_path) == 6, "raised, it holds more again"


async def test_the_required_free_space_can_be_changed_while_the_store_runs(open_store, tmp_path) -> None:
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


async def test_evictions_that_free_nothing_stop_until_space_is_free(open_store, monkeypatch) -> None:
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
    save_all(store, "b", TOKENS)
    await store.queue.drained(5)
    assert save_all(store, "b", TOKENS)[0]
    assert_sum_rule(store)


async def test_space_for_snapshots_that_wait_to_be_written_does_not_count_as_free(open_store, gate) -> None:
    store = await open_store()
    assert save_all(store, "a", TOKENS[:4]) == [True]
    size = store.stats().in_flight_bytes
    min_free_bytes = store.queue.free_bytes - int(1.5 * size)
    store.quota.set_limits(max_bytes=1 << 30, min_free_bytes=min_free_bytes)
    assert save_all(store, "b", TOKENS[:4]) == [False]
    gate.set()


async def test_clear_removes_all_snapshots_and_quarantined_files(open_store, tmp_path) -> None:
    other = await open_store(identity=identity(weights="other"))
    save_all(other, "a", TOKENS)
    await other.close()
    store = await open_store()
    for tenant in "ab":
        save_all(store, tenant, TOKENS)
    (tmp_path / "cache" / "quarantine" / "doubtful").write_bytes(b"x" * 1000)
    assert await store.eraser.clear()
    stats = store.stats()
    assert (files(tmp_path), stats.stored, stats.stored_bytes) == (0, 0, 0)
    assert list((tmp_path / "cache" / "quarantine").iterdir()) == []
    assert_sum_rule(store)
    save_all(store, "a", TOKENS)
    await store.queue.drained(5)
    assert await num_restored(store, TOKENS) == 10


async def test_a_load_whose_snapshots_were_cleared_restores_nothing(open_store) -> None:
    store = await open_store()
    save_all(store, "a", TOKENS)
    await store.queue.drained(5)
    match = store.kv.match(store.kv.chain("a"), TOKENS)
    assert await store.eraser.clear()
    assert await store.kv.load(match) is None
    assert store.stats().held_bytes == 0
    assert_sum_rule(store)


@pytest.mark.parametrize(
    ("stuck_at", "what", "deadline_s"),
    [("write", "erase", 2.0), ("place", "erase", 0.2), ("write", "clear", 0.2), ("place", "clear", 5.0)],
)
async def test_erase_and_clear_return_in_time_while_the_disk_hangs_and_the_files_do_not_come_back(
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
