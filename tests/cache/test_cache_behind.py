"""What no session sees any more leaves the disk by its age in tokens, although there is room."""

from __future__ import annotations

import random
import sqlite3
from typing import TYPE_CHECKING

import pytest
from made_kv import BLOCK, LAYOUT, identity, save_all
from test_cache_gaps import Sessions, grown, is_there
from test_cache_gaps import assert_room_rule as assert_gaps_room_rule
from test_cache_reach import POLICY, assert_restored, save

from cache.disk.catalog import Catalog
from cache.index.index import Index

if TYPE_CHECKING:
    from cache.store import Store

LIMITED = LAYOUT.under(POLICY)
TOKENS = [at * 7 % 50 for at in range(400)]
KEEP = 20


async def settled(store: Store) -> None:
    """Evict all that is behind, without the pauses."""
    assert await store.barrier(5)
    while store._behind:
        store._room._shrink()
    assert await store.barrier(5)


def on_disk(store: Store) -> int:
    return sum(path.stat().st_size for path in store._folder.snapshots.iterdir())


def starts(store: Store) -> list[int]:
    """List where the blocks start whose files are there; no other file is."""
    nodes = [node for node in store._index if is_there(store, node)]
    assert len(nodes) == len(list(store._folder.snapshots.iterdir()))
    assert store.stats().stored_bytes == on_disk(store)
    assert_gaps_room_rule(store)
    return sorted(node.start for node in nodes)


async def test_a_session_without_end_takes_the_same_disk_for_ever(open_store) -> None:
    """Its sinks, and `keep_behind` before its end; after any restart its end is there."""
    found = {}
    for end in (100, 200, 400):
        store = await open_store(keep_behind=KEEP)
        chain = store.chain("a", POLICY)
        await grown(store, chain, end, TOKENS)
        await settled(store)
        found[end] = on_disk(store)
        assert starts(store) == [0, *range(end - KEEP - BLOCK, end, BLOCK)]
        assert store.stats().evicted == 0, "nothing was evicted to make room"
        match = store.match(chain, TOKENS[:end])
        assert match.num_tokens == end
        assert_restored(await store.load(match), LIMITED, TOKENS[:end])
        assert await store.close()
    assert max(found.values()) < 1.05 * found[100]


async def test_a_rewind_behind_prefills_again_and_is_stored_again(open_store) -> None:
    store = await open_store(keep_behind=KEEP)
    chain = store.chain("a", POLICY)
    await grown(store, chain, 400, TOKENS)
    await settled(store)
    near = store.match(chain, TOKENS[:388])
    assert_restored(await store.load(near), LIMITED, TOKENS[:388])
    rewound = [*TOKENS[:200], 1, 2, 3, 4]
    assert store.match(chain, rewound).num_tokens == 4, "its first block, with its sinks"
    save(store, LIMITED, chain, rewound)
    await settled(store)
    match = store.match(chain, rewound)
    assert match.num_tokens == len(rewound)
    assert_restored(await store.load(match), LIMITED, rewound)
    assert store.match(chain, TOKENS[:400]).num_tokens == 400
    starts(store)


async def test_what_another_session_shares_or_holds_or_a_pin_names_stays(open_store) -> None:
    """And leaves once it is shared, held or pinned no more."""
    store = await open_store(keep_behind=KEEP)
    chain = store.chain("a", POLICY)
    other = [*TOKENS[:100], 1, 2, 3, 4]
    await grown(store, chain, 100, TOKENS)
    save(store, LIMITED, chain, other)
    assert await store.barrier(5)
    await grown(store, chain, 200, TOKENS)
    held = store.match(chain, TOKENS[:200])
    await store.pin(chain, TOKENS[:8])
    await grown(store, chain, 300, TOKENS)
    await settled(store)
    shared, seen_by_held = range(80, 104, BLOCK), range(180, 204, BLOCK)
    assert {0, 4, *shared[:-1]} <= {*starts(store)}
    assert {*seen_by_held[:-1]} <= {*starts(store)}
    assert not {8, 40, 120, 160, 240} & {*starts(store)}
    assert_restored(await store.load(store.match(chain, other)), LIMITED, other)
    assert_restored(await store.load(held), LIMITED, TOKENS[:200])
    await settled(store)
    assert not {*seen_by_held} & {*starts(store)}
    assert store.forget("a", other) == 1
    await settled(store)
    assert starts(store) == [0, 4, *range(276, 300, BLOCK)], "two are pinned, one of them with sinks"


async def test_under_the_policy_full_nothing_is_behind(open_store, monkeypatch) -> None:
    """Nor is anything looked for."""
    looks = []
    monkeypatch.setattr(Index, "descendants", lambda *_: looks.append(1))
    store = await open_store(keep_behind=0)
    save_all(store, "a", TOKENS)
    assert await store.barrier(5)
    assert (store.stats().stored, len(store._behind)) == (len(TOKENS) // BLOCK, 0)
    assert store.match("a", TOKENS).num_tokens == len(TOKENS)
    assert looks == []


async def test_what_an_earlier_process_left_leaves_once_a_session_is_opened(open_store) -> None:
    store = await open_store()
    await grown(store, store.chain("a", POLICY), 400, TOKENS)
    assert len(starts(store)) == 100
    assert await store.close()
    store = await open_store(keep_behind=KEEP)
    chain = store.chain("a", POLICY)
    match = store.match(chain, TOKENS[:400])
    assert_restored(await store.load(match), LIMITED, TOKENS[:400])
    await settled(store)
    assert starts(store) == [0, *range(376, 400, BLOCK)]


async def test_a_kill_between_the_row_of_a_gap_and_its_file_costs_nothing(open_store, monkeypatch) -> None:
    """The file is taken up by the next start, and leaves again."""
    store = await open_store(keep_behind=KEEP)
    with monkeypatch.context() as patched:
        patched.setattr(type(store._writer), "_remove_files", lambda *_: None)
        await grown(store, store.chain("a", POLICY), 200, TOKENS)
        await settled(store)
        assert any(node.is_gap for node in store._index)
        assert await store.close()
    store = await open_store(keep_behind=KEEP)
    assert not any(node.is_gap for node in store._index)
    chain = store.chain("a", POLICY)
    assert store.match(chain, TOKENS[:200]).num_tokens == 200
    await settled(store)
    assert starts(store) == [0, *range(176, 200, BLOCK)]
    assert store.stats().rejected == 0


async def test_a_file_whose_row_cannot_be_written_stays_until_the_next_start(open_store, monkeypatch) -> None:
    """A row with a size and no file would break the chain, and cost the session's end."""
    put = Catalog.put

    def fail(self, rows, *, durable=False) -> None:
        if durable:
            raise sqlite3.OperationalError("disk I/O error")
        put(self, rows)

    store = await open_store(keep_behind=KEEP)
    with monkeypatch.context() as patched:
        patched.setattr(Catalog, "put", fail)
        await grown(store, store.chain("a", POLICY), 200, TOKENS)
        await settled(store)
        assert await store.close()
    store = await open_store(keep_behind=KEEP)
    chain = store.chain("a", POLICY)
    assert store.match(chain, TOKENS[:200]).num_tokens == 200
    await settled(store)
    assert starts(store) == [0, *range(176, 200, BLOCK)]


async def test_an_encrypted_directory_is_as_flat(open_store) -> None:
    sealing = pytest.importorskip("cache.disk.sealing")
    for end in (200, 400):
        store = await open_store(keep_behind=KEEP, access=sealing.Sealed(bytes(32)), identity=identity())
        chain = store.chain("a", POLICY)
        await grown(store, chain, end, TOKENS)
        await settled(store)
        assert starts(store) == [0, *range(end - KEEP - BLOCK, end, BLOCK)]
        assert_restored(await store.load(store.match(chain, TOKENS[:end])), LIMITED, TOKENS[:end])
        assert await store.close()


@pytest.mark.parametrize("seed", range(2))
async def test_random_sessions_lose_nothing_that_is_near(open_store, seed) -> None:
    """They grow, branch, are held, pinned, forgotten and restarted while old blocks leave."""
    sessions = Sessions(random.Random(seed), open_store)
    sessions.open = lambda: open_store(keep_behind=KEEP)
    await sessions.run(50)
