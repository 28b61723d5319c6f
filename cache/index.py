"""What is stored, on its way, and in which order it was last used: a tree in memory.

Belongs to the event loop. Knows no files; `catalog` keeps what must outlive the process.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass
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
    """A snapshot that is stored, or on its way there. Belongs to the event loop."""

    digest: bytes
    name: Name
    size_bytes: int
    used: int
    durable: bool = False
    #: Loads that need the file. It is not evicted meanwhile, and `doomed` waits for the last of them.
    pins: int = 0
    doomed: bool = False

    @property
    def parent(self) -> bytes:
        """The name of the prefix that it continues."""
        return self.name.parent

    @property
    def usable(self) -> bool:
        """Whether a match may count on it."""
        return self.durable and not self.doomed

    @property
    def held(self) -> bool:
        """Whether eviction must leave it alone for now."""
        return self.pins > 0 or not self.durable

    @property
    def row(self) -> Row:
        """What the catalog keeps of it."""
        name = self.name
        return Row(
            self.digest, name.parent, name.start, name.tokens, self.size_bytes, self.used, name.resumable
        )


class Index:
    """The tree of snapshots of all tenants and models in the directory.

    Entries are in order of use, and every child stands before its parent: using a snapshot uses its
    whole chain. So eviction can take them as they come, and meets every leaf before its parent.
    """

    def __init__(self, clock: Callable[[], float], rows: Iterable[Row] = ()) -> None:
        self._clock = clock
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._children: dict[bytes, list[tuple[bytes, bytes]]] = {}
        self._now = 0
        self.stored = 0
        self.stored_bytes = 0
        for row in _in_order(list(rows)):
            self.add(Entry(row.digest, row.name, row.size_bytes, row.used), use=False)
            self.settle(self._entries[row.digest])
            self._now = max(self._now, row.used)

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
        return [self._entries[child] for _, child in self._children.get(digest, ())]

    def next_use(self) -> int:
        """Give the next point on the clock of uses: the time of day, but never twice and never backwards."""
        self._now = max(self._now + 1, int(self._clock() * 1e6))
        return self._now

    def add(self, entry: Entry, *, use: bool = True) -> None:
        """Take in a new entry, as the most recently used one unless told otherwise."""
        self._entries[entry.digest] = entry
        insort(self._children.setdefault(entry.parent, []), (entry.name.tokens, entry.digest))
        if use:
            self.use(entry)

    def settle(self, entry: Entry) -> None:
        """Note that an entry's file is in place."""
        entry.durable = True
        self.stored += 1
        self.stored_bytes += entry.size_bytes

    def remove(self, entry: Entry) -> None:
        """Forget an entry."""
        del self._entries[entry.digest]
        siblings = self._children[entry.parent]
        del siblings[bisect_left(siblings, (entry.name.tokens, entry.digest))]
        if not siblings:
            del self._children[entry.parent]
        if entry.durable:
            self.stored -= 1
            self.stored_bytes -= entry.size_bytes

    def use(self, entry: Entry) -> None:
        """Note that an entry, and with it its chain, was used now."""
        used = self.next_use()
        link: Entry | None = entry
        while link is not None:
            link.used = used
            self._entries.move_to_end(link.digest)
            link = self._entries.get(link.parent)

    def longest(self, parent: bytes, packed: bytes) -> tuple[Entry, int] | None:
        """Find the stored child of `parent` that shares the most leading tokens with `packed`, and how many.

        Siblings are sorted by their tokens, so it is one of the two next to where `packed` would stand; of
        two that share as much, the smaller one is read faster.
        """
        siblings = self._children.get(parent, [])
        at = bisect_left(siblings, (packed,))
        found: list[tuple[int, int, Entry]] = []
        for side in (range(at, len(siblings)), range(at - 1, -1, -1)):
            entries = (self._entries[siblings[i][1]] for i in side)
            entry = next((entry for entry in entries if entry.usable), None)
            if entry is not None and (num_tokens := num_common(entry.name.tokens, packed)):
                found.append((num_tokens, -entry.size_bytes, entry))
        num_tokens, _, entry = max(found, key=lambda one: one[:2], default=(0, 0, None))
        return None if entry is None else (entry, num_tokens)

    def shadowed(self, entry: Entry) -> list[Entry]:
        """List the siblings whose tokens are a beginning of this entry's: it holds all they hold."""
        return list(self._beginnings(entry.parent, entry.name.tokens[:-TOKEN_BYTES]))

    def ending(self, parent: bytes, packed: bytes) -> Entry | None:
        """Find the longest stored child of `parent` at whose end `packed` can be resumed: its beginning."""
        found = self._beginnings(parent, packed)
        return next((entry for entry in found if entry.usable and entry.name.resumable), None)

    def _beginnings(self, parent: bytes, packed: bytes) -> Iterator[Entry]:
        """Find the children of `parent` whose tokens are a beginning of `packed`, longest first.

        A step finds the last sibling up to `bound`; the part of it that fits bounds the next one.
        """
        siblings = self._children.get(parent, [])
        bound = packed
        while bound and (at := bisect_left(siblings, (bound + b"\0",))):
            tokens, digest = siblings[at - 1]
            fits = num_common(tokens, bound) * TOKEN_BYTES
            if fits == len(tokens):
                yield self._entries[digest]
                fits -= TOKEN_BYTES
            bound = bound[:fits]

    def covered(self, parent: bytes, packed: bytes) -> bool:
        """Tell whether an entry, on its way or stored, holds all of `packed` after `parent`."""
        siblings = self._children.get(parent, [])
        at = bisect_left(siblings, (packed,))
        return at < len(siblings) and siblings[at][0].startswith(packed)

    def below(self, entry: Entry) -> list[Entry]:
        """List all entries that need this one, children before their parents."""
        found = [entry]
        for parent in found:
            found += self.children(parent.digest)
        return found[:0:-1]


def _in_order(rows: list[Row]) -> list[Row]:
    """Sort rows by use, a parent as its most recently used descendant, children before their parents."""
    used = {row.digest: row.used for row in rows}
    for row in sorted(rows, key=lambda row: -row.start):
        if row.parent in used:
            used[row.parent] = max(used[row.parent], used[row.digest])
    return sorted(
        (row._replace(used=used[row.digest]) for row in rows), key=lambda row: (row.used, -row.start)
    )
