"""Carriers: a paged session's every sixteenth block has the sketches (2-bit keys) of its group of blocks.

So a restore opens fewer files.
"""

from __future__ import annotations

import numpy as np
import pytest
from made_kv import BLOCK, LAYOUT, assert_sum_rule, cut, extended, identity, kv

from cache.disk import format as snapshot_format
from cache.disk.header import read_header
from cache.names.blocks import Span
from cache.names.policy import Policy
from cache.names.snapshot import CARRIED, ModelLayout, Name, Tensor, TensorBuffers, carried, seen
from cache.names.tokens import pack

POLICY = Policy(2, 6, 64)
GROUP = 16 * BLOCK
TYPES = {"codes": np.uint32, "scales": np.float32, "biases": np.float32}
SKETCHES = tuple(
    (f"0.sketch.{part}", {np.uint32: "U32", np.float32: "F32"}[kind], (2, 1)) for part, kind in TYPES.items()
)
OWN = ModelLayout(LAYOUT.kv, sketches=SKETCHES)
TOKENS = [(7 * i) % 90 for i in range(3 * GROUP + 5 * BLOCK + 3)]


def sketches(tokens) -> dict[str, np.ndarray]:
    """Make sketches in which each value is a fingerprint of all tokens up to its position."""
    base = kv(tokens)["0.keys"][:, :, :, :1]
    return {f"0.sketch.{part}": (base * (i + 2)).astype(kind) for i, (part, kind) in enumerate(TYPES.items())}


def cut_paged(tokens, span, more) -> tuple[Tensor, ...]:
    """Copy a span's KV and sketches as a paged session's device would, with the sketches of `more`, too."""
    tensors = [Tensor(one.name, one.dtype, one.shape, one.data, POLICY) for one in cut(tokens, span)]
    for name, whole in sketches(tokens).items():
        for prefix, part in (("", span), (CARRIED, more)):
            if part is not None:
                held = np.ascontiguousarray(whole[:, :, part.start : part.end])
                kind = "U32" if held.dtype == np.uint32 else "F32"
                tensors.append(Tensor(prefix + name, kind, held.shape, memoryview(held).cast("B")))
    return tuple(tensors)


def save(store, chain, tokens=TOKENS, size=lambda more: more) -> None:
    for span in store.kv.wanted(chain, tokens):
        assert store.kv.save(chain, tokens, span, cut_paged(tokens, span, size(carried(span, BLOCK))))


@pytest.fixture
async def stored(open_store):
    """Return a store with a stored session, and the session's chain."""
    store = await open_store(layout=OWN)
    chain = store.kv.chain("a", POLICY)
    save(store, chain)
    assert await store.queue.drained(5)
    return store, chain


def file_of(store, node):
    return store._folder.path(node.digest)


def assert_restored(restored, tokens) -> None:
    assert restored.num_tokens == len(tokens)
    for name, whole in sketches(tokens).items():
        assert np.array_equal(np.array(restored.tensors[name])[:, :, : len(tokens)], whole), name
    for name, whole in kv(tokens).items():
        visible = [whole[:, :, one.start : one.end] for one in seen(POLICY, len(tokens))]
        assert np.array_equal(np.array(restored.tensors[name]), np.concatenate(visible, axis=2)), name


def test_every_sixteenth_block_file_also_holds_2_bit_keys_of_the_last_sixteen_blocks() -> None:
    spans = [Span(at, at + BLOCK) for at in range(0, 2 * GROUP, BLOCK)]
    assert [one for one in spans if carried(one, BLOCK)] == [spans[15], spans[31]]
    assert carried(spans[31], BLOCK) == Span(GROUP, 2 * GROUP)
    assert carried(Span(GROUP - 2, GROUP), BLOCK) is None, "a piece of a tail"


def test_splitting_a_buffer_of_restored_kv_at_a_token_gives_each_half_its_token_ranges_and_bytes() -> None:
    rows = (memoryview(bytes(range(12))),)
    before, after = TensorBuffers(rows, 2, POLICY, (Span(0, 2), Span(10, 14))).split(11)
    assert [*before.segments(Span(8, 16))] == [(None, 2), (2, 1), (None, 5)]
    assert [*after.segments(Span(8, 16))] == [(None, 3), (0, 3), (None, 2)]
    assert bytes(after.rows[0]) == bytes(range(6, 12))


@pytest.mark.parametrize(
    "num_tokens",
    [3, GROUP, GROUP + 1, 2 * GROUP - 2, len(TOKENS)],
)
async def test_a_paged_session_is_restored_although_files_of_invisible_blocks_without_2_bit_keys_are_missing(
    stored, num_tokens
) -> None:
    """The session ends at, before or after the end of a group, or within a carrier."""
    store, chain = stored
    match = await extended(store, TOKENS[:num_tokens], chain=chain)
    assert match.num_tokens == num_tokens
    spans = {node: Span(node.start, node.end) for node in match.nodes}
    num_carried = max((span.end for span in spans.values() if carried(span, BLOCK)), default=0)
    looked_at = [*seen(POLICY, num_tokens), Span(num_carried, num_tokens)]
    for node, span in spans.items():
        is_seen = any(one.start < span.end and span.start < one.end for one in looked_at)
        if not (is_seen or carried(span, BLOCK)):
            file_of(store, node).unlink()
    assert_restored(await store.kv.load(match, capacity_tokens=num_tokens + 30), TOKENS[:num_tokens])
    assert store.stats().rejected == 0


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param((Span(GROUP - BLOCK, GROUP + BLOCK),), id="a carrier block and the block after it"),
        pytest.param((Span(5, 6), Span(7, 8), Span(9, 11)), id="tokens with others between them"),
    ],
)
async def test_reading_tokens_of_a_paged_session_from_disk_gives_the_kv_of_exactly_those_tokens(
    stored, wanted: tuple[Span, ...]
) -> None:
    store, chain = stored
    found, arrays = await store.kv.recall(chain, TOKENS, wanted)
    assert found == wanted
    places = [at for span in wanted for at in range(span.start, span.end)]
    whole = kv(TOKENS)
    assert {name: np.array(array).tolist() for name, array in arrays.items()} == {
        name: whole[name][:, :, places].tolist() for name in whole
    }


async def test_reading_unstored_tokens_of_a_paged_session_from_disk_gives_no_kv_and_pins_no_snapshot(
    stored,
) -> None:
    store, chain = stored
    span = Span(len(TOKENS), len(TOKENS) + 3)
    assert await store.kv.recall(chain, [*TOKENS, 1, 2, 3], [span]) == ((), {})
    assert store.stats().held_bytes == 0


@pytest.mark.parametrize("section", [0, 2, 3])
async def test_a_restore_that_reads_only_the_2_bit_keys_of_a_file_detects_damage_in_those_keys_alone(
    stored, section
) -> None:
    """A restore reads only the carried sketches of this file, so it detects no damage elsewhere in it."""
    store, chain = stored
    match = store.kv.match(chain, TOKENS)
    path = file_of(store, match.nodes[31])
    header, content = read_header(path), bytearray(path.read_bytes())
    assert len(header.sections) == 4
    content[-sum(one.size_bytes for one in header.sections[section:])] ^= 1
    path.write_bytes(content)
    restored = await store.kv.load(match)
    if section < 3:
        assert_restored(restored, TOKENS)
        return
    assert restored is None
    assert store.stats().rejected == 1
    again = store.kv.match(chain, TOKENS)
    assert again.num_tokens == 2 * GROUP - BLOCK
    assert_restored(await store.kv.load(again), TOKENS[: again.num_tokens])
    save(store, chain)
    assert await store.queue.drained(5)
    assert_restored(await store.kv.load(store.kv.match(chain, TOKENS)), TOKENS)
    assert_sum_rule(store)


@pytest.mark.parametrize(
    "size", [lambda _: None, lambda more: more and Span(more.start + 1, more.end)], ids=["none", "fewer"]
)
async def test_a_restore_rejects_the_file_of_a_sixteenth_block_that_lacks_some_of_its_2_bit_keys(
    open_store, size
) -> None:
    store = await open_store(layout=OWN)
    chain = store.kv.chain("a", POLICY)
    save(store, chain, size=size)
    assert await store.queue.drained(5)
    assert await store.kv.load(store.kv.match(chain, TOKENS)) is None
    assert store.stats().rejected == 1
    assert store.kv.match(chain, TOKENS).num_tokens == GROUP - BLOCK


def test_the_file_of_a_block_with_2_bit_keys_passes_verification(tmp_path) -> None:
    own = identity(policy=OWN.name(POLICY))
    span = Span(GROUP - BLOCK, GROUP)
    name = Name(bytes(32), span.start, pack(TOKENS[span.start : span.end]))
    tensors = OWN.under(POLICY).ordered(cut_paged(TOKENS, span, carried(span, BLOCK)))
    path = tmp_path / f"{name.digest.hex()}.safetensors"
    encoded = snapshot_format.encode(name, own, tensors)
    snapshot_format.write(encoded, path)
    assert path.stat().st_size == encoded.size_bytes
    assert snapshot_format.prove(path) == name
