"""The nodes of the index's tree: snapshots, and the roots at which their chains begin.

They belong to the event loop, and `index` alone changes them.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final

from cache.disk.rows import Row
from cache.names.blocks import TOKEN_BYTES
from cache.names.snapshot import Name

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The order of siblings: by their tokens. Files of other formats have none that could be told.
BY_TOKENS: Final = attrgetter("tokens", "digest")


class Parent:
    """A prefix that snapshots continue: a tenant's empty one, or what a snapshot ends."""

    __slots__ = ("children", "digest")

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        #: In the order of `BY_TOKENS`; a list only where there are some, since most nodes are leaves.
        self.children: list[Node] | tuple[()] = ()


class Node(Parent):
    """A snapshot that is stored, or on its way there.

    One that was removed and saved anew is another node, with the same digest.
    """

    __slots__ = (
        "doomed",
        "durable",
        "holds",
        "kept",
        "resumable",
        "size_bytes",
        "start",
        "tokens",
        "up",
        "used",
    )

    def __init__(self, row: Row, up: Parent, *, durable: bool) -> None:
        self.children = ()
        #: What it continues.
        self.up = up
        #: When it was used last, in microseconds since 1970: it alone, not what continues it.
        self.used: int
        self.digest, _, self.start, self.tokens, self.size_bytes, self.used, resumable, _ = row
        #: Whether a session can go on at its end.
        self.resumable = bool(resumable)
        #: Whether its file is in place.
        self.durable = durable
        #: Whether it is to be removed once nobody needs it any more.
        self.doomed = False
        #: Loads and turns that need it, and with it all that it continues.
        self.holds = 0
        #: Pinned prefixes that it is a part of.
        self.kept = 0

    def __repr__(self) -> str:
        return f"Node({self.digest.hex()})"

    @property
    def parent(self) -> bytes:
        """The name of the prefix that it continues."""
        return self.up.digest

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
        """Whether a match may end with it."""
        return self.durable and not self.doomed

    @property
    def evictable(self) -> bool:
        """Whether nobody needs it now, nor anything that continues it."""
        return self.durable and not (self.holds or self.kept or self.children)

    @property
    def name(self) -> Name:
        """Which KV it holds."""
        return Name(self.parent, self.start, self.tokens, self.resumable)

    @property
    def row(self) -> Row:
        """What the catalog keeps of it."""
        return Row.of(self.digest, self.name, self.size_bytes, self.used)

    def chain(self) -> Iterator[Node]:
        """Go up to the first node of its chain, from the node itself on."""
        node: Parent = self
        while isinstance(node, Node):
            yield node
            node = node.up
