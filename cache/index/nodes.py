"""The entries of the index, one for each snapshot. Only `index` changes them, on the event loop."""

from __future__ import annotations

from msgspec import Struct

from cache.disk.rows import SnapshotRow


class Node(Struct, eq=False, gc=False):
    """A snapshot in the index: stored, or queued for the disk. It needs no other node.

    It does not have its tokens, which its digest names: they would take more memory than all the rest. If a
    snapshot is removed and saved again, it gets a new node with the same digest.
    """

    digest: bytes
    parent: bytes
    start: int
    num_tokens: int
    size_bytes: int
    #: The last use, in microseconds since 1970. Snapshots that were used together have the same.
    used: int
    #: Whether a session can resume at the node's end.
    resumable: bool
    #: A digest of the tenant and of all tokens up to the node's end: see `marks`.
    mark: bytes
    #: Whether the node's file is complete on disk.
    durable: bool = False
    #: The use after which the index looks at the node again, to evict it; None while it cannot be.
    due: int | None = None
    #: Whether to remove the node once nothing holds it.
    doomed: bool = False
    #: How many loads and turns use the node now.
    holds: int = 0

    def __repr__(self) -> str:
        return f"Node({self.digest.hex()})"

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
    def row(self) -> SnapshotRow:
        """The catalog's row of the snapshot."""
        return SnapshotRow(
            self.digest,
            self.parent,
            self.start,
            self.num_tokens,
            self.size_bytes,
            self.used,
            int(self.resumable),
            self.mark,
        )
