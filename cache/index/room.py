"""How much room the snapshots have, and who leaves for want of it.

Owns the limits, the pinned prefixes and the count of the evicted. Belongs to the event loop and never waits
for the disk: what is free there is what the writer has last measured. Knows nothing of files.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from cache.names.errors import PinRefusedError

from .pins import Pins

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cache.disk.rows import Pin
    from cache.disk.writer import Writer

    from .index import Index
    from .pins import TrackedPin
    from .removal import Removal

_log = structlog.get_logger("turnkeep.cache")

#: At most so many snapshots are evicted in one step; the rest waits for the next save, or the next tick.
EVICT_LIMIT: Final = 32

#: The pause between two steps while a lowered limit is made good.
STEP_PAUSE_S: Final = 0.01

#: Pinned prefixes may take this share of the disk limit: the sessions that go on need the rest.
PIN_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUsage:
    """Bytes at one instant: `free + pinned + evictable = capacity`.

    `capacity` is what snapshots may take: the disk limit less the quarantine, as far as the file system has
    it beside what is to be left free. `pinned` is what eviction has to leave alone: pinned prefixes (`kept`
    of it), what is on its way to the disk or being loaded, and the chains that those continue. `free` is
    below 0 while a lowered limit is being made good.
    """

    capacity: int
    free: int
    pinned: int
    evictable: int
    kept: int


class Room:
    """Evicts through `removal`."""

    def __init__(
        self,
        index: Index,
        writer: Writer,
        pins: Iterable[Pin],
        removal: Removal,
        *,
        max_bytes: int,
        min_free_bytes: int,
    ) -> None:
        self.max_bytes = max_bytes
        self.min_free_bytes = min_free_bytes
        self.evicted = 0
        self._index = index
        self._writer = writer
        self._removal = removal
        self._pins = Pins(index, pins)
        self._loop = asyncio.get_running_loop()
        self._step: asyncio.TimerHandle | None = None

    def usage(self) -> DiskUsage:
        """Measure."""
        used = self._index.stored_bytes + self._writer.counts.in_flight_bytes
        free, pinned = -self._excess(), self._index.held_bytes()
        # What was forgotten while it was under way is in flight still, but in the index no more.
        pinned += self._writer.counts.in_flight_bytes - self._index.on_its_way_bytes
        return DiskUsage(
            capacity=used + free,
            free=free,
            pinned=pinned,
            evictable=used - pinned,
            kept=self._index.kept_bytes,
        )

    def make(self, size_bytes: int) -> bool:
        """Evict until `size_bytes` more fit both limits; False where they cannot, or not in one step."""
        need = self._excess() + size_bytes
        if need <= 0:
            return True
        if need > self.usage().evictable:
            return False  # nothing is given up in vain, nor looked through
        return self._evict(need, EVICT_LIMIT) >= need

    def set_limits(self, max_bytes: int, min_free_bytes: int) -> None:
        """Hold to these limits from now on. What is over them leaves a step at a time."""
        self.max_bytes, self.min_free_bytes = max_bytes, min_free_bytes
        _log.info("cache_limits_changed", max_bytes=max_bytes, min_free_bytes=min_free_bytes)
        if self._index.kept_bytes > max_bytes:
            _log.warning("pins_exceed_the_limit", pinned_bytes=self._index.kept_bytes, max_bytes=max_bytes)
        self.check()

    def check(self) -> None:
        """See to it that what is over the limits leaves, as far as it may."""
        if self._step is None and self._excess() > 0:
            self._step = self._loop.call_later(STEP_PAUSE_S, self._shrink)

    def shrink_at_once(self) -> None:
        """Evict all that exceeds the limits, in one go: at a start, where no request waits for it yet."""
        used = self._index.stored_bytes + self._writer.quarantined_bytes
        before = self.evicted
        self._evict(min(used - self.max_bytes, self.usage().evictable), len(self._index))
        if self.evicted > before:
            _log.warning("cache_shrunk", evicted=self.evicted - before, max_bytes=self.max_bytes)

    def pin(self, pin: Pin) -> TrackedPin:
        """Keep a prefix, what is stored of it and what comes. Raises `PinRefusedError`."""
        new = self._pins.get(pin) is None
        tracked = self._pins.add(pin)
        most = int(PIN_SHARE * self.max_bytes)
        if new and self._index.kept_bytes > most:
            size_bytes, kept_bytes = tracked.size_bytes, self._index.kept_bytes
            self._pins.remove(pin)
            raise PinRefusedError(
                f"with these {size_bytes} bytes {kept_bytes} would be pinned, and at most {most} may be"
                f" ({PIN_SHARE:.0%} of the limit of {self.max_bytes}): unpin others, or raise max_disk"
            )
        return tracked

    def unpin(self, root: bytes, tokens: bytes, *, exactly: bool) -> list[Pin]:
        """Let go of all pinned prefixes of these packed tokens, or only of the one that is all of them."""
        gone = [pin for pin in self._pins.within(root, tokens) if not exactly or pin.tokens == tokens]
        for pin in gone:
            self._pins.remove(pin)
        self.check()
        return gone

    def clear(self) -> None:
        """Forget the pins, which are gone with everything else."""
        self._pins.clear()

    def close(self) -> None:
        """Evict nothing any more."""
        if self._step is not None:
            self._step.cancel()

    def _excess(self) -> int:
        """How far over its limits the cache is (negative: how much still fits)."""
        in_flight = self._writer.counts.in_flight_bytes
        used = self._index.stored_bytes + in_flight + self._writer.quarantined_bytes
        free = self._writer.free_bytes + self._writer.unlinking_bytes - in_flight
        return max(used - self.max_bytes, self.min_free_bytes - free)

    def _shrink(self) -> None:
        self._step = None
        excess = self._excess()
        if excess > 0 and self._evict(min(excess, self.usage().evictable), EVICT_LIMIT):
            self.check()

    def _evict(self, need_bytes: int, limit: int) -> int:
        """Evict; returns the bytes that this frees."""
        victims = self._removal.evict(need_bytes, limit)
        self.evicted += len(victims)
        return sum(victim.size_bytes for victim in victims)
