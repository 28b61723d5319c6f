"""Keeps the KV of idle sessions on the device, and checks whether there is memory for more.

Device thread only.

Also counts the memory promised to restores. If memory is short, sends a `Short` event to the event loop;
only the event loop decides whose KV is dropped. Knows nothing of turns or steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from cache.kv import layers

from .turn import Short

if TYPE_CHECKING:
    from collections.abc import Callable

    from cache.names.policy import Policy
    from turnkeep_client.subjects import SessionKey

    from .memory import Estimator
    from .turn import ResidentKv


@dataclass(frozen=True, slots=True)
class RoomRequest:
    """A restore's request for memory; `reply` gets True once it is granted, False if it never can be."""

    key: SessionKey
    num_tokens: int
    reply: Callable[[bool], None]
    policy: Policy


class Room:
    """The KV of idle sessions, and the restores that wait for memory or have been promised memory."""

    def __init__(self, estimator: Estimator, block: int, report_short: Callable[[Short], None]) -> None:
        """`report_short` sends a `Short` event to the event loop, which then drops idle sessions."""
        #: Whether the event loop was asked to drop sessions, and has not answered with `made_room`.
        self.awaits_drops = False
        self.estimator = estimator
        self._block = block
        self._report_short = report_short
        self._resident: dict[SessionKey, ResidentKv] = {}
        self._promised: dict[SessionKey, int] = {}  # bytes that a restore is about to load
        self._requests: list[RoomRequest] = []

    @property
    def is_promised(self) -> bool:
        """Whether a restore has been promised memory and is still under way."""
        return bool(self._promised)

    def get(self, key: SessionKey) -> ResidentKv | None:
        """Return an idle session's KV without removing it."""
        return self._resident.get(key)

    def put(self, key: SessionKey, resident: ResidentKv) -> None:
        """Keep a session's KV after its turn has ended."""
        self._resident[key] = resident

    def pop(self, key: SessionKey) -> ResidentKv | None:
        """Remove a session's KV and return it."""
        return self._resident.pop(key, None)

    def clear(self) -> None:
        """Drop the KV of all idle sessions."""
        self._resident.clear()

    def request(self, request: RoomRequest) -> None:
        """Queue a restore's request for memory; an earlier promise to the session ends."""
        self.end_promise(request.key)
        self._requests.append(request)

    def end_promise(self, key: SessionKey) -> None:
        """End the promise of memory to a session's restore, whose KV is loaded now or no longer needed."""
        self._promised.pop(key, None)

    def release(self, key: SessionKey) -> None:
        """Release the memory promised to a session's restore, or withdraw the request for it."""
        self.end_promise(key)
        self._requests = [request for request in self._requests if request.key != key]

    def made_room(self) -> None:
        """Record that the event loop has answered the last `Short` event."""
        self.awaits_drops = False

    def grant_requests(self, *, is_busy: bool) -> None:
        """Grant the restores' requests in the order of their arrival, while there is memory.

        A request that does not fit waits while idle sessions, running turns (`is_busy`) or other restores
        may still free memory; otherwise it is refused.
        """
        while self._requests:
            request = self._requests[0]
            estimator = self.estimator.under(request.policy)
            size_bytes = estimator.restore_bytes(request.num_tokens, self._block)
            fits = self.has(size_bytes)
            if not fits and (self.ask_for(size_bytes) or is_busy or self._promised):
                return
            if not fits:
                mx.synchronize()  # a step that ran ahead, and was not needed, may still hold memory
                fits = self.has(size_bytes)
                if not fits and self.ask_for(size_bytes):
                    return
            if fits:
                self._promised[request.key] = size_bytes
            del self._requests[0]
            request.reply(fits)

    def has(self, size_bytes: int) -> bool:
        """Say whether `size_bytes` more fit onto the device, besides the memory promised to restores."""
        return self._excess(size_bytes) <= 0

    def has_or_asks(self, size_bytes: int) -> bool:
        """Say whether `size_bytes` more fit now; if not, ask the event loop to drop idle sessions."""
        if self.has(size_bytes):
            return True
        self.ask_for(size_bytes)
        return False

    def ask_for(self, size_bytes: int, *, but: SessionKey | None = None) -> bool:
        """Ask the event loop to drop idle sessions; return False if all of them but `but` hold too little.

        After True, `size_bytes` may fit once `made_room` has been called.
        """
        excess = self._excess(size_bytes)
        idle = [resident for key, resident in self._resident.items() if key != but]
        if not idle or sum(layers.allocated_bytes(resident.caches) for resident in idle) < excess:
            return False
        if not self.awaits_drops:
            self.awaits_drops = True
            self._report_short(Short(excess, but))
        return True

    def _excess(self, size_bytes: int) -> int:
        promised = sum(self._promised.values())
        return mx.get_active_memory() + promised + size_bytes - self.estimator.limit_bytes
