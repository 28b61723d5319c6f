"""What is stored, on its way, and when it was last used: a tree in memory.

Belongs to the event loop. Knows no files; `catalog` keeps what must outlive the process.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Final

from cache.disk.rows import Row
from cache.names.blocks import TOKEN_BYTES, num_common

from .entries import PLACE, Entry, Node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cache.names.snapshot import Name

#: More than the tokens of any snapshot take, packed: what follows a name is looked for in so much at a time.
MOST_BYTES: Final = 1 << 16


class Index:
    """The tree of snapshots of all tenants and models in the directory.

    Only leaves are removed, so every entry has its whole chain before it. So whoever needs a chain holds its
    last entry alone, and whoever uses a chain uses its last entry alone: nobody walks it. An entry that is
    removed leaves its last use and its holds to the entry before it.
    """

    def __init__(self, clock: Callable[[], float], stored: Sequence[Row] = ()) -> None:
        self._clock = clock
        self._now = 0
        #: Hears of every entry that has come or gone.
        self.changed: Callable[[Entry], None] = lambda _: None
        self._fill(stored)

    def _fill(self, stored: Sequence[Row]) -> None:
        """Take in what is stored."""
        nowhere = Node(b"")
        self._entries = entries = {row.digest: Entry(row, nowhere, durable=True) for row in stored}
        #: What chains begin at, as long as there are some.
        self._roots: dict[bytes, Node] = {}
        families: dict[bytes, list[Entry]] = {}
        for entry, row in zip(entries.values(), stored, strict=True):
            entry.up = up = entries.get(row.parent) or self._node(row.parent)
            if up.children:
                up.children.append(entry)
                families[up.digest] = up.children
            else:
                up.children = [entry]
        for siblings in families.values():
            siblings.sort(key=PLACE)
        #: Entries that a load or a turn needs, or that are on their way; all before them is needed too.
        self._held: set[Entry] = set()
        self._now = max(self._now, max((row.used for row in stored), default=0))
        self.stored = len(self._entries)
        self.stored_bytes = sum(row.size_bytes for row in stored)
        #: Of entries that are not stored yet.
        self.on_its_way_bytes = 0
        #: Of entries that pinned prefixes are made of.
        self.kept_bytes = 0
        #: A heap of (used, digest): at least one for each entry that may be evicted, and some that are stale.
        self._line: list[tuple[int, bytes]] = []
        self._line_up()

    def __iter__(self) -> Iterator[Entry]:
        """Go through the entries as they would be evicted: least recently used first, children first."""
        entries = sorted(self._entries.values(), key=lambda entry: entry.start, reverse=True)
        used: dict[Node, int] = {entry: entry.used for entry in entries}
        for entry in entries:
            if entry.up in used:
                used[entry.up] = max(used[entry.up], used[entry])
        return iter(sorted(entries, key=used.__getitem__))

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_whole(self) -> bool:
        """Whether every snapshot has its chain before it."""
        return not any(entry.start for root in self._roots.values() for entry in root.children)

    def get(self, digest: bytes) -> Entry | None:
        """Find an entry, on its way or stored."""
        return self._entries.get(digest)

    def follow(self, digests: Sequence[bytes], *, usable: bool) -> list[Entry]:
        """Find the entries of a chain up to the first that is not there, or that a match may not end with.

        Since each of them has all before it, the last one is found by bisection.
        """
        num = bisect_left(digests, True, key=lambda digest: digest not in self._entries)
        entries = list(self._entries[digests[num - 1]].chain()) if num else []
        entries.reverse()
        while usable and entries and not entries[-1].usable:
            entries.pop()
        return entries

    def children(self, digest: bytes) -> Sequence[Entry]:
        """List the entries that continue `digest`, in the order of their tokens."""
        node = self._entries.get(digest) or self._roots.get(digest)
        return node.children if node is not None else ()

    def next_use(self) -> int:
        """Give the next point on the clock of uses: the time of day, but never twice and never backwards."""
        self._now = max(self._now + 1, int(self._clock() * 1e6))
        return self._now

    def add(self, name: Name, size_bytes: int) -> Entry:
        """Take in a new snapshot, which is on its way, as the most recently used one."""
        digest, up = name.digest, self._node(name.parent)
        row = Row.of(digest, name, size_bytes, self.next_use())
        entry = self._entries[digest] = Entry(row, up, durable=False)
        if isinstance(up.children, list):
            insort(up.children, entry, key=PLACE)
        else:
            up.children = [entry]
        self._held.add(entry)
        self.on_its_way_bytes += size_bytes
        self.changed(entry)
        return entry

    def settle(self, entry: Entry) -> None:
        """Note that an entry's file is in place."""
        entry.durable = True
        self.on_its_way_bytes -= entry.size_bytes
        self.stored += 1
        self.stored_bytes += entry.size_bytes
        self._look_at(entry)

    def remove(self, entry: Entry) -> None:
        """Forget an entry that nothing continues."""
        del self._entries[entry.digest]
        self._held.discard(entry)
        if entry.durable:
            self.stored -= 1
            self.stored_bytes -= entry.size_bytes
        else:
            self.on_its_way_bytes -= entry.size_bytes
        up = entry.up
        if isinstance(up.children, list) and len(up.children) > 1:
            del up.children[bisect_left(up.children, PLACE(entry), key=PLACE)]
        else:
            up.children = ()
        if isinstance(up, Entry):
            up.used = max(up.used, entry.used)
            up.pins += entry.pins
            self._look_at(up)
        elif not up.children:
            del self._roots[up.digest]
        self.changed(entry)

    def clear(self) -> None:
        """Forget all entries. Those that are being loaded are on their own."""
        for node in (*self._entries.values(), *self._roots.values()):
            node.children = ()  # else they wait for the garbage collector, from which a start keeps them
        self._fill(())

    def use(self, entry: Entry) -> None:
        """Note that an entry, and with it its chain, was used now."""
        entry.used = self.next_use()

    def hold(self, entry: Entry) -> None:
        """Count a load or a turn that needs an entry, and with it its chain."""
        entry.pins += 1
        self._look_at(entry)

    def release(self, entry: Entry) -> Entry | None:
        """Count one less; returns the entry that was held: this one, or the last one left of its chain."""
        held = next(filter(self.has, entry.chain()), None)
        if held is not None:
            held.pins -= 1
            self._look_at(held)
        return held

    def has(self, entry: Entry) -> bool:
        """Say whether an entry is there: not removed, nor another one under its name."""
        return self._entries.get(entry.digest) is entry

    def keep(self, entry: Entry, by: int = 1) -> None:
        """Count a pinned prefix that the entry is a part of (`by` -1: one that was given up)."""
        was_kept = entry.kept > 0
        entry.kept += by
        self.kept_bytes += ((entry.kept > 0) - was_kept) * entry.size_bytes
        if self.has(entry):
            self._look_at(entry)

    def held_bytes(self) -> int:
        """Measure what eviction must leave alone: what is held, stored or not, and what that continues."""
        seen: set[Entry] = set()
        size_bytes = self.kept_bytes  # the whole chain of what is kept is kept
        for held in self._held:
            for entry in held.chain():
                if entry.kept or entry in seen:
                    break
                seen.add(entry)
                size_bytes += entry.size_bytes
        return size_bytes

    def oldest(self) -> Entry | None:
        """Find the least recently used entry that may be evicted; None where none may."""
        while self._line:
            used, digest = self._line[0]
            entry = self._entries.get(digest)
            if entry is None or not entry.evictable:
                heapq.heappop(self._line)  # it lines up anew when it may be
            elif entry.used != used:
                heapq.heapreplace(self._line, (entry.used, digest))
            else:
                return entry
        return None

    def _look_at(self, entry: Entry) -> None:
        """Note whether an entry is held, and line it up if it may be evicted, maybe once more."""
        if entry.pins or not entry.durable:
            self._held.add(entry)
        else:
            self._held.discard(entry)
        if entry.evictable:
            heapq.heappush(self._line, (entry.used, entry.digest))
            if len(self._line) > 1.5 * len(self._entries) + 64:
                self._line_up()  # a third of it at least says nothing any more

    def _line_up(self) -> None:
        """Line up all entries that may be evicted by their last use."""
        leaves = (entry for entry in self._entries.values() if not entry.children)
        self._line = [(entry.used, entry.digest) for entry in leaves if entry.evictable]
        heapq.heapify(self._line)

    def _node(self, digest: bytes) -> Node:
        """Find the entry of a name, or else the root."""
        return self._entries.get(digest) or self._roots.setdefault(digest, Node(digest))

    def longest(self, parent: bytes, packed: bytes, *, usable: bool = True) -> tuple[Entry, int] | None:
        """Find the child of `parent` that shares the most leading tokens with `packed`, and how many.

        Siblings are sorted by their tokens, so it is one of the two next to where `packed` would stand; of
        two that share as much, the smaller one is read faster. With `usable` only what a match may count on.
        """
        siblings = self.children(parent)
        at = bisect_left(siblings, (packed, b""), key=PLACE)
        found: list[tuple[int, int, Entry]] = []
        for side in (range(at, len(siblings)), range(at - 1, -1, -1)):
            entry = next((siblings[i] for i in side if siblings[i].usable or not usable), None)
            if entry is not None and (num_tokens := num_common(entry.tokens, packed)):
                found.append((num_tokens, -entry.size_bytes, entry))
        num_tokens, _, entry = max(found, key=lambda one: one[:2], default=(0, 0, None))
        return None if entry is None else (entry, num_tokens)

    def reach(
        self, parent: bytes, packed: bytes, *, usable: bool = False, least_share: float = 0.0
    ) -> tuple[tuple[Entry, ...], int]:
        """Follow `packed` as far as entries hold it, and count its tokens that they hold.

        The last entry may hold more than it shares with `packed`; what it shares is at least `least_share` of
        it. Of several ways that reach as far, the one with the least to read.
        """
        best: tuple[tuple[Entry, ...], int] = (), 0
        part = self.longest(parent, packed, usable=usable) if packed else None
        if part is not None and part[1] >= least_share * part[0].num_tokens:
            best = (part[0],), part[1]
        for entry in self._beginnings(parent, packed):
            if usable and not entry.usable:
                continue
            rest = packed[len(entry.tokens) :]
            path, num_tokens = self.reach(entry.digest, rest, usable=usable, least_share=least_share)
            found = (entry, *path), entry.num_tokens + num_tokens
            best = max(best, found, key=lambda one: (one[1], -sum(entry.size_bytes for entry in one[0])))
        return best

    def within(self, parent: bytes, packed: bytes) -> list[Entry]:
        """List the entries after `parent` that hold nothing but a part of `packed`, children last."""
        found: list[Entry] = []
        open_ends = [(parent, 0)]
        while open_ends:
            parent, at = open_ends.pop()
            for entry in self._beginnings(parent, packed[at : at + MOST_BYTES]):
                found.append(entry)
                open_ends.append((entry.digest, at + len(entry.tokens)))
        return found

    def swallowed(self, entry: Entry) -> list[Entry]:
        """List the pieces of whose tokens this entry holds all, children first."""
        return [other for other in reversed(self.within(entry.parent, entry.tokens)) if other is not entry]

    def ending(self, parent: bytes, packed: bytes) -> tuple[Entry, ...]:
        """Find the way to the furthest stored entry at whose end `packed` can be resumed."""
        best: tuple[Entry, ...] = ()
        for entry in self._beginnings(parent, packed):
            if entry.usable:
                path = (entry, *self.ending(entry.digest, packed[len(entry.tokens) :]))
                if path[-1].resumable:
                    best = max(best, path, key=lambda one: one[-1].end if one else 0)
        return best

    def _beginnings(self, parent: bytes, packed: bytes) -> Iterator[Entry]:
        """Find the children of `parent` whose tokens are a beginning of `packed`, the longest first.

        A step finds the last sibling up to `bound`; the part of it that fits bounds the next one.
        """
        siblings = self.children(parent)
        bound = packed
        while bound and (at := bisect_left(siblings, (bound + b"\0", b""), key=PLACE)):
            entry = siblings[at - 1]
            fits = num_common(entry.tokens, bound) * TOKEN_BYTES
            if fits == len(entry.tokens):
                yield entry
                fits -= TOKEN_BYTES
            bound = bound[:fits]

    def below(self, entry: Entry) -> list[Entry]:
        """List all entries that need this one, children before their parents."""
        found = [entry]
        for parent in found:
            found += parent.children
        return found[:0:-1]
