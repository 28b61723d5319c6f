"""The index's columns: numbers for digests, the order of use, and how little an idle session takes."""

from __future__ import annotations

import gc
import time
import tracemalloc
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.index.index import Index
from cache.index.numbers import NONE, Numbers
from cache.index.recency import Recency
from cache.names import blocks
from cache.names.snapshot import Name

#: Few beginnings, so that many want the same place; some of the last place of any table.
DIGESTS = st.builds(
    lambda head, tail: head + bytes([tail]) * (blocks.DIGEST_BYTES - 8),
    st.sampled_from([bytes(8), b"\1" + bytes(7), b"\2" + bytes(7), b"\xff" * 8]),
    st.integers(0, 9),
)


@given(st.lists(DIGESTS, unique=True, max_size=30), st.lists(DIGESTS, max_size=60))
def test_a_digest_has_its_number_until_it_is_removed(first, changes) -> None:
    numbers = Numbers(first)
    known = {digest: number for number, digest in enumerate(first)}
    for digest in changes:
        if digest in known:
            numbers.remove(known.pop(digest))
        else:
            known[digest] = numbers.add(digest)
    assert len(numbers) == len(known) == len(set(known.values()))
    every = [*first, *changes]
    assert numbers.find_all(every) == [known.get(digest, NONE) for digest in every]
    for digest in every:
        assert numbers.find(digest) == known.get(digest, NONE)
    assert {number: numbers.digest(number) for number in known.values()} == {
        number: digest for digest, number in known.items()
    }


def test_numbers_are_given_again_so_that_the_columns_stay_as_long_as_what_there_is() -> None:
    numbers = Numbers()
    for i in range(1000):
        assert numbers.add(i.to_bytes(blocks.DIGEST_BYTES, "little")) < 3
        if i >= 2:
            numbers.remove(numbers.find((i - 2).to_bytes(blocks.DIGEST_BYTES, "little")))


@pytest.mark.parametrize("digest", [b"", bytes(31), bytes(33)])
def test_what_is_no_digest_gets_no_number(digest) -> None:
    numbers = Numbers([bytes(32)])
    assert numbers.find(digest) == NONE
    with pytest.raises(ValueError, match="32 bytes"):
        numbers.add(digest)


@given(st.permutations(range(5)), st.lists(st.integers(0, 9), max_size=40))
def test_numbers_come_in_the_order_of_their_use(first, changes) -> None:
    recency, order = Recency(first), list(first)
    for number in changes:
        if number not in order:
            recency.add(number)
        elif len(order) % 2:
            recency.use([number])
        else:
            recency.remove(number)
        was_removed = number in order and len(order) % 2 == 0
        order = [other for other in order if other != number] + [number] * (not was_removed)
        assert list(recency) == order


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 60), st.booleans()), max_size=20))
def test_long_runs_that_were_used_together_are_moved_as_one(uses) -> None:
    recency, order = Recency(range(100)), list(range(100))
    for start, num, swapped in uses:
        used = order[start : start + num]
        if swapped:
            used[1:3] = used[2:0:-1]
        recency.use(used)
        order = [number for number in order if number not in used] + used
        assert list(recency) == order


def saved(index: Index, chance: Random) -> None:
    """Enter what a session leaves after a turn or two: a block, and a tail of 20 tokens."""
    packed = blocks.pack(chance.choices(range(49_152), k=148))
    block = Name(blocks.root(b"identity", "tenant"), 0, packed[:512])
    for name in (block, Name(block.digest, 128, packed[512:])):
        index.settle(index.add(name, 60_000))


def test_an_idle_session_costs_little_more_than_its_tokens() -> None:
    """592 bytes are the tokens of a block and a tail; it was 1,569 in all, with an object for each."""
    index, chance, num_sessions = Index(time.time), Random(1), 2000
    for _ in range(100):
        saved(index, chance)
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(num_sessions):
            saved(index, chance)
        gc.collect()
        per_session = tracemalloc.get_traced_memory()[0] / num_sessions
    finally:
        tracemalloc.stop()
    assert 592 < per_session < 1000
    assert index.stored == 2 * (num_sessions + 100)


def test_what_was_removed_leaves_nothing_behind() -> None:
    """A cache that is full forgets as much as it takes in, for ever."""
    index, chance = Index(time.time), Random(1)
    for _ in range(300):
        saved(index, chance)
        while len(index) > 20:
            index.remove(next(iter(index)))
    facts = index._facts
    assert len(facts.tokens) <= 24
    assert len(facts.numbers) == len(index) + 1, "and the tenant's root"
    assert sum(map(len, facts.tokens)) == sum(len(entry.tokens) for entry in index)
