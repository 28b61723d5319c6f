"""What is stored, on its way, and in which order it was last used: a tree in memory.

Belongs to the event loop. Knows no files; `catalog` keeps what must outlive the process.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from .blocks import TOKEN_BYTES, num_common
from .format import Name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class Row(NamedTuple):
    """A snapshot as the catalog keeps it. `used` is microseconds since 1970, and never repeats."""

    digest: bytes
    parent: bytes
    start: int
    tokens: bytes
    size_bytes: int
    used: int
    resumable: bool = True

    @property
    def name(self) -> Name:
        """Which KV it holds."""
        return Name(self.parent, self.start, self.tokens, bool(self.resumable))


@dataclass(slots=True, eq=False)
class Entry:
    """A snapshot that is stored, or on its way there. Belongs to the event loop.

    Its name lies open here: ten thousand idle sessions cost little but their entries.
    """

    digest: bytes
    #: The name of the prefix that it continues.
    parent: bytes
    start: int
    tokens: bytes
    size_bytes: int
    used: int
    resumable: bool = True
    durable: bool = False
    #: Loads that need the file, counted by `Index.hold`. It is not evicted meanwhile, and `doomed` waits for
    #: the last of them.
    pins: int = 0
    doomed: bool = False
    #: Pinned prefixes that it is a part of, counted by `Index.keep`.
    kept: int = 0

    @property
    def name(self) -> Name:
        """Which KV it holds."""
        return Name(self.parent, self.start, self.tokens, self.resumable)

    @property
    def num_tokens(self) -> int:
        """Count the tokens."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + self.num_tokens

    @property
    def usable(self) -> bool:
        """Whether a match may count on it."""
        return self.durable and not self.doomed

    @property
    def held(self) -> bool:
        """Whether eviction must leave it alone for now."""
        return self.pins > 0 or self.kept > 0 or not self.durable

    @property
    def row(self) -> Row:
        """What the catalog keeps of it."""
        return Row(
            self.digest, self.parent, self.start, self.tokens, self.size_bytes, self.used, self.resumable
        )


class Index:
    """The tree of snapshots of all tenants and models in the directory.

    Entries are in order of use, and every child stands before its parent: using a snapshot uses its
    whole chain. So eviction can take them as they come, and meets every leaf before its parent.
    """

    def __init__(self, clock: Callable[[], float], rows: Iterable[Row] = ()) -> None:
        self._clock = clock
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._children: dict[bytes, list[Entry]] = {}
        self._held: set[Entry] = set()
        self._now = 0
        self.stored = 0
        self.stored_bytes = 0
        #: Of entries that are not stored yet.
        self.on_its_way_bytes = 0
        #: Of entries that pinned prefixes are made of.
        self.kept_bytes = 0
        #: Hears of every entry that has come or gone.
        self.changed: Callable[[Entry], None] = lambda _: None
        self._fill(list(rows))

    def _fill(self, rows: list[Row]) -> None:
        """Take in what is stored: all at once, since there may be very many."""
        used = _inherited_uses(rows)
        names = {row.digest: row.digest for row in rows}  # one object for the name that all children bear
        for digest, parent, start, tokens, size_bytes, _, resumable in rows:
            name, when, whole = names.get(parent, parent), used[digest], bool(resumable)
            entry = Entry(digest, name, start, tokens, size_bytes, when, whole, True)
            self._entries[digest] = entry
            siblings = self._children.get(name)
            if siblings is None:
                self._children[name] = [entry]
            else:
                siblings.append(entry)
            self.stored_bytes += size_bytes
        for siblings in self._children.values():
            if len(siblings) > 1:
                siblings.sort(key=_place)
        self.stored = len(rows)
        self._now = max(used.values(), default=0)

    def __iter__(self) -> Iterator[Entry]:
        """Go through the entries, least recently used first, children before their parents."""
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, digest: bytes) -> Entry | None:
        """Find an entry, on its way or stored."""
        return self._entries.get(digest)

    def num_children(self, digest: bytes) -> int:
        """Count the entries that continue `digest`."""
        return len(self._children.get(digest, ()))

    def children(self, digest: bytes) -> list[Entry]:
        """List the entries that continue `digest`."""
        return list(self._children.get(digest, ()))

    def next_use(self) -> int:
        """Give the next point on the clock of uses: the time of day, but never twice and never backwards."""
        self._now = max(self._now + 1, int(self._clock() * 1e6))
        return self._now

    def add(self, entry: Entry) -> None:
        """Take in a new entry, as the most recently used one."""
        self._entries[entry.digest] = entry
        if entry.parent in self._entries:  # one object for the name that both bear
            entry.parent = self._entries[entry.parent].digest
        siblings = self._children.get(entry.parent)
        if siblings is None:
            self._children[entry.parent] = [entry]
        else:
            insort(siblings, entry, key=_place)
        self.use(entry)
        self.on_its_way_bytes += entry.size_bytes
        self._look_at(entry)
        self.changed(entry)

    def settle(self, entry: Entry) -> None:
        """Note that an entry's file is in place."""
        entry.durable = True
        self.on_its_way_bytes -= entry.size_bytes
        self.stored += 1
        self.stored_bytes += entry.size_bytes
        self._look_at(entry)

    def hold(self, entry: Entry, by: int = 1) -> None:
        """Count a load that needs the file (`by` -1: one that needs it no more)."""
        entry.pins += by
        self._look_at(entry)

    def keep(self, entry: Entry, by: int = 1) -> None:
        """Count a pinned prefix that the entry is a part of (`by` -1: one that was given up)."""
        was, entry.kept = entry.kept > 0, entry.kept + by
        if was != (entry.kept > 0):
            self.kept_bytes += entry.size_bytes if entry.kept else -entry.size_bytes

    def held_bytes(self) -> int:
        """Measure what eviction must leave alone: what is held, stored or not, and what that continues."""
        seen: set[bytes] = set()
        size_bytes = self.kept_bytes  # the whole chain of what is kept is kept
        for entry in self._held:
            link: Entry | None = entry
            while link is not None and not link.kept and link.digest not in seen:
                seen.add(link.digest)
                size_bytes += link.size_bytes
                link = self._entries.get(link.parent)
        return size_bytes

    def remove(self, entry: Entry) -> None:
        """Forget an entry."""
        del self._entries[entry.digest]
        siblings = self._children[entry.parent]
        del siblings[bisect_left(siblings, _place(entry), key=_place)]
        if not siblings:
            del self._children[entry.parent]
        if entry.durable:
            self.stored -= 1
            self.stored_bytes -= entry.size_bytes
        else:
            self.on_its_way_bytes -= entry.size_bytes
        self._held.discard(entry)
        self.changed(entry)

    def clear(self) -> None:
        """Forget all entries. Those that are being loaded are on their own."""
        self._entries, self._children, self._held = OrderedDict(), {}, set()
        self.stored = self.stored_bytes = self.on_its_way_bytes = self.kept_bytes = 0

    def use(self, entry: Entry) -> None:
        """Note that an entry, and with it its chain, was used now."""
        used = self.next_use()
        link: Entry | None = entry
        while link is not None:
            link.used = used
            self._entries.move_to_end(link.digest)
            link = self._entries.get(link.parent)

    def longest(self, parent: bytes, packed: bytes, *, usable: bool = True) -> tuple[Entry, int] | None:
        """Find the child of `parent` that shares the most leading tokens with `packed`, and how many.

        Siblings are sorted by their tokens, so it is one of the two next to where `packed` would stand; of
        two that share as much, the smaller one is read faster. With `usable` only what a match may count on.
        """
        siblings = self._children.get(parent, [])
        at = bisect_left(siblings, (packed, b""), key=_place)
        found: list[tuple[int, int, Entry]] = []
        for side in (range(at, len(siblings)), range(at - 1, -1, -1)):
            entries = (siblings[i] for i in side)
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
        for entry in self._beginnings(parent, packed):
            found += (entry, *self.within(entry.digest, packed[len(entry.tokens) :]))
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
        siblings = self._children.get(parent, [])
        bound = packed
        while bound and (at := bisect_left(siblings, (bound + b"\0", b""), key=_place)):
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
            found += self.children(parent.digest)
        return found[:0:-1]

    def _look_at(self, entry: Entry) -> None:
        if (entry.pins > 0 or not entry.durable) and self._entries.get(entry.digest) is entry:
            self._held.add(entry)
        else:
            self._held.discard(entry)


def _place(entry: Entry) -> tuple[bytes, bytes]:
    """Order siblings by their tokens; files of other formats have none that could be told."""
    return entry.tokens, entry.digest


def _inherited_uses(rows: list[Row]) -> dict[bytes, int]:
    """Give each row the last use of its most recently used descendant.

    Sorts `rows` in place, by that, children before their parents.
    """
    used = {row.digest: row.used for row in rows}
    # Children come first, so that one pass hands their use up to the root. The second sort keeps that order.
    rows.sort(key=attrgetter("start"), reverse=True)
    for digest, parent, *_ in rows:
        own = used[digest]
        if used.get(parent, own) < own:
            used[parent] = own
    rows.sort(key=lambda row: used[row.digest])
    return used
