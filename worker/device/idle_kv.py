"""Keeps the KV of idle sessions on the device, and checks whether there is memory for more.

Device thread only.

Idle KV has no time limit: it stays until the session's next turn, or until the event loop or a lack of memory
has it dropped, least recently used first; the event loop is told. Also counts the memory promised to
restores. Knows nothing of turns or steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from cache.kv import layers

if TYPE_CHECKING:
    from collections.abc import Callable

    from cache.names.policy import Policy
    from turnkeep_client.subjects import SessionKey

    from .memory import Estimator
    from .turn import ResidentKv


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """A restore's request for memory for the KV of `num_tokens` tokens."""

    key: SessionKey
    num_tokens: int
    #: Called with True once the memory is granted, with False if it never can be.
    reply: Callable[[bool], None]
    policy: Policy


class IdleKv:
    """The KV of idle sessions, and the restores that wait for memory or have been promised memory."""

    def __init__(
        self, estimator: Estimator, block: int, dropped: Callable[[tuple[SessionKey, ...]], None]
    ) -> None:
        """`dropped` is called with the sessions whose KV was dropped because memory was short or KV lost."""
        self.estimator = estimator
        self._block = block
        self._dropped = dropped
        self._resident: dict[SessionKey, ResidentKv] = {}  # least recently used first
        self._promised: dict[SessionKey, int] = {}  # bytes that a restore is about to load
        self._requests: list[MemoryRequest] = []

    @property
    def is_promised(self) -> bool:
        """Whether a restore has been promised memory and is still under way."""
        return bool(self._promised)

    def get(self, key: SessionKey) -> ResidentKv | None:
        """Return an idle session's KV without removing it; None if there is none."""
        return self._resident.get(key)

    def put(self, key: SessionKey, resident: ResidentKv) -> None:
        """Keep a session's KV after its turn has ended, as the most recently used."""
        self._resident[key] = resident

    def pop(self, key: SessionKey) -> ResidentKv | None:
        """Remove a session's KV and return it; None if there is none."""
        return self._resident.pop(key, None)

    def clear(self) -> None:
        """Drop the KV of all idle sessions, since it is unknown after a failed evaluation."""
        keys = tuple(self._resident)
        self._resident.clear()
        self._dropped(keys)

    def request(self, request: MemoryRequest) -> None:
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

    def grant_requests(self, *, is_busy: bool) -> None:
        """Grant the restores' requests in the order of their arrival, while there is memory.

        A request that does not fit waits while running turns (`is_busy`) or other restores may still free
        memory; otherwise it is refused.
        """
        while self._requests:
            request = self._requests[0]
            estimator = self.estimator.under(request.policy)
            size_bytes = estimator.restore_bytes(request.num_tokens, self._block)
            fits = self.make_room(size_bytes)
            if not fits and (is_busy or self._promised):
                return
            if not fits:
                mx.synchronize()  # a step that ran ahead, and was not needed, may still hold memory
                fits = self.make_room(size_bytes)
            if fits:
                self._promised[request.key] = size_bytes
            del self._requests[0]
            request.reply(fits)

    def make_room(self, size_bytes: int, *, but: SessionKey | None = None) -> bool:
        """Make room for `size_bytes` more, besides the memory promised to restores; return False if it lacks.

        Drops idle sessions' KV as needed, except that of `but`; none if all of it together is too little.
        """
        excess = self._excess(size_bytes)
        if excess <= 0:
            return True
        held = {key: layers.allocated_bytes(kv.caches) for key, kv in self._resident.items() if key != but}
        if sum(held.values()) < excess:
            return False
        keys = []
        for key, held_bytes in held.items():
            if excess <= 0:
                break
            del self._resident[key]
            keys.append(key)
            excess -= held_bytes
        self._dropped(tuple(keys))
        return self._excess(size_bytes) <= 0

    def _excess(self, size_bytes: int) -> int:
        promised = sum(self._promised.values())
        return mx.get_active_memory() + promised + size_bytes - self.estimator.limit_bytes
