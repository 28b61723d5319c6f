"""Prefixes that stay until they are unpinned: which they are, and which snapshots hold them.

A pin names tokens, not files: what is saved of them later is kept too, and where a longer snapshot takes a
shorter one's place the pin goes over to it. Belongs to the event loop; `catalog` keeps the pins on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from cache.names.blocks import TOKEN_BYTES

from .index import MOST_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cache.disk.rows import Pin

    from .entries import Entry
    from .index import Index


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


class _Way(NamedTuple):
    """Where in a pin's packed tokens a name ends, and the entries behind it with the tokens each shares."""

    at: int
    found: dict[Entry, int]


@dataclass(slots=True, eq=False)
class Held:
    """A pin, and the ways in the tree along which its tokens are stored or on their way now.

    There is a way for every name under which an entry that comes or goes may change what holds them.
    """

    pin: Pin
    ways: dict[bytes, _Way] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Count the pin's tokens that entries hold."""
        ends = (way.at // TOKEN_BYTES + num for way in self.ways.values() for num in way.found.values())
        return max(ends, default=0)

    @property
    def size_bytes(self) -> int:
        """Measure the entries; what other pins hold too is counted for each."""
        return sum(entry.size_bytes for way in self.ways.values() for entry in way.found)


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
            self._follow(held, pin.root, 0)
        return held

    def remove(self, pin: Pin) -> None:
        """Let go of a prefix."""
        held = self._pins.pop(pin.name)
        self._leave(held, pin.root)

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
        parent = entry.parent
        for held in list(self._watching.get(parent, ())):
            self._follow(held, parent, held.ways[parent].at)

    def _leave(self, held: Held, name: bytes) -> None:
        """Let go of the entries behind a name, and of those behind them."""
        names = [name]
        while names:
            way = held.ways.pop(name := names.pop(), None)
            if way is None:
                continue
            self._watching[name].discard(held)
            if not self._watching[name]:
                del self._watching[name]
            for entry in way.found:
                self._index.keep(entry, -1)
                names.append(entry.digest)

    def _follow(self, held: Held, name: bytes, at: int) -> None:
        """Find the entries that hold a pin's tokens behind a name; what holds those before is as it was."""
        tokens = held.pin.tokens
        open_ends = [(name, at)]
        while open_ends:
            name, at = open_ends.pop()
            before = held.ways[name].found if name in held.ways else {}
            found = self._found(name, tokens[at : at + MOST_BYTES])
            held.ways[name] = _Way(at, found)
            self._watching.setdefault(name, set()).add(held)
            for entry in before.keys() - found.keys():
                self._index.keep(entry, -1)
                self._leave(held, entry.digest)
            for entry in found.keys() - before.keys():
                self._index.keep(entry)
            for entry, num_common in found.items():
                end = at + num_common * TOKEN_BYTES
                if num_common == entry.num_tokens and end < len(tokens) and entry.digest not in held.ways:
                    open_ends.append((entry.digest, end))

    def _found(self, parent: bytes, packed: bytes) -> dict[Entry, int]:
        """Find what holds the most of `packed`.

        Where one that is on its way holds more than a stored one both are kept: its write may fail.
        """
        both = (self._index.longest(parent, packed, usable=usable) for usable in (True, False))
        return {found[0]: found[1] for found in both if found is not None}
