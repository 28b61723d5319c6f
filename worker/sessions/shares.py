"""Who is at work: so many sessions of a tenant as keep the device busy, and fewer beside others.

What is not at work waits here before anything is read for it. Each session at work makes the steps of the
device and the turns of the event loop longer for all others; many more of them than the device has rows gain
nothing.
"""

from __future__ import annotations

import heapq
import itertools
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Final

from anyio import Event

from worker.device.admission import place
from worker.device.engine import StoppingError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from turnkeep_client.subjects import SessionKey

#: Whoever was at work so recently is likely to come again, and does not wait for a flood to make room then.
_PRESENT_S: Final = 10.0


@dataclass(slots=True, eq=False)
class _Tenant:
    """`floods` from when it has more sessions than may ever be at work, until none of them waits."""

    seen_s: float
    num_at_work: int = 0
    waiting: list[tuple[float, int, Event]] = field(default_factory=list)
    floods: bool = False


class Shares:
    """Bounds each tenant's sessions at work; none waits for another tenant's to end. Event loop only."""

    def __init__(self, num_rows: int, clock: Callable[[], float] = monotonic) -> None:
        """The device decodes `num_rows` answers at a time."""
        self._most = 4 * num_rows  # while some decode, more are read, prefilled and committed
        self._least = max(num_rows // 4, 1)
        self._clock = clock
        self._present: dict[str, _Tenant] = {}  # the one seen last is the last
        self._turns: dict[SessionKey, Event] = {}  # of those that wait
        self._numbers = itertools.count()
        self._is_stopped = False

    @asynccontextmanager
    async def enter(self, key: SessionKey, priority: int, *, at_once: bool) -> AsyncIterator[None]:
        """Be at work, `at_once` or when the tenant's share has room.

        Raises `StoppingError` where the worker stops before.
        """
        if self._is_stopped:
            raise StoppingError
        mine = self._seen(key.tenant)
        turn = self._turns[key] = Event()
        waiting = (place(mine.seen_s, priority), next(self._numbers), turn)
        heapq.heappush(mine.waiting, waiting)
        if at_once:
            self.admit(key)
        self._admit_waiting()
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():  # it had been let in already
                self._leave(key.tenant)
            else:
                mine.waiting.remove(waiting)
                heapq.heapify(mine.waiting)
            raise
        finally:
            del self._turns[key]
        try:
            if self._is_stopped:
                raise StoppingError
            yield
        finally:
            self._leave(key.tenant)

    def admit(self, key: SessionKey) -> None:
        """Let a session in that waits, whatever its tenant's share is: it needs no device any more."""
        turn = self._turns.get(key)
        if turn is not None and not turn.is_set():
            self._present[key.tenant].num_at_work += 1
            turn.set()

    def stop(self) -> None:
        """Send away all who wait, and who come from now on."""
        self._is_stopped = True
        for key in self._turns:
            self.admit(key)  # to find out

    def _seen(self, name: str) -> _Tenant:
        tenant = self._present.pop(name, None) or _Tenant(0.0)
        tenant.seen_s = self._clock()
        self._present[name] = tenant
        return tenant

    def _leave(self, name: str) -> None:
        self._seen(name).num_at_work -= 1
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        """Let in whoever has room."""
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
                _, _, turn = heapq.heappop(tenant.waiting)
                if not turn.is_set():
                    tenant.num_at_work += 1
                    turn.set()
