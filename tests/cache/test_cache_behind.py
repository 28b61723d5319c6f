"""`keep_behind`: KV that no session sees is removed by its age in tokens, even if the disk has space."""

from __future__ import annotations

import random
import sqlite3
from dataclasses import replace

import numpy as np
import pytest
import test_cache_carriers as carriers
from made_kv import BLOCK, LAYOUT, assert_room_rule, identity, kv, save_all
from test_cache_gaps import FILE, Sessions, grown, is_there
from test_cache_gaps import assert_room_rule as assert_gaps_room_rule
from test_cache_reach import HYBRID, POLICY, assert_restored, save

from cache.disk import format as snapshot_format
from cache.disk.catalog import Catalog
from cache.disk.disk_work import DiskWork
from cache.disk.header import read_header
from cache.disk.rows import PARTIAL
from cache.index.index import Index
from cache.names.blocks import Span
from cache.names.policy import FULL, Policy
from cache.names.snapshot import ModelLayout, carried
from cache.names.tokens import pack
from cache.store import Store

LIMITED = LAYOUT.under(POLICY)
TOKENS = [at * 7 % 50 for at in range(400)]
KEEP = 20


async def settled(store: Store) -> None:
    """Remove all old KV that is due now, without the pauses between removals."""
    assert await store.queue.drained(5)
    while store.quota._window_eviction:
        store.quota._shrink()
        assert await store.queue.drained(5)
    assert await store.queue.drained(5)


def on_disk(store: Store) -> int:
    return sum(path.stat().st_size for path in store._folder.snapshots.iterdir())


def starts(store: Store) -> list[int]:
    """Return the start positions of all blocks with a file; assert that there are no other files."""
    nodes = [node for node in store._index if is_there(store, node)]
    assert len(nodes) == len(list(store._folder.snapshots.iterdir()))
    assert store.stats().stored_bytes == on_disk(store)
    assert_gaps_room_rule(store)
    return sorted(node.start for node in nodes)


async def test_a_growing_sink_window_session_uses_constant_disk_space(open_store) -> None:
    """On disk are its sinks and the last `keep_behind` tokens, also after restarts."""
    found = {}
    for end in (100, 200, 400):
        store = await open_store(keep_behind=KEEP)
        chain = store.kv.chain("a", POLICY)
        await grown(store, chain, end, TOKENS)
        await settled(store)
        found[end] = on_disk(store)
        assert starts(store) == [0, *range(end - KEEP - BLOCK, end, BLOCK)]
        assert store.stats().evicted == 0, "nothing was evicted to make room"
        match = store.kv.match(chain, TOKENS[:end])
        assert match.num_tokens == end
        assert_restored(await store.kv.load(match), LIMITED, TOKENS[:end])
        assert await store.close()
    assert max(found.values()) < 1.05 * found[100]


async def test_a_session_rewound_to_removed_tokens_saves_them_again_and_can_be_restored(open_store) -> None:
    store = await open_store(keep_behind=KEEP)
    chain = store.kv.chain("a", POLICY)
    await grown(store, chain, 400, TOKENS)
    await settled(store)
    near = store.kv.match(chain, TOKENS[:388])
    assert_restored(await store.kv.load(near), LIMITED, TOKENS[:388])
    rewound = [*TOKENS[:200], 1, 2, 3, 4]
    assert store.kv.match(chain, rewound).num_tokens == 4, "its first block, with its sinks"
    save(store, LIMITED, chain, rewound)
    await settled(store)
    match = store.kv.match(chain, rewound)
    assert match.num_tokens == len(rewound)
    assert_restored(await store.kv.load(match), LIMITED, rewound)
    assert store.kv.match(chain, TOKENS[:400]).num_tokens == 400
    starts(store)


async def test_old_kv_is_not_removed_while_another_session_shares_or_uses_it(open_store) -> None:
    """The KV is removed as soon as no session shares or uses it."""
    store = await open_store(keep_behind=KEEP)
    chain = store.kv.chain("a", POLICY)
    other = [*TOKENS[:100], 1, 2, 3, 4]
    await grown(store, chain, 100, TOKENS)
    save(store, LIMITED, chain, other)
    assert await store.queue.drained(5)
    await grown(store, chain, 200, TOKENS)
    held = store.kv.match(chain, TOKENS[:200])
    await grown(store, chain, 300, TOKENS)
    await settled(store)
    shared, seen_by_held = range(80, 104, BLOCK), range(180, 204, BLOCK)
    assert {0, *shared[:-1]} <= {*starts(store)}
    assert {*seen_by_held[:-1]} <= {*starts(store)}
    assert not {4, 40, 120, 160, 240} & {*starts(store)}
    assert_restored(await store.kv.load(store.kv.match(chain, other)), LIMITED, other)
    assert_restored(await store.kv.load(held), LIMITED, TOKENS[:200])
    await settled(store)
    assert not {*seen_by_held} & {*starts(store)}
    assert store.eraser.forget("a", pack(other)) == 1
    await settled(store)
    assert starts(store) == [0, *range(276, 300, BLOCK)], "the first one has sinks"


async def test_the_full_policy_removes_no_old_kv_and_searches_for_none(open_store, monkeypatch) -> None:
    """Under `full` the model sees all tokens, so no block is ever visited in a search for old KV."""
    looks = []
    monkeypatch.setattr(Index, "descendants", lambda *_: looks.append(1))
    store = await open_store(keep_behind=0)
    save_all(store, "a", TOKENS)
    assert await store.queue.drained(5)
    assert (store.stats().stored, len(store.quota._window_eviction)) == (len(TOKENS) // BLOCK, 0)
    assert store.kv.match(store.kv.chain("a"), TOKENS).num_tokens == len(TOKENS)
    assert looks == []


async def test_old_kv_of_an_earlier_process_is_removed_once_its_session_is_restored(open_store) -> None:
    store = await open_store()
    await grown(store, store.kv.chain("a", POLICY), 400, TOKENS)
    assert len(starts(store)) == 100
    assert await store.close()
    store = await open_store(keep_behind=KEEP)
    chain = store.kv.chain("a", POLICY)
    match = store.kv.match(chain, TOKENS[:400])
    assert_restored(await store.kv.load(match), LIMITED, TOKENS[:400])
    await settled(store)
    assert starts(store) == [0, *range(376, 400, BLOCK)]


async def test_a_crash_after_an_index_row_is_updated_and_before_its_file_is_removed_loses_nothing(
    open_store, monkeypatch
) -> None:
    """The next start adds the file to the index again, and then removes it properly."""
    store = await open_store(keep_behind=KEEP)
    with monkeypatch.context() as patched:
        patched.setattr(DiskWork, "_remove_files", lambda *_: None)
        await grown(store, store.kv.chain("a", POLICY), 200, TOKENS)
        await settled(store)
        assert any(node.is_gap for node in store._index)
        assert await store.close()
    store = await open_store(keep_behind=KEEP)
    assert not any(node.is_gap for node in store._index)
    chain = store.kv.chain("a", POLICY)
    assert store.kv.match(chain, TOKENS[:200]).num_tokens == 200
    await settled(store)
    assert starts(store) == [0, *range(176, 200, BLOCK)]
    assert store.stats().rejected == 0


async def test_a_file_whose_index_row_cannot_be_updated_stays_until_the_next_start(
    open_store, monkeypatch
) -> None:
    """If the file were removed, a row without a file would make the session's later blocks unusable."""
    put = Catalog.put

    def fail(self, rows, *, durable=False) -> None:
        if durable:
            raise sqlite3.OperationalError("disk I/O error")
        put(self, rows)

    store = await open_store(keep_behind=KEEP)
    with monkeypatch.context() as patched:
        patched.setattr(Catalog, "put", fail)
        await grown(store, store.kv.chain("a", POLICY), 200, TOKENS)
        await settled(store)
        assert await store.close()
    store = await open_store(keep_behind=KEEP)
    chain = store.kv.chain("a", POLICY)
    assert store.kv.match(chain, TOKENS[:200]).num_tokens == 200
    await settled(store)
    assert starts(store) == [0, *range(176, 200, BLOCK)]


async def test_a_growing_sink_window_session_uses_constant_disk_space_in_an_encrypted_cache_too(
    open_store,
) -> None:
    sealing = pytest.importorskip("cache.disk.sealing")
    for end in (200, 400):
        store = await open_store(keep_behind=KEEP, codec=sealing.Sealed(bytes(32)), identity=identity())
        chain = store.kv.chain("a", POLICY)
        await grown(store, chain, end, TOKENS)
        await settled(store)
        assert starts(store) == [0, *range(end - KEEP - BLOCK, end, BLOCK)]
        assert_restored(await store.kv.load(store.kv.match(chain, TOKENS[:end])), LIMITED, TOKENS[:end])
        assert await store.close()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("layout", "policy"), [(LIMITED, POLICY), (HYBRID, FULL)])
async def test_random_sessions_never_lose_recent_kv_while_old_kv_is_removed(
    open_store, layout, policy, seed
) -> None:
    """Sessions grow, branch, are held and forgotten; the store restarts, and some writes fail."""
    sessions = Sessions(random.Random(seed), open_store)
    sessions.layout, sessions.policy = layout, policy
    model = HYBRID if policy == FULL else LAYOUT
    sessions.open = lambda: open_store(keep_behind=8, layout=model, max_bytes=40 * FILE)
    await sessions.run(60)


def header_starts(store: Store) -> tuple[list[int], list[int]]:
    """Return the start positions of complete files, and of files without the windowed layers' sections."""
    found: dict[bool, list[int]] = {False: [], True: []}
    for node in store._index:
        path = store._folder.path(node.digest)
        num_sections = len(read_header(path, store._folder.codec).sections)
        assert num_sections == 2 - node.is_partial
        assert path.stat().st_size == node.size_bytes
        found[node.is_partial].append(node.start)
    assert_room_rule(store)
    return sorted(found[False]), sorted(found[True])


async def grown_hybrid(store: Store, end: int, tokens=TOKENS) -> None:
    await grown(store, store.kv.chain("a"), end, tokens, HYBRID)
    await settled(store)


@pytest.mark.parametrize("is_sealed", [False, True])
async def test_a_model_with_full_and_window_layers_drops_only_its_old_window_sections(
    open_store, is_sealed
) -> None:
    """Layers that see all tokens keep all KV, and after each restart the whole session is restored."""
    settings = {"layout": HYBRID, "keep_behind": KEEP}
    if is_sealed:
        settings["codec"] = pytest.importorskip("cache.disk.sealing").Sealed(bytes(32))
    for end in (100, 200):
        store = await open_store(**settings)
        await grown_hybrid(store, end)
        whole, partial = header_starts(store)
        assert whole == [0, *range(end - KEEP - BLOCK, end, BLOCK)], "the first has sinks"
        assert partial == [*range(BLOCK, end - KEEP - BLOCK, BLOCK)]
        match = store.kv.match(store.kv.chain("a"), TOKENS[:end])
        assert_restored(await store.kv.load(match), HYBRID, TOKENS[:end])
        assert (store.stats().rejected, store.stats().evicted) == (0, 0)
        assert await store.close()


async def test_a_rewound_session_of_a_model_with_windows_writes_shortened_files_in_full_again(
    open_store,
) -> None:
    store = await open_store(layout=HYBRID, keep_behind=KEEP)
    await grown_hybrid(store, 200)
    rewound = [*TOKENS[:100], 1, 2, 3, 4]
    assert store.kv.match(store.kv.chain("a"), rewound).num_tokens == 4
    held = store.kv.hold(store.kv.chain("a"), rewound)
    wanted = store.kv.wanted(store.kv.chain("a"), rewound)
    assert [span.start for span in wanted] == [96, 100], "what it sees at its end"
    save(store, HYBRID, store.kv.chain("a"), rewound)
    await settled(store)
    store.kv.release(held)
    for tokens in (rewound, TOKENS[:200]):
        match = store.kv.match(store.kv.chain("a"), tokens)
        assert match.num_tokens == len(tokens)
        assert_restored(await store.kv.load(match), HYBRID, tokens)
    await settled(store)
    header_starts(store)
    assert {96, 100} <= {*header_starts(store)[0]}


@pytest.mark.parametrize("when", ["before the file", "before the row"])
async def test_a_crash_while_a_file_is_shortened_loses_nothing(open_store, monkeypatch, when) -> None:
    """The next start shortens the file, or corrects the index row of a file that is already short."""
    store = await open_store(layout=HYBRID, keep_behind=KEEP)
    with monkeypatch.context() as patched:
        if when == "before the file":
            patched.setattr(DiskWork, "shorten", lambda *_: None)
        else:
            put = Catalog.put

            def keep_whole(self, rows, **how) -> None:
                put(self, [row for row in rows if not row.resumable & PARTIAL], **how)

            patched.setattr(Catalog, "put", keep_whole)
        await grown_hybrid(store, 200)
        assert await store.close()
    store = await open_store(layout=HYBRID, keep_behind=KEEP)
    assert not any(node.is_partial for node in store._index)
    rewound = store.kv.match(store.kv.chain("a"), TOKENS[:100])
    assert rewound.num_tokens == 100
    restored = await store.kv.load(rewound)
    assert (restored is None) == (when == "before the row")
    await settled(store)
    assert header_starts(store)[1] == [*range(BLOCK, 200 - KEEP - BLOCK, BLOCK)]
    match = store.kv.match(store.kv.chain("a"), TOKENS[:200])
    assert_restored(await store.kv.load(match), HYBRID, TOKENS[:200])
    assert store.stats().rejected == 0
    assert list(store._folder.quarantined.iterdir()) == []


async def test_a_session_of_a_model_with_windows_is_restored_in_full_after_the_index_is_lost(
    open_store,
) -> None:
    store = await open_store(layout=HYBRID, keep_behind=KEEP)
    await grown_hybrid(store, 200)
    before = header_starts(store)
    assert await store.close()
    store._folder.catalog.unlink()
    store = await open_store(layout=HYBRID, keep_behind=KEEP)
    match = store.kv.match(store.kv.chain("a"), TOKENS[:200])
    assert_restored(await store.kv.load(match), HYBRID, TOKENS[:200])
    await settled(store)
    assert header_starts(store) == before


@pytest.mark.parametrize("fails", ["shortening", "making whole"])
async def test_a_file_stays_unchanged_if_it_cannot_be_shortened_or_written_in_full_again(
    open_store, monkeypatch, fails
) -> None:
    store = await open_store(layout=HYBRID, keep_behind=KEEP)
    await grown_hybrid(store, 100)
    before = header_starts(store)
    with monkeypatch.context() as patched:
        patched.setattr(snapshot_format, "write", _fail)
        if fails == "making whole":
            held = store.kv.hold(store.kv.chain("a"), TOKENS[:60])
            save(store, HYBRID, store.kv.chain("a"), TOKENS[:60])
            assert await store.queue.drained(5)
            store.kv.release(held)
            assert store.stats().failed >= 1
        else:
            store.quota._window_eviction._keep_tokens = 8
            store.quota._window_eviction._due |= dict.fromkeys(store._index)
            await settled(store)
    assert header_starts(store) == before
    match = store.kv.match(store.kv.chain("a"), TOKENS[:100])
    assert_restored(await store.kv.load(match), HYBRID, TOKENS[:100])


async def test_erasing_or_evicting_a_session_with_shortened_files_leaves_no_file(open_store) -> None:
    store = await open_store(layout=HYBRID, keep_behind=KEEP)
    await grown_hybrid(store, 100)
    held = store.kv.hold(store.kv.chain("a"), TOKENS[:60])
    save(store, HYBRID, store.kv.chain("a"), TOKENS[:60])  # still being written when it is forgotten
    store.kv.release(held)
    assert (await store.eraser.erase("a", pack(TOKENS[:100]))).settled
    assert (len(store._index), on_disk(store)) == (0, 0)
    await grown_hybrid(store, 100)
    store.quota.set_limits(max_bytes=0, min_free_bytes=0)
    while store._index.stored:
        store.quota._shrink()
    assert await store.queue.drained(5)
    assert (len(store._index), on_disk(store), store.stats().stored_bytes) == (0, 0, 0)


async def test_a_paged_session_keeps_all_old_kv_because_it_may_recall_it(open_store) -> None:
    """A recall may end at any position, so the KV of the model's own windowed layers stays too."""
    paged, tokens = carriers.POLICY, carriers.TOKENS
    window = Policy(0, 6)
    layout = ModelLayout(LAYOUT.kv, reaches=(FULL, FULL, window, window), sketches=carriers.SKETCHES)
    store = await open_store(layout=layout, keep_behind=0)
    chain = store.kv.chain("a", paged)
    for span in store.kv.wanted(chain, tokens):
        cut = carriers.cut_paged(tokens, span, carried(span, BLOCK))
        tensors = (replace(one, reach=window) if one.name.startswith("1.") else one for one in cut)
        assert store.kv.save(chain, tokens, span, tuple(tensors))
    await settled(store)
    assert not any(node.is_hollow for node in store._index)
    spans, recalled = await store.kv.recall(chain, tokens[:128], (Span(64, 128),))
    assert spans == (Span(64, 128),)
    assert np.array_equal(np.array(recalled["0.keys"]), kv(tokens)["0.keys"][:, :, 64:128])


def _fail(*_) -> None:
    raise OSError(5, "Input/output error")
