"""Prefixes that stay until they are unpinned: which they are, and which snapshots hold them.

A pin names tokens, not files: what is saved of them later is kept too, and where a longer snapshot takes a
shorter one's place the pin goes over to it. Belongs to the event loop; `catalog` keeps the pins on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .blocks import TOKEN_BYTES, link

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .entries import Entry
    from .index import Index


class Pin(NamedTuple):
    """A pinned prefix as the catalog keeps it: packed `tokens` after a tenant's and a model's `root`."""

    root: bytes
    tokens: bytes

    @property
    def name(self) -> bytes:
        """Name the prefix."""
        return link(self.root, self.tokens)


@dataclass(frozen=True, slots=True)
class Pinned:
    """A pinned prefix: of its `num_tokens`, `num_stored` are stored or on their way, in `size_bytes`.

    `pinned_bytes` are those of all pins together. `noted` says that the pin is on disk too.
    """

    num_tokens: int
    num_stored: int
    size_bytes: int
    pinned_bytes: int
    noted: bool


@dataclass(slots=True, eq=False)
class Held:
    """A pin and the entries that hold its tokens now, stored or on their way."""

    pin: Pin
    entries: list[Entry] = field(default_factory=list)
    #: Under these an entry that comes or goes may change `entries`.
    parents: set[bytes] = field(default_factory=set)
    num_tokens: int = 0

    @property
    def size_bytes(self) -> int:
        """Measure the entries; what other pins hold too is counted for each."""
        return sum(entry.size_bytes for entry in self.entries)


class Pins:
    """The pinned prefixes of all tenants and models in a directory."""

    def __init__(self, index: Index, pins: Iterable[Pin]) -> None:
        self._index = index
        self._pins: dict[bytes, Held] = {}
        self._watching: dict[bytes, set[Held]] = {}
        for pin in pins:
            self.add(pin)
        index.changed = self._changed

    def __len__(self) -> int:
        return len(self._pins)

    def get(self, pin: Pin) -> Held | None:
        """Find a pin."""
        return self._pins.get(pin.name)

    def add(self, pin: Pin) -> Held:
        """Keep a prefix from now on; one that is pinned already stays so."""
        held = self._pins.get(pin.name)
        if held is None:
            held = self._pins[pin.name] = Held(pin)
            self._follow(held)
        return held

    def remove(self, pin: Pin) -> None:
        """Let go of a prefix."""
        held = self._pins.pop(pin.name)
        self._leave(held)

    def within(self, root: bytes, tokens: bytes) -> list[Pin]:
        """List the pins of prefixes of these packed tokens."""
        return [
            held.pin
            for held in self._pins.values()
            if held.pin.root == root and tokens.startswith(held.pin.tokens)
        ]

    def clear(self) -> None:
        """Forget all pins, of an index that was cleared."""
        self._pins, self._watching = {}, {}

    def _changed(self, entry: Entry) -> None:
        for held in list(self._watching.get(entry.parent, ())):
            self._leave(held)
            self._follow(held)

    def _leave(self, held: Held) -> None:
        for entry in held.entries:
            self._index.keep(entry, -1)
        for parent in held.parents:
            self._watching[parent].discard(held)
            if not self._watching[parent]:
                del self._watching[parent]

    def _follow(self, held: Held) -> None:
        """Find the entries that hold a pin's tokens.

        Where one that is on its way holds more than a stored one both are kept: its write may fail.
        """
        held.entries, held.parents, held.num_tokens = [], set(), 0
        open_ends = [(held.pin.root, held.pin.tokens)]
        while open_ends:
            parent, rest = open_ends.pop()
            held.parents.add(parent)
            found = {
                longest[0]: longest[1]
                for on_its_way in (False, True)
                if (longest := self._index.longest(parent, rest, usable=not on_its_way))
            }
            for entry, num_common in found.items():
                held.entries.append(entry)
                before = (len(held.pin.tokens) - len(rest)) // TOKEN_BYTES
                held.num_tokens = max(held.num_tokens, before + num_common)
                if num_common == entry.num_tokens and num_common * TOKEN_BYTES < len(rest):
                    open_ends.append((entry.digest, rest[num_common * TOKEN_BYTES :]))
        for entry in held.entries:
            self._index.keep(entry)
        for parent in held.parents:
            self._watching.setdefault(parent, set()).add(held)
