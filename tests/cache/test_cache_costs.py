"""The steps of the event loop and the memory of a restore grow only with new tokens; which CPUs it uses."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter

import numpy as np
import pytest
from made_kv import BLOCK, assert_is_kv_of, cut, identity, save_all

from cache.disk import chain_reader
from cache.index.index import SnapshotIndex
from cache.index.nodes import Node
from cache.kv import arrays
from cache.kv.arrays import BlankTensors
from cache.names import blocks
from cache.names.snapshot import ModelLayout
from cache.names.tokens import Chain, as_tokens

TOKENS = list(range(200))

linux = pytest.mark.skipif(sys.platform != "linux", reason="only there threads choose their CPUs")


@pytest.mark.parametrize("dtype", sorted(arrays.TYPES))
def test_bytes_written_into_a_restore_buffer_appear_in_the_mlx_array(dtype) -> None:
    mlx_type, numpy_type = arrays.TYPES[dtype]
    blank = BlankTensors(
        ModelLayout((("0.keys", dtype, (2, 3)), ("0.values", dtype, (2, 0)))), 5, (("state.1", dtype, (7,)),)
    )
    keys, values = blank.places
    item = np.dtype(numpy_type).itemsize
    assert ([row.nbytes for row in keys.rows], keys.token_bytes) == ([256 * 3 * item] * 2, 3 * item)
    assert ([row.nbytes for row in values.rows], values.token_bytes) == ([0, 0], 0)
    written = np.random.default_rng(0).integers(0, 2, (2, 256 * 3)).astype(numpy_type)
    for row, numbers in zip(keys.rows, written, strict=True):
        row[:] = numbers.tobytes()
    blank.state[0][:] = written[0, :7].tobytes()
    del keys, values, row
    found = blank.arrays()
    assert {name: array.dtype for name, array in found.items()} == dict.fromkeys(found, mlx_type)
    assert found["0.keys"].shape == (1, 2, 256, 3)
    assert found["0.values"].shape == (1, 2, 256, 0)
    for name, expected in (("0.keys", written), ("state.1", written[0, :7])):
        assert bytes(memoryview(found[name])) == expected.tobytes()


@linux
async def test_two_restore_threads_use_separate_cpus_and_get_their_affinity_back(
    open_store, monkeypatch
) -> None:
    monkeypatch.setattr(chain_reader, "LEAST_HELPED_BYTES", 0)
    seen: dict[int, set[int]] = {}
    both = threading.Barrier(2)
    read = chain_reader.snapshot_format.read

    def watched(*args, **fields):
        if threading.get_native_id() not in seen:
            seen[threading.get_native_id()] = os.sched_getaffinity(0)
            both.wait(timeout=10)
        return read(*args, **fields)

    monkeypatch.setattr(chain_reader.snapshot_format, "read", watched)
    store = await open_store()
    save_all(store, "a", TOKENS)
    assert await store.queue.drained(10)
    assert_is_kv_of((await store.kv.load(store.kv.match(store.kv.chain("a"), TOKENS))).tensors, TOKENS)
    one, other = seen.values()
    allowed = os.sched_getaffinity(0)
    assert one | other == allowed
    assert not one & other or len(allowed) == 1
    for thread in seen:
        assert os.sched_getaffinity(thread) == allowed


@linux
async def test_a_restore_still_works_if_cpu_affinity_cannot_be_set(open_store, monkeypatch) -> None:
    def forbidden(thread: int, mask: object) -> None:
        raise PermissionError

    monkeypatch.setattr(chain_reader, "LEAST_HELPED_BYTES", 0)
    monkeypatch.setattr(chain_reader.os, "sched_setaffinity", forbidden)
    store = await open_store()
    save_all(store, "a", TOKENS)
    assert await store.queue.drained(10)
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


async def test_the_steps_of_a_turn_grow_linearly_with_its_number_of_blocks(open_store, steps) -> None:
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


async def test_saving_one_more_block_takes_the_same_steps_in_a_short_and_a_long_session(
    open_store, steps
) -> None:
    store = await open_store()
    tokens = list(range(61 * BLOCK))
    chain, costs = store.kv.chain("a"), []
    for num_blocks in (3, 60):
        save_all(store, "a", tokens[: (num_blocks - 1) * BLOCK])
        assert await store.queue.drained(30)
        store.kv.release(store.kv.hold(chain, tokens[: (num_blocks - 1) * BLOCK]))
        steps.clear()
        span = blocks.Span((num_blocks - 1) * BLOCK, num_blocks * BLOCK)
        assert store.kv.save(chain, tokens[: span.end], span, cut(tokens, span))
        costs.append(steps.copy())
        await store.queue.drained(30)
    assert costs[0] == costs[1]


@pytest.mark.parametrize("is_held", [False, True])
async def test_eviction_does_not_go_through_all_held_blocks_for_every_evicted_block(
    open_store, monkeypatch, is_held
) -> None:
    """The held blocks are the least recently used, so each search for a victim would begin with them."""
    store = await open_store()
    save_all(store, "a", list(range(60 * BLOCK)))
    assert await store.queue.drained(30)
    size = store.stats().stored_bytes // 60
    if is_held:
        held = store.kv.hold(store.kv.chain("a"), list(range(60 * BLOCK)))
    seen = []
    evictable = Node.evictable
    monkeypatch.setattr(Node, "evictable", property(lambda one: seen.append(one) or evictable.fget(one)))
    store.quota.set_limits(max_bytes=70 * size, min_free_bytes=0)
    for session in range(1000, 1100):
        save_all(store, "b", [session] * BLOCK)
        assert await store.queue.drained(30)
    stats = store.stats()
    assert stats.evicted >= 85
    assert (stats.held_bytes > 0) == is_held
    assert len(seen) <= 5 * stats.evicted + 2 * 60
    if is_held:
        found = store.kv.match(store.kv.chain("a"), list(range(60 * BLOCK)))
        assert found.num_tokens == 60 * BLOCK
        store.kv.release(found)
        store.kv.release(held)
        store.quota.set_limits(max_bytes=0, min_free_bytes=0)
        while store.stats().stored:
            assert await store.queue.drained(30)


async def test_a_chain_does_not_return_cached_block_names_for_other_tokens(open_store) -> None:
    """A `Chain` caches the names of the tokens asked for last, which must not affect other tokens."""
    tokens, other = list(range(20)), [*range(9), 99, *range(10, 20)]
    chain = Chain(blocks.root(identity().digest(), "a"), BLOCK)
    for asked in (tokens, tokens[:7], other, tokens, [7], other[:12], tokens[:3]):
        packed = as_tokens(asked)
        fresh = Chain(chain.root, BLOCK)
        assert list(chain.names(packed)) == list(fresh.names(packed))
