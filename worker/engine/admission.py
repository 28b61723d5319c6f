"""Decides which turns get device memory, which wait for it, and which are paused.

Pure: takes sizes, returns decisions, which the engine carries out. `ledger` counts the bytes.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import chain, count, zip_longest
from operator import attrgetter
from typing import TYPE_CHECKING

from worker.device.request import PRIORITY_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from turnkeep_client.subjects import SessionKey

    from .ledger import Claim, Ledger


@dataclass(frozen=True, slots=True)
class Decision:
    """What the caller must do now: start granted claims, drop idle sessions' KV, pause running claims."""

    granted: list[Claim] = field(default_factory=list)
    dropped: list[SessionKey] = field(default_factory=list)
    paused: list[Claim] = field(default_factory=list)


class Admission:
    """Decides in which order waiting turns get memory.

    Turns that have run, or were overtaken, come first, oldest first. If pausing younger turns makes enough
    room for such a turn, they are paused, youngest first, and no younger turn gets memory before it.
    Otherwise the turn waits for older turns, and younger turns may use the remaining memory.

    New turns come next. Of the first turns of all priorities, the one with the lowest `place_s` (see
    `request.place`) comes first; within a priority, tenants rotate, each with its lowest `place_s` first. A
    new turn that would bring its tenant above `max_tenant_bytes` waits until it fits, or until it is the
    tenant's only turn; other turns of the tenant overtake it only if their `place_s` is at most 10 s higher.

    A turn that fits may overtake a turn that does not; from then on the overtaken turn counts as older than
    the turns that overtake it. So no turn waits for ever, and the oldest always continues.
    """

    def __init__(self, ledger: Ledger, max_tenant_bytes: int | None = None) -> None:
        self._ledger = ledger
        self._max_tenant_bytes = max_tenant_bytes
        self._ages = count()
        self._aged: list[Claim] = []
        self._overtaken: Claim | None = None
        self._new: dict[int, dict[str, deque[Claim]]] = {}  # by priority, then by tenant in rotation

    @property
    def num_waiting(self) -> int:
        """Number of turns that wait for memory and have reserved none, so without running ones that grow."""
        new = sum(len(queue) for tenants in self._new.values() for queue in tenants.values())
        return new + sum(not self._ledger.reserved(claim) for claim in self._aged)

    def begin(self, claim: Claim, size_bytes: int) -> Decision:
        """Request `size_bytes` for a new turn, or for a paused one, whose reservation ends; decide."""
        self._give_back(claim)
        claim.wanted = size_bytes
        if claim.age is not None:
            self._aged.append(claim)
        else:
            self._new.setdefault(claim.priority, {}).setdefault(claim.key.tenant, deque()).append(claim)
        return self.decide()

    def grow(self, claim: Claim, size_bytes: int) -> Decision:
        """Request that a running turn's reservation grow to `size_bytes`, and decide."""
        if not claim.wanted:
            self._aged.append(claim)
        claim.wanted = size_bytes
        return self.decide()

    def release(self, claim: Claim) -> Decision:
        """End the reservation and any request of a turn that has ended or was withdrawn, and decide."""
        self._give_back(claim)
        return self.decide()

    def decide(self) -> Decision:
        """Grant memory to the claims that fit now. Idle sessions' KV is no reason to wait: it is dropped."""
        decision = Decision()
        for claim in sorted(self._aged, key=_age):
            if not self._grant(claim, decision) and self._pause_younger(claim, decision):
                return decision
        refused: Claim | None = None
        over: dict[str, float] = {}  # by tenant: the place of the first turn that exceeds its share
        for claim in self._rotation():
            tenant = claim.key.tenant
            if self._is_over_share(claim) or claim.place_s > over.get(tenant, math.inf) + PRIORITY_S:
                over.setdefault(tenant, claim.place_s)
                continue
            if self._ledger.excess(claim, claim.wanted) > 0:
                refused = refused or claim
                continue
            if refused is not None and self._overtaken is None:
                self._served(refused, wanted=refused.wanted)
                refused.age = next(self._ages)
                self._aged.append(refused)
                self._overtaken = refused  # not earlier: `_served` ends the protection of a turn
            self._grant(claim, decision)
        return decision

    def _give_back(self, claim: Claim) -> None:
        if claim.wanted:
            self._served(claim)
        claim.is_pausing = False
        self._ledger.release(claim)

    def _is_over_share(self, claim: Claim) -> bool:
        if self._max_tenant_bytes is None:
            return False
        tenant = claim.key.tenant
        held = sum(
            self._ledger.reserved(other) for other in self._ledger.running if other.key.tenant == tenant
        )
        return held > 0 and held + claim.wanted > self._max_tenant_bytes

    def _grant(self, claim: Claim, decision: Decision) -> bool:
        """Reserve the bytes that a turn wants; return False if running turns hold too much."""
        victims = self._ledger.reserve(claim, claim.wanted)
        if victims is None:
            return False
        self._served(claim)
        if claim.age is None:
            claim.age = next(self._ages)
        decision.granted.append(claim)
        decision.dropped.extend(victims)
        return True

    def _pause_younger(self, claim: Claim, decision: Decision) -> bool:
        """Pause younger turns if that frees enough memory for a claim; return False if it does not."""
        excess = self._ledger.excess(claim, claim.wanted)
        younger = sorted(
            (other for other in self._ledger.running if _age(other) > _age(claim)), key=_age, reverse=True
        )
        if sum(map(self._ledger.reserved, younger)) < excess:
            return False
        coming = sum(self._ledger.reserved(other) for other in younger if other.is_pausing)
        for other in younger:
            if coming >= excess:
                break
            if not other.is_pausing:
                other.is_pausing = True
                decision.paused.append(other)
                coming += self._ledger.reserved(other)
        return True

    def _served(self, claim: Claim, *, wanted: int = 0) -> None:
        """Remove a claim from its queue; for a new turn, move its tenant to the end of the rotation."""
        claim.wanted = wanted
        if claim is self._overtaken:
            self._overtaken = None
        if claim in self._aged:
            self._aged.remove(claim)
            return
        tenants = self._new[claim.priority]
        queue = tenants.pop(claim.key.tenant)
        queue.remove(claim)
        if queue:
            tenants[claim.key.tenant] = queue
        elif not tenants:
            del self._new[claim.priority]

    def _rotation(self) -> Iterator[Claim]:
        """Yield the claims of new turns in the order in which they get memory.

        Of the first turns of all priorities, the one with the lowest `place_s` comes next. Within a priority,
        tenants rotate.
        """
        levels = [
            deque(claim for claim in chain.from_iterable(zip_longest(*queues)) if claim is not None)
            for tenants in self._new.values()
            if (queues := [sorted(queue, key=attrgetter("place_s")) for queue in tenants.values()])
        ]
        while levels := [level for level in levels if level]:
            yield min(levels, key=lambda level: level[0].place_s).popleft()


def _age(claim: Claim) -> int:
    if claim.age is None:
        raise AssertionError("a turn that has neither run nor been overtaken has no age")
    return claim.age
