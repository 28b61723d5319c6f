"""Layers with a recurrent state, saved as a whole: a match ends at a state, and reads only that state."""

from __future__ import annotations

import numpy as np
import pytest
from made_kv import BLOCK, LAYOUT, assert_is_kv_of, assert_sum_rule, cut, flip, identity

from cache.disk import format as snapshot_format
from cache.kv.arrays import BlankTensors
from cache.names import blocks
from cache.names.blocks import Span
from cache.names.errors import DoubtfulSnapshotError
from cache.names.snapshot import ModelLayout, Name, Tensor
from cache.names.tokens import Chain, as_tokens, pack

IDENTITY = identity()
TOKENS = list(range(20, 34))
STATES = (("state.2.0.numbers", "I64", (3, 5)),)
STATEFUL = ModelLayout(LAYOUT.kv, STATES)


def state(end: int) -> Tensor:
    """Make a state tensor whose numbers are the position `end`, with a dtype and shape unlike the KV's."""
    data = np.full((3, 5), end, np.int64)
    return Tensor("state.2.0.numbers", "I64", data.shape, memoryview(data).cast("B"))


def save(store, tokens, end, *, resumable=True, only_state=False) -> bool:
    """Save the span that ends at `end`: a full block, or a tail."""
    span = Span((end - 1) // BLOCK * BLOCK, end)
    tensors = () if only_state else cut(tokens, span)
    return store.kv.save(store.kv.chain("a"), tokens, span, (*tensors, *([state(end)] if resumable else [])))


async def restored(store, tokens) -> int:
    """Restore the longest prefix of these tokens, check KV and state, and return its number of tokens."""
    match = store.kv.match(store.kv.chain("a"), tokens)
    found = await store.kv.load(match)
    if found is None:
        return 0
    ends = np.array(found.tensors.pop("state.2.0.numbers"))
    assert (ends == found.num_tokens).all()
    assert ends.shape == (3, 5)
    if found.tensors:
        assert_is_kv_of(found.tensors, tokens[: found.num_tokens])
    return found.num_tokens


async def test_a_model_with_recurrent_states_is_restored_only_to_the_end_of_a_stored_snapshot(
    open_store,
) -> None:
    """The KV of a part of a snapshot could be used, but a state is only that of the whole snapshot."""
    store = await open_store(layout=STATEFUL)
    for end in (4, 8, 11):
        assert save(store, TOKENS, end)
    assert await store.queue.drained(5)
    expected = {3: 0, 4: 4, 7: 4, 8: 8, 10: 8, 11: 11, 14: 11}
    assert {num: await restored(store, TOKENS[:num]) for num in expected} == expected
    other = [*TOKENS[:10], 99, *TOKENS[11:]]
    assert await restored(store, other) == 8, "a tail that goes on differently"
    assert store.kv.wanted(store.kv.chain("a"), TOKENS[:10]) == [Span(8, 10)], "its state is worth a file"
    assert store.kv.wanted(store.kv.chain("a"), TOKENS[:11]) == []


async def test_recurrent_states_after_a_missing_block_can_be_restored_once_that_block_has_been_saved(
    open_store,
) -> None:
    """The second block was dropped with its state; until it is saved again, no later block is used."""
    store = await open_store(layout=STATEFUL)
    save(store, TOKENS, 4)
    assert save(store, TOKENS, 12)
    assert await store.queue.drained(5)
    assert await restored(store, TOKENS[:12]) == 4
    assert store.kv.wanted(store.kv.chain("a"), TOKENS[:14]) == [Span(4, 8), Span(12, 14)]
    assert save(store, TOKENS, 8, resumable=False)
    assert await store.queue.drained(5)
    expected = {4: 4, 8: 4, 11: 4, 12: 12, 14: 12}
    assert {num: await restored(store, TOKENS[:num]) for num in expected} == expected
    assert store.kv.wanted(store.kv.chain("a"), TOKENS[:14]) == [Span(12, 14)]
    assert_sum_rule(store)


@pytest.mark.parametrize("lost", [False, True], ids=["known from the index", "known from file headers"])
async def test_a_reopened_store_restores_only_up_to_the_ends_of_snapshots_that_contain_a_recurrent_state(
    open_store, tmp_path, lost
) -> None:
    store = await open_store(layout=STATEFUL)
    save(store, TOKENS, 4)
    save(store, TOKENS, 8, resumable=False)
    save(store, TOKENS, 12)
    save(store, TOKENS, 14, resumable=False)
    assert await store.close()
    if lost:
        for path in (tmp_path / "cache").glob("*index*"):
            path.unlink()
    store = await open_store(layout=STATEFUL)
    expected = {8: 4, 12: 12, 14: 12}
    assert {num: await restored(store, TOKENS[:num]) for num in expected} == expected


def file_of(tmp_path, tokens, end):
    root = blocks.root(IDENTITY.digest(), "a")
    start = (end - 1) // BLOCK * BLOCK
    parent = Chain(root, BLOCK).names(as_tokens(tokens[:start]))[-1]
    digest = blocks.link(parent, pack(tokens[start:end]))
    return next((tmp_path / "cache").rglob(f"{digest.hex()}.safetensors"))


async def test_a_damaged_recurrent_state_is_a_miss_and_the_next_restore_uses_the_previous_state(
    open_store, tmp_path
) -> None:
    store = await open_store(layout=STATEFUL)
    for end in (4, 8, 12):
        save(store, TOKENS, end)
    assert await store.queue.drained(5)
    flip(file_of(tmp_path, TOKENS, 12))
    flip(file_of(tmp_path, TOKENS, 4))  # this state is read only by a restore that ends there
    assert await restored(store, TOKENS) == 0
    assert store.stats().rejected == 1
    assert await restored(store, TOKENS) == 8
    flip(file_of(tmp_path, TOKENS, 8), -200)  # in its keys and values
    assert await restored(store, TOKENS) == 0
    assert await restored(store, TOKENS) == 0
    assert store.stats().rejected == 3
    assert store.kv.match(store.kv.chain("a"), TOKENS).num_tokens == 0


async def test_a_partial_block_with_a_recurrent_state_is_removed_only_once_a_later_state_is_stored(
    open_store,
) -> None:
    store = await open_store(layout=STATEFUL)
    save(store, TOKENS, 6)
    save(store, TOKENS, 4)
    save(store, TOKENS, 6)
    assert await store.queue.drained(5)
    save(store, TOKENS, 8, resumable=False)
    assert await store.queue.drained(5)
    assert await restored(store, TOKENS) == 6
    other = await open_store(layout=STATEFUL, directory=store._folder.path(b"").parent.parent / "other")
    for end in (4, 6, 8):
        save(other, TOKENS, end)
    assert await other.queue.drained(5)
    assert await restored(other, TOKENS[:7]) == 4
    assert other.stats().stored == 2


def write(path, end: int, tensors, *, resumable=True) -> Name:
    root = blocks.root(IDENTITY.digest(), "a")
    name = Name(root, 0, pack(TOKENS[:end]), resumable)
    snapshot_format.write(snapshot_format.encode(name, IDENTITY, tensors), path)
    return name


def load(path, name: Name, *, state: bool = True):
    wanted = (path, name.digest, 0, IDENTITY.digest())
    layout, states = snapshot_format.peek(*wanted)
    blank = BlankTensors(ModelLayout(layout), name.num_tokens, states if state else ())
    snapshot_format.read(
        *wanted,
        layout=layout,
        places=blank.places,
        state=blank.state if state else None,
    )
    return blank.arrays()


def test_a_snapshot_without_a_recurrent_state_is_valid_but_a_restore_cannot_end_with_that_snapshot(
    tmp_path,
) -> None:
    path = tmp_path / "x.safetensors"
    name = write(path, 4, cut(TOKENS, Span(0, 4)), resumable=False)
    load(path, name, state=False)
    path = path.rename(tmp_path / name.digest.hex())
    assert snapshot_format.prove(path) == name, "for what it is, it is sound"
    with pytest.raises(DoubtfulSnapshotError, match="no state"):
        load(path, name)


@pytest.mark.parametrize(
    ("tensors", "resumable"),
    [
        ((), True),
        ((state(4),), False),
        ((state(4), *cut(TOKENS, Span(0, 4))), True),
        ((*cut(TOKENS, Span(0, 4))[:-1], state(4)), True),
        ((Tensor("2.numbers", "I64", (3, 5), state(4).data),), True),
        ((Tensor("state.numbers", "I64", (3, 5), state(4).data),), True),
        ((Tensor("state.2.numbers", "F32", (3, 5), state(4).data),), True),
    ],
)
def test_encoding_a_snapshot_with_missing_or_misnamed_recurrent_state_tensors_raises_an_error(
    tmp_path, tensors, resumable
) -> None:
    with pytest.raises(ValueError, match="not a snapshot"):
        write(tmp_path / "x.safetensors", 4, tensors, resumable=resumable)
