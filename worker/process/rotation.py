"""Limits how many tasks do something at once; the tenants whose tasks wait take turns."""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from anyio import Event

from .concurrency import in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

T = TypeVar("T")
P = ParamSpec("P")


class Rotation:
    """Places for tasks: one tenant's waiting tasks, however many, delay another's by few. Event loop only."""

    def __init__(self, most: int) -> None:
        #: Number of places that no task has.
        self.num_free = most
        self._waiting: dict[str, deque[Event]] = {}  # by tenant, the next one first

    @asynccontextmanager
    async def enter(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a place, and keep it inside the block."""
        if self.num_free:
            self.num_free -= 1
        else:
            await self._wait(tenant)
        try:
            yield
        finally:
            self._pass_on()

    async def in_thread(self, tenant: str, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Wait for a place, and run blocking work on a thread."""
        async with self.enter(tenant):
            return await in_thread(work, *args, **named)

    async def _wait(self, tenant: str) -> None:
        entered = Event()
        self._waiting.setdefault(tenant, deque()).append(entered)
        try:
            await entered.wait()
        except BaseException:
            if entered.is_set():  # it has the place already
                self._pass_on()
            else:
                self._waiting[tenant].remove(entered)
                if not self._waiting[tenant]:
                    del self._waiting[tenant]
            raise

    def _pass_on(self) -> None:
        """Give a place to the next tenant's first task; that tenant is last from then on."""
        if not self._waiting:
            self.num_free += 1
            return
        tenant = next(iter(self._waiting))
        queue = self._waiting.pop(tenant)
        queue.popleft().set()
        if queue:
            self._waiting[tenant] = queue
