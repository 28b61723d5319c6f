"""How snapshots leave: out of the index first, children before their parents, then off the disk.

Belongs to the event loop. Knows what is being loaded or written, and that what was given up must not come
back; not why something leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import structlog

from cache.disk.writer import DropReason, State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cache.disk.writer import Write, Writer

    from .entries import Entry
    from .index import Index

_log = structlog.get_logger("turnkeep.cache")


class Leaving:
    """Takes entries out of the index, and lets the writer remove their files."""

    def __init__(self, index: Index, writer: Writer) -> None:
        self._index = index
        self._writer = writer
        #: Files that may be in place though they were given up: what was saved anew was to replace them.
        self._left: set[bytes] = set()

    def discard(self, entries: list[Entry]) -> None:
        """Take entries without children out of the index, and their files off the disk.

        One that is being loaded stays until that is done.
        """
        for entry in entries:
            self._index.doom(entry, doomed=entry.pins > 0)
        self._take_out([entry for entry in entries if not entry.doomed], "cancelled")

    def discard_unneeded(self, entries: Iterable[Entry]) -> int:
        """Discard those of these entries, children first, that nothing else continues; count them."""
        gone = 0
        for entry in entries:
            if all(child.doomed for child in self._index.children(entry.digest)):
                self.discard([entry])
                gone += 1
        return gone

    def resume(self, entry: Entry) -> None:
        """Let an entry go that was to be discarded, once nobody loads it any more."""
        if entry.doomed and not entry.pins:
            # What was saved on top of it meanwhile needs it again.
            self._index.doom(entry, doomed=False)
            if not self._index.num_children(entry.digest):
                self.discard([entry])

    def reject(self, entry: Entry, doubt: str) -> bool:
        """Give up a doubtful snapshot and all that continues it, pinned or not: nothing could match it.

        False where another load was first, or it was forgotten meanwhile.
        """
        if self._index.get(entry.digest) != entry:
            return False
        _log.warning("snapshot_quarantined", digest=entry.digest.hex(), reason=doubt)
        self._take_out([*self._index.below(entry), entry], "no_parent")
        return True

    def settle(self, write: Write) -> None:
        """Take note of the end of a write."""
        entry = write.entry
        if write.state is State.DURABLE and write.abandoned is None:
            self._left.discard(entry.digest)
            self._index.settle(entry)
            if entry.resumable:
                self.discard_unneeded(self._index.swallowed(entry))
            return
        if self._index.get(entry.digest) == entry:
            self._take_out([*self._index.below(entry), entry], "no_parent")
        # The file may be in place: it was abandoned after the writer last looked, or the sync of the
        # directory failed. If it has been saved anew, that write is queued already, and replaces it, unless
        # it is given up too.
        if write.state in {State.DURABLE, State.FAILED}:
            self._left.add(entry.digest)
        if entry.digest in self._left and self._index.get(entry.digest) is None:
            self._left.remove(entry.digest)
            self._writer.unlink([write.row])

    def _take_out(self, entries: list[Entry], reason: DropReason | Literal["cancelled"]) -> None:
        """Take entries out, children before their parents; those on their way are abandoned for `reason`."""
        rows = []
        for entry in entries:
            if entry.durable:
                rows.append(entry.row)
            else:
                self._writer.abandon(entry, reason)
            self._index.remove(entry)
        if rows:
            self._writer.unlink(rows)
