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

    def evict(self, need_bytes: int, limit: int) -> list[Entry]:
        """Evict least recently used leaves until `need_bytes` are free, at most `limit`; returns them."""
        victims: list[Entry] = []
        while need_bytes > 0 and len(victims) < limit and (victim := self._index.oldest()) is not None:
            self._index.remove(victim)
            need_bytes -= victim.size_bytes
            victims.append(victim)
        if victims:
            self._writer.unlink([victim.row for victim in victims])
        return victims

    def discard(self, entries: Iterable[Entry]) -> int:
        """Discard those of these entries, children first, that nothing else continues; count them.

        What a load or a turn needs stays until it is released.
        """
        num_discarded = 0
        for entry in entries:
            if all(child.doomed for child in entry.children):
                entry.doomed = True
                self.resume(entry)
                num_discarded += 1
        return num_discarded

    def resume(self, released: Entry) -> None:
        """Go on with what was to be discarded, from an entry upwards, as far as nobody needs it any more."""
        for entry in released.chain():
            if not entry.doomed or entry.pins:
                return
            if not entry.children:
                self._take_out([entry], "cancelled")
            elif all(child.doomed for child in entry.children):
                return  # somebody else holds one of them
            else:
                entry.doomed = False  # what was saved on top of it meanwhile needs it again

    def reject(self, entry: Entry, doubt: str) -> bool:
        """Give up a doubtful snapshot and all that continues it, pinned or not: nothing could match it.

        False where another load was first, or it was forgotten meanwhile.
        """
        if not self._index.has(entry):
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
                self.discard(self._index.swallowed(entry))
            return
        if self._index.has(entry):
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
