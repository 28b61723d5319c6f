"""Limits how many sessions of a tenant work at once.

The limit is high enough to keep the device busy, and lower while other tenants have work. Sessions above the
limit wait here before their logs are read. Each working session makes the device's steps and the event loop
slower for all others, and many more sessions than the device has batch rows bring no gain. Sessions with
short answers may exceed the limit by about a quarter, so that they seldom wait for long answers.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from anyio import Event, move_on_after

from worker.device.request import SHORT_TOKENS, has_place, place
from worker.engine.port import StoppingError
from worker.process.clock import monotonic

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from turnkeep_client.subjects import SessionKey

#: A tenant that had work within this time keeps its share, as its next request is likely to come soon.
_PRESENT_S: Final = 10.0


@dataclass(slots=True, order=True)
class _Entry:
    """A waiting or admitted session. Sessions with a lower `order.place` are admitted first."""

    place_s: float
    number: int
    is_short: bool = field(compare=False)
    admitted: Event = field(default_factory=Event, compare=False)


@dataclass(slots=True, eq=False)
class _Tenant:
    """One tenant's sessions at work and waiting, both keyed by whether the session's answer is short.

    `floods` says that the tenant had more sessions than may ever work at once, and some of them still wait.
    """

    seen_s: float
    at_work: Counter[bool] = field(default_factory=Counter)
    waiting: dict[bool, list[_Entry]] = field(default_factory=lambda: {False: [], True: []})
    floods: bool = False

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting.values()))

    def pop(self, share: int) -> _Entry | None:
        """Remove and return the next session to admit; None if the tenant's limit, `share`, allows none."""
        heaps = [
            heap
            for is_short, heap in self.waiting.items()
            if heap and has_place(self.at_work.total(), self.at_work[True], share, 4, is_short=is_short)
        ]
        return heapq.heappop(min(heaps)) if heaps else None

    def admit(self, entry: _Entry) -> None:
        """Count a session as at work, unless it is counted already."""
        if not entry.admitted.is_set():
            self.at_work[entry.is_short] += 1
            entry.admitted.set()


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
        self._waiting: dict[SessionKey, _Entry] = {}
        self._numbers = itertools.count()
        self._is_stopped = False

    @asynccontextmanager
    async def enter(
        self,
        key: SessionKey,
        priority: int,
        *,
        at_once: bool,
        max_new: int = sys.maxsize,
        most_s: float | None = None,
    ) -> AsyncIterator[None]:
        """Count the session as at work inside the block; its next answer has at most `max_new` tokens.

        Unless `at_once`, first wait until the tenant has fewer sessions at work than its limit; after
        `most_s` seconds enter anyway. Raises `StoppingError` if the worker stops before that. There is no
        await after the block: its caller relies on that.
        """
        if self._is_stopped:
            raise StoppingError
        mine = self._seen(key.tenant)
        place_s, number = place(mine.seen_s, priority, max_new), next(self._numbers)
        entry = self._waiting[key] = _Entry(place_s, number, max_new <= SHORT_TOKENS)
        heap = mine.waiting[entry.is_short]
        heapq.heappush(heap, entry)
        if at_once:
            self.admit(key)
        self._admit_waiting()
        try:
            with move_on_after(most_s):
                await entry.admitted.wait()
            mine.admit(entry)  # after `most_s` without a place, which it no longer needs
        except BaseException:
            if entry.admitted.is_set():  # admitted already
                self._leave(key.tenant, entry)
            else:
                heap.remove(entry)
                heapq.heapify(heap)
            raise
        finally:
            del self._waiting[key]
        try:
            if self._is_stopped:
                raise StoppingError
            yield
        finally:
            self._leave(key.tenant, entry)

    def admit(self, key: SessionKey) -> None:
        """Admit a waiting session above its tenant's limit, because it no longer needs the device."""
        if (entry := self._waiting.get(key)) is not None:
            self._present[key.tenant].admit(entry)

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

    def _leave(self, name: str, entry: _Entry) -> None:
        self._seen(name).at_work[entry.is_short] -= 1
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        """Compute each tenant's limit anew, and admit waiting sessions that it allows."""
        horizon_s = self._clock() - _PRESENT_S
        while (first := next(iter(self._present.items())))[1].seen_s < horizon_s:
            if first[1].at_work.total():  # as it has while sessions of it wait
                self._seen(first[0])
            else:
                del self._present[first[0]]
        tenants = self._present.values()
        for tenant in tenants:
            is_large = tenant.at_work.total() + tenant.num_waiting > self._most
            tenant.floods = is_large or (tenant.floods and bool(tenant.num_waiting))
        beside_floods = self._most // len(tenants) if all(tenant.floods for tenant in tenants) else 0
        for tenant in tenants:
            share = max(beside_floods if tenant.floods else self._most, self._least)
            while (entry := tenant.pop(share)) is not None:
                tenant.admit(entry)
