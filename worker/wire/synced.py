"""Knows which entries of the log the NATS server has synced to its files: a power cut may lose later ones."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from worker.process.clock import monotonic

if TYPE_CHECKING:
    from .journal import Journal

#: Syncs may be late by this share of the time between two of them.
_LATE: Final = 0.25


class SyncedEntries:
    """Knows up to which entry of the log the server's files are complete. Event loop only."""

    def __init__(self, journal: Journal, sync_s: float) -> None:
        """The server syncs its files every `sync_s` seconds; with 0, before it acknowledges an entry."""
        self._journal = journal
        self.after_s = sync_s * (1 + _LATE)
        self._server = ""  # the server process that has these entries
        self._last_seq = 0
        #: The log's last sequences at earlier times, and when all entries up to them are synced.
        self._seen: deque[tuple[float, int]] = deque()

    def has(self, seq: int) -> bool:
        """Whether the entry at this sequence is synced, so that no power cut can lose it."""
        return self._server == self._journal.server and seq <= self._last_seq

    async def look(self) -> int:
        """Read the log's end, up to which it counts as synced `after_s` later; return its size in bytes.

        Raises nats-py's errors.
        """
        server = self._journal.server
        num_bytes, last_seq = await self._journal.end()
        end = self._seen[-1][1] if self._seen else self._last_seq
        if server != self._server or last_seq < end:  # entries may be lost, and others get their sequences
            self._server, self._last_seq = server, 0
            self._seen.clear()
        self._seen.append((monotonic() + self.after_s, last_seq))
        while self._seen and self._seen[0][0] <= monotonic():
            self._last_seq = self._seen.popleft()[1]
        return num_bytes
