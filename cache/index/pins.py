"""The pinned prefixes, and the snapshots that contain their tokens.

A pin names tokens, not files: it covers snapshots that are saved later, and passes from a short snapshot to a
longer one that replaces it. Belongs to the event loop; `catalog` stores the pins on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from cache.names.snapshot import MOST_TOKEN_BYTES
from cache.names.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cache.disk.rows import Pin

    from .index import Index
    from .nodes import Node


@dataclass(frozen=True, slots=True)
class Pinned:
    """A pinned prefix of `num_tokens` tokens; `num_stored` of them are in snapshots of `size_bytes` in total.

    `pinned_bytes` is the size of all pins together. `noted` says whether the pin is recorded on disk.
    """

    num_tokens: int
    num_stored: int
    size_bytes: int
    pinned_bytes: int
    noted: bool


class _Path(NamedTuple):
    """Where a prefix of a pin ends, in bytes, and how many of the pin's tokens each node after it has."""

    at: int
    found: dict[Node, int]


@dataclass(slots=True, eq=False)
class TrackedPin:
    """A pin, and the nodes, stored or queued, that have its tokens now.

    The key of `paths` is the digest of a prefix of the pin, the value has the nodes that continue this
    prefix. A node that is added or removed after a prefix affects only the entries from this prefix on.
    """

    pin: Pin
    paths: dict[bytes, _Path] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """How many of the pin's first tokens are stored or queued."""
        ends = (path.at // TOKEN_BYTES + num for path in self.paths.values() for num in path.found.values())
        return max(ends, default=0)

    @property
    def size_bytes(self) -> int:
        """The bytes of the pin's nodes. A node that several pins share counts for each of them."""
        return sum(node.size_bytes for path in self.paths.values() for node in path.found)


class Pins:
    """The pinned prefixes of all tenants and models in a directory."""

    def __init__(self, index: Index, pins: Iterable[Pin]) -> None:
        self._index = index
        self._pins: dict[bytes, TrackedPin] = {}
        self._watching: dict[bytes, set[TrackedPin]] = {}
        for pin in pins:
            self.add(pin)
        index.changed = self._changed

    def __len__(self) -> int:
        return len(self._pins)

    def get(self, pin: Pin) -> TrackedPin | None:
        """Return the tracked state of a pin; None if the prefix is not pinned."""
        return self._pins.get(pin.name)

    def add(self, pin: Pin) -> TrackedPin:
        """Pin a prefix, if it is not pinned yet, and return its tracked state."""
        tracked = self._pins.get(pin.name)
        if tracked is None:
            tracked = self._pins[pin.name] = TrackedPin(pin)
            self._follow(tracked, pin.root, 0)
        return tracked

    def remove(self, pin: Pin) -> None:
        """Unpin a prefix."""
        tracked = self._pins.pop(pin.name)
        self._unfollow(tracked, pin.root)

    def within(self, root: bytes, tokens: bytes) -> list[Pin]:
        """Return the pins that are prefixes of these packed tokens."""
        return [
            tracked.pin
            for tracked in self._pins.values()
            if tracked.pin.root == root and tokens.startswith(tracked.pin.tokens)
        ]

    def clear(self) -> None:
        """Drop all pins; to be called after `Index.clear`."""
        self._pins, self._watching = {}, {}

    def _changed(self, node: Node) -> None:
        parent = node.parent
        for tracked in list(self._watching.get(parent, ())):
            self._follow(tracked, parent, tracked.paths[parent].at)

    def _unfollow(self, tracked: TrackedPin, name: bytes) -> None:
        """Remove the pin from the nodes that continue the prefix `name`, and from their descendants."""
        names = [name]
        while names:
            path = tracked.paths.pop(name := names.pop(), None)
            if path is None:
                continue
            self._watching[name].discard(tracked)
            if not self._watching[name]:
                del self._watching[name]
            for node in path.found:
                self._index.keep(node, -1)
                names.append(node.digest)

    def _follow(self, tracked: TrackedPin, name: bytes, at: int) -> None:
        """Find and pin the nodes after the prefix `name` that have the pin's tokens from byte `at` on."""
        tokens = tracked.pin.tokens
        open_ends = [(name, at)]
        while open_ends:
            name, at = open_ends.pop()
            before = tracked.paths[name].found if name in tracked.paths else {}
            found = self._found(name, tokens[at : at + MOST_TOKEN_BYTES])
            tracked.paths[name] = _Path(at, found)
            self._watching.setdefault(name, set()).add(tracked)
            for node in before.keys() - found.keys():
                self._index.keep(node, -1)
                self._unfollow(tracked, node.digest)
            for node in found.keys() - before.keys():
                self._index.keep(node)
            for node, num_common in found.items():
                end = at + num_common * TOKEN_BYTES
                if num_common == node.num_tokens and end < len(tokens) and node.digest not in tracked.paths:
                    open_ends.append((node.digest, end))

    def _found(self, parent: bytes, packed: bytes) -> dict[Node, int]:
        """Return the child of `parent` with the longest prefix of `packed`, and the prefix's token count.

        If this child is not stored yet, the best stored child is returned too, since the write may fail.
        """
        both = (
            self._index.closest_child(parent, packed, usable=usable, gaps=True) for usable in (True, False)
        )
        return {found[0]: found[1] for found in both if found is not None}
