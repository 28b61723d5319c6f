"""Makes good the snapshots that were dropped because the writer's queue was full. Event loop only.

The KV of an idle session that is only on the device is lost with the process. Once the queue is empty, the
session's missing blocks are cut again, in turns that add no token, most recently active sessions first. Knows
which sessions lack snapshots; the engine runs the turns.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cache.store import Store
    from turnkeep_client.subjects import SessionKey

#: How often to look whether the writer's queue is empty.
_POLL_S: Final = 0.05


class Mending:
    """The sessions that lack snapshots, and the one that is being mended."""

    def __init__(
        self,
        store: Store,
        is_at_work: Callable[[SessionKey], bool],
        mend: Callable[[SessionKey], Awaitable[bool]],
    ) -> None:
        """`mend` cuts what fits into the empty queue, and returns True if more is missing.

        It is called for sessions that are not at work.
        """
        self._store = store
        self._is_at_work = is_at_work
        self._mend = mend
        self._lacking: dict[SessionKey, None] = {}  # least recently active first
        self._some = asyncio.Event()
        self._ended: dict[SessionKey, asyncio.Event] = {}

    def note(self, key: SessionKey) -> None:
        """Record that a snapshot of a session was dropped."""
        self._lacking.pop(key, None)
        self._lacking[key] = None
        self._some.set()

    def discard(self, key: SessionKey) -> None:
        """Forget a session: its KV has left the device or must not be stored. Also while it is mended."""
        self._lacking.pop(key, None)

    async def ended(self, key: SessionKey) -> None:
        """Wait until the session is not being mended."""
        while key in self._ended:
            await self._ended[key].wait()

    async def run(self) -> None:
        """Mend sessions whenever the queue is empty, until cancelled."""
        while True:
            await self._some.wait()
            if not await self._next():
                await asyncio.sleep(_POLL_S)
            if not self._lacking:
                self._some.clear()

    async def finish(self, within_s: float) -> int:
        """Mend all sessions, or as many as time allows; return how many still lack snapshots."""
        until_s = monotonic() + within_s
        while self._lacking and monotonic() < until_s:
            if not await self._next():
                await asyncio.sleep(_POLL_S)
        return len(self._lacking)

    async def _next(self) -> bool:
        """Mend the most recently active idle session; False if there is none, or the queue is not empty."""
        free = (
            key for key in reversed(self._lacking) if not self._is_at_work(key) and key not in self._ended
        )
        key = next(free, None) if self._store.is_idle else None
        if key is None:
            return False
        self._ended[key] = ended = asyncio.Event()
        try:
            if not await self._mend(key):
                self.discard(key)  # what could not be cut is not tried again before the session's next turn
        finally:
            del self._ended[key]
            ended.set()
        return True
