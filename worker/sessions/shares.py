"""Limits how many sessions of a tenant work at once.

The limit is high enough to keep the device busy, and lower while other tenants have work. Sessions above the
limit wait here before their logs are read. Each working session makes the device's steps and the event loop
slower for all others, and many more sessions than the device has batch rows bring no gain.
"""

from __future__ import annotations

import heapq
import itertools
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from anyio import Event

from worker.device.admission import place
from worker.device.engine import StoppingError
from worker.process.clock import monotonic

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from turnkeep_client.subjects import SessionKey

#: A tenant that was at work so recently keeps its share, as its next request is likely to come soon.
_PRESENT_S: Final = 10.0


@dataclass(slots=True, eq=False)
class _Tenant:
    """One tenant's sessions.

    `floods` says that it had more sessions than may ever work at once, and some of them still wait.
    """

    seen_s: float
    num_at_work: int = 0
    waiting: list[tuple[float, int, Event]] = field(default_factory=list)
    floods: bool = False


class Shares:
    """Limits how many sessions of each tenant work at once. Event loop only.

    A session waits only for sessions of its own tenant.
    """

    def __init__(self, num_rows: int, clock: Callable[[], float] = monotonic) -> None:
        """`num_rows` is the number of batch rows of the device."""
        self._most = 4 * num_rows  # while some decode, others are read, prefilled or committed
        self._least = max(num_rows // 4, 1)
        self._clock = clock
        self._present: dict[str, _Tenant] = {}  # in the order of `seen_s`
        self._waiting: dict[SessionKey, Event] = {}
        self._numbers = itertools.count()
        self._is_stopped = False

    @asynccontextmanager
    async def enter(self, key: SessionKey, priority: int, *, at_once: bool) -> AsyncIterator[None]:
        """Count the session as at work inside the block.

        Unless `at_once`, first wait until the tenant has fewer sessions at work than its limit. Raises
        `StoppingError` if the worker stops before that.
        """
        if self._is_stopped:
            raise StoppingError
        mine = self._seen(key.tenant)
        admitted = self._waiting[key] = Event()
        waiting = (place(mine.seen_s, priority), next(self._numbers), admitted)
        heapq.heappush(mine.waiting, waiting)
        if at_once:
            self.admit(key)
        self._admit_waiting()
        try:
            await admitted.wait()
        except BaseException:
            if admitted.is_set():  # admitted already
                self._leave(key.tenant)
            else:
                mine.waiting.remove(waiting)
                heapq.heapify(mine.waiting)
            raise
        finally:
            del self._waiting[key]
        try:
            if self._is_stopped:
                raise StoppingError
            yield
        finally:
            self._leave(key.tenant)

    def admit(self, key: SessionKey) -> None:
        """Admit a waiting session above its tenant's limit, because it no longer needs the device."""
        admitted = self._waiting.get(key)
        if admitted is not None and not admitted.is_set():
            self._present[key.tenant].num_at_work += 1
            admitted.set()

    def stop(self) -> None:
        """Raise `StoppingError` in all waiting and later calls of `enter`."""
        self._is_stopped = True
        for key in self._waiting:
            self.admit(key)  # it then finds out that the worker stops

    def _seen(self, name: str) -> _Tenant:
        tenant = self._present.pop(name, None) or _Tenant(0.0)
        tenant.seen_s = self._clock()
        self._present[name] = tenant
        return tenant

    def _leave(self, name: str) -> None:
        self._seen(name).num_at_work -= 1
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        """Admit waiting sessions of tenants whose share has room."""
        horizon_s = self._clock() - _PRESENT_S
        while (first := next(iter(self._present.items())))[1].seen_s < horizon_s:
            if first[1].num_at_work or first[1].waiting:
                self._seen(first[0])
            else:
                del self._present[first[0]]
        tenants = self._present.values()
        for tenant in tenants:
            is_large = tenant.num_at_work + len(tenant.waiting) > self._most
            tenant.floods = is_large or (tenant.floods and bool(tenant.waiting))
        beside_floods = self._most // len(tenants) if all(tenant.floods for tenant in tenants) else 0
        for tenant in tenants:
            share = beside_floods if tenant.floods else self._most
            while tenant.waiting and tenant.num_at_work < max(share, self._least):
                _, _, admitted = heapq.heappop(tenant.waiting)
                if not admitted.is_set():
                    tenant.num_at_work += 1
                    admitted.set()
