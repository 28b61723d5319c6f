"""A door that a few may be behind at a time; tenants come in by turns."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Gate:
    """Lets `limit` in at a time; one tenant's queue costs another no more than a turn. Event loop only."""

    def __init__(self, limit: int) -> None:
        self._num_free = limit
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order of their turns

    @asynccontextmanager
    async def enter(self, tenant: str) -> AsyncIterator[None]:
        """Wait for the tenant's turn, and hold a place."""
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(tenant)
        try:
            yield
        finally:
            self._leave()

    async def _wait(self, tenant: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the place had been handed over already
                self._leave()
            raise

    def _leave(self) -> None:
        """Hand the place to whose turn it is."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            queue = self._waiting.pop(tenant)
            turn = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
