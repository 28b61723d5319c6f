"""Layers that see only sinks and a window: all of their KV is stored, and the visible part restored."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from made_kv import BLOCK, LAYOUT, assert_sum_rule, cut, extended, identity, kv
from mlx_lm.models.cache import KVCache, RotatingKVCache

from cache.disk.header import read_header
from cache.kv import layers
from cache.names.blocks import Span
from cache.names.policy import FULL, Policy
from cache.names.snapshot import ModelLayout, TensorBuffers, seen
from cache.names.tokens import pack

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


def test_a_restore_buffer_gives_the_offset_of_each_part_of_a_span_or_none_if_it_is_not_visible() -> None:
    place = TensorBuffers((), 0, Policy(2, 6), seen(Policy(2, 6), 20))
    assert [*place.segments(Span(0, 4))] == [(0, 2), (None, 2)]
    assert [*place.segments(Span(4, 8))] == [(None, 4)]
    assert [*place.segments(Span(12, 16))] == [(None, 2), (2, 2)]
    assert [*place.segments(Span(16, 24))] == [(4, 4), (None, 4)]
    assert [*place.segments(Span(0, 24))] == [(0, 2), (None, 12), (2, 6), (None, 4)]
    assert seen(Policy(2, 6), 8) == (Span(0, 8),)
    assert seen(Policy(0, 6), 8) == (Span(2, 8),)


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 7, 8, 9, 12, 14, 25, 40, 41])
@pytest.mark.parametrize("layout", [HYBRID, LAYOUT.under(POLICY), HYBRID.under(Policy(1, 9)), SHORT])
async def test_a_restore_gives_each_layer_exactly_its_visible_tokens(open_store, layout, num_tokens) -> None:
    """The restored prefix ends at, before and after ends of blocks, sinks and windows, or within a file."""
    store = await open_store(layout=layout)
    save(store, layout, store.kv.chain("a"), TOKENS)
    assert await store.queue.drained(5)
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


async def test_a_sink_window_restore_reads_the_same_number_of_bytes_at_any_length(open_store) -> None:
    """The files of blocks in the middle are not opened, so they may be missing."""
    store = await open_store()
    chain, layout = store.kv.chain("a", POLICY), LAYOUT.under(POLICY)
    save(store, layout, chain, TOKENS)
    assert await store.queue.drained(5)
    sizes = []
    for num_tokens in (20, 40):
        match = store.kv.match(chain, TOKENS[:num_tokens])
        needed = [match.nodes[0], *match.nodes[-2:]]
        hidden = [file_of(store, node) for node in match.nodes if node not in needed]
        for path in hidden:
            path.rename(path.with_suffix(".hidden"))
        restored = await store.kv.load(match)
        assert_restored(restored, layout, TOKENS[:num_tokens])
        assert restored.size_bytes == sum(node.size_bytes for node in needed)
        sizes.append(restored.size_bytes)
        for path in hidden:
            path.with_suffix(".hidden").rename(path)
    assert max(sizes) - min(sizes) < 32, "but for the digits of positions"
    assert store.stats().restored_bytes == sum(sizes)


@pytest.mark.parametrize(("node", "section", "num_left"), [(0, 0, 0), (3, 0, 12), (0, 1, 0), (9, 1, 36)])
async def test_damage_in_a_file_section_that_is_read_drops_the_file_and_all_later_ones(
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


async def test_damage_in_a_file_section_is_detected_only_by_a_restore_that_reads_the_section(
    open_store,
) -> None:
    store = await open_store(layout=HYBRID)
    save(store, HYBRID, store.kv.chain("a"), TOKENS[:40])
    assert await store.queue.drained(5)
    match = store.kv.match(store.kv.chain("a"), TOKENS[:40])
    flip(file_of(store, match.nodes[3]), 1)
    assert_restored(await store.kv.load(match), HYBRID, TOKENS[:40])
    rewound = store.kv.match(store.kv.chain("a"), TOKENS[:16])
    assert await store.kv.load(rewound) is None
    assert store.kv.match(store.kv.chain("a"), TOKENS[:40]).num_tokens == 12


def flip(path, section) -> None:
    """Change a byte in a section of a file."""
    header, content = read_header(path), bytearray(path.read_bytes())
    behind = sum(one.size_bytes for one in header.sections[section:])
    content[len(content) - behind + header.sections[section].size_bytes // 2] ^= 1
    path.write_bytes(content)


async def test_a_file_with_the_sections_of_another_layout_is_rejected(open_store) -> None:
    """The tensors are the same, but the file is divided into other sections."""
    store = await open_store()
    save(store, LAYOUT, store.kv.chain("a"), TOKENS[:8])
    assert await store.close()
    store = await open_store(layout=HYBRID)
    assert await store.kv.load(store.kv.match(store.kv.chain("a"), TOKENS[:8])) is None
    assert store.stats().rejected == 1


async def test_a_snapshot_with_limited_layers_and_a_state_restores_both(open_store) -> None:
    states = (("state.2.numbers", "I64", (2,)),)
    layout = ModelLayout(LAYOUT.kv, states, reaches=HYBRID.reaches)
    store = await open_store(layout=layout)
    for span in store.kv.wanted(store.kv.chain("a"), TOKENS[:24]):
        data = memoryview(np.array([span.end, 1], np.int64)).cast("B")
        state = replace(cut(TOKENS, span)[0], name="state.2.numbers", dtype="I64", shape=(2,), data=data)
        assert store.kv.save(store.kv.chain("a"), TOKENS, span, (*tensors_of(layout, TOKENS, span), state))
    assert await store.queue.drained(5)
    match = store.kv.match(store.kv.chain("a"), TOKENS)
    assert match.num_tokens == 24
    restored = await store.kv.load(match)
    assert np.array(restored.tensors.pop("state.2.numbers")).tolist() == [24, 1]
    assert_restored(restored, layout, TOKENS[:24])


async def test_cache_policies_share_no_snapshots_and_an_erase_removes_those_of_all_policies(
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


async def test_saving_kv_of_another_policy_raises_an_error(open_store) -> None:
    """Such KV has other values, and would give wrong answers under the name of this policy."""
    store = await open_store()
    chain, span = store.kv.chain("a", POLICY), Span(0, BLOCK)
    with pytest.raises(ValueError, match="another policy"):
        store.kv.save(chain, TOKENS, span, cut(TOKENS, span))
    with pytest.raises(ValueError, match="another policy"):
        store.kv.save(store.kv.chain("a"), TOKENS, span, tensors_of(LAYOUT.under(POLICY), TOKENS, span))
    assert store.stats().accepted == 0


@pytest.mark.parametrize("policy", [FULL, POLICY, Policy(0, 5)])
async def test_ring_and_plain_caches_are_saved_to_files_and_restored_bit_by_bit(open_store, policy) -> None:
    """A model with plain layers and windowed layers, also if both see the same tokens."""
    model = SimpleNamespace(make_cache=lambda: [RotatingKVCache(5), KVCache(), RotatingKVCache(5)])
    sample = run(layers.make(model, rings=True), 1)
    base = layers.layout(sample, lambda given=FULL: layers.make(model, given, rings=True))
    store = await open_store(layout=base, identity=identity(caches=layers.describe(sample)))
    chain = store.kv.chain("a", policy)
    caches = run(layers.make(model, policy, rings=True), 37)
    for span in store.kv.wanted(chain, TOKENS[:37]):
        assert store.kv.save(chain, TOKENS, span, layers.cut(caches, span.start, span.end))
    assert await store.queue.drained(5)
    restored = await store.kv.load(store.kv.match(chain, TOKENS))
    again = layers.rebuild(restored.tensors, layers.make(model, policy, rings=True), restored.num_tokens)
    for one, other in zip(caches, again, strict=True):
        assert one.offset == other.offset == 37
        reach = FULL if type(one) is KVCache else Policy(one.sink, one.window)
        for span in seen(reach, 37):
            mine, its = (layers.cut([cache], span.start, span.end) for cache in (one, other))
            assert [bytes(t.data) for t in mine] == [bytes(t.data) for t in its]


def run(caches, num_tokens):
    """Write the KV of `num_tokens` random tokens to the caches; return the caches."""
    mx.random.seed(3)
    keys, values = (mx.random.normal((1, 2, num_tokens, 8)) for _ in range(2))
    for cache in caches:
        if isinstance(cache, KVCache):
            cache.update_and_fetch(keys, values)
        else:
            cache.write([keys], [values])
    mx.eval([cache.state for cache in caches])
    return caches
