"""Does it fit, and what has to leave for it. Pure: sizes in, a decision out.

The ledger counts bytes of KV on the device: `reserved` for turns that run, `idle` for sessions that only
stay resident to be quick. The sum never exceeds the limit. Turns wait for room in the order of `place`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from turnkeep_client.subjects import SessionKey

#: A request counts as if it had come so many seconds earlier for each step of its priority.
PRIORITY_S: Final = 10.0


def place(arrived_s: float, priority: int) -> float:
    """Give a request's place in the queue for memory; lower ones come first.

    It never changes, so nobody starves: what comes later and is more important overtakes for a while only.
    """
    return arrived_s - priority * PRIORITY_S


class Ledger:
    """Device bytes by session; least recently used idle sessions leave first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._reserved: dict[SessionKey, int] = {}
        self._idle: OrderedDict[SessionKey, int] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        """Bytes reserved by running turns and held by idle sessions."""
        return sum(self._reserved.values()) + sum(self._idle.values())

    @property
    def num_resident(self) -> int:
        """Sessions that hold KV on the device."""
        return len(self._reserved) + len(self._idle)

    def ever_fits(self, size_bytes: int) -> bool:
        """Say whether a turn could run if it had the device to itself."""
        return size_bytes <= self.max_bytes

    def reserve(self, key: SessionKey, size_bytes: int) -> list[SessionKey] | None:
        """Reserve for a turn of `key`, whose own idle bytes count as free.

        Returns the idle sessions that must be dropped from the device for it (already taken out of the
        ledger), or None if running turns hold too much: then nothing has changed.
        """
        others = sum(self._reserved.values()) - self._reserved.get(key, 0)
        if others + size_bytes > self.max_bytes:
            return None
        idle = sum(self._idle.values()) - self._idle.pop(key, 0)
        victims = []
        while others + idle + size_bytes > self.max_bytes:
            victim, freed = self._idle.popitem(last=False)
            idle -= freed
            victims.append(victim)
        self._reserved[key] = size_bytes
        return victims

    def settle(self, key: SessionKey, idle_bytes: int) -> None:
        """End a turn: what it reserved becomes what the session really holds."""
        self._reserved.pop(key, None)
        self._idle.pop(key, None)
        if idle_bytes:
            self._idle[key] = idle_bytes

    def forget(self, key: SessionKey) -> None:
        """Drop a session that left the device."""
        self._idle.pop(key, None)
        self._reserved.pop(key, None)
