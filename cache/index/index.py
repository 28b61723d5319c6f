"""What is stored, on its way, and in which order it was last used: a tree in memory.

Belongs to the event loop. Knows no files; `catalog` keeps what must outlive the process.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Final

from cache.disk.rows import Columns
from cache.names.blocks import TOKEN_BYTES, num_common

from .entries import DOOMED, DURABLE, PRESENT, Entry, Facts
from .numbers import NONE
from .recency import Recency

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from cache.names.snapshot import Name

#: More than the tokens of any snapshot take, packed: what follows a name is looked for in so much at a time.
MOST_BYTES: Final = 1 << 16

#: In the column of only children: there are more, and they are in a list.
_MANY: Final = -2
_NOTHING: Final = Columns()


class Index:
    """The tree of snapshots of all tenants and models in the directory.

    Entries are in order of use, and every child stands before its parent: using a snapshot uses its
    whole chain. So eviction can take them as they come, and meets every leaf before its parent.

    A name has a number as long as it is a snapshot's, or others continue it, as they do a tenant's root, or a
    load that began while it was there still needs it.
    """

    def __init__(self, clock: Callable[[], float], stored: Columns = _NOTHING) -> None:
        self._clock = clock
        self._now = 0
        #: Hears of every entry that has come or gone.
        self.changed: Callable[[Entry], None] = lambda _: None
        self._fill(stored)

    def _fill(self, stored: Columns) -> None:
        """Take in what is stored: all at once, since there may be very many."""
        import numpy as np  # here, because a command line that is asked for help has no time for it

        num = len(stored.digests)
        self._facts = facts = Facts(stored)
        parents = np.array(facts.parents[:num])
        num_children = np.bincount(parents, minlength=len(facts.parents))
        only_children = np.full(len(facts.parents), NONE, np.int32)
        only_children[parents] = np.arange(num)
        only_children[num_children > 1] = _MANY
        self._only_child = array("i", only_children.tobytes())
        #: The children of those that have several, in the order of their tokens.
        self._families: dict[int, list[int]] = {}
        for number in np.flatnonzero(num_children[parents] > 1).tolist():
            self._families.setdefault(facts.parents[number], []).append(number)
        for siblings in self._families.values():
            siblings.sort(key=self._place)
        self._recency = Recency(_inherit_uses(facts, num))
        self._now = max(self._now, max(facts.used, default=0))
        #: Entries that are being loaded, or are on their way.
        self._held: set[int] = set()
        #: Whether every snapshot that was stored had its parent beside it.
        self.is_whole = facts.is_whole
        self.stored = num
        self.stored_bytes = sum(facts.sizes)
        #: Of entries that are not stored yet.
        self.on_its_way_bytes = 0
        #: Of entries that pinned prefixes are made of.
        self.kept_bytes = 0

    def __iter__(self) -> Iterator[Entry]:
        """Go through the entries, least recently used first, children before their parents."""
        return map(self._facts.entry, self._recency)

    def __len__(self) -> int:
        return self.stored + sum(not self._facts.states[number] & DURABLE for number in self._held)

    def get(self, digest: bytes) -> Entry | None:
        """Find an entry, on its way or stored."""
        number = self._facts.numbers.find(digest)
        if number == NONE or not self._facts.states[number] & PRESENT:
            return None
        return Entry(self._facts, number, digest)

    def follow(self, digests: Sequence[bytes], *, usable: bool) -> list[Entry]:
        """Find the entries of a chain up to the first that is not there, or that a match may not count on."""
        facts = self._facts
        states, wanted = facts.states, (PRESENT | DURABLE if usable else PRESENT)
        looked_at = PRESENT | DURABLE | DOOMED if usable else PRESENT
        entries: list[Entry] = []
        for number, digest in zip(facts.numbers.find_all(digests), digests, strict=True):
            if number == NONE or states[number] & looked_at != wanted:
                break
            entries.append(Entry(facts, number, digest))
        return entries

    def num_children(self, digest: bytes) -> int:
        """Count the entries that continue `digest`."""
        return len(self._siblings(digest))

    def children(self, digest: bytes) -> list[Entry]:
        """List the entries that continue `digest`."""
        return [self._facts.entry(number) for number in self._siblings(digest)]

    def next_use(self) -> int:
        """Give the next point on the clock of uses: the time of day, but never twice and never backwards."""
        self._now = max(self._now + 1, int(self._clock() * 1e6))
        return self._now

    def add(self, name: Name, size_bytes: int) -> Entry:
        """Take in a new snapshot, which is on its way, as the most recently used one, its chain behind it."""
        facts = self._facts
        number, parent = self._number(name.digest), self._number(name.parent)
        facts.set(number, parent, name, size_bytes)
        if facts.states[parent] & PRESENT:
            if facts.used[parent] != self._now:  # else its chain is at the end, as that of one turn's cuts
                self.use(facts.entry(parent))
            self._recency.add(number, before=parent)
        else:
            self._recency.add(number)
        facts.used[number] = self.next_use()
        self._adopt(parent, number)
        entry = facts.entry(number)
        self.on_its_way_bytes += size_bytes
        self._look_at(number)
        self.changed(entry)
        return entry

    def settle(self, entry: Entry) -> None:
        """Note that an entry's file is in place."""
        self._facts.states[entry.number] |= DURABLE
        self.on_its_way_bytes -= entry.size_bytes
        self.stored += 1
        self.stored_bytes += entry.size_bytes
        self._look_at(entry.number)

    def hold(self, entries: Iterable[Entry]) -> None:
        """Count a load that needs the files of these entries.

        It counts for their names: one that is removed and saved anew meanwhile is held too.
        """
        pins, numbers = self._facts.pins, [entry.number for entry in entries]
        for number in numbers:
            pins[number] += 1
        self._held.update(numbers)

    def release(self, entry: Entry) -> None:
        """Count a load less that needs the file."""
        facts, number = entry.facts, entry.number
        facts.pins[number] -= 1
        if facts is self._facts:  # else it was held since before all was forgotten
            self._look_at(number)
            self._let_go(number)

    def doom(self, entry: Entry, *, doomed: bool = True) -> None:
        """Note that an entry goes once nobody loads it."""
        states = self._facts.states
        states[entry.number] = states[entry.number] | DOOMED if doomed else states[entry.number] & ~DOOMED

    def keep(self, entry: Entry, by: int = 1) -> None:
        """Count a pinned prefix that the entry is a part of (`by` -1: one that was given up)."""
        kept, number = self._facts.kept, entry.number
        was = kept.get(number, 0)
        kept[number] = was + by
        if not was:
            self.kept_bytes += entry.size_bytes
        elif not kept[number]:
            self.kept_bytes -= entry.size_bytes
            del kept[number]

    def held_bytes(self) -> int:
        """Measure what eviction must leave alone: what is held, stored or not, and what that continues."""
        facts = self._facts
        seen: set[int] = set()
        size_bytes = self.kept_bytes  # the whole chain of what is kept is kept
        for number in self._held:
            while facts.states[number] & PRESENT and number not in facts.kept and number not in seen:
                seen.add(number)
                size_bytes += facts.sizes[number]
                number = facts.parents[number]  # noqa: PLW2901
        return size_bytes

    def remove(self, entry: Entry) -> None:
        """Forget an entry."""
        facts, number = self._facts, entry.number
        if entry.durable:
            self.stored -= 1
            self.stored_bytes -= entry.size_bytes
        else:
            self.on_its_way_bytes -= entry.size_bytes
        parent = facts.parents[number]
        facts.states[number] = 0
        self._recency.remove(number)
        self._held.discard(number)
        self._disown(parent, number)
        self.changed(entry)
        self._let_go(number)
        self._let_go(parent)

    def clear(self) -> None:
        """Forget all entries. Those that are being loaded are on their own."""
        self._facts.forget()
        self._fill(_NOTHING)

    def use(self, entry: Entry) -> None:
        """Note that an entry, and with it its chain, was used now."""
        now, used = self.next_use(), self._facts.used
        chain = list(self._chain(entry.number))
        for number in chain:
            used[number] = now
        self._recency.use(chain)

    def pass_over_kept(self) -> None:
        """Put what pinned prefixes are made of behind all others, where it would be the first to be evicted.

        Else whoever looks for victims would go through all of it each time. When it was used stays as it is.
        """
        facts = self._facts
        moved: set[int] = set()
        while (first := next(iter(self._recency), NONE)) in facts.kept and first not in moved:
            chain = list(self._chain(first))
            self._recency.use(chain)
            moved.update(chain)

    def longest(self, parent: bytes, packed: bytes, *, usable: bool = True) -> tuple[Entry, int] | None:
        """Find the child of `parent` that shares the most leading tokens with `packed`, and how many.

        Siblings are sorted by their tokens, so it is one of the two next to where `packed` would stand; of
        two that share as much, the smaller one is read faster. With `usable` only what a match may count on.
        """
        siblings = self._siblings(parent)
        at = bisect_left(siblings, (packed, b""), key=self._place)
        found: list[tuple[int, int, Entry]] = []
        for side in (range(at, len(siblings)), range(at - 1, -1, -1)):
            entries = (self._facts.entry(siblings[i]) for i in side)
            entry = next((entry for entry in entries if entry.usable or not usable), None)
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
        return [other for other in reversed(self.within(entry.parent, entry.tokens)) if other != entry]

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
        siblings = self._siblings(parent)
        bound = packed
        while bound and (at := bisect_left(siblings, (bound + b"\0", b""), key=self._place)):
            entry = self._facts.entry(siblings[at - 1])
            fits = num_common(entry.tokens, bound) * TOKEN_BYTES
            if fits == len(entry.tokens):
                yield entry
                fits -= TOKEN_BYTES
            bound = bound[:fits]

    def below(self, entry: Entry) -> list[Entry]:
        """List all entries that need this one, children before their parents."""
        found = [entry]
        for parent in found:
            found += self.children(parent.digest)
        return found[:0:-1]

    def _chain(self, number: int) -> Iterator[int]:
        """Go up from a number to the first entry of its chain."""
        states, parents = self._facts.states, self._facts.parents
        while states[number] & PRESENT:
            yield number
            number = parents[number]

    def _number(self, digest: bytes) -> int:
        """Find a name's number, or give it one."""
        number = self._facts.numbers.find(digest)
        if number == NONE:
            number = self._facts.add(digest)
            if number == len(self._only_child):
                self._only_child.append(NONE)
        return number

    def _siblings(self, parent: bytes) -> Sequence[int]:
        """List the children of a name, in the order of their tokens."""
        number = self._facts.numbers.find(parent)
        if number == NONE or (only := self._only_child[number]) == NONE:
            return ()
        return self._families[number] if only == _MANY else (only,)

    def _place(self, number: int) -> tuple[bytes, bytes]:
        """Order siblings by their tokens; files of other formats have none that could be told."""
        return self._facts.tokens[number], self._facts.numbers.digest(number)

    def _adopt(self, parent: int, child: int) -> None:
        only = self._only_child[parent]
        if only == NONE:
            self._only_child[parent] = child
            return
        if only != _MANY:
            self._families[parent], self._only_child[parent] = [only], _MANY
        insort(self._families[parent], child, key=self._place)

    def _disown(self, parent: int, child: int) -> None:
        if self._only_child[parent] == child:
            self._only_child[parent] = NONE
            return
        siblings = self._families[parent]
        del siblings[bisect_left(siblings, self._place(child), key=self._place)]
        if len(siblings) == 1:
            self._only_child[parent] = self._families.pop(parent)[0]

    def _look_at(self, number: int) -> None:
        facts = self._facts
        state = facts.states[number]
        if state & PRESENT and (facts.pins[number] or not state & DURABLE):
            self._held.add(number)
        else:
            self._held.discard(number)

    def _let_go(self, number: int) -> None:
        """Give back a number that nothing needs any more."""
        facts = self._facts
        if not (facts.states[number] & PRESENT or facts.pins[number]) and self._only_child[number] == NONE:
            facts.tokens[number] = b""
            facts.numbers.remove(number)


def _inherit_uses(facts: Facts, num: int) -> list[int]:
    """Give each of the first `num` numbers the last use of its most recently used descendant.

    Returns them in that order, children before their parents.
    """
    import numpy as np  # here, because a command line that is asked for help has no time for it

    # Children come first, so that one pass hands their use up to the root. The second sort keeps that order.
    order = np.argsort(-np.array(facts.starts[:num]), kind="stable")
    used, parents = facts.used, facts.parents
    for number in order.tolist():
        if used[number] > used[parent := parents[number]]:
            used[parent] = used[number]
    found: list[int] = order[np.argsort(np.array(used)[order], kind="stable")].tolist()
    return found
