"""Removes snapshots: first from the index, children before parents, then from the disk.

Belongs to the event loop. Knows which snapshots are being loaded or written, and makes sure that a write does
not restore a removed snapshot. The callers know the reason: eviction, `forget`, a damaged file.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

import structlog

from cache.disk.disk_work import DropReason, WriteState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cache.disk.disk_work import Write
    from cache.disk.rows import Row
    from cache.names.identity import Identity
    from cache.names.snapshot import ModelLayout

    from .index import Index
    from .nodes import Node
    from .write_queue import WriteQueue

_log = structlog.get_logger("turnkeep.cache")


class Remover:
    """Removes nodes from the index, and queues the removal of their files on the writer."""

    def __init__(self, index: Index, queue: WriteQueue) -> None:
        self._index = index
        self._queue = queue
        #: Abandoned files that may be on disk, because a later save of the same snapshot was to replace them.
        self._left: set[bytes] = set()
        #: How many files are being shortened by `make_partial`.
        self.num_shortened = 0
        #: Called with each node that no worker needs, since it is doubtful or a larger node has its tokens.
        self.useless: Callable[[Node], None] = lambda _: None

    def evict(self, need_bytes: int, limit: int) -> list[Row]:
        """Evict least recently used files until `need_bytes` are freed, `limit` at most; return their rows.

        Evicts leaves, and nodes whose KV no session sees any more, which become gaps.
        """
        victims: list[Row] = []
        removed: list[Row] = []
        gaps: list[Row] = []
        while need_bytes > 0 and len(victims) < limit and (victim := self._index.oldest()) is not None:
            row = victim.row
            if victim.children:
                self._index.make_gap(victim)
                gaps.append(row)
            else:
                self._index.remove(victim)
                removed.append(row)
            if row.size_bytes:  # a gap without children is removed too, but frees nothing
                need_bytes -= row.size_bytes
                victims.append(row)
        if gaps:
            self._queue.make_gaps(gaps, needed=True)  # before `unlink`, which may have the same nodes
        if removed:
            self._queue.unlink(removed)
        return victims

    def make_gaps(self, nodes: Sequence[Node]) -> None:
        """Evict the files of nodes whose KV no session sees any more, even if there is disk space."""
        rows = [node.row for node in nodes]
        for node in nodes:
            self._index.make_gap(node)
        if rows:
            self._queue.make_gaps(rows)

    def make_partial(self, node: Node, layout: ModelLayout, identity: Identity) -> None:
        """Queue the eviction of a part of a node's file: the KV of layers with windows."""
        row = node.row
        node.rest_bytes = node.size_bytes  # from now on no match relies on these sections
        self.num_shortened += 1
        self._queue.shorten(row, layout, identity, partial(self._shortened, node))

    def _shortened(self, node: Node, size_bytes: int | None) -> None:
        self.num_shortened -= 1
        if not (self._index.has(node) and node.is_partial):
            return  # removed meanwhile, or about to be whole again
        if size_bytes is None:
            node.rest_bytes = 0
        else:
            node.rest_bytes = size_bytes
            self._index.resize(node, size_bytes)

    def discard(self, nodes: Iterable[Node]) -> int:
        """Remove these nodes, children first, except nodes that a remaining node continues; return how many.

        A node that a load or a turn uses stays until its release.
        """
        num_discarded = 0
        for node in nodes:
            if all(child.doomed for child in node.children):
                node.doomed = True
                self.discard_released(node)
                num_discarded += 1
        return num_discarded

    def discard_released(self, released: Node) -> None:
        """Remove discarded nodes of a released node's chain, from its end to the first one still needed."""
        for node in released.chain():
            if not node.doomed or node.holds:
                return
            if not node.children:
                self._remove([node], "cancelled")
            elif all(child.doomed for child in node.children):
                return  # one of the children is still held
            else:
                node.doomed = False  # a snapshot that was saved meanwhile continues it

    def reject(self, node: Node, doubt: str) -> bool:
        """Remove a snapshot whose file failed verification, and all its descendants.

        False if the snapshot has been removed already, by another load or by `forget`.
        """
        if not self._index.has(node):
            return False
        _log.warning("snapshot_quarantined", digest=node.digest.hex(), reason=doubt)
        self.useless(node)
        self._remove([*self._index.descendants(node), node], "no_parent")
        return True

    def note_end(self, node: Node, write: Write) -> None:
        """Update the index after a write has ended."""
        # The partial file that an abandoned write was to replace is gone once its own file is in place.
        in_place = bool(node.rest_bytes) and self._index.has(node)
        if write.state is WriteState.DURABLE and (write.abandoned is None or in_place):
            self._left.discard(node.digest)
            self._index.mark_durable(node)
            if node.resumable:
                superseded = self._index.superseded(node)
                self.discard(superseded)
                for other in superseded:
                    if not self._index.has(other):
                        self.useless(other)
            return
        if self._index.has(node):
            if node.rest_bytes:
                self._index.leave_partial(node)
                return
            descendants = self._index.descendants(node)
            if any(other.durable for other in descendants):  # the node was to fill a gap
                self._index.make_gap(node)
                self._queue.make_gaps([node.row])  # its file may be on disk all the same
                return
            self._remove([*descendants, node], "no_parent")
        # The file may be on disk: the write was abandoned after the writer's last check, or the sync of the
        # directory failed. A later save of the same snapshot is queued already and replaces the file, unless
        # that save is abandoned too.
        if write.state in {WriteState.DURABLE, WriteState.FAILED}:
            self._left.add(node.digest)
        if node.digest in self._left and self._index.get(node.digest) is None:
            self._left.remove(node.digest)
            self._queue.unlink([write.row])

    def _remove(self, nodes: list[Node], reason: DropReason | Literal["cancelled"]) -> None:
        """Remove nodes, children before parents; writes in flight are abandoned for `reason`."""
        rows = []
        for node in nodes:
            if not node.durable:
                self._queue.abandon(node, reason)
            if node.durable or node.rest_bytes:
                rows.append(node.row)
            self._index.remove(node)
        if rows:
            self._queue.unlink(rows)
