"""Tails grow in pieces, so that few tokens are written again, and a restore finds all saved tokens."""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_kv import assert_is_kv_of, assert_sum_rule, cut, identity, put, save_all

from cache.disk.folder import Folder
from cache.disk.header import read_name
from cache.names import blocks
from cache.names.blocks import Span
from cache.names.tokens import pack

LONG = 16  # tokens of a block, enough for a tail of several pieces


def piece_starts(store) -> list[tuple[int, int]]:
    return sorted((entry.start, entry.end) for entry in store._index)


@given(st.integers(0, 8).map(lambda power: 2**power), st.lists(st.integers(1, 40), min_size=1, max_size=300))
def test_the_kv_of_a_token_is_written_to_disk_at_most_2_plus_log2_of_block_size_divided_by_turn_size_times(
    block, turns
) -> None:
    edges, end, writes = [0], 0, Counter()
    for turn in turns:
        grown = end + turn
        for boundary in range(end - end % block + block, grown + 1, block):
            writes.update(range(boundary - block, boundary))
            edges = [boundary]
        if grown % block:
            start = blocks.tail_start(edges, grown)
            assert start in edges
            edges = [*edges[: edges.index(start) + 1], grown]
            writes.update(range(start, grown))
        end = grown
    most = math.ceil(math.log2(max(1, block / min(turns)))) + 2
    assert max(writes.values()) <= most
    assert len(edges) <= 2 + math.isqrt(2 * block), "pieces at the end are shorter and shorter"


async def test_saving_a_full_block_removes_the_partial_blocks_of_the_same_tokens(
    open_store, tmp_path
) -> None:
    store = await open_store(identity=identity(block_tokens=LONG))
    tokens = list(range(18))
    for end in (8, 12, 14, 18):
        await put(store, tokens[:end])
    assert piece_starts(store) == [(0, 16), (16, 18)]
    assert len(list((tmp_path / "cache" / "snapshots").iterdir())) == 2


async def test_saving_a_full_block_keeps_a_partial_block_that_another_sessions_kv_needs(open_store) -> None:
    store = await open_store(identity=identity(block_tokens=LONG))
    for tokens in ([*range(8)], [*range(8), 50, 51], [*range(16)]):
        await put(store, tokens)
    assert piece_starts(store) == [(0, 8), (0, 16), (8, 10)]
    restored = await store.kv.load(store.kv.match(store.kv.chain("a"), [*range(8), 50, 51]))
    assert restored.num_tokens == 10
    assert_is_kv_of(restored.tensors, [*range(8), 50, 51])
    assert store.eraser.forget("a", pack([*range(8), 50, 51])) == 2
    assert store.eraser.forget("a", pack(list(range(16)))) == 1


@pytest.mark.parametrize("forget", [False, True], ids=["replaced", "erased"])
async def test_a_turn_can_extend_partial_blocks_that_other_turns_replaced_or_erased_meanwhile(
    open_store, forget
) -> None:
    """The turn holds the pieces while another turn replaces them by a longer piece, or forgets them."""
    store = await open_store(identity=identity(block_tokens=LONG))
    mine = [*range(8), 8, 50]
    for end in (8, 9):
        save_all(store, "a", mine[:end])
    await store.queue.drained(5)
    held = store.kv.hold(store.kv.chain("a"), mine[:9])
    assert held.edges == (0, 8, 9)
    if forget:
        assert store.eraser.forget("a", pack(mine[:9])) == 2
    else:
        save_all(store, "a", list(range(18)))
    await store.queue.drained(5)
    span = Span(9, 10)
    assert store.kv.save(store.kv.chain("a"), mine, span, cut(mine, span))
    store.kv.release(held)
    await store.queue.drained(5)
    restored = await store.kv.load(store.kv.match(store.kv.chain("a"), mine))
    assert_is_kv_of(restored.tensors, mine)


async def test_a_partial_block_whose_preceding_block_is_not_stored_is_not_saved(open_store) -> None:
    store = await open_store()
    save_all(store, "a", [1, 2])
    assert not store.kv.save(store.kv.chain("a"), [1, 7, 3], Span(2, 3), cut([1, 7, 3], Span(2, 3)))
    assert not store.kv.save(store.kv.chain("a"), [1, 2, 3], Span(1, 3), cut([1, 2, 3], Span(1, 3)))
    assert store.stats().dropped == {"no_parent": 2}
    assert_sum_rule(store)


@pytest.mark.parametrize("lose_the_catalog", [False, True], ids=["with the index", "without the index"])
async def test_after_a_crash_at_any_write_the_next_process_restores_every_durable_token(
    open_store, tmp_path, monkeypatch, lose_the_catalog
) -> None:
    """The next process is tested with a copy of the directory after each step of the writer."""
    moments: list[tuple[Path, int]] = []
    place, remove = Folder.place, Folder.remove
    reached = 0

    def keep(folder: Folder) -> None:
        copy = tmp_path / f"moment-{len(moments)}"
        for path in (folder.directory / "snapshots").iterdir():
            (copy / "snapshots").mkdir(parents=True, exist_ok=True)
            os.link(path, copy / "snapshots" / path.name)
        if not lose_the_catalog:
            for path in folder.directory.glob("index.sqlite*"):
                (copy / path.name).write_bytes(path.read_bytes())
        moments.append((copy, reached))

    def placed(folder: Folder, path: Path, digest: bytes) -> None:
        nonlocal reached
        place(folder, path, digest)
        reached = read_name(folder.path(digest)).span.end
        keep(folder)

    def removed(folder: Folder, digest: bytes) -> None:
        remove(folder, digest)
        keep(folder)

    monkeypatch.setattr(Folder, "place", placed)
    monkeypatch.setattr(Folder, "remove", removed)
    store = await open_store(identity=identity(block_tokens=8))
    tokens = list(range(19))
    for end in (1, 2, 3, 4, 5, 7, 9, 10, 11, 15, 19):
        await put(store, tokens[:end])
    monkeypatch.undo()
    assert len(moments) > 15
    for copy, expected in moments:
        after = await open_store(directory=copy, identity=identity(block_tokens=8))
        restored = await after.kv.load(after.kv.match(after.kv.chain("a"), tokens))
        assert restored.num_tokens == expected
        assert_is_kv_of(restored.tensors, tokens[:expected])
        await after.close()


def test_a_turn_that_adds_no_token_to_a_partial_block_writes_no_further_file_of_that_block() -> None:
    assert blocks.tail_start((8,), 9) == 8
    assert blocks.tail_start((8, 9), 9) == 9
