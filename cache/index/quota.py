"""The disk limits of the cache: decides when snapshots are evicted.

Owns the limits and the count of evictions. Belongs to the event loop and never waits for the disk: the writer
measures the free space there. Knows nothing of files.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from cache.disk.disk_work import FreedSpace
    from cache.names.snapshot import Name

    from .index import SnapshotIndex
    from .nodes import Node
    from .remover import Remover
    from .write_queue import WriteQueue

_log = structlog.get_logger("turnkeep.cache")

#: The most snapshots that are evicted at a time; the others wait for the next save or step.
EVICT_LIMIT: Final = 32

#: The pause between two evictions after a limit was lowered.
STEP_PAUSE_S: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUsage:
    """Bytes at one instant: `free + held + evictable = capacity`."""

    #: What snapshots may use: the disk limit minus the quarantine, and no more than the file system has
    #: beyond `min_free_bytes`.
    capacity: int
    #: Negative while a lowered limit is exceeded.
    free: int
    #: Snapshots that must not be evicted now: they are being written, or a load or a turn uses them.
    held: int
    evictable: int


class Quota:
    """Keeps an index within the disk limits; `remover` does the evictions."""

    def __init__(
        self,
        index: SnapshotIndex,
        queue: WriteQueue,
        remover: Remover,
        *,
        max_bytes: int,
        min_free_bytes: int,
    ) -> None:
        self._most_queued_bytes = queue.queue_bytes
        self.evicted = 0
        self._index = index
        self._queue = queue
        self._remover = remover
        self._loop = asyncio.get_running_loop()
        self._step: asyncio.TimerHandle | None = None
        #: While fewer bytes than this are free, evictions for want of free space have no effect.
        self._no_effect_below = 0
        queue.on_removed = self._note_removed
        self._set(max_bytes, min_free_bytes)

    def usage(self) -> DiskUsage:
        """Return the current use of the disk."""
        used = self._index.stored_bytes + self._queue.counts.in_flight_bytes
        free, held = -self._excess(), self._index.held_bytes + self._queue.counts.in_flight_bytes
        return DiskUsage(capacity=used + free, free=free, held=held, evictable=used - held)

    def has_room(self, size_bytes: int, used: int) -> bool:
        """Return whether a snapshot last used at `used` may find room: free bytes, or an older snapshot."""
        if self._excess() + size_bytes <= 0:
            return True
        self._queue.measure()  # nothing else would, until a save is accepted
        oldest = self._index.oldest()
        return not self._has_no_effect(size_bytes) and oldest is not None and oldest.used < used

    def add(self, name: Name, size_bytes: int, used: int | None = None) -> Node | None:
        """Add a snapshot that is queued for the disk to the index, after evicting others if space is lacking.

        `used` is as in `SnapshotIndex.add`. Returns its node. None, and nothing is added, if too little can
        be evicted, or not in one step of `EVICT_LIMIT` snapshots: then a later call may succeed.
        """
        node = self._index.add(name, size_bytes, used)
        if self._has_evicted_for(node):
            return node
        self._index.remove(node)
        return None

    def _has_evicted_for(self, node: Node) -> bool:
        need = self._excess() + node.size_bytes
        if need <= 0:
            return True
        if self._has_no_effect(node.size_bytes) or need > self.usage().evictable:
            self._queue.measure()  # nothing else would, until a save is accepted
            return False  # evicting everything would not be enough
        # Without what was used with it, such as the blocks before it, the snapshot would be of no use.
        return self._evict(need, EVICT_LIMIT, node.used) >= need

    def set_limits(self, *, max_bytes: int, min_free_bytes: int) -> None:
        """Change the limits. Snapshots above them are evicted in the background, in small batches."""
        self._set(max_bytes, min_free_bytes)
        _log.info("cache_limits_changed", max_bytes=max_bytes, min_free_bytes=min_free_bytes)
        self.check()

    def _set(self, max_bytes: int, min_free_bytes: int) -> None:
        self.max_bytes, self.min_free_bytes = max_bytes, min_free_bytes
        # More would wait in memory, also unpublished tokens' KV, and then find no room.
        self._queue.queue_bytes = min(self._most_queued_bytes, max_bytes)

    def check(self) -> None:
        """Schedule evictions if limits are exceeded."""
        if self._step is None and self._excess() > 0:
            self._step = self._loop.call_later(STEP_PAUSE_S, self._shrink)

    def shrink_at_once(self) -> None:
        """Evict all snapshots above the disk limit in one step; for a start, when no request waits."""
        used = self._index.stored_bytes + self._queue.quarantined_bytes
        before = self.evicted
        self._evict(min(used - self.max_bytes, self.usage().evictable), len(self._index))
        if self.evicted > before:
            _log.warning("cache_shrunk", evicted=self.evicted - before, max_bytes=self.max_bytes)

    def close(self) -> None:
        """Cancel scheduled evictions."""
        if self._step is not None:
            self._step.cancel()

    def _excess(self) -> int:
        """Return by how many bytes the cache exceeds its limits; if negative, how many more bytes fit."""
        return max(self._above_limit(), self._lacking())

    def _above_limit(self) -> int:
        used = self._index.stored_bytes + self._queue.counts.in_flight_bytes
        return used + self._queue.quarantined_bytes - self.max_bytes

    def _lacking(self) -> int:
        """Return how many bytes the file system lacks of the minimum that stays free; negative if none."""
        free = self._queue.free_bytes + self._queue.unlinking_bytes - self._queue.counts.in_flight_bytes
        return self.min_free_bytes - free

    def _has_no_effect(self, size_bytes: int = 0) -> bool:
        """Whether free space lacks for `size_bytes` more, and the last eviction did not raise it."""
        if self._queue.free_bytes >= self._no_effect_below:
            self._no_effect_below = 0
        return self._no_effect_below > 0 and self._lacking() + size_bytes > 0

    def _note_removed(self, freed: FreedSpace) -> None:
        """Without effect, further evictions would only empty the cache: they wait until space is free."""
        lacks = freed.after_bytes < self.min_free_bytes and freed.removed_bytes > 0
        if not (lacks and freed.is_missing):
            self._no_effect_below = 0
            return
        if not self._no_effect_below:
            _log.warning(
                "eviction_freed_nothing",
                removed_bytes=freed.removed_bytes,
                free_bytes=freed.after_bytes,
                min_free_bytes=self.min_free_bytes,
                hint="snapshots of the file system or hard links keep removed files: free space elsewhere,"
                " delete local snapshots (macOS: tmutil listlocalsnapshots /), or lower min_free_disk",
            )
        self._no_effect_below = max(self._no_effect_below, freed.enough_bytes)

    def _shrink(self) -> None:
        self._step = None
        excess = self._above_limit() if self._has_no_effect() else self._excess()
        if excess > 0 and self._evict(min(excess, self.usage().evictable), EVICT_LIMIT):
            self.check()

    def _evict(self, need_bytes: int, limit: int, before: int | None = None) -> int:
        """Evict snapshots until `need_bytes` are freed, `limit` at most; return the bytes of their files.

        Evicts only those last used earlier than `before`, if that is given.
        """
        victims = self._remover.evict(need_bytes, limit, before)
        self.evicted += len(victims)
        return sum(victim.size_bytes for victim in victims)
