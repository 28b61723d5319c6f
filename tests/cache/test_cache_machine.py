"""The cache against a reference model, in random orders of turns, loads, limits, faults and restarts.

Runs are short and deterministic. `TURNKEEP_TEST_EXAMPLES=3000` runs that many random examples,
different ones each time.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from made_kv import BLOCK, LAYOUT, assert_is_kv_of, assert_sum_rule, identity, save_all

from cache.disk import format as snapshot_format
from cache.disk.codec import PLAIN
from cache.index import stored_kv
from cache.names import blocks
from cache.names.blocks import Span
from cache.names.tokens import num_common, pack
from cache.store import Store
from tests.at_rest import come_to_rest

WRITE, LOAD_S, BRANCHES = snapshot_format.write, stored_kv.LOAD_S, stored_kv._MOST_BRANCHES

TENANTS = st.sampled_from("ab")
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=11).map(tuple)

DAMAGES = ("flipped", "cut short", "removed")

#: A snapshot in the model: its tenant, where it and those before it start, and all tokens up to its end.
Node = tuple[str, tuple[int, ...], tuple[int, ...]]


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return num_common(pack(one), pack(other))


class Driven(RuleBasedStateMachine):
    """A hypothesis state machine that runs operations on a store in a real directory."""

    max_bytes = 1 << 30
    queue_bytes = 1 << 30
    codec = PLAIN

    def __init__(self) -> None:
        super().__init__()
        #: Snapshots whose files were damaged, and how.
        self.bad: dict[Node, str] = {}
        self.loop = asyncio.new_event_loop()
        self.now = 0.0
        self.wall = 1e9
        self.directory = Path(tempfile.mkdtemp(prefix="cache-machine-"))

    @initialize()
    def open(self) -> None:
        stored_kv.LOAD_S = 60.0  # on a busy machine a read may take long
        stored_kv._MOST_BRANCHES = 1000  # all
        self.store = self.run(
            Store.open(
                self.directory,
                identity=identity(),
                layout=LAYOUT,
                max_bytes=self.max_bytes,
                queue_bytes=self.queue_bytes,
                min_free_bytes=0,
                clock=lambda: self.wall,
                monotonic=lambda: self.now,
                codec=self.codec,
            )
        )

    def run(self, work):
        return self.loop.run_until_complete(work)

    def settle(self) -> None:
        assert self.run(self.store.queue.drained(10))

    def files(self) -> set[str]:
        found = map(self.codec.digest_in, (self.directory / "snapshots").iterdir())
        return {digest.hex() for digest in found}

    async def come_to_rest(self) -> None:
        await come_to_rest(self.store)
        if not self.bad:  # else the index has files that are gone, until something reads them
            assert {node.digest.hex() for node in self.store._index} == self.files()

    def teardown(self) -> None:
        stored_kv.LOAD_S, stored_kv._MOST_BRANCHES = LOAD_S, BRANCHES
        if hasattr(self, "store"):
            self.run(self.come_to_rest())
            self.run(self.store.close(60))
        self.run(self.loop.shutdown_default_executor())
        self.loop.close()
        shutil.rmtree(self.directory)

    @invariant()
    def every_snapshot_is_counted_once(self) -> None:
        if hasattr(self, "store"):
            assert_sum_rule(self.store)

    @invariant()
    def limits_hold(self) -> None:
        if hasattr(self, "store"):
            stats = self.store.stats()
            assert stats.stored_bytes + stats.in_flight_bytes <= self.most_bytes
            assert stats.in_flight_bytes <= self.queue_bytes

    @property
    def most_bytes(self) -> int:
        return self.max_bytes

    @rule(jump_s=st.sampled_from([-1e6, -1, 1, 1e6]))
    def move_the_clock(self, jump_s) -> None:
        self.wall += jump_s

    @rule(some_time=st.integers(0, 3))
    def let_the_writer_go_on(self, some_time) -> None:
        self.run(asyncio.sleep(some_time / 1000))

    def load(self, tenant, tokens, match) -> int:
        restored = self.run(self.store.kv.load(match))
        if restored is None:
            return 0
        assert restored.num_tokens <= len(tokens)
        assert_is_kv_of(restored.tensors, tokens[: restored.num_tokens])
        return restored.num_tokens


class Faithful(Driven):
    """With a large disk limit, the store finds exactly what the reference model finds."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: set[Node] = set()
        #: All snapshots that were ever saved, by their digests.
        self.named: dict[bytes, Node] = {}

    @property
    def unreadable(self) -> set[str]:
        """Damages that leave no header to be read; such a small file is one encrypted chunk."""
        return {"removed", "cut short"} if self.codec is PLAIN else {*DAMAGES}

    def children(self, parent: Node) -> list[Node]:
        tenant, cuts, tokens = parent
        end = (*cuts, len(tokens))
        return [
            node
            for node in self.nodes
            if node[0] == tenant and node[1] == end and node[2][: len(tokens)] == tokens
        ]

    def lost_with(self, bad: Node) -> set[Node]:
        """Return a damaged snapshot, and the pieces of a tail that nothing finds without it."""
        _, _, tokens = bad
        lost = {bad}
        for child in self.children(bad) if len(tokens) % BLOCK else ():
            lost |= self.lost_with(child)
        return lost

    def lose(self, lost: set[Node]) -> None:
        self.nodes -= lost
        for node in lost & self.bad.keys():
            del self.bad[node]

    def path(self, node: Node) -> Path:
        tenant, cuts, tokens = node
        digest = blocks.root(identity().digest(), tenant)
        for start, end in pairwise((*cuts, len(tokens))):
            digest = blocks.link(digest, pack(tokens[start:end]))
        return self.directory / "snapshots" / self.codec.file_name(digest)

    def longest(self, parent: Node, tokens: tuple[int, ...]) -> int:
        longest = len(parent[2])
        for child in self.children(parent):
            if child[2] == tokens[: len(child[2])]:
                longest = max(longest, self.longest(child, tokens))
        return longest

    def most_shared(self, parent: Node, tokens: tuple[int, ...]) -> int:
        """Return how many tokens after `parent` a snapshot that continues it begins with, by its header."""
        found = (child for child in self.children(parent) if self.bad.get(child) not in self.unreadable)
        return max((common(child[2], tokens) - len(parent[2]) for child in found), default=0)

    def name(self, tenant: str, entry, tokens: tuple[int, ...]) -> Node:
        """Note an entry of the store's index that was saved for these tokens; return it as a node."""
        root = blocks.root(identity().digest(), tenant)
        before = (tenant, (), ()) if entry.parent == root else self.named[entry.parent]
        assert before == (tenant, before[1], tokens[: entry.start])
        assert entry.digest == blocks.link(entry.parent, pack(tokens[entry.start : entry.end]))
        return self.named.setdefault(entry.digest, (tenant, (*before[1], entry.start), tokens[: entry.end]))

    def take_stock(self) -> None:
        """Check the store's entries: all were saved, and a missing one is contained in another entry."""
        there = {self.named[entry.digest] for entry in self.store._index}
        assert there <= self.nodes
        for tenant, cuts, tokens in self.nodes - there:
            assert any(
                other[0] == tenant and cuts[: len(other[1])] == other[1] and other[2][: len(tokens)] == tokens
                for other in there
            )
        self.lose(self.nodes - there)

    @rule(tenant=TENANTS, tokens=TOKENS)
    def take_a_turn(self, tenant, tokens) -> None:
        before = set(self.store._index)
        wanted = self.store.kv.wanted(self.store.kv.chain(tenant), tokens)
        assert save_all(self.store, tenant, tokens) == [True] * len(wanted)
        added = sorted(set(self.store._index) - before, key=lambda entry: entry.start)
        new = [self.name(tenant, entry, tokens) for entry in added]
        assert sorted((cuts[-1], held) for _, cuts, held in new) == [
            (span.start, tokens[: span.end]) for span in wanted
        ]
        self.nodes |= set(new)

    @rule(tenant=TENANTS, tokens=TOKENS)
    def restore(self, tenant, tokens) -> None:
        self.settle()
        self.take_stock()
        match = self.store.kv.match(self.store.kv.chain(tenant), tokens)
        num_tokens = self.longest((tenant, (), ()), tokens)
        assert match.num_tokens == num_tokens
        path = [self.named[entry.digest] for entry in match.nodes]
        num_tokens += self.most_shared(path[-1] if path else (tenant, (), ()), tokens)
        match = self.run(self.store.kv.extend(match, self.store.kv.chain(tenant), tokens))
        assert match.num_tokens == num_tokens
        # If two snapshots share equally many tokens, either may be used, but it must be stored.
        path = [self.named[entry.digest] for entry in match.nodes]
        assert set(path) <= self.nodes
        bad = next((node for node in path if node in self.bad), None)
        if bad is not None:
            num_tokens, damage = bad[1][-1], self.bad[bad]
            self.lose(self.lost_with(bad))
        assert self.load(tenant, tokens, match) == num_tokens
        if bad is not None:
            self.settle()
            assert not self.path(bad).exists()
            kept = self.directory / "quarantine" / self.path(bad).name
            assert kept.exists() == (damage != "removed")

    @rule(
        tenant=TENANTS,
        tokens=TOKENS,
        shared=st.sampled_from([0, 0, 1, 3, 4, 6]),
        data=st.data(),
        is_saved=st.booleans(),
    )
    def forget(self, tenant, tokens, shared, data, is_saved) -> None:
        # Wait for the writer, so that model and store agree on which tails are already removed.
        self.settle()
        self.take_stock()
        if self.nodes and is_saved:
            tenant, _, tokens = data.draw(st.sampled_from(sorted(self.nodes)))
        gone: set[Node] = set()
        for node in sorted(self.nodes, key=lambda node: -len(node[1])):
            owner, _, held = node
            is_of_it = owner == tenant and held == tokens[: len(held)] and len(held) > shared
            if is_of_it and gone.issuperset(self.children(node)):
                gone.add(node)
        self.lose(gone)
        assert self.store.eraser.forget(tenant, pack(tokens), shared) == len(gone)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), damage=st.sampled_from(DAMAGES))
    def damage(self, data, damage) -> None:
        self.settle()
        self.take_stock()
        node = data.draw(st.sampled_from(sorted(self.nodes)))
        if node in self.bad:
            return
        path = self.path(node)
        whole = path.read_bytes()
        if damage == "removed":
            path.unlink()
        else:
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1] if damage == "flipped" else []))
        self.bad[node] = damage

    @rule(lose_the_catalog=st.booleans())
    def restart(self, lose_the_catalog) -> None:
        self.settle()
        self.take_stock()
        assert self.run(self.store.close(60))
        found = self.unreadable if lose_the_catalog else {"removed"}
        if lose_the_catalog:
            for path in self.directory.glob("index.sqlite*"):
                path.unlink()
        if gone := [node for node, damage in self.bad.items() if damage in found]:
            for node in gone:
                self.lose(self.lost_with(node))
            # A start that finds a file missing drops what may be a piece of a tail without the one before.
            for node in sorted(self.bad.keys() & self.nodes, key=lambda node: len(node[2])):
                tenant, cuts, tokens = node
                before = (tenant, cuts[:-1], tokens[: cuts[-1]])
                if self.bad[node] in self.unreadable and cuts[-1] and before not in self.nodes:
                    self.lose(self.lost_with(node))
        self.open()
        assert self.store.stats().stored == len(self.nodes)

    @rule()
    def look_at_the_disk(self) -> None:
        self.settle()
        self.take_stock()
        num_removed = [*self.bad.values()].count("removed")
        assert len(self.files()) + num_removed == self.store.stats().stored == len(self.nodes)


class Cramped(Driven):
    """With a small disk limit, the store evicts snapshots, but all that it restores is right."""

    max_bytes = 9_000
    queue_bytes = 5_000

    async def come_to_rest(self) -> None:
        """Let everything go, and have the disk work."""
        self.failing = False
        self.now += 1000
        for *_, match in self.held:
            self.store.kv.release(match)
        await super().come_to_rest()

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), numbers=st.sets(st.integers(0, 2)))
    def recall(self, data, numbers) -> None:
        """Read some blocks, of which none may be stored."""
        self.settle()
        tenant, tokens = data.draw(st.sampled_from(sorted(self.saved)))
        spans = [Span(number * BLOCK, (number + 1) * BLOCK) for number in numbers]
        num_holds = sum(node.holds for node in self.store._index)
        found, _ = self.run(self.store.kv.recall(self.store.kv.chain(tenant), tokens, spans))
        assert {*found} <= {*spans}
        assert sum(node.holds for node in self.store._index) == num_holds

    @rule(tenant=TENANTS, tokens=TOKENS)
    def hold_what_is_queued(self, tenant, tokens) -> None:
        """Take a turn that holds its snapshots before and while they are written."""
        self.take_a_turn(tenant, tokens)
        known = self.store.kv.hold(self.store.kv.chain(tenant), tokens)
        assert_sum_rule(self.store)
        self.settle()
        assert_sum_rule(self.store)
        self.store.kv.release(known)

    def __init__(self) -> None:
        super().__init__()
        self.failing = False
        self.saved: set[tuple[str, tuple[int, ...]]] = set()
        self.held: list = []
        #: Whether the files on disk were ever larger than the limit, when a new one was complete.
        self.overfull = False
        #: Bytes above a lowered limit that are not evicted yet.
        self.used_bytes = 0
        #: Matches whose snapshots a `clear` has removed.
        self.lost: set[int] = set()

    @property
    def most_bytes(self) -> int:
        return max(self.max_bytes, self.used_bytes)

    @rule(max_bytes=st.sampled_from([2_000, 5_000, 9_000, 14_000]))
    def change_the_limit(self, max_bytes) -> None:
        stats = self.store.stats()
        self.used_bytes = max(self.used_bytes, stats.stored_bytes + stats.in_flight_bytes)
        self.max_bytes = max_bytes
        self.store.quota.set_limits(max_bytes=max_bytes, min_free_bytes=0)

    @rule()
    def clear(self) -> None:
        assert self.run(self.store.eraser.clear(10))
        assert self.store.stats().stored == 0
        self.lost = {id(match) for *_, match in self.held}

    @rule(tenant=TENANTS, tokens=TOKENS)
    def take_a_turn(self, tenant, tokens) -> None:
        save_all(self.store, tenant, tokens)
        self.saved.add((tenant, tokens))

    @rule(tenant=TENANTS, tokens=TOKENS)
    def hold(self, tenant, tokens) -> None:
        self.held.append((tenant, tokens, self.store.kv.match(self.store.kv.chain(tenant), tokens)))

    @precondition(lambda self: self.held)
    @rule(load=st.booleans())
    def let_go(self, load) -> None:
        """Release or load a held match; a load must succeed whatever was evicted since the match."""
        tenant, tokens, match = self.held.pop()
        if not load:
            self.store.kv.release(match)
            return
        if id(match) in self.lost:  # its snapshots were cleared, and may be saved again
            self.load(tenant, tokens, match)
            return
        assert self.load(tenant, tokens, match) == match.num_tokens
        known = [common(saved, tokens) for owner, saved in self.saved if owner == tenant]
        assert match.num_tokens <= max(known, default=0), "nothing is found that was never saved"

    @rule(tenant=TENANTS, tokens=TOKENS)
    def forget(self, tenant, tokens) -> None:
        self.store.eraser.forget(tenant, pack(tokens))

    @rule()
    def turn_the_disk_off_or_on(self) -> None:
        self.failing = not self.failing
        self.now += 1000

    def write(self, draft, path, *more) -> None:
        if self.failing:
            raise OSError(errno.EIO, "Input/output error")
        WRITE(draft, path, *more)
        used = sum(file.stat().st_size for file in self.directory.glob("[st]*/*"))
        self.overfull = self.overfull or used > self.most_bytes

    @invariant()
    def evicted_files_are_gone_before_others_are_written(self) -> None:
        assert not self.overfull

    @initialize()
    def take_hold_of_the_disk(self) -> None:
        snapshot_format.write = self.write

    def teardown(self) -> None:
        super().teardown()
        snapshot_format.write = WRITE

    @precondition(lambda self: not self.held)
    @rule(lose_the_catalog=st.booleans(), discard=st.sampled_from([False, False, False, True]))
    def restart(self, lose_the_catalog, discard) -> None:
        assert self.run(self.store.close(60, discard=discard))
        if lose_the_catalog:
            for path in self.directory.glob("index.sqlite*"):
                path.unlink()
        self.open()
        self.used_bytes = 0

    @rule()
    def look_at_the_disk(self) -> None:
        self.settle()
        self.run(asyncio.sleep(0.03))  # one or two steps of evictions for a lowered limit
        self.settle()
        stats = self.store.stats()
        assert stats.free_bytes >= 0 or stats.evictable_bytes == 0
        self.used_bytes = stats.stored_bytes + stats.in_flight_bytes
        assert len(self.files()) == stats.stored
        loading = {
            entry.digest for *_, match in self.held if id(match) not in self.lost for entry in match.nodes
        }
        assert loading <= {bytes.fromhex(name) for name in self.files()}


HUNT = os.environ.get("TURNKEEP_TEST_EXAMPLES")


class WithKey(Faithful):
    """`Faithful` in an encrypted directory."""

    def __init__(self) -> None:
        super().__init__()
        self.codec = pytest.importorskip("cache.disk.encryption").EncryptedCodec(bytes(32))


#: Thousands of examples take longer than a test may.
pytestmark = [pytest.mark.timeout(0)] if HUNT else []

FEW = settings(
    max_examples=int(HUNT or 30),
    stateful_step_count=60 if HUNT else 30,
    derandomize=not HUNT,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
Faithful.TestCase.settings = FEW
WithKey.TestCase.settings = settings(FEW, max_examples=int(HUNT or 8))
Cramped.TestCase.settings = FEW
test_after_random_operations_the_cache_finds_exactly_what_a_reference_model_finds = Faithful.TestCase
test_after_random_operations_an_encrypted_cache_finds_exactly_what_a_reference_model_finds = WithKey.TestCase
test_random_operations_on_a_cache_short_of_disk_space_exceed_no_limit_and_restore_no_wrong_kv = (
    Cramped.TestCase
)
