"""The entries of the index, one for each snapshot. Only `index` changes them, on the event loop."""

from __future__ import annotations

from operator import attrgetter
from typing import Final

from cache.disk.rows import SnapshotRow
from cache.names.snapshot import Name
from cache.names.tokens import TOKEN_BYTES

#: The order of siblings. Files of another format version have no known tokens.
BY_TOKENS: Final = attrgetter("tokens", "digest")


class Node:
    """A snapshot in the index: stored, or queued for the disk. It needs no other node.

    If a snapshot is removed and saved again, it gets a new node with the same digest.
    """

    __slots__ = (
        "digest",
        "doomed",
        "due",
        "durable",
        "holds",
        "mark",
        "parent",
        "resumable",
        "size_bytes",
        "start",
        "tokens",
        "used",
    )

    def __init__(self, row: SnapshotRow, *, durable: bool) -> None:
        #: The last use, in microseconds since 1970. Snapshots that were used together have the same.
        self.used: int
        self.digest, self.parent, self.start, self.tokens, self.size_bytes, self.used, resumable, *rest = row
        #: Whether a session can resume at the node's end.
        self.resumable = bool(resumable)
        #: A digest of the tenant and of all tokens up to the node's end: see `marks`.
        self.mark: bytes = rest[0]
        #: Whether the node's file is complete on disk.
        self.durable = durable
        #: Whether to remove the node once nothing holds it.
        self.doomed = False
        #: The use after which the index looks at the node again, to evict it; None while it cannot be.
        self.due: int | None = None
        #: How many loads and turns use the node now.
        self.holds = 0

    def __repr__(self) -> str:
        return f"Node({self.digest.hex()})"

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
        """Whether a match may use the snapshot: it is on disk, and not to be removed."""
        return self.durable and not self.doomed

    @property
    def evictable(self) -> bool:
        """Whether the snapshot may be evicted now: it is on disk, and nothing uses it."""
        return self.durable and not self.holds

    @property
    def name(self) -> Name:
        """The snapshot's `Name`: its tokens, their position, and the prefix that they continue."""
        return Name(self.parent, self.start, self.tokens, self.resumable, self.mark)

    @property
    def row(self) -> SnapshotRow:
        """The catalog's row of the snapshot."""
        return SnapshotRow.of(self.digest, self.name, self.size_bytes, self.used)
