"""Layers with a recurrent state, saved as a whole: a match ends at a state, and reads only that state."""

from __future__ import annotations

import numpy as np
import pytest
from made_kv import BLOCK, LAYOUT, assert_is_kv_of, assert_sum_rule, cut, identity, kv, uploaded

from cache.disk import format as snapshot_format
from cache.disk.tier import SharedDirectory
from cache.disk.unencrypted import PLAIN
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


async def test_a_match_for_a_stateful_model_ends_at_the_end_of_a_snapshot(open_store) -> None:
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


async def test_a_match_for_a_stateful_model_picks_the_longest_of_several_tails(open_store) -> None:
    """There are many tails with the same beginning, which then differ or are too long."""
    store = await open_store(layout=STATEFUL, identity=identity(block_tokens=16))
    many = [[*TOKENS[:num], *rest] for num in (3, 5, 9) for rest in ([], [1], [98], [98, 99])]
    for tokens in many:
        whole = (*cut(tokens, Span(0, len(tokens))), state(len(tokens)))
        store.kv.save(store.kv.chain("a"), tokens, Span(0, len(tokens)), whole)
        assert await store.queue.drained(5)
    # A tail is removed when a longer one that begins with it is stored: at most a block is prefilled again.
    expected = {4: 0, 8: 0, 9: 0, 10: 0}
    assert {num: await restored(store, TOKENS[:num]) for num in expected} == expected
    assert await restored(store, [*TOKENS[:9], 98, 99, 7]) == 11
    assert await restored(store, [*TOKENS[:9], 98, 3]) == 0
    assert await restored(store, [*TOKENS[:5], 1, 3]) == 6


async def test_later_states_can_be_restored_once_a_missing_block_is_saved_even_without_a_state(
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


@pytest.mark.parametrize("lost", [False, True], ids=["catalog", "headers"])
async def test_a_reopened_store_knows_which_snapshots_have_a_state(open_store, tmp_path, lost) -> None:
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


async def test_a_session_of_a_model_with_only_states_is_restored_from_its_last_saved_state(
    open_store,
) -> None:
    """The file of a block without a state has only a header."""
    store = await open_store(layout=ModelLayout((), STATES))
    for end in (4, 8, 12, 14):
        assert save(store, TOKENS, end, only_state=True, resumable=end != 4)
    assert await store.close()
    store = await open_store(layout=ModelLayout((), STATES))
    expected = {4: 0, 8: 8, 13: 12, 14: 14}
    assert {num: await restored(store, TOKENS[:num]) for num in expected} == expected


def flip(path, at: int) -> None:
    whole = bytearray(path.read_bytes())
    whole[at] ^= 1
    path.write_bytes(whole)


def file_of(tmp_path, tokens, end):
    root = blocks.root(IDENTITY.digest(), "a")
    start = (end - 1) // BLOCK * BLOCK
    parent = Chain(root, BLOCK).names(as_tokens(tokens[:start]))[-1]
    digest = blocks.link(parent, pack(tokens[start:end]))
    return next((tmp_path / "cache").rglob(f"{digest.hex()}.safetensors"))


async def test_a_damaged_state_is_a_miss_and_the_next_restore_uses_the_state_before_it(
    open_store, tmp_path
) -> None:
    store = await open_store(layout=STATEFUL)
    for end in (4, 8, 12):
        save(store, TOKENS, end)
    assert await store.queue.drained(5)
    flip(file_of(tmp_path, TOKENS, 12), -1)
    flip(file_of(tmp_path, TOKENS, 4), -1)  # this state is read only by a restore that ends there
    assert await restored(store, TOKENS) == 0
    assert store.stats().rejected == 1
    assert await restored(store, TOKENS) == 8
    flip(file_of(tmp_path, TOKENS, 8), -200)  # in its keys and values
    assert await restored(store, TOKENS) == 0
    assert await restored(store, TOKENS) == 0
    assert store.stats().rejected == 3
    assert store.kv.match(store.kv.chain("a"), TOKENS).num_tokens == 0


async def test_a_tail_is_removed_only_once_a_later_state_is_stored(open_store) -> None:
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


def test_a_file_with_the_state_of_another_position_is_rejected(tmp_path) -> None:
    early, late = tmp_path / "4.safetensors", tmp_path / "8.safetensors"
    write(early, 4, (*cut(TOKENS, Span(0, 4)), state(4)))
    name = write(late, 8, (*cut(TOKENS, Span(0, 8)), state(8)))
    load(late, name)
    num_bytes = state(8).data.nbytes
    late.write_bytes(late.read_bytes()[:-num_bytes] + early.read_bytes()[-num_bytes:])
    with pytest.raises(DoubtfulSnapshotError, match="checksum"):
        load(late, name)
    assert_is_kv_of(load(late, name, state=False), TOKENS[:8])


def test_any_change_in_a_file_with_a_state_is_detected(tmp_path) -> None:
    path = tmp_path / "x.safetensors"
    name = write(path, 4, (*cut(TOKENS, Span(0, 4)), state(4)))
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(DoubtfulSnapshotError):
            load(path, name)
    for length in (0, 9, 200, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DoubtfulSnapshotError):
            load(path, name)
    path.write_bytes(whole + b"\0")
    with pytest.raises(DoubtfulSnapshotError):
        load(path, name)


def test_a_snapshot_without_a_state_is_valid_but_a_restore_cannot_end_there(tmp_path) -> None:
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
def test_encoding_tensors_that_do_not_form_a_snapshot_raises_an_error(tmp_path, tensors, resumable) -> None:
    with pytest.raises(ValueError, match="not a snapshot"):
        write(tmp_path / "x.safetensors", 4, tensors, resumable=resumable)


def test_a_quantised_layer_and_a_layer_with_keys_only_are_read_back_unchanged(tmp_path) -> None:
    """The quantised layer has six tensors of two dtypes; the other has values of size zero."""
    import mlx.core as mx

    whole = kv(TOKENS)["0.keys"][:, :, :4]
    codes = np.ascontiguousarray(whole.astype(np.uint32))
    tensors = [
        Tensor(f"0.{part}.{kind}", dtype, data.shape, memoryview(data).cast("B"))
        for part in ("keys", "values")
        for kind, dtype, data in (
            ("codes", "U32", codes),
            ("scales", "F32", np.ascontiguousarray(whole)),
            ("biases", "F32", np.ascontiguousarray(whole + 1)),
        )
    ]
    tensors.append(Tensor("1.0.keys", "F32", whole.shape, tensors[1].data))
    tensors.append(Tensor("1.0.values", "F32", (1, 1, 4, 0), memoryview(b"")))
    path = tmp_path / "x.safetensors"
    name = write(path, 4, tuple(tensors))
    arrays = load(path, name)
    assert mx.array_equal(arrays["0.values.codes"][:, :, :4], mx.array(codes))
    assert mx.array_equal(arrays["0.keys.biases"][:, :, :4], mx.array(whole + 1))
    assert arrays["1.0.values"][:, :, :4].shape == (1, 1, 4, 0)


async def test_a_store_resumes_at_a_state_that_another_store_put_in_the_shared_tier(
    open_store, tmp_path
) -> None:
    tier = SharedDirectory(tmp_path / "tier", PLAIN, max_bytes=1 << 30, min_free_bytes=0)
    one = await open_store(tmp_path / "one", layout=STATEFUL, tier=tier)
    for end, resumable in ((4, False), (8, True), (11, True)):
        assert save(one, TOKENS, end, resumable=resumable)
    assert await one.queue.drained(5)
    await uploaded(one)
    two = await open_store(tmp_path / "two", layout=STATEFUL, tier=tier)
    found = await two.kv.find_remote(two.kv.chain("a"), TOKENS)
    assert found is not None
    await two.remote.fetch(found)
    assert await restored(two, TOKENS) == 11
