"""What is on the device between turns, and whether there is room for more. Device thread only.

Keeps idle sessions' KV, and the room that restores were promised. Drops no session: the event loop does that,
asked by a `Short`. Knows nothing of turns or steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from cache.kv import layers

from .turn import Short

if TYPE_CHECKING:
    from collections.abc import Callable

    from turnkeep_client.subjects import SessionKey

    from .memory import Estimator
    from .turn import Held


@dataclass(frozen=True, slots=True)
class Ask:
    """A restore's wish for room. `answer` is called with False where there never will be any."""

    key: SessionKey
    num_tokens: int
    answer: Callable[[bool], None]


class Room:
    """Idle sessions by their keys, and restores that wait for room or have it."""

    def __init__(self, estimator: Estimator, block: int, ask: Callable[[Short], None]) -> None:
        """`ask` tells the event loop what is short."""
        #: Whether the event loop was asked to drop sessions, and has not answered: `made`.
        self.is_asked = False
        self.estimator = estimator
        self._block = block
        self._ask = ask
        self._held: dict[SessionKey, Held] = {}
        self._promised: dict[SessionKey, int] = {}  # bytes that restores are about to bring
        self._asking: list[Ask] = []

    @property
    def is_promised(self) -> bool:
        """Say whether a restore is under way: its turn, or its end, is a command to come."""
        return bool(self._promised)

    def get(self, key: SessionKey) -> Held | None:
        """Return what a session holds, and leave it in its place."""
        return self._held.get(key)

    def put(self, key: SessionKey, held: Held) -> None:
        """Keep what a session holds after its turn."""
        self._held[key] = held

    def take(self, key: SessionKey) -> Held | None:
        """Give out what a session holds, to its turn or to nobody."""
        return self._held.pop(key, None)

    def ask(self, ask: Ask) -> None:
        """Queue up for the room that a restore needs."""
        self._asking.append(ask)

    def arrived(self, key: SessionKey) -> None:
        """Give up the room that was promised: what it was for is on the device now."""
        self._promised.pop(key, None)

    def release(self, key: SessionKey) -> None:
        """Give up the room that a restore was promised, or waits for."""
        self.arrived(key)
        self._asking = [ask for ask in self._asking if ask.key != key]

    def made(self) -> None:
        """Note that the event loop has dropped what it could for the last `Short`."""
        self.is_asked = False

    def grant(self, *, is_busy: bool) -> None:
        """Answer restores that ask for room, in their order, as far as there is any.

        If there is none, they keep waiting while idle sessions, running turns (`is_busy`) or other restores
        may still free some.
        """
        while self._asking:
            ask = self._asking[0]
            size_bytes = self.estimator.restore_bytes(ask.num_tokens, self._block)
            fits = self.has(size_bytes)
            if not fits and (self.comes(size_bytes) or is_busy or self._promised):
                return
            if not fits:
                mx.synchronize()  # a step begun ahead that nobody needs any more may still hold some
                fits = self.has(size_bytes)
                if not fits and self.comes(size_bytes):
                    return
            if fits:
                self._promised[ask.key] = size_bytes
            del self._asking[0]
            ask.answer(fits)

    def has(self, size_bytes: int) -> bool:
        """Say whether there is room for so many bytes more, beside what was promised."""
        return self._excess(size_bytes) <= 0

    def has_now(self, size_bytes: int) -> bool:
        """Say whether there is room for what can be done without; where there is not, ask for next time."""
        if self.has(size_bytes):
            return True
        self.comes(size_bytes)
        return False

    def comes(self, size_bytes: int, *, but: SessionKey | None = None) -> bool:
        """Ask for room that is lacking; False if that is in vain: all idle sessions but one hold too little.

        Look again once it is `made`.
        """
        excess = self._excess(size_bytes)
        idle = [held for key, held in self._held.items() if key != but]
        if not idle or sum(layers.allocated_bytes(held.caches) for held in idle) < excess:
            return False
        if not self.is_asked:
            self.is_asked = True
            self._ask(Short(excess, but))
        return True

    def _excess(self, size_bytes: int) -> int:
        promised = sum(self._promised.values())
        return mx.get_active_memory() + promised + size_bytes - self.estimator.limit_bytes
