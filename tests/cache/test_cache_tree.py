"""The index's tree, compared with a simple model that searches whole chains; and its use of memory."""

from __future__ import annotations

import gc
import os
import time
import tracemalloc
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.index.index import Index
from cache.names import blocks
from cache.names.snapshot import Name
from cache.names.tokens import pack

PICKS = st.integers(0, 99)


class Modelled(RuleBasedStateMachine):
    """Compares an `Index` with a model in which a use or hold touches all entries of a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(lambda: 0.0)
        self.there: list = []
        self.used: dict = {}
        #: Each hold is a list of all entries of a chain; removed entries stay in the list.
        self.holds: list[list] = []

    def free(self, entry) -> bool:
        return not any(entry in chain for chain in self.holds) and entry.durable

    def children(self, entry) -> list:
        return [other for other in self.there if other.up is entry]

    def chain(self, entry) -> list:
        return (
            []
            if entry is None
            else [*self.chain(next((e for e in self.there if e is entry.up), None)), entry]
        )

    def picked(self, pick: int, entries: list):
        return entries[pick % len(entries)]

    @rule(pick=PICKS, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=2), is_stored=st.booleans())
    def add(self, pick, tokens, is_stored) -> None:
        before = self.picked(pick, [None, *self.there])
        parent, start = (before.digest, before.end) if before is not None else (bytes(32), 0)
        name = Name(parent, start, pack(tokens))
        if self.index.get(name.digest) is None:
            entry = self.index.add(name, 1 << len(self.used) % 20)
            self.there.append(entry)
            self.note_use(entry)
            if is_stored and entry in self.on_their_way():
                self.index.mark_durable(entry)

    def note_use(self, entry) -> None:
        for link in self.chain(entry):
            self.used[link] = entry.used

    def on_their_way(self) -> list:
        return [e for e in self.there if not e.durable and all(link.durable for link in self.chain(e)[:-1])]

    @precondition(on_their_way)
    @rule(pick=PICKS)
    def settle(self, pick) -> None:
        self.index.mark_durable(self.picked(pick, self.on_their_way()))

    @precondition(lambda self: self.there)
    @rule(pick=PICKS)
    def use(self, pick) -> None:
        entry = self.picked(pick, self.there)
        self.index.use(entry)
        self.note_use(entry)

    @precondition(lambda self: self.there)
    @rule(pick=PICKS)
    def hold(self, pick) -> None:
        entry = self.picked(pick, self.there)
        self.index.hold(entry)
        self.holds.append(self.chain(entry))

    @precondition(lambda self: self.holds)
    @rule(pick=PICKS)
    def release(self, pick) -> None:
        chain = self.holds.pop(pick % len(self.holds))
        left = [entry for entry in chain if entry in self.there]
        assert self.index.release(chain[-1]) is (left[-1] if left else None)

    def leaves(self) -> list:
        return [entry for entry in self.there if not self.children(entry)]

    @precondition(leaves)
    @rule(pick=PICKS)
    def remove(self, pick) -> None:
        """Remove a leaf, also a held one, as after a failed write or a damaged file."""
        entry = self.picked(pick, self.leaves())
        self.index.remove(entry)
        self.there.remove(entry)

    def oldest(self):
        return min(filter(self.free, self.leaves()), key=self.used.get, default=None)

    @precondition(oldest)
    @rule(num=st.integers(1, 3))
    def evict(self, num) -> None:
        for _ in range(num):
            victim = self.index.oldest()
            assert victim is self.oldest()
            if victim is not None:
                self.index.remove(victim)
                self.there.remove(victim)

    @precondition(lambda self: len(self.there) > 6 and not self.on_their_way())
    @rule(chance=st.randoms())
    def restart(self, chance) -> None:
        rows, used = [entry.row for entry in self.there], self.used
        chance.shuffle(rows)
        self.index = Index(lambda: 0.0, rows)
        used_by_name = {entry.digest: used[entry] for entry in self.there}
        self.there = [self.index.get(row.digest) for row in rows]
        self.used = {entry: used_by_name[entry.digest] for entry in self.there}
        self.holds = []

    @invariant()
    def entries_come_in_the_order_of_use_and_children_before_parents(self) -> None:
        order = list(self.index)
        assert sorted(map(id, order)) == sorted(map(id, self.there))
        assert [self.used[entry] for entry in order] == sorted(self.used[entry] for entry in self.there)
        assert all(order.index(e) < order.index(e.up) for e in order if e.up in self.there)

    @invariant()
    def the_oldest_leaf_that_nobody_needs_is_the_first_to_go(self) -> None:
        assert self.index.oldest() is self.oldest()

    @invariant()
    def a_chain_is_found_as_far_as_it_is_there(self) -> None:
        for entry in self.there:
            chain = self.chain(entry)
            digests = [link.digest for link in chain]
            assert self.index.num_known([*digests, b"more"]) == len(chain)
            stored = [link for link in chain if link.durable]
            assert self.index.follow(digests) == stored
            assert self.index.get(entry.digest) is entry
            assert entry in self.index.children(entry.parent)

    @invariant()
    def bytes_are_those_of_the_entries(self) -> None:
        held = set().union(*self.holds, *(self.chain(e) for e in self.there if not e.durable))
        assert self.index.held_bytes() == sum(e.size_bytes for e in held if e in self.there)
        stored = [entry.size_bytes for entry in self.there if entry.durable]
        assert (self.index.stored, self.index.stored_bytes) == (len(stored), sum(stored))
        assert self.index.on_its_way_bytes == sum(e.size_bytes for e in self.there if not e.durable)


HUNT = os.environ.get("TURNKEEP_TEST_EXAMPLES")
Modelled.TestCase.settings = settings(
    max_examples=int(HUNT or 60),
    stateful_step_count=40,
    derandomize=not HUNT,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_the_index_tree_behaves_like_a_naive_model_that_walks_whole_chains = Modelled.TestCase


def saved(index: Index, chance: Random) -> None:
    """Add the entries of a session to the index: a block, and a tail of 20 tokens."""
    packed = pack(chance.choices(range(49_152), k=148))
    block = Name(blocks.root(b"identity", "tenant"), 0, packed[:512])
    for name in (block, Name(block.digest, 128, packed[512:])):
        index.mark_durable(index.add(name, 60_000))


def test_an_idle_session_takes_less_than_two_kib_in_the_index() -> None:
    """592 bytes of this are the tokens of a block and a tail."""
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
    assert 592 < per_session < 1700, "the session itself takes some hundred bytes besides"
    assert index.stored == 2 * (num_sessions + 100)


def test_the_index_keeps_no_memory_of_removed_entries() -> None:
    """A full cache evicts as many entries as it adds, for as long as the worker runs."""
    index, chance = Index(time.time), Random(1)
    for _ in range(300):
        saved(index, chance)
        while len(index) > 20:
            index.remove(next(iter(index)))
    assert len(list(index)) == 20
    assert len(index._eviction_heap) <= 1.5 * 22 + 65
    assert len(index._roots) == 1, "the tenant's"
    assert not index._held
    for entry in list(index):
        index.remove(entry)
    assert not index._roots
