"""Limits concurrent work, such as reading logs, and shares the places fairly between tenants."""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from anyio import Event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Gate:
    """Lets `limit` callers in at a time; waiting tenants take turns. Event loop only."""

    def __init__(self, limit: int) -> None:
        self._num_free = limit
        self._waiting: dict[str, deque[Event]] = {}  # tenants in the order of rotation

    @asynccontextmanager
    async def enter(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a place, and occupy it until the block ends."""
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(tenant)
        try:
            yield
        finally:
            self._leave()

    async def _wait(self, tenant: str) -> None:
        admitted = Event()
        self._waiting.setdefault(tenant, deque()).append(admitted)
        try:
            await admitted.wait()
        except BaseException:
            if admitted.is_set():  # the place was handed over already
                self._leave()
            else:
                self._withdraw(tenant, admitted)
            raise

    def _withdraw(self, tenant: str, admitted: Event) -> None:
        queue = self._waiting[tenant]
        queue.remove(admitted)
        if not queue:
            del self._waiting[tenant]

    def _leave(self) -> None:
        """Hand the place to the next waiting tenant, if any."""
        if not self._waiting:
            self._num_free += 1
            return
        tenant = next(iter(self._waiting))
        queue = self._waiting.pop(tenant)
        queue.popleft().set()
        if queue:
            self._waiting[tenant] = queue  # to the end of the rotation
