"""Sessions longer than the disk limit: the middle of a chain leaves before its end, and its names stay."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from made_kv import BLOCK, LAYOUT, cut
from test_cache_reach import POLICY, assert_restored, save

from cache.admin import pruning, survey
from cache.disk import format as snapshot_format
from cache.names.policy import FULL
from cache.names.snapshot import ModelLayout, seen

LIMITED = LAYOUT.under(POLICY)
TOKENS = [at * 7 % 50 for at in range(400)]
#: A little more than any file here takes.
FILE = 1600


async def grown(store, chain, num_tokens, tokens=TOKENS) -> None:
    """Save a session's blocks as it grows, each as soon as the one before it is on disk."""
    for end in range(BLOCK, num_tokens + 1, BLOCK):
        for span in store.wanted(chain, tokens, end - BLOCK, end):
            kv = tuple(replace(one, reach=POLICY) for one in cut(tokens, span))
            assert store.save(chain, tokens, span, kv), "dropped"
        assert await store.barrier(5)


def limited(open_store, num_files, **changes):
    return open_store(max_bytes=num_files * FILE, **changes)


def is_there(store, node) -> bool:
    there = store._folder.path(node.digest).exists()
    assert there == (not node.is_gap)
    return there


def longest(store, chain, tokens) -> int:
    """Find the longest prefix of whole blocks that can be restored, the slow way."""
    nodes = store._index.follow(
        chain.names(b"".join(t.to_bytes(4, "little") for t in tokens))[1:], usable=False
    )
    there = [is_there(store, node) for node in nodes]
    for end in range(len(nodes) * BLOCK, 0, -BLOCK):
        needed = {at // BLOCK for span in seen(POLICY, end) for at in range(span.start, span.end)}
        if all(there[i] for i in (*needed, end // BLOCK - 1)):
            return end
    return 0


def assert_room_rule(store) -> None:
    stats = store.stats()
    assert stats.stored == sum(not node.is_gap for node in store._index)
    assert stats.stored_bytes == sum(node.size_bytes for node in store._index if node.durable)
    assert stats.free_bytes + stats.pinned_bytes + stats.evictable_bytes == stats.capacity_bytes
    assert 0 <= stats.pinned_bytes <= stats.stored_bytes + stats.in_flight_bytes


async def test_a_session_goes_on_behind_the_disk_limit(open_store) -> None:
    """Every block is saved, its end can be restored, and what is between sinks and window makes room."""
    store = await limited(open_store, 8)
    chain = store.chain("a", POLICY)
    await grown(store, chain, 400)
    stats = store.stats()
    assert (stats.durable, sum(stats.dropped.values())) == (100, 0)
    assert 6 <= stats.stored <= 11
    assert stats.evicted == 100 - stats.stored
    assert_room_rule(store)
    match = store.match(chain, TOKENS)
    assert match.num_tokens == 400
    assert_restored(await store.load(match), LIMITED, TOKENS)


async def test_a_chain_with_gaps_survives_restarts(open_store) -> None:
    store = await limited(open_store, 8)
    await grown(store, store.chain("a", POLICY), 200)
    before = {node.digest: (node.size_bytes, node.start) for node in store._index}
    assert await store.close()
    for _ in range(2):
        store = await limited(open_store, 8)
        assert {node.digest: (node.size_bytes, node.start) for node in store._index} == before
        chain = store.chain("a", POLICY)
        match = store.match(chain, TOKENS)
        assert match.num_tokens == 200
        assert_restored(await store.load(match), LIMITED, TOKENS[:200])
        assert_room_rule(store)
        assert await store.close()
    store = await limited(open_store, 8)
    chain = store.chain("a", POLICY)
    for end in range(204, 301, BLOCK):
        save(store, LIMITED, chain, TOKENS[:end], end - BLOCK)
        assert await store.barrier(5)
    assert store.match(chain, TOKENS).num_tokens == 300


async def test_a_rewind_into_a_gap_finds_the_longest_prefix_that_is_all_there(open_store) -> None:
    store = await limited(open_store, 12)
    chain = store.chain("a", POLICY)
    await grown(store, chain, 300)
    found = set()
    for end in range(BLOCK, 301, BLOCK):
        match = store.match(chain, TOKENS[:end])
        assert match.num_tokens == longest(store, chain, TOKENS[:end])
        found.add(match.num_tokens)
        restored = await store.load(match)
        if match.num_tokens:
            assert_restored(restored, LIMITED, TOKENS[: match.num_tokens])
    assert 300 in found
    assert store.stats().rejected == 0


async def test_a_session_that_goes_on_in_a_gap_fills_what_it_sees(open_store) -> None:
    """It prefills the gap once, and not again at its next restore."""
    store = await limited(open_store, 12)
    chain = store.chain("a", POLICY)
    await grown(store, chain, 300)
    nodes = store.match(chain, TOKENS[:300]).nodes
    gap = next(node for node in reversed(nodes) if node.is_gap and not nodes[node.start // BLOCK - 1].usable)
    rewound = [*TOKENS[: gap.end], 1, 2, 3]
    held = store.hold(chain, rewound)
    assert held.edges[0] < gap.end, "what is not there is not called stored"
    wanted = store.wanted(chain, rewound, held.edges[0], len(rewound))
    assert [span.end for span in wanted][-2:] == [gap.end, len(rewound)]
    assert store.wanted(chain, TOKENS[:300], 0, 300) == [], "nobody sees the rest again"
    save(store, LIMITED, chain, rewound, held.edges[0])
    assert await store.barrier(5)
    store.release(held)
    assert_room_rule(store)
    match = store.match(chain, rewound)
    assert match.num_tokens == len(rewound)
    assert_restored(await store.load(match), LIMITED, rewound)
    assert store.match(chain, TOKENS[:300]).num_tokens == 300
    for node in store._index:
        is_there(store, node)


async def test_a_gap_whose_filling_fails_stays_a_gap(open_store, monkeypatch) -> None:
    """What continues it is on disk: nothing of that is lost, and no file is left behind."""
    store = await limited(open_store, 12)
    chain = store.chain("a", POLICY)
    await grown(store, chain, 300)
    gap = next(node for node in store._index if node.is_gap)
    rewound = TOKENS[: gap.end]
    nodes = {node.digest for node in store._index}
    gaps = {node.digest for node in store._index if node.is_gap}

    def fail(*_) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(snapshot_format, "write", fail)
        save(store, LIMITED, chain, rewound, store.hold(chain, rewound).edges[0])
        assert await store.barrier(5)
    assert store.stats().failed >= 1
    assert {node.digest for node in store._index} == nodes
    assert gaps <= {node.digest for node in store._index if node.is_gap}
    assert_room_rule(store)
    assert store.match(chain, TOKENS[:300]).num_tokens == 300
    for node in store._index:
        is_there(store, node)


async def test_what_a_load_needs_is_not_evicted_meanwhile(open_store) -> None:
    """Also where it ends in the middle of a chain that goes on."""
    store = await limited(open_store, 100)
    chain = store.chain("a", POLICY)
    await grown(store, chain, 200)
    match = store.match(chain, TOKENS[:120])
    store.set_limits(max_bytes=0)
    for _ in range(200):
        if store.stats().evictable_bytes == 0:
            break
        store._room._shrink()
    assert_room_rule(store)
    kept = [node for node in store._index if not node.is_gap]
    assert {node.start for node in kept} == {0, 108, 112, 116}
    assert_restored(await store.load(match), LIMITED, TOKENS[:120])
    for _ in range(200):
        store._room._shrink()
    assert (store.stats().stored, len(store._index)) == (0, 0)
    assert await store.barrier(5)
    assert await store.close()
    store = await limited(open_store, 8)
    assert len(store._index) == 0


async def test_a_branch_keeps_its_window_until_it_leaves(open_store) -> None:
    store = await limited(open_store, 100)
    chain = store.chain("a", POLICY)
    await grown(store, chain, 200)
    other = [*TOKENS[:80], 1, 2, 3, 4]
    save(store, LIMITED, chain, other, 80)
    assert await store.barrier(5)
    store.set_limits(max_bytes=14 * FILE)
    for _ in range(20):
        store._room._shrink()
    for tokens in (other, TOKENS[:200]):
        match = store.match(chain, tokens)
        assert match.num_tokens == len(tokens)
        assert_restored(await store.load(match), LIMITED, tokens)


async def test_pinned_blocks_and_full_chains_get_no_gaps(open_store) -> None:
    store = await limited(open_store, 60)
    chain = store.chain("a", POLICY)
    await store.pin(chain, TOKENS[:40])
    await grown(store, chain, 200)
    save(store, LAYOUT, "a", TOKENS[:40])
    assert await store.barrier(5)
    store.set_limits(max_bytes=20 * FILE)
    for _ in range(20):
        store._room._shrink()
    nodes = store.match(chain, TOKENS[:200]).nodes
    assert len(nodes) == 50
    assert not any(node.is_gap for node in nodes[:10])
    assert any(node.is_gap for node in nodes)
    assert not any(node.is_gap for node in store.match("a", TOKENS[:40]).nodes)


async def test_a_chain_with_gaps_is_forgotten_to_the_last_row(open_store) -> None:
    store = await limited(open_store, 8)
    await grown(store, store.chain("a", POLICY), 200)
    forgotten = await store.erase("a", TOKENS[:200])
    assert forgotten.settled
    assert len(store._index) == 0
    catalog = store._folder.catalog
    assert await store.close()
    with closing(sqlite3.connect(catalog)) as db:
        assert db.execute("SELECT COUNT(*) FROM snapshot").fetchone() == (0,)


async def test_a_kill_before_the_file_of_a_gap_is_gone_costs_nothing(open_store) -> None:
    """The row says that it is gone, the file is there: it is taken up again."""
    store = await limited(open_store, 8)
    await grown(store, store.chain("a", POLICY), 100)
    gap = next(node for node in store._index if node.is_gap)
    path = store._folder.path(gap.digest)
    assert not path.exists()
    assert await store.close()
    rich = await open_store(path.parent.parent.parent / "other")
    await grown(rich, rich.chain("a", POLICY), 100)
    path.write_bytes(rich._folder.path(gap.digest).read_bytes())
    store = await limited(open_store, 12)
    assert not store._index.get(gap.digest).is_gap
    assert store.match(store.chain("a", POLICY), TOKENS).num_tokens == 100
    assert store.stats().rejected == 0


async def test_the_index_lost_costs_what_is_behind_the_gap(open_store) -> None:
    """Its names were in the index alone: what is before it is found by the files."""
    store = await limited(open_store, 8)
    await grown(store, store.chain("a", POLICY), 200)
    num_before = next(i for i, node in enumerate(sorted(store._index, key=lambda n: n.start)) if node.is_gap)
    assert await store.close()
    store._folder.catalog.unlink()
    store = await limited(open_store, 8)
    assert store.stats().stored == num_before
    assert store.match(store.chain("a", POLICY), TOKENS).num_tokens == num_before * BLOCK


async def test_a_chain_with_gaps_is_listed_and_pruned(open_store, tmp_path) -> None:
    store = await limited(open_store, 8)
    await grown(store, store.chain("a", POLICY), 200)
    stored, stored_bytes = store.stats().stored, store.stats().stored_bytes
    assert await store.close()
    found = survey.inspect(tmp_path / "cache")
    (chain,) = found.chains
    assert (chain.num_tokens, chain.num_files, chain.size_bytes) == (200, stored, stored_bytes)
    assert [(one.num_files, one.size_bytes) for one in found.usage] == [(stored, stored_bytes)]
    pruned = pruning.prune(
        tmp_path / "cache", model=chain.model.identity, older_than_s=None, to_bytes=0, now_s=0
    )
    assert (pruned.num_files, pruned.left_bytes) == (stored, 0)
    assert survey.inspect(tmp_path / "cache").chains == []


@pytest.mark.parametrize("seed", range(4))
async def test_random_sessions_are_restored_as_far_as_files_reach(open_store, seed) -> None:
    """Branches, rewinds, restarts and pressure: a match is the longest that is there, and its KV is right."""
    chance = random.Random(seed)
    store = await limited(open_store, 15)
    sessions = [TOKENS[:8]]
    for _ in range(60):
        chain = store.chain("a", POLICY)
        tokens = chance.choice(sessions)
        act = chance.random()
        if act < 0.6:
            longer = tokens + [chance.randrange(3) for _ in range(BLOCK * chance.randrange(1, 6))]
            for end in range(BLOCK, len(longer) + 1, BLOCK):
                for span in store.wanted(chain, longer, end - BLOCK, end):
                    kv = tuple(replace(one, reach=POLICY) for one in cut(longer, span))
                    store.save(chain, longer, span, kv)
                await store.barrier(5)
            sessions.append(longer)
        elif act < 0.8:
            sessions.append(tokens[: BLOCK * chance.randrange(1, len(tokens) // BLOCK + 1)])
        elif act < 0.9:
            assert await store.close()
            store = await limited(open_store, 15)
            chain = store.chain("a", POLICY)
        tokens = chance.choice(sessions)
        match = store.match(chain, tokens)
        assert match.num_tokens >= longest(store, chain, tokens)
        restored = await store.load(match)
        if match.num_tokens:
            assert_restored(restored, LIMITED, tokens[: match.num_tokens])
        assert_room_rule(store)
        assert await store.barrier(5)
        for node in store._index:
            is_there(store, node)
    assert store.stats().rejected == 0
    assert any(node.is_gap for node in store._index)


async def test_the_windows_of_a_model_have_gaps_too(open_store) -> None:
    """Where every layer is one; with a layer that sees all tokens there is nothing to spare."""
    store = await limited(open_store, 8, layout=ModelLayout(LAYOUT.kv, reaches=(POLICY,) * 4))
    await grown(store, "a", 200)
    match = store.match("a", TOKENS)
    assert match.num_tokens == 200
    assert_restored(await store.load(match), LIMITED, TOKENS[:200])
    assert store.chain("a").policy == FULL
