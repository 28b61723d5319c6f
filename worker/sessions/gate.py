"""A limit on how many do something at a time (folds, say), shared fairly between tenants."""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from anyio import Event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Gate:
    """Lets `limit` callers in at a time, those that wait by tenant in rotation. Event loop only."""

    def __init__(self, limit: int) -> None:
        self._num_free = limit
        self._waiting: dict[str, deque[Event]] = {}  # in the order of their turns

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
        turn = Event()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():  # the place had been handed over already
                self._leave()
            else:
                self._withdraw(tenant, turn)
            raise

    def _withdraw(self, tenant: str, turn: Event) -> None:
        queue = self._waiting[tenant]
        queue.remove(turn)
        if not queue:
            del self._waiting[tenant]

    def _leave(self) -> None:
        """Hand the place to whose turn it is."""
        if not self._waiting:
            self._num_free += 1
            return
        tenant = next(iter(self._waiting))
        queue = self._waiting.pop(tenant)
        queue.popleft().set()
        if queue:
            self._waiting[tenant] = queue  # behind the others
