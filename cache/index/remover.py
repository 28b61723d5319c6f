"""Removes snapshots: first from the index, then from the disk.

Belongs to the event loop. Knows which snapshots are being loaded or written, and makes sure that a write does
not restore a removed snapshot. The callers know the reason: eviction, `forget`, a damaged file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import structlog

from cache.disk.disk_work import DropReason, WriteState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cache.disk.disk_work import Write
    from cache.disk.rows import SnapshotRow

    from .index import SnapshotIndex
    from .nodes import Node
    from .write_queue import WriteQueue

_log = structlog.get_logger("turnkeep.cache")


class Remover:
    """Removes nodes from the index, and queues the removal of their files on the writer."""

    def __init__(self, index: SnapshotIndex, queue: WriteQueue, block_tokens: int) -> None:
        self._index = index
        self._queue = queue
        self._block = block_tokens
        #: Abandoned files that may be on disk, because a later save of the same snapshot was to replace them.
        self._left: set[bytes] = set()
        #: Called with each node that no worker needs, since it is doubtful or a larger node has its tokens.
        self.useless: Callable[[Node], None] = lambda _: None
        #: Called after snapshots were removed whose KV a session may still have on the device.
        self.lost: Callable[[], None] = lambda: None

    def evict(self, need_bytes: int, limit: int, before: int | None = None) -> list[SnapshotRow]:
        """Evict the least recently used snapshots until `need_bytes` are freed; return the rows.

        Evicts `limit` snapshots at most, and only those last used earlier than `before`, if that is given. A
        piece of a tail is evicted after those that continue it, since it was used whenever they were.
        """
        victims: list[SnapshotRow] = []
        while need_bytes > 0 and len(victims) < limit and (victim := self._index.oldest()) is not None:
            if before is not None and victim.used >= before:
                break
            *pieces, _ = self._with_pieces(victim)  # none, or still in the queue
            self._remove(pieces, "no_parent")
            self._index.remove(victim)
            need_bytes -= victim.size_bytes
            victims.append(victim.row)
        if victims:
            self._queue.unlink(victims)
        return victims

    def discard(self, nodes: Iterable[Node]) -> int:
        """Remove these nodes, except nodes that a remaining node continues; return how many.

        Nodes come after those that continue them. A node that a load or a turn uses counts too, but stays
        until its release (`discard_released`), and longer if a new snapshot continues it by then.
        """
        num_discarded = 0
        for node in nodes:
            if all(child.doomed for child in self._index.children(node.digest)):
                node.doomed = True
                num_discarded += 1
                if not node.holds:
                    self._remove([node], "cancelled")
        return num_discarded

    def discard_released(self, released: Iterable[Node]) -> None:
        """Remove those of the released nodes that were discarded, and that nothing holds or continues now."""
        for node in reversed(tuple(released)):
            if node.doomed and not node.holds and self._index.has(node):
                if all(child.doomed for child in self._index.children(node.digest)):
                    self._remove([node], "cancelled")
                else:
                    node.doomed = False  # a snapshot that was saved meanwhile continues it

    def reject(self, node: Node, doubt: str) -> bool:
        """Remove a snapshot whose file failed verification, also from the remote tier, and call `lost`.

        Removes the pieces of a tail that continue it too. False, and nothing happens, if the snapshot has
        been removed already, by another load or by `forget`.
        """
        if not self._index.has(node):
            return False
        _log.warning("snapshot_quarantined", digest=node.digest.hex(), reason=doubt)
        self.useless(node)
        self._remove(self._with_pieces(node), "no_parent")
        self.lost()
        return True

    def note_end(self, node: Node, write: Write) -> None:
        """Update the index after a write has ended: mark the node as stored, or remove it.

        Removes the smaller snapshots that a stored one replaces, and a file that an abandoned write has left.
        """
        if write.state is WriteState.DURABLE and write.abandoned is None:
            self._left.discard(node.digest)
            self._index.mark_durable(node)
            if node.resumable:
                superseded = self._index.superseded(node, write.tokens)
                self.discard(superseded)
                for other in superseded:
                    if not self._index.has(other):
                        self.useless(other)
            return
        if self._index.has(node):
            self._remove(self._with_pieces(node), "no_parent")
        # The file may be on disk: the write was abandoned after the writer's last check, or the sync of the
        # directory failed. A later save of the same snapshot is queued already and replaces the file, unless
        # that save is abandoned too.
        if write.state in {WriteState.DURABLE, WriteState.FAILED}:
            self._left.add(node.digest)
        if node.digest in self._left and self._index.get(node.digest) is None:
            self._left.remove(node.digest)
            self._queue.unlink([write.row])

    def _with_pieces(self, node: Node) -> list[Node]:
        """Return a node, and before it the pieces of a tail that nothing finds without it."""
        return [*(self._index.pieces_after(node, self._block) if node.end % self._block else ()), node]

    def _remove(self, nodes: list[Node], reason: DropReason | Literal["cancelled"]) -> None:
        """Remove nodes; writes in flight are abandoned for `reason`."""
        for node in nodes:
            if not node.durable:
                self._queue.abandon(node, reason)
            self._index.remove(node)
        if rows := [node.row for node in nodes if node.durable]:
            self._queue.unlink(rows)
