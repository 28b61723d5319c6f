"""The steps of the event loop and the memory of a restore grow only with new tokens; which CPUs it uses."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
from made_kv import BLOCK, assert_is_kv_of, cut, save_all, stored

from cache.disk import chain_reader
from cache.index.index import SnapshotIndex
from cache.index.nodes import Node
from cache.names import blocks

TOKENS = list(range(200))

linux = pytest.mark.skipif(sys.platform != "linux", reason="only there threads choose their CPUs")


@linux
async def test_a_restore_succeeds_even_if_the_system_forbids_setting_cpu_affinity(
    open_store, monkeypatch
) -> None:
    def forbidden(thread: int, mask: object) -> None:
        raise PermissionError

    monkeypatch.setattr(chain_reader, "LEAST_HELPED_BYTES", 0)
    monkeypatch.setattr(chain_reader.os, "sched_setaffinity", forbidden)
    store = await stored(open_store, TOKENS)
    assert_is_kv_of((await store.kv.load(store.kv.match(store.kv.chain("a"), TOKENS))).tensors, TOKENS)


@pytest.fixture
def steps(monkeypatch) -> Counter[str]:
    """Count hashed blocks, and searches among the snapshots that continue the same prefix."""
    counted: Counter[str] = Counter()

    def count(owner, name, size) -> None:
        real = getattr(owner, name)

        def counting(*args, **named):
            counted[name] += size(*args)
            return real(*args, **named)

        monkeypatch.setattr(owner, name, counting)

    count(blocks, "link", lambda *_: 1)
    count(SnapshotIndex, "furthest", lambda *_: 1)
    return counted


async def turn(store, tokens, steps: Counter[str]) -> Counter[str]:
    """Call the store as the engine does for a turn that prefills all of these tokens; return its steps."""
    before = steps.copy()
    chain = store.kv.chain("a")
    store.kv.release(store.kv.match(chain, tokens))
    held = store.kv.hold(chain, tokens)
    for span in store.kv.wanted(chain, tokens):
        assert store.kv.save(chain, tokens[: span.end], span, cut(tokens, span))
    store.kv.release(held)
    assert await store.queue.drained(30)
    return steps - before


async def test_the_cpu_work_of_the_cache_index_for_a_turn_is_linear_in_the_number_of_blocks(
    open_store, steps
) -> None:
    costs = []
    for first, num_blocks in ((1, 30), (2, 60)):
        store = await open_store()
        tokens = [first, *range(num_blocks * BLOCK - 1)]
        costs.append(await turn(store, tokens, steps))
        await store.close()
    one, two = costs
    assert one["link"] == 30, "each block is hashed once in a turn"
    for name in ("link", "furthest"):
        assert two[name] <= 2.5 * one[name], (name, one, two)


async def test_evicting_many_blocks_does_not_scan_all_blocks_in_use_again_for_each_evicted_block(
    open_store, monkeypatch
) -> None:
    """The held blocks are the least recently used, so each search for a victim would begin with them."""
    store = await open_store()
    save_all(store, "a", list(range(60 * BLOCK)))
    assert await store.queue.drained(30)
    size = store.stats().stored_bytes // 60
    store.kv.hold(store.kv.chain("a"), list(range(60 * BLOCK)))
    seen = []
    evictable = Node.evictable
    monkeypatch.setattr(Node, "evictable", property(lambda one: seen.append(one) or evictable.fget(one)))
    store.quota.set_limits(max_bytes=70 * size, min_free_bytes=0)
    for session in range(1000, 1100):
        save_all(store, "b", [session] * BLOCK)
        assert await store.queue.drained(30)
    stats = store.stats()
    assert stats.evicted >= 85
    assert len(seen) <= 5 * stats.evicted + 2 * 60
    assert store.kv.match(store.kv.chain("a"), list(range(60 * BLOCK))).num_tokens == 60 * BLOCK
