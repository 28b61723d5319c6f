"""Sink-window sessions longer than the disk limit: blocks in the middle are evicted first.

The names of evicted blocks stay in the index, as gaps between sinks and window.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
from contextlib import closing

import pytest
from made_kv import BLOCK, LAYOUT
from test_cache_reach import POLICY, assert_restored, save, tensors_of

from cache.admin import archive, pruning, survey
from cache.disk import format as snapshot_format
from cache.disk.folder import Folder
from cache.index import gap_rules
from cache.index.nodes import Node
from cache.names.errors import CacheError
from cache.names.policy import FULL, Policy
from cache.names.snapshot import ModelLayout, seen
from cache.names.tokens import as_tokens, pack

LIMITED = LAYOUT.under(POLICY)
TOKENS = [at * 7 % 50 for at in range(400)]
#: A little more than the size of each file here, in bytes.
FILE = 1600


async def grown(store, chain, num_tokens, tokens=TOKENS, layout=LIMITED) -> None:
    """Save a session block by block, each when the block before it is on disk."""
    for end in range(BLOCK, num_tokens + 1, BLOCK):
        for span in store.kv.wanted(chain, tokens[:end]):
            assert store.kv.save(chain, tokens, span, tensors_of(layout, tokens, span)), "dropped"
        assert await store.queue.drained(5)


def limited(open_store, num_files, **changes):
    return open_store(max_bytes=num_files * FILE, **changes)


def is_there(store, node) -> bool:
    there = store._folder.path(node.digest).exists()
    assert there == (not node.is_gap)
    return there


def longest(store, chain, tokens) -> int:
    """Return the longest prefix of whole blocks that can be restored, by testing all prefixes."""
    nodes = [node for name in chain.names(as_tokens(tokens))[1:] if (node := store._index.get(name))]
    there = [is_there(store, node) and not (node.is_partial or node.doomed) for node in nodes]
    for end in range(len(nodes) * BLOCK, 0, -BLOCK):
        needed = {at // BLOCK for span in seen(POLICY, end) for at in range(span.start, span.end)}
        if all(there[i] for i in (*needed, end // BLOCK - 1)):
            return end
    return 0


def assert_room_rule(store) -> None:
    stats = store.stats()
    assert stats.stored == sum(not node.is_gap for node in store._index)
    assert stats.stored_bytes == sum(node.size_bytes for node in store._index if node.durable)
    assert stats.free_bytes + stats.held_bytes + stats.evictable_bytes == stats.capacity_bytes
    assert 0 <= stats.held_bytes <= stats.stored_bytes + stats.in_flight_bytes


async def test_a_sink_window_session_longer_than_the_disk_limit_is_saved_and_restored(open_store) -> None:
    """Every block is saved, those between sinks and window are evicted, and the whole session matches."""
    store = await limited(open_store, 8)
    chain = store.kv.chain("a", POLICY)
    await grown(store, chain, 400)
    stats = store.stats()
    assert (stats.durable, sum(stats.dropped.values())) == (100, 0)
    assert 6 <= stats.stored <= 11
    assert stats.evicted == 100 - stats.stored
    assert_room_rule(store)
    match = store.kv.match(chain, TOKENS)
    assert match.num_tokens == 400
    assert_restored(await store.kv.load(match), LIMITED, TOKENS)


async def test_sinks_of_more_than_one_block_are_not_evicted_while_a_session_needs_them(open_store) -> None:
    """It needs them while it grows, and while a restore of it is pending."""
    policy = Policy(10, 6)
    store = await limited(open_store, 12)
    chain = store.kv.chain("a", policy)
    for end in range(BLOCK, 201, BLOCK):
        save(store, LAYOUT.under(policy), chain, TOKENS[:end])
        assert await store.queue.drained(5)
    match = store.kv.match(chain, TOKENS[:200])
    assert match.num_tokens == 200
    assert any(node.is_gap for node in match.nodes)
    needed = {0, 4, 8, 188, 192, 196}
    assert {node.start for node in gap_rules.needed_by(match.nodes[-1])} == needed
    store.quota.set_limits(max_bytes=0, min_free_bytes=0)
    for _ in range(20):
        store.quota._shrink()
    assert {node.start for node in store._index if not node.is_gap} == needed
    assert_restored(await store.kv.load(match), LAYOUT.under(policy), TOKENS[:200])


async def test_a_session_with_evicted_middle_blocks_survives_restarts(open_store) -> None:
    store = await limited(open_store, 8)
    await grown(store, store.kv.chain("a", POLICY), 200)
    before = {node.digest: (node.size_bytes, node.start) for node in store._index}
    assert await store.close()
    for _ in range(2):
        store = await limited(open_store, 8)
        assert {node.digest: (node.size_bytes, node.start) for node in store._index} == before
        chain = store.kv.chain("a", POLICY)
        match = store.kv.match(chain, TOKENS)
        assert match.num_tokens == 200
        assert_restored(await store.kv.load(match), LIMITED, TOKENS[:200])
        assert_room_rule(store)
        assert await store.close()
    store = await limited(open_store, 8)
    chain = store.kv.chain("a", POLICY)
    for end in range(204, 301, BLOCK):
        save(store, LIMITED, chain, TOKENS[:end])
        assert await store.queue.drained(5)
    assert store.kv.match(chain, TOKENS).num_tokens == 300


async def test_a_match_of_a_rewound_session_is_the_longest_prefix_that_can_still_be_restored(
    open_store,
) -> None:
    store = await limited(open_store, 12)
    chain = store.kv.chain("a", POLICY)
    await grown(store, chain, 300)
    found = set()
    for end in range(BLOCK, 301, BLOCK):
        match = store.kv.match(chain, TOKENS[:end])
        assert match.num_tokens == longest(store, chain, TOKENS[:end])
        found.add(match.num_tokens)
        restored = await store.kv.load(match)
        if match.num_tokens:
            assert_restored(restored, LIMITED, TOKENS[: match.num_tokens])
    assert 300 in found
    assert store.stats().rejected == 0


async def test_a_session_rewound_into_evicted_blocks_saves_only_the_blocks_that_it_sees_again(
    open_store,
) -> None:
    """It prefills these blocks once; after that they can be restored."""
    store = await limited(open_store, 12)
    chain = store.kv.chain("a", POLICY)
    await grown(store, chain, 300)
    nodes = store.kv.match(chain, TOKENS[:300]).nodes
    gap = next(node for node in reversed(nodes) if node.is_gap and not nodes[node.start // BLOCK - 1].usable)
    rewound = [*TOKENS[: gap.end], 1, 2, 3]
    held = store.kv.hold(chain, rewound)
    assert held.edges[0] < gap.end, "what is not there is not called stored"
    wanted = store.kv.wanted(chain, rewound)
    assert [span.end for span in wanted][-2:] == [gap.end, len(rewound)]
    assert store.kv.wanted(chain, TOKENS[:300]) == [], "nobody sees the rest again"
    save(store, LIMITED, chain, rewound)
    assert await store.queue.drained(5)
    store.kv.release(held)
    assert_room_rule(store)
    match = store.kv.match(chain, rewound)
    assert match.num_tokens == len(rewound)
    assert_restored(await store.kv.load(match), LIMITED, rewound)
    assert store.kv.match(chain, TOKENS[:300]).num_tokens == 300
    for node in store._index:
        is_there(store, node)


async def test_a_failed_write_of_an_evicted_block_leaves_the_index_and_later_blocks_unchanged(
    open_store, monkeypatch
) -> None:
    """The blocks after it stay on disk, and the failed write leaves no file."""
    store = await limited(open_store, 12)
    chain = store.kv.chain("a", POLICY)
    await grown(store, chain, 300)
    gap = next(node for node in store._index if node.is_gap)
    rewound = TOKENS[: gap.end]
    nodes = {node.digest for node in store._index}
    gaps = {node.digest for node in store._index if node.is_gap}

    with monkeypatch.context() as patched:
        patched.setattr(snapshot_format, "write", _fail)
        save(store, LIMITED, chain, rewound)
        assert await store.queue.drained(5)
    assert store.stats().failed >= 1
    assert {node.digest for node in store._index} == nodes
    assert gaps <= {node.digest for node in store._index if node.is_gap}
    assert_room_rule(store)
    assert store.kv.match(chain, TOKENS[:300]).num_tokens == 300
    for node in store._index:
        is_there(store, node)


async def test_eviction_keeps_the_blocks_that_a_pending_restore_needs(open_store) -> None:
    """Also if the restore ends in the middle of a session."""
    store = await limited(open_store, 100)
    chain = store.kv.chain("a", POLICY)
    await grown(store, chain, 200)
    match = store.kv.match(chain, TOKENS[:120])
    store.quota.set_limits(max_bytes=0, min_free_bytes=0)
    for _ in range(200):
        if store.stats().evictable_bytes == 0:
            break
        store.quota._shrink()
    assert_room_rule(store)
    kept = [node for node in store._index if not node.is_gap]
    assert {node.start for node in kept} == {0, 108, 112, 116}
    assert_restored(await store.kv.load(match), LIMITED, TOKENS[:120])
    for _ in range(200):
        store.quota._shrink()
    assert (store.stats().stored, len(store._index)) == (0, 0)
    assert await store.queue.drained(5)
    assert await store.close()
    store = await limited(open_store, 8)
    assert len(store._index) == 0


async def test_eviction_keeps_the_windows_of_both_branches_of_a_session(open_store) -> None:
    store = await limited(open_store, 100)
    chain = store.kv.chain("a", POLICY)
    await grown(store, chain, 200)
    other = [*TOKENS[:80], 1, 2, 3, 4]
    save(store, LIMITED, chain, other)
    assert await store.queue.drained(5)
    store.quota.set_limits(max_bytes=14 * FILE, min_free_bytes=0)
    for _ in range(20):
        store.quota._shrink()
    for tokens in (other, TOKENS[:200]):
        match = store.kv.match(chain, tokens)
        assert match.num_tokens == len(tokens)
        assert_restored(await store.kv.load(match), LIMITED, tokens)


async def test_eviction_removes_no_middle_blocks_of_sessions_under_full(open_store) -> None:
    store = await limited(open_store, 60)
    chain = store.kv.chain("a", POLICY)
    await grown(store, chain, 200)
    save(store, LAYOUT, store.kv.chain("a"), TOKENS[:40])
    assert await store.queue.drained(5)
    store.quota.set_limits(max_bytes=20 * FILE, min_free_bytes=0)
    for _ in range(20):
        store.quota._shrink()
    nodes = store.kv.match(chain, TOKENS[:200]).nodes
    assert len(nodes) == 50
    assert any(node.is_gap for node in nodes)
    assert not any(node.is_gap for node in store.kv.match(store.kv.chain("a"), TOKENS[:40]).nodes)


async def test_erasing_a_session_with_evicted_blocks_removes_all_of_its_index_rows(open_store) -> None:
    store = await limited(open_store, 8)
    await grown(store, store.kv.chain("a", POLICY), 200)
    forgotten = await store.eraser.erase("a", pack(TOKENS[:200]))
    assert forgotten.settled
    assert len(store._index) == 0
    catalog = store._folder.catalog
    assert await store.close()
    with closing(sqlite3.connect(catalog)) as db:
        assert db.execute("SELECT COUNT(*) FROM snapshot").fetchone() == (0,)


async def test_an_evicted_block_whose_file_still_exists_is_used_again_after_the_next_start(
    open_store,
) -> None:
    """Its index row says that it is evicted, but the start finds the file and uses it."""
    store = await limited(open_store, 8)
    await grown(store, store.kv.chain("a", POLICY), 100)
    gap = next(node for node in store._index if node.is_gap)
    path = store._folder.path(gap.digest)
    assert not path.exists()
    assert await store.close()
    rich = await open_store(path.parent.parent.parent / "other")
    await grown(rich, rich.kv.chain("a", POLICY), 100)
    path.write_bytes(rich._folder.path(gap.digest).read_bytes())
    store = await limited(open_store, 12)
    assert not store._index.get(gap.digest).is_gap
    assert store.kv.match(store.kv.chain("a", POLICY), TOKENS).num_tokens == 100
    assert store.stats().rejected == 0


async def test_a_crash_right_after_a_middle_block_s_file_is_removed_leaves_the_end_restorable(
    open_store, tmp_path, monkeypatch
) -> None:
    """The row is changed before the file is removed: a row of a missing file would end the session there."""
    store, remove, lives = await limited(open_store, 8), Folder.remove, []

    def copied(folder, digest) -> None:
        remove(folder, digest)
        lives.append(tmp_path / str(len(lives)))
        shutil.copytree(tmp_path / "cache", lives[-1])

    await grown(store, store.kv.chain("a", POLICY), 32)
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "remove", copied)
        await grown(store, store.kv.chain("a", POLICY), 48)
    assert len(lives) >= 2
    for directory in lives:
        store = await limited(open_store, 8, directory=directory)
        found = store.kv.match(store.kv.chain("a", POLICY), TOKENS).num_tokens
        assert found >= 36, directory.name


async def test_finding_the_blocks_that_a_session_needs_does_not_visit_the_blocks_in_the_middle(
    open_store, monkeypatch
) -> None:
    """On a full disk this search runs for each snapshot, and a session may have a million tokens."""
    store, seen = await limited(open_store, 8), []
    chain = Node.chain
    monkeypatch.setattr(Node, "chain", lambda self: (seen.append(node) or node for node in chain(self)))
    costs = []
    for num_tokens in (100, 300):
        await grown(store, store.kv.chain("a", POLICY), num_tokens)
        held = store.kv.hold(store.kv.chain("a", POLICY), TOKENS[:num_tokens])
        slow = [
            node
            for node in chain(held.last)
            if node.start < POLICY.sink or node.end > held.last.start - POLICY.window
        ]
        assert {*gap_rules.needed_by(held.last)} == {*slow}
        assert store.stats().held_bytes == sum(node.size_bytes for node in slow)
        seen.clear()
        assert store.stats().held_bytes > 0
        costs.append(len(seen))
        store.kv.release(held)
    assert costs[0] == costs[1]


async def test_after_the_loss_of_the_index_the_blocks_before_the_first_evicted_one_are_found(
    open_store,
) -> None:
    """Later blocks cannot be found, since only the index had the evicted block's name."""
    store = await limited(open_store, 8)
    await grown(store, store.kv.chain("a", POLICY), 200)
    num_before = next(i for i, node in enumerate(sorted(store._index, key=lambda n: n.start)) if node.is_gap)
    assert await store.close()
    store._folder.catalog.unlink()
    store = await limited(open_store, 8)
    assert store.stats().stored == num_before
    assert store.kv.match(store.kv.chain("a", POLICY), TOKENS).num_tokens == num_before * BLOCK


async def test_a_chain_with_evicted_blocks_is_listed_with_its_files_and_can_be_pruned(
    open_store, tmp_path
) -> None:
    store = await limited(open_store, 8)
    await grown(store, store.kv.chain("a", POLICY), 200)
    stored, stored_bytes = store.stats().stored, store.stats().stored_bytes
    assert await store.close()
    found = survey.inspect(tmp_path / "cache")
    (chain,) = found.chains
    assert (chain.num_tokens, chain.num_files, chain.size_bytes) == (200, stored, stored_bytes)
    assert [(one.num_files, one.size_bytes) for one in found.models] == [(stored, stored_bytes)]
    pruned = pruning.prune(
        tmp_path / "cache", model=chain.model.identity, older_than_s=None, to_bytes=0, now_s=0
    )
    assert (pruned.num_files, pruned.left_bytes) == (stored, 0)
    assert survey.inspect(tmp_path / "cache").chains == []


async def test_a_chain_with_evicted_blocks_is_exported_up_to_the_first_evicted_block(
    open_store, tmp_path
) -> None:
    store = await limited(open_store, 8)
    await grown(store, store.kv.chain("a", POLICY), 200)
    nodes = store.kv.match(store.kv.chain("a", POLICY), TOKENS).nodes
    num_before = next(i for i, node in enumerate(nodes) if node.is_gap)
    assert await store.close()
    with pytest.raises(CacheError, match="it is no file"):
        archive.export(tmp_path / "cache", [nodes[-1].digest.hex()], tmp_path / "one.tar")
    assert archive.export(tmp_path / "cache", None, tmp_path / "all.tar").num_files == num_before
    Folder(tmp_path / "other").close()
    limits = {"max_bytes": 1 << 30, "min_free_bytes": 0}
    found = archive.import_files(tmp_path / "other", tmp_path / "all.tar", **limits)
    assert found.num_files == num_before


class Sessions:
    """Random operations on sessions: grow, branch, rewind, hold, forget, restart, failing writes."""

    layout, policy = LIMITED, POLICY

    def __init__(self, chance: random.Random, open_store) -> None:
        self.chance = chance
        self.open = lambda: limited(open_store, 15)
        self.tokens = [TOKENS[:8]]
        self.held: list = []

    async def run(self, num_steps: int) -> None:
        self.store = await self.open()
        acts = [self.grow] * 6 + [self.rewind] * 2 + [self.hold, self.release, self.forget]
        for _ in range(num_steps):
            self.chain = self.store.kv.chain("a", self.policy)
            await self.chance.choice([*acts, self.restart])()
            await self.check()
        for held in self.held:
            self.store.kv.release(held)
        assert self.store.stats().held_bytes == 0
        while self.store._remover.evict(1 << 40, 32):
            pass
        assert (len(self.store._index), self.store.stats().stored_bytes) == (0, 0)

    async def grow(self) -> None:
        tokens = self.chance.choice(self.tokens)
        longer = tokens + [self.chance.randrange(3) for _ in range(self.chance.randrange(1, 6 * BLOCK))]
        hold = self.store.kv.hold(self.chain, longer)
        fails = self.chance.random() < 0.1
        write = snapshot_format.write
        for span in self.store.kv.wanted(self.chain, longer):
            snapshot_format.write = _fail if fails and self.chance.random() < 0.5 else write
            self.store.queue._resume()  # or nothing would be saved for a second
            self.store.kv.save(self.chain, longer, span, tensors_of(self.layout, longer, span))
            await self.store.queue.drained(5)
        snapshot_format.write = write
        self.store.queue._resume()
        self.store.kv.release(hold)
        self.tokens.append(longer)

    async def rewind(self) -> None:
        tokens = self.chance.choice(self.tokens)
        self.tokens.append(tokens[: self.chance.randrange(1, len(tokens) + 1)])

    async def hold(self) -> None:
        self.held.append(self.store.kv.match(self.chain, self.chance.choice(self.tokens)))

    async def release(self) -> None:
        if self.held:
            match = self.held.pop(0)
            restored = await self.store.kv.load(match)
            if restored is not None:
                assert restored.num_tokens == match.num_tokens

    async def forget(self) -> None:
        if self.chance.random() < 0.3:
            await self.store.eraser.erase("a", pack(self.chance.choice(self.tokens)))

    async def restart(self) -> None:
        self.held = []
        assert await self.store.close()
        self.store = await self.open()
        self.chain = self.store.kv.chain("a", self.policy)

    async def settle(self) -> None:
        assert await self.store.queue.drained(5)
        while self.store.quota._window_eviction:
            self.store.quota._shrink()
            assert await self.store.queue.drained(5)

    async def check(self) -> None:
        await self.settle()
        store, tokens = self.store, self.chance.choice(self.tokens)
        match = store.kv.match(self.chain, tokens)
        assert match.num_tokens >= longest(store, self.chain, tokens)
        restored = await store.kv.load(match)
        if match.num_tokens:
            assert_restored(restored, self.layout, tokens[: match.num_tokens])
        await self.settle()
        assert_room_rule(store)
        assert store.stats().rejected == 0
        for node in store._index:
            is_there(store, node)


def _fail(*_) -> None:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("seed", range(3))
async def test_a_match_in_random_sessions_is_the_longest_prefix_that_the_files_on_disk_allow(
    open_store, seed
) -> None:
    """Also the restored KV is right, and the counters match the files."""
    await Sessions(random.Random(seed), open_store).run(50)


async def test_a_session_of_a_model_with_only_window_layers_may_exceed_the_disk_limit_too(
    open_store,
) -> None:
    """If one layer saw all tokens, no block could be evicted from the middle."""
    store = await limited(open_store, 8, layout=ModelLayout(LAYOUT.kv, reaches=(POLICY,) * 4))
    await grown(store, store.kv.chain("a"), 200)
    match = store.kv.match(store.kv.chain("a"), TOKENS)
    assert match.num_tokens == 200
    assert_restored(await store.kv.load(match), LIMITED, TOKENS[:200])
    assert store.kv.chain("a").policy == FULL
