"""How snapshots leave: out of the index first, children before their parents, then off the disk.

Belongs to the event loop. Knows what is being loaded or written, and that what was given up must not come
back; not why something leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import structlog

from cache.disk.writer import DropReason, WriteState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cache.disk.writer import Write, Writer

    from .index import Index
    from .nodes import Node

_log = structlog.get_logger("turnkeep.cache")


class Removal:
    """Takes nodes out of the index, and lets the writer remove their files."""

    def __init__(self, index: Index, writer: Writer) -> None:
        self._index = index
        self._writer = writer
        #: Files that may be in place though they were given up: what was saved anew was to replace them.
        self._left: set[bytes] = set()

    def evict(self, need_bytes: int, limit: int) -> list[Node]:
        """Evict least recently used leaves until `need_bytes` are free, at most `limit`; returns them."""
        victims: list[Node] = []
        while need_bytes > 0 and len(victims) < limit and (victim := self._index.oldest()) is not None:
            self._index.remove(victim)
            need_bytes -= victim.size_bytes
            victims.append(victim)
        if victims:
            self._writer.unlink([victim.row for victim in victims])
        return victims

    def discard(self, nodes: Iterable[Node]) -> int:
        """Discard those of these nodes, children first, that nothing else continues; count them.

        What a load or a turn needs stays until it is released.
        """
        num_discarded = 0
        for node in nodes:
            if all(child.doomed for child in node.children):
                node.doomed = True
                self.discard_released(node)
                num_discarded += 1
        return num_discarded

    def discard_released(self, released: Node) -> None:
        """Go on with what was to be discarded, from a node upwards, as far as nobody needs it any more."""
        for node in released.chain():
            if not node.doomed or node.holds:
                return
            if not node.children:
                self._remove([node], "cancelled")
            elif all(child.doomed for child in node.children):
                return  # somebody else holds one of them
            else:
                node.doomed = False  # what was saved on top of it meanwhile needs it again

    def reject(self, node: Node, doubt: str) -> bool:
        """Give up a doubtful snapshot and all that continues it, pinned or not: nothing could match it.

        False where another load was first, or it was forgotten meanwhile.
        """
        if not self._index.has(node):
            return False
        _log.warning("snapshot_quarantined", digest=node.digest.hex(), reason=doubt)
        self._remove([*self._index.descendants(node), node], "no_parent")
        return True

    def note_end(self, write: Write) -> None:
        """Take note of the end of a write."""
        node = write.node
        if write.state is WriteState.DURABLE and write.abandoned is None:
            self._left.discard(node.digest)
            self._index.mark_durable(node)
            if node.resumable:
                self.discard(self._index.superseded(node))
            return
        if self._index.has(node):
            self._remove([*self._index.descendants(node), node], "no_parent")
        # The file may be in place: it was abandoned after the writer last looked, or the sync of the
        # directory failed. If it has been saved anew, that write is queued already, and replaces it, unless
        # it is given up too.
        if write.state in {WriteState.DURABLE, WriteState.FAILED}:
            self._left.add(node.digest)
        if node.digest in self._left and self._index.get(node.digest) is None:
            self._left.remove(node.digest)
            self._writer.unlink([write.row])

    def _remove(self, nodes: list[Node], reason: DropReason | Literal["cancelled"]) -> None:
        """Take nodes out, children before their parents; those on their way are abandoned for `reason`."""
        rows = []
        for node in nodes:
            if node.durable:
                rows.append(node.row)
            else:
                self._writer.abandon(node, reason)
            self._index.remove(node)
        if rows:
            self._writer.unlink(rows)
