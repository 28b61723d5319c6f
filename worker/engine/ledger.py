"""Counts the bytes of device memory that sessions' KV takes, and chooses the idle KV that makes room.

Pure: takes sizes, returns decisions. Bytes of KV are those that running turns have reserved, and those of
idle sessions whose KV stays on the device. The sum never exceeds the limit. A turn reserves what it is likely
to need, and more as it grows. `admission` says which turn gets memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnkeep_client.subjects import SessionKey

    from .kv_on_device import KvOnDevice


@dataclass(slots=True, eq=False)
class Claim:
    """A turn's claim on device memory, from its arrival to its end, also while it waits."""

    key: SessionKey
    priority: int
    #: The turn's rank among new ones; see `request.place`.
    place_s: float
    #: The requested bytes; 0 once they are granted.
    wanted: int = 0
    #: Orders turns that have run or were overtaken: a lower number is older. Only younger turns are paused
    #: for older ones, and keep their age meanwhile.
    age: int | None = None
    is_pausing: bool = False


class Ledger:
    """Counts the device bytes that turns have reserved and that idle sessions' KV takes.

    Idle KV has no time limit: it is dropped only to make room, the least recently used first. `reserve`
    chooses it; `IdleKv.make_room` drops more if the device measures less room than the ledger has.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        #: The sessions with KV on the device, least recently used first.
        self.kv_on_device: dict[SessionKey, KvOnDevice] = {}
        self._reserved: dict[Claim, int] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes reserved by running turns and held by idle sessions."""
        idle_bytes = sum(self.kv_on_device[key].size_bytes for key in self._idle())
        return sum(self._reserved.values()) + idle_bytes

    @property
    def num_resident(self) -> int:
        """Number of sessions that hold KV on the device."""
        return len(self._reserved) + len(self._idle())

    @property
    def busy(self) -> set[SessionKey]:
        """The sessions of which a turn has reserved memory; all others are idle."""
        return {claim.key for claim in self._reserved}

    @property
    def running(self) -> tuple[Claim, ...]:
        """The turns that have reserved memory."""
        return tuple(self._reserved)

    def reserved(self, claim: Claim) -> int:
        """Return the bytes that a turn has reserved."""
        return self._reserved.get(claim, 0)

    def excess(self, claim: Claim, size_bytes: int) -> int:
        """Return by how many bytes a turn's reservation of `size_bytes` exceeds the limit; <= 0 if it fits.

        Counts what other turns have reserved, but not the KV of idle sessions.
        """
        return sum(self._reserved.values()) - self.reserved(claim) + size_bytes - self.max_bytes

    def reserve(self, claim: Claim, size_bytes: int) -> list[SessionKey] | None:
        """Reserve `size_bytes` for a turn; the idle KV of its own session counts as free memory.

        Returns the idle sessions whose KV the caller must drop from the device (the ledger has already
        removed them). Returns None and changes nothing if running turns hold too much.
        """
        if self.excess(claim, size_bytes) > 0:
            return None
        self._reserved[claim] = size_bytes
        victims: list[SessionKey] = []
        idle, lacking = iter(self._idle()), self.used_bytes - self.max_bytes
        while lacking > 0:
            victims.append(next(idle))
            lacking -= self.kv_on_device.pop(victims[-1]).size_bytes
        return victims

    def release(self, claim: Claim) -> None:
        """End a turn's reservation, if it has one.

        Unless its next turn has reserved memory by now, the session then counts as idle, with the bytes of
        its resident KV.
        """
        self._reserved.pop(claim, None)

    def _idle(self) -> list[SessionKey]:
        busy = self.busy
        return [key for key in self.kv_on_device if key not in busy]
