"""What is known of each snapshot, a column for each fact; and the handle by which others name one.

Belongs to the event loop, and is changed by `index` alone. An object with these fields and its place in dicts
takes five times as much: ten thousand idle sessions cost little but this.
"""

from __future__ import annotations

from array import array
from typing import Final

from cache.disk.rows import Columns, Row
from cache.names.blocks import TOKEN_BYTES
from cache.names.snapshot import Name

from .numbers import NONE, Numbers

#: The number is a snapshot's, stored or on its way; else it is only a prefix that others continue, or one
#: that is gone and still being loaded.
PRESENT: Final = 1
RESUMABLE: Final = 2
DURABLE: Final = 4
#: To be removed once nobody loads it.
DOOMED: Final = 8

#: What is stored, by whether a session can go on at its end.
_STATES: Final = bytes((PRESENT | DURABLE, PRESENT | DURABLE | RESUMABLE)).ljust(256)


class Facts:
    """The columns, by the digests' numbers."""

    __slots__ = (
        "born",
        "is_whole",
        "kept",
        "numbers",
        "parents",
        "pins",
        "sizes",
        "starts",
        "states",
        "tokens",
        "used",
    )

    def __init__(self, stored: Columns) -> None:
        """Take in what is stored: row number n gets number n, the roots of tenants those behind."""
        num, parents = len(stored.digests), stored.parents
        self.numbers = Numbers(stored.digests)
        self.starts: array[int] = array("q", stored.starts)
        self.tokens: list[bytes] = list(stored.tokens)
        self.sizes: array[int] = array("q", stored.sizes)
        self.used: array[int] = array("q", stored.used)
        self.states = array("B", bytes(map(bool, stored.resumable)).translate(_STATES))
        #: Loads that need the file.
        self.pins = array("I", bytes(4 * num))
        #: How often the number has been given to a snapshot.
        self.born = array("I", bytes(4 * num))
        #: Pinned prefixes that it is a part of, where there are any.
        self.kept: dict[int, int] = {}
        found = self.numbers.find_all(parents)
        #: The number of the prefix that it continues.
        self.parents: array[int] = array("i", found)
        #: Whether what does not begin at a root had its parent among what was stored.
        self.is_whole = True
        roots: dict[bytes, int] = {}
        at = -1
        for _ in range(found.count(NONE)):
            at = found.index(NONE, at + 1)
            root = parents[at]
            if root not in roots:
                roots[root] = self.add(root)
            self.parents[at] = roots[root]
            self.is_whole = self.is_whole and self.starts[at] == 0

    def add(self, digest: bytes) -> int:
        """Number a digest, of which nothing is known yet."""
        number = self.numbers.add(digest)
        if number == len(self.tokens):
            self.tokens.append(b"")
            self.parents.append(NONE)
            for column in (self.starts, self.sizes, self.used, self.states, self.pins, self.born):
                column.append(0)
        return number

    def set(self, number: int, parent: int, name: Name, size_bytes: int) -> None:
        """Let a number stand for a new snapshot, which is on its way."""
        self.parents[number] = parent
        self.starts[number] = name.start
        self.tokens[number] = name.tokens
        self.sizes[number] = size_bytes
        self.states[number] = PRESENT | (RESUMABLE if name.resumable else 0)
        self.born[number] += 1

    def forget(self) -> None:
        """Let nothing be present any more. Handles go on counting what loads need."""
        self.states = array("B", bytes(len(self.states)))

    def entry(self, number: int) -> Entry:
        """Make a handle."""
        return Entry(self, number, self.numbers.digest(number))


class Entry:
    """A snapshot that is stored, or on its way there: a handle, equal to all others of the same snapshot.

    One that was removed and saved anew is another snapshot under the same digest. Of one that is gone only
    the digest may be asked for, unless it was held (`Index.hold`) all the time.
    """

    __slots__ = ("_born", "digest", "facts", "number")

    def __init__(self, facts: Facts, number: int, digest: bytes) -> None:
        """`number` is its place in the columns."""
        self.facts = facts
        self.number = number
        self.digest = digest
        self._born = facts.born[number]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Entry)
            and self.number == other.number
            and self._born == other._born
            and self.facts is other.facts
        )

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Entry({self.digest.hex()})"

    @property
    def parent(self) -> bytes:
        """The name of the prefix that it continues."""
        return self.facts.numbers.digest(self.facts.parents[self.number])

    @property
    def start(self) -> int:
        """The position of its first token."""
        return self.facts.starts[self.number]

    @property
    def tokens(self) -> bytes:
        """Its tokens, packed."""
        return self.facts.tokens[self.number]

    @property
    def size_bytes(self) -> int:
        """What its file takes."""
        return self.facts.sizes[self.number]

    @property
    def used(self) -> int:
        """When it was used last, in microseconds since 1970."""
        return self.facts.used[self.number]

    @property
    def resumable(self) -> bool:
        """Whether a session can go on at its end."""
        return bool(self.facts.states[self.number] & RESUMABLE)

    @property
    def durable(self) -> bool:
        """Whether its file is in place."""
        return bool(self.facts.states[self.number] & DURABLE)

    @property
    def doomed(self) -> bool:
        """Whether it goes once nobody loads it."""
        return bool(self.facts.states[self.number] & DOOMED)

    @property
    def pins(self) -> int:
        """Count the loads that need the file. It is not evicted meanwhile."""
        return self.facts.pins[self.number]

    @property
    def kept(self) -> int:
        """Count the pinned prefixes that it is a part of."""
        return self.facts.kept.get(self.number, 0)

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
        return self.facts.states[self.number] & (PRESENT | DURABLE | DOOMED) == PRESENT | DURABLE

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
