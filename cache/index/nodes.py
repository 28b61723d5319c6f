"""The nodes of the index's tree: snapshots, and the roots at which their chains begin.

Nodes belong to the event loop; only `index` changes them.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final

from cache.disk.rows import PARTIAL, Row
from cache.names.snapshot import Name
from cache.names.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cache.names.policy import Policy

#: The order of siblings. Files of another format version have no known tokens.
BY_TOKENS: Final = attrgetter("tokens", "digest")


class Parent:
    """The parent of snapshots: a root (a tenant's empty prefix), or a node."""

    __slots__ = ("children", "digest", "reach")

    def __init__(self, digest: bytes, reach: Policy | None = None) -> None:
        self.digest = digest
        #: The tokens that layers see, at most, in sessions under this parent; None: unknown, or all tokens.
        self.reach = reach
        #: Children in the order of `BY_TOKENS`; a tuple while empty, since most nodes are leaves.
        self.children: list[Node] | tuple[()] = ()


class Node(Parent):
    """A snapshot in the index: stored, or queued for the disk.

    If a snapshot is removed and saved again, it gets a new node with the same digest.
    """

    __slots__ = (
        "beginning",
        "doomed",
        "durable",
        "holds",
        "rest_bytes",
        "resumable",
        "size_bytes",
        "start",
        "tokens",
        "up",
        "used",
    )

    def __init__(self, row: Row, up: Parent, *, durable: bool) -> None:
        self.children = ()
        #: The root or node that this node continues.
        self.up = up
        self.reach = up.reach
        #: The node's own last use, in microseconds since 1970, without the uses of its descendants.
        self.used: int
        self.digest, _, self.start, self.tokens, self.size_bytes, self.used, resumable, _ = row
        #: Whether a session can resume at the node's end.
        self.resumable = bool(resumable & 1)
        #: The size of the node's partial file, also while a whole file is queued; 0 if there is none.
        self.rest_bytes = self.size_bytes if resumable & PARTIAL else 0
        #: Whether the node's file is complete on disk.
        self.durable = durable
        #: Whether to remove the node once nothing holds it.
        self.doomed = False
        #: How many loads and turns hold the node, and so its chain.
        self.holds = 0
        #: The first node of the chain, once the property `first` was used.
        self.beginning: Node | None = None

    def __repr__(self) -> str:
        return f"Node({self.digest.hex()})"

    @property
    def parent(self) -> bytes:
        """The digest of the prefix that the snapshot continues: of a node, or of a root."""
        return self.up.digest

    @property
    def num_tokens(self) -> int:
        """The number of the snapshot's own tokens."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def end(self) -> int:
        """The position after the snapshot's last token."""
        return self.start + self.num_tokens

    @property
    def usable(self) -> bool:
        """Whether a match may end with the snapshot: it is on disk, complete, and not to be removed."""
        return self.durable and not self.doomed and not self.is_hollow

    @property
    def is_gap(self) -> bool:
        """Whether the node's file was evicted. The node stays, because its children need its digest."""
        return not self.size_bytes

    @property
    def is_partial(self) -> bool:
        """Whether the file lacks the KV of layers with windows, which was evicted."""
        return self.durable and self.rest_bytes > 0

    @property
    def is_hollow(self) -> bool:
        """Whether the node is a gap or partial: all or some of its KV was evicted."""
        return self.is_gap or self.is_partial

    @property
    def evictable(self) -> bool:
        """Whether the snapshot may be evicted now: a durable leaf that nothing holds."""
        return self.durable and not (self.holds or self.children)

    @property
    def name(self) -> Name:
        """The snapshot's `Name`: its tokens, their position, and the prefix that they continue."""
        return Name(self.parent, self.start, self.tokens, self.resumable)

    @property
    def row(self) -> Row:
        """The catalog's row of the snapshot."""
        row = Row.of(self.digest, self.name, self.size_bytes, self.used)
        return row._replace(resumable=self.resumable | PARTIAL) if self.is_partial else row

    @property
    def first(self) -> Node:
        """The first node of this node's chain. Cached, since the nodes before a node never change."""
        passed, node = [], self
        while node.beginning is None and isinstance(node.up, Node):
            passed.append(node)
            node = node.up
        first = node.beginning or node
        for node in passed:
            node.beginning = first
        return first

    def chain(self) -> Iterator[Node]:
        """Yield the nodes of this node's chain in reverse order: this node first."""
        node: Parent = self
        while isinstance(node, Node):
            yield node
            node = node.up
