"""Layers that see only sinks and a window: all KV is stored, the visible part restored, the rest evicted."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import numpy as np
import pytest
from made_kv import BLOCK, LAYOUT, assert_sum_rule, cut, extended, kv, put

from cache.admin import archive, pruning, survey
from cache.disk import format as snapshot_format
from cache.disk.header import read_header
from cache.names.blocks import Span
from cache.names.marks import STRIDE, Marks
from cache.names.policy import FULL, Policy
from cache.names.snapshot import ModelLayout, TensorBuffers, seen
from cache.names.tokens import as_tokens, pack

POLICY = Policy(2, 6)
#: Layer 0 sees all tokens, layer 1 its sinks and a window.
HYBRID = ModelLayout(LAYOUT.kv, reaches=(FULL, FULL, POLICY, POLICY))
#: The window of layer 1 is shorter than a block.
SHORT = replace(HYBRID, reaches=(FULL, FULL, Policy(0, 2), Policy(0, 2)))
TOKENS = list(range(20, 61))


def tensors_of(layout: ModelLayout, tokens, span):
    """Return a span of KV as a device would copy it whose layers see the tokens that `layout` says."""
    reaches = {name: reach for (name, _, _), reach in zip(layout.kv, layout.reaches, strict=True)}
    return tuple(replace(tensor, reach=reaches[tensor.name]) for tensor in cut(tokens, span))


def save(store, layout, chain, tokens) -> None:
    for span in store.kv.wanted(chain, tokens):
        assert store.kv.save(chain, tokens, span, tensors_of(layout, tokens, span))


def assert_restored(restored, layout, tokens) -> None:
    """Assert that each layer got exactly the KV that it sees; a layer that sees all may have free memory."""
    assert restored.num_tokens == len(tokens)
    expected = kv(tokens)
    assert restored.tensors.keys() == expected.keys()
    for (name, _, _), reach in zip(layout.kv, layout.reaches, strict=True):
        spans = seen(reach, len(tokens))
        visible = np.concatenate([expected[name][:, :, span.start : span.end] for span in spans], axis=2)
        found = np.array(restored.tensors[name])
        if reach != FULL:
            assert found.shape == visible.shape, name
        assert np.array_equal(found[:, :, : visible.shape[2]], visible), name


def file_of(store, node):
    return store._folder.path(node.digest)


def test_a_buffer_of_restored_kv_has_offsets_for_the_visible_parts_of_a_block_and_none_for_other_parts() -> (
    None
):
    place = TensorBuffers((), 0, Policy(2, 6), seen(Policy(2, 6), 20))
    assert [*place.segments(Span(0, 4))] == [(0, 2), (None, 2)]
    assert [*place.segments(Span(4, 8))] == [(None, 4)]
    assert [*place.segments(Span(12, 16))] == [(None, 2), (2, 2)]
    assert [*place.segments(Span(16, 24))] == [(4, 4), (None, 4)]
    assert [*place.segments(Span(0, 24))] == [(0, 2), (None, 12), (2, 6), (None, 4)]
    assert seen(Policy(2, 6), 8) == (Span(0, 8),)
    assert seen(Policy(0, 6), 8) == (Span(2, 8),)


@pytest.mark.parametrize(
    "layout",
    [HYBRID, LAYOUT.under(POLICY), HYBRID.under(Policy(1, 9)), SHORT],
    ids=["plain and window layers", "sink_window", "sink_window with window layers", "windows of 2 tokens"],
)
async def test_a_restore_gives_each_layer_exactly_the_kv_of_its_visible_tokens(open_store, layout) -> None:
    """The restored prefix ends at, before and after ends of blocks, sinks and windows, or within a file."""
    store = await open_store(layout=layout)
    save(store, layout, store.kv.chain("a"), TOKENS)
    assert await store.queue.drained(5)
    for num_tokens in (1, 2, 4, 7, 8, 9, 12, 14, 25, 40, 41):
        match = await extended(store, TOKENS[:num_tokens])
        assert match.num_tokens == num_tokens
        assert_restored(await store.kv.load(match, capacity_tokens=300), layout, TOKENS[:num_tokens])


async def test_a_restore_reads_only_the_file_sections_that_its_layers_need(open_store) -> None:
    store = await open_store(layout=HYBRID)
    save(store, HYBRID, store.kv.chain("a"), TOKENS)
    assert await store.queue.drained(5)
    match = store.kv.match(store.kv.chain("a"), TOKENS[:40])
    sections = [read_header(file_of(store, node)).sections for node in match.nodes]
    heads = [
        node.size_bytes - sum(one.size_bytes for one in found)
        for node, found in zip(match.nodes, sections, strict=True)
    ]
    assert {len(found) for found in sections} == {2}
    limited = [0, 8, 9]  # tokens 0 and 1, and 34 to 39
    expected = sum(heads) + sum(found[0].size_bytes for found in sections)
    expected += sum(sections[i][1].size_bytes for i in limited)
    assert (await store.kv.load(match)).size_bytes == expected


@pytest.mark.parametrize(
    ("node", "section", "num_left"),
    [(0, 0, 0), (3, 0, 12), (0, 1, 0), (9, 1, 36)],
    ids=["file 0, section 0", "file 3, section 0", "file 0, section 1", "file 9, section 1"],
)
async def test_damage_in_a_file_section_that_a_restore_reads_leaves_only_tokens_before_that_file_restorable(
    open_store, node, section, num_left
) -> None:
    """The prefix before that file has another window, so a new match is needed for it."""
    store = await open_store(layout=HYBRID)
    save(store, HYBRID, store.kv.chain("a"), TOKENS[:40])
    assert await store.queue.drained(5)
    match = store.kv.match(store.kv.chain("a"), TOKENS[:40])
    flip(file_of(store, match.nodes[node]), section)
    assert await store.kv.load(match) is None
    assert store.stats().rejected == 1
    again = store.kv.match(store.kv.chain("a"), TOKENS[:40])
    assert again.num_tokens == num_left
    if num_left:
        assert_restored(await store.kv.load(again), HYBRID, TOKENS[:num_left])
    assert_sum_rule(store)


def flip(path, section) -> None:
    """Change a byte in a section of a file."""
    header, content = read_header(path), bytearray(path.read_bytes())
    behind = sum(one.size_bytes for one in header.sections[section:])
    content[len(content) - behind + header.sections[section].size_bytes // 2] ^= 1
    path.write_bytes(content)


async def test_a_snapshot_file_with_the_sections_of_another_layer_layout_is_rejected(open_store) -> None:
    """The tensors are the same, but the file is divided into other sections."""
    store = await open_store()
    save(store, LAYOUT, store.kv.chain("a"), TOKENS[:8])
    assert await store.close()
    store = await open_store(layout=HYBRID)
    assert await store.kv.load(store.kv.match(store.kv.chain("a"), TOKENS[:8])) is None
    assert store.stats().rejected == 1


async def test_sessions_under_different_cache_policies_share_no_snapshots_and_an_erase_covers_all_policies(
    open_store,
) -> None:
    store = await open_store()
    chains = [store.kv.chain("a"), store.kv.chain("a", POLICY), store.kv.chain("a", Policy(2, 7))]
    for chain in chains:
        assert store.kv.match(chain, TOKENS).num_tokens == 0
        save(store, LAYOUT.under(chain.policy), chain, TOKENS)
    assert await store.close()
    store = await open_store()
    assert store.stats().stored == 3 * 11
    forgotten = await store.eraser.erase("a", pack(TOKENS))
    assert (forgotten.num_snapshots, forgotten.settled) == (3 * 11, True)
    assert not any(store.kv.match(chain, TOKENS).num_tokens for chain in chains)


async def test_saving_kv_computed_under_another_cache_policy_raises_an_error(open_store) -> None:
    """Such KV has other values, and would give wrong answers under the name of this policy."""
    store = await open_store()
    chain, span = store.kv.chain("a", POLICY), Span(0, BLOCK)
    with pytest.raises(ValueError, match="another policy"):
        store.kv.save(chain, TOKENS, span, cut(TOKENS, span))
    with pytest.raises(ValueError, match="another policy"):
        store.kv.save(store.kv.chain("a"), TOKENS, span, tensors_of(LAYOUT.under(POLICY), TOKENS, span))
    assert store.stats().accepted == 0


LIMITED = LAYOUT.under(POLICY)
LONG = [at * 7 % 50 for at in range(400)]
#: A little more than the size of each file here, in bytes.
FILE = 1700


async def grown(store, chain, num_tokens, tokens=LONG, layout=LIMITED) -> None:
    """Save a session block by block, each when the block before it is on disk."""
    for end in range(BLOCK, num_tokens + 1, BLOCK):
        for span in store.kv.wanted(chain, tokens[:end]):
            assert store.kv.save(chain, tokens, span, tensors_of(layout, tokens, span)), "dropped"
        assert await store.queue.drained(5)


def limited(open_store, num_files, **changes):
    return open_store(max_bytes=num_files * FILE, **changes)


def longest(store, chain, tokens) -> int:
    """Return the longest prefix of whole blocks that can be restored, by testing all prefixes."""
    nodes = [store._index.get(name) for name in chain.names(as_tokens(tokens))[1:]]
    there = [node is not None and node.usable for node in nodes]
    for end in range(len(nodes) * BLOCK, 0, -BLOCK):
        needed = {at // BLOCK for span in seen(POLICY, end) for at in range(span.start, span.end)}
        if all(there[i] for i in needed):
            return end
    return 0


def shrunk(store, max_bytes) -> None:
    store.quota.set_limits(max_bytes=max_bytes, min_free_bytes=0)
    for _ in range(200):
        store.quota._shrink()


@pytest.mark.parametrize(
    "layout",
    [LAYOUT, ModelLayout(LAYOUT.kv, reaches=(POLICY,) * 4)],
    ids=["the policy's window", "the model's window"],
)
async def test_a_windowed_session_longer_than_the_disk_limit_is_saved_and_restored(
    open_store, layout
) -> None:
    """Every block is saved, those between sinks and window are evicted, and the whole session matches."""
    store = await limited(open_store, 8, layout=layout)
    chain = store.kv.chain("a", POLICY if layout is LAYOUT else FULL)
    await grown(store, chain, 400)
    stats = store.stats()
    assert (stats.durable, sum(stats.dropped.values())) == (100, 0)
    assert stats.evicted == 100 - stats.stored > 88
    assert_sum_rule(store)
    match = store.kv.match(chain, LONG)
    assert match.num_tokens == 400
    assert_restored(await store.kv.load(match), LIMITED, LONG)


async def test_a_session_rewound_into_evicted_blocks_saves_those_blocks_again_and_can_be_restored(
    open_store,
) -> None:
    """It prefills these blocks once; after that they can be restored."""
    store = await limited(open_store, 12)
    chain = store.kv.chain("a", POLICY)
    await grown(store, chain, 300)
    rewound = [*LONG[:152], 1, 2, 3]
    held = store.kv.hold(chain, rewound)
    assert held.edges[0] < 152, "what is not there is not called stored"
    assert [span.end for span in store.kv.wanted(chain, rewound)][-2:] == [152, 155]
    assert store.kv.wanted(chain, LONG[:300]) == [], "nobody sees the rest again"
    for span in store.kv.wanted(chain, rewound):
        assert store.kv.save(chain, rewound, span, tensors_of(LIMITED, rewound, span))
        assert await store.queue.drained(5)
    store.kv.release(held)
    match = store.kv.match(chain, rewound)
    assert match.num_tokens == len(rewound)
    assert_restored(await store.kv.load(match), LIMITED, rewound)


@pytest.mark.parametrize("by_marks", [False, True], ids=["erased by tokens", "erased by logged hashes"])
async def test_erasing_a_session_with_evicted_blocks_removes_all_of_its_remaining_blocks(
    open_store, by_marks
) -> None:
    """Also after the loss of the index, and nothing of other tokens."""
    store = await limited(open_store, 200)
    await grown(store, store.kv.chain("a", POLICY), 200)
    other = [9, *LONG[1:200]]
    for tenant, tokens in (("a", other), ("b", LONG[:200])):
        chain = store.kv.chain(tenant, POLICY)
        await grown(store, chain, 200, tokens)
    await put(store, LONG[:40])
    sessions = [("a", other), ("b", LONG[:200]), ("a", LONG[:200])]
    for tenant, tokens in sessions:
        store.kv.release(store.kv.match(store.kv.chain(tenant, POLICY), tokens))
    shrunk(store, 14 * FILE)
    found = [store.kv.find(store.kv.chain(tenant, POLICY), tokens) for tenant, tokens in sessions]
    assert [match.num_tokens for match in found] == [200, 200, 200]
    # Snapshots before the first mark are alike to all sessions of the tenant.
    least = STRIDE if by_marks else 0
    left = {node.digest for match in found[:2] for node in match.nodes if node.end > least}
    assert await store.close()
    store._folder.catalog.unlink()
    store = await limited(open_store, 200)
    if by_marks:
        assert await store.eraser.erase_marked("a", Marks.of("a", pack(LONG[:200])))
    else:
        assert (await store.eraser.erase("a", pack(LONG[:200]))).settled
    there = {node.digest for node in store._index}
    assert left <= there
    assert there.isdisjoint(node.digest for node in found[2].nodes)


async def test_a_session_with_evicted_blocks_can_be_listed_exported_imported_and_pruned(
    open_store, tmp_path
) -> None:
    store = await limited(open_store, 8)
    await grown(store, store.kv.chain("a", POLICY), 200)
    stored, stored_bytes = store.stats().stored, store.stats().stored_bytes
    assert await store.close()
    found = survey.inspect(tmp_path / "cache")
    assert max(chain.num_tokens for chain in found.chains) == 200
    assert [(one.num_files, one.size_bytes) for one in found.models] == [(stored, stored_bytes)]
    archive.export(tmp_path / "cache", None, tmp_path / "archive.tar")
    limits = {"max_bytes": 1 << 30, "min_free_bytes": 0}
    done = archive.import_files(tmp_path / "other", tmp_path / "archive.tar", fresh=True, **limits)
    assert (done.num_files, done.skipped) == (stored, [])
    store = await limited(open_store, 8, directory=tmp_path / "other")
    assert store.kv.match(store.kv.chain("a", POLICY), LONG).num_tokens == 200
    model = found.models[0].identity
    pruned = pruning.prune(tmp_path / "cache", model=model, older_than_s=None, to_bytes=0, now_s=0)
    assert (pruned.num_files, pruned.left_bytes) == (stored, 0)


class Sessions:
    """Random operations on sessions: grow, branch, rewind, hold, forget, restart, failing writes."""

    layout, policy = LIMITED, POLICY

    def __init__(self, chance: random.Random, open_store) -> None:
        self.chance = chance
        self.open = lambda: limited(open_store, 15)
        self.tokens = [LONG[:8]]
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
        if self.chance.random() < 0.5:
            self.store._folder.catalog.unlink()
        self.store = await self.open()
        self.chain = self.store.kv.chain("a", self.policy)

    async def settle(self) -> None:
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
        assert_sum_rule(store)
        assert store.stats().rejected == 0
        files = {store._folder.codec.digest_of(path.name) for path in store._folder.snapshots.iterdir()}
        assert files == {node.digest for node in store._index}


def _fail(*_) -> None:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("seed", range(int(os.environ.get("TURNKEEP_TEST_EXAMPLES", "3"))))
async def test_in_random_sessions_the_cache_match_is_the_longest_prefix_that_the_files_on_disk_allow(
    open_store, seed
) -> None:
    """Also the restored KV is right, and the counters match the files."""
    await Sessions(random.Random(seed), open_store).run(50)
