"""What stays on the device between turns: idle sessions' KV, and the room that restores were promised.

Belongs to the device thread. It alone lets sessions leave the device, and knows nothing of turns or steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from cache.kv import layers

if TYPE_CHECKING:
    from collections.abc import Callable

    from cache.names.blocks import Tokens
    from turnkeep_client.subjects import SessionKey

    from .memory import Estimator


#: How long a prompt that has no room waits for memory that is no session's, and how often it looks. What
#: the writer is at in that moment is not given up, and a disk may hang for longer.
_PATIENCE_S = 2.0
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Held:
    """A session's caches, and the tokens that they cover."""

    caches: list[Any]
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Ask:
    """A restore's wish for room. `answer` is called with False where there never will be any."""

    key: SessionKey
    num_tokens: int
    answer: Callable[[bool], None]


class Resident:
    """Idle sessions in the order of their last use, and restores that wait for room or have it."""

    def __init__(self, estimator: Estimator, block: int, left: Callable[[SessionKey], None]) -> None:
        """`left` is called for every session that has to leave for room."""
        self._estimator = estimator
        self._block = block
        self._left = left
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

    def grant(self, *, is_busy: bool) -> None:
        """Answer those who want room for a restore, in their order, as far as there is any.

        Who finds none waits on while there may be more later: turns are under way (`is_busy`), or restores.
        """
        while self._asking:
            ask = self._asking[0]
            size_bytes = self._estimator.restore_bytes(ask.num_tokens, self._block)
            fits = self.make_room(size_bytes)
            if not fits and (is_busy or self._promised):
                return
            if not fits:
                mx.synchronize()  # a step begun ahead that nobody needs any more may still hold some
                fits = self.make_room(size_bytes)
            if fits:
                self._promised[ask.key] = size_bytes
            del self._asking[0]
            ask.answer(fits)

    def make_room(self, size_bytes: int, *, but: SessionKey | None = None) -> bool:
        """Let idle sessions go, least recently used first, until there is room.

        The session `but` stays. False if there is none, and then nobody has left in vain.
        """
        size_bytes += sum(self._promised.values())
        excess = mx.get_active_memory() + size_bytes - self._estimator.limit_bytes
        if excess <= 0:
            return True
        idle = [key for key in self._held if key != but]
        if sum(layers.allocated_bytes(self._held[key].caches) for key in idle) < excess:
            return False
        while idle and mx.get_active_memory() + size_bytes > self._estimator.limit_bytes:
            key = idle.pop(0)
            del self._held[key]
            self._left(key)
        return mx.get_active_memory() + size_bytes <= self._estimator.limit_bytes

    def comes_free(self, size_bytes: int) -> bool:
        """Wait a while for memory that the event loop is about to let go."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while not self.make_room(size_bytes):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_LOOK_S)
        return True

    def wait_for_restore(self) -> None:
        """Sleep for a moment while a restore is under way on another thread."""
        time.sleep(_LOOK_S)
