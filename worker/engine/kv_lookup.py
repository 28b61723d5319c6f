"""Finds the KV that a turn can reuse: its own or another session's KV on the device, or a prefix on SSD.

Makes the `DeviceTurn` with its plan, and owns its resources until the turn ends: snapshots protected from
eviction from disk, and device memory reserved for a restore. Measures how fast this machine restores and
prefills: on a slow device a restore saves seconds, on a fast one with a slow disk prefilling can be faster.
Event loop only.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from itertools import chain as chained
from time import monotonic
from typing import TYPE_CHECKING, Final

from cache.names.blocks import Span
from worker.device.memory import GROWTH_TOKENS
from worker.device.turn import DeviceTurn, KvRead, TurnPlan
from worker.observe.traces import Phase

from .kv_on_device import NO_KV
from .run import resolve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

    import mlx.core as mx

    from cache.names.policy import Policy
    from cache.names.tokens import Chain, Tokens
    from cache.store import Store, StoredPast
    from turnkeep_client.subjects import SessionKey
    from worker.device.device import Device
    from worker.device.request import TurnRequest
    from worker.device.turn import KvRequest

    from .ledger import Ledger
    from .run import Run

#: A restore reads the whole prefix from SSD, so that prefix must be longer than the one on the device by more
#: than 1/16 of the latter. If it is, the measured `RestoreTimes` decide.
_RESTORE_GAIN: Final = 16
#: The fewest common tokens for which a turn copies another session's KV, or waits for its prefill.
LEAST_SHARED: Final = 32
#: How long a turn waits for blocks being written, rather than prefill their tokens again.
SETTLE_S: Final = 5.0
#: How long a turn waits for blocks that it needs while the disk takes none.
PATIENCE_S: Final = 30.0
#: If a file is corrupt or missing, a second try restores the prefix before it.
_RESTORE_TRIES: Final = 2


class TurnSnapshots:
    """The snapshots of a turn's context, protected from eviction until `release`."""

    def __init__(self, store: Store, chain: Chain, context: Tokens) -> None:
        self._store = store
        self._chain = chain
        self._context = context
        self._prefix = store.kv.hold(chain, context)
        self._past: StoredPast | None = None

    @property
    def edges(self) -> tuple[int, ...]:
        """The positions where the stored pieces of the last, partial block start and end."""
        return self._prefix.edges

    def release(self) -> None:
        """End the protection."""
        if self._past is not None:
            self._store.kv.end_past(self._past)
        self._store.kv.release(self._prefix)

    async def read(self, needs: KvRequest) -> KvRead:
        """Read from SSD the KV that the running turn requests, or what is there of it; see `KvRead`."""
        past, spans = None, tuple[Span, ...]()
        tensors: dict[str, mx.array] = {}
        if needs.num_past:
            past = await self._store.kv.past(self._chain, self._context, needs.num_past, PATIENCE_S)
            prefix = self._store.kv.hold(self._chain, self._context)
            self.release()
            self._prefix, self._past = prefix, past
        if needs.spans:
            tokens = needs.turn.request.tokens(needs.spans[-1].end)
            spans, tensors = await self._store.kv.recall(self._chain, tokens, needs.spans)
        return KvRead(past, spans, tensors)


class KvFinder:
    """Finds reusable KV for the turns of one device, and makes the turns."""

    def __init__(self, device: Device, store: Store | None, ledger: Ledger) -> None:
        self._device = device
        self._store = store
        self._ledger = ledger
        self._kv_on_device = ledger.kv_on_device
        #: The measured speeds of restoring and prefilling.
        self.rates = RestoreTimes()

    @asynccontextmanager
    async def prepare(
        self, run: Run, submitted: Collection[DeviceTurn]
    ) -> AsyncIterator[tuple[DeviceTurn, TurnSnapshots | None]]:
        """Find the longest reusable KV for a run's next turn, restore it if it is on SSD, and make the turn.

        `submitted` are the turns on the device. Yields the turn, and its snapshots, None without a store.
        Until the block ends, these are protected from eviction, and memory for a restore is reserved.
        """
        request, snapshots = run.request, None
        try:
            plan, num_usable, num_found = self._on_device(request, submitted)
            if self._store is None or request.embedding is not None:
                turn = DeviceTurn(request, plan, run.place_s, num_granted=run.num_granted)
            else:
                found = num_usable, num_found
                turn, snapshots = await self._on_disk(self._store, run, plan, *found)
            yield turn, snapshots
        finally:
            if snapshots is not None:
                snapshots.release()
            if run.room is not None:
                self._device.release_room(run.key)
            run.room = None

    def _on_device(
        self, request: TurnRequest, submitted: Collection[DeviceTurn]
    ) -> tuple[TurnPlan, int, int]:
        """Plan which KV on the device a turn reuses; return how many tokens' KV it can use, and will find."""
        # KV that cannot be trimmed must leave the context's last token for the turn to run.
        num_usable = len(request.context) - (not self._device.kv(request.policy).is_plain)
        num_usable = min(num_usable, len(request.reusable))
        held = self._kv_on_device.get(request.key, NO_KV)
        num_kept = min(held.tokens.num_common(request.context), num_usable)
        num_kept = held.num_usable(num_kept, request.policy)
        source, num_shared = self._find_source(request, num_kept, submitted)
        spans = () if request.audited is None else (request.audited.span,)
        return TurnPlan(num_kept, source=source, spans=spans), num_usable, max(num_kept, num_shared)

    async def _on_disk(
        self, store: Store, run: Run, plan: TurnPlan, num_usable: int, num_found: int
    ) -> tuple[DeviceTurn, TurnSnapshots]:
        """Restore a turn's KV if the disk has more of it, and plan which of it to save."""
        request, phases = run.request, list[Phase]()
        num_restored, tensors = 0, None
        usable, least = request.context[:num_usable], _least(num_found)
        chain = store.kv.chain(request.tenant, request.policy, request.context)
        if num_usable > least:
            if not self._device.kv(request.policy).is_plain:  # for example after a rewind
                await store.kv.settle(chain, usable, least, SETTLE_S, run.must_stop_waiting)
            phases += await self._fetch(store, chain, usable, num_found)
            num_restored, tensors = await self._restore(store, chain, run, usable, num_found, phases)
        snapshots = TurnSnapshots(store, chain, request.context)
        whole = request.context[: request.target - request.target % chain.block]
        spans = tuple(store.kv.wanted(chain, whole)) if request.policy.has_snapshots else ()
        plan = TurnPlan(
            plan.num_kept,
            num_restored,
            plan.source if tensors is None else None,
            plan.spans or spans,
            snapshots.edges,
            chain,
            tuple(phases),
        )
        return DeviceTurn(request, plan, run.place_s, tensors, run.num_granted), snapshots

    async def _restore(
        self, store: Store, chain: Chain, run: Run, usable: Tokens, num_found: int, phases: list[Phase]
    ) -> tuple[int, dict[str, mx.array] | None]:
        """Restore the longest stored prefix, if that is faster than prefilling its tokens that lack KV.

        Returns how many tokens it has, and its arrays; (0, None) if nothing was restored. Adds the phases of
        the reads to `phases`.
        """
        policy = run.request.policy
        for _ in range(_RESTORE_TRIES):
            match = store.kv.match(chain, usable)
            found_s = monotonic()
            has_room = False
            try:
                match = await store.kv.extend(match, chain, usable)
                # Includes memory for the turn's first tokens, so that the caches need not be copied to grow.
                capacity_tokens = min(len(run.request.context) + 1, match.num_tokens + GROWTH_TOKENS)
                size_bytes = self._device.kv(policy).held(match.num_tokens)
                is_better = match.num_tokens > _least(num_found) and self.rates.should_restore(
                    size_bytes, match.num_tokens - num_found
                )
                has_room = is_better and await self._has_room(run, policy, capacity_tokens)
            finally:  # the wait may be cancelled
                if not has_room:
                    store.kv.release(match)
            if not has_room:
                break
            restored = await store.kv.load(match, capacity_tokens=capacity_tokens)
            if restored is not None:
                self.rates.restored.learn(restored.size_bytes, restored.seconds)
                phases.append(Phase("restore", found_s, monotonic(), restored.num_tokens))
                if restored.num_tokens > num_found:
                    return restored.num_tokens, restored.tensors
        return 0, None

    async def _fetch(self, store: Store, chain: Chain, usable: Tokens, num_found: int) -> list[Phase]:
        """Fetch blocks of the context that only the remote tier has, if that is faster than prefilling."""
        asked_s = monotonic()
        there = await store.kv.find_remote(chain, usable)
        if store.remote is None or there is None:
            return []
        held = self._device.kv(chain.policy).held
        size_bytes = held(there.num_tokens) - held(there.num_stored)
        if not self.rates.should_fetch(size_bytes, there.num_tokens - max(there.num_stored, num_found)):
            return []
        num_bytes, seconds = await store.remote.fetch(there)
        self.rates.fetched.learn(num_bytes, seconds)
        return [Phase("fetch", asked_s, monotonic())]

    def _find_source(
        self, request: TurnRequest, num_kept: int, submitted: Collection[DeviceTurn]
    ) -> tuple[SessionKey | None, int]:
        """Find the tenant's session whose KV, on the device or in prefill, covers the longest common prefix.

        Returns the session's key and the prefix's length; (None, 0) if the turn's own KV is about as long.
        Of equal sessions, an idle one is preferred, then the one submitted first.
        """
        if not self._device.served.trimmable:  # such KV cannot be truncated to a prefix
            return None, 0
        found, most, context = None, num_kept + LEAST_SHARED - 1, request.reusable
        if len(context) <= most:
            return None, 0
        busy = self._ledger.busy
        idle = ((key, held.tokens) for key, held in self._kv_on_device.items() if key not in busy)
        others = (turn.request for turn in submitted if turn.request.key != request.key)  # not its abandoned
        running = ((other.key, other.context) for other in others if other.policy == request.policy)
        for key, tokens in chained(idle, running):
            if key.tenant != request.tenant or min(len(tokens), len(context)) <= most:
                continue
            # Compare one token first: most sessions differ there.
            if tokens[most] != context[most] or (num := tokens.num_common(context)) <= most:
                continue
            if key in busy or self._kv_on_device.get(key, NO_KV).num_usable(num, request.policy):
                found, most = key, num
        return found, most if found else 0

    async def _has_room(self, run: Run, policy: Policy, num_tokens: int) -> bool:
        """Wait until the device has room for a restore; return False if it never will, or on cancellation.

        The wait is needed since dropped KV stays in memory until the running step ends.
        """
        if 2 * self._ledger.used_bytes <= self._ledger.max_bytes:
            return True
        loop = asyncio.get_running_loop()
        room: asyncio.Future[bool] = loop.create_future()
        run.room = room

        def answered(granted: bool) -> None:
            loop.call_soon_threadsafe(lambda: resolve(room, granted=granted))

        self._device.reserve_room(run.key, num_tokens, answered, policy)
        return await room


def _least(num_found: int) -> int:
    """Return the prefix length that a restore must exceed if the device has KV of `num_found` tokens."""
    return num_found + num_found // _RESTORE_GAIN


#: Smaller restores and prompts are not measured: fixed costs dominate them.
_LEAST_BYTES: Final = 32 * 2**20
_LEAST_TOKENS: Final = 128
#: Weight of the last measurement in an average.
_SHARE: Final = 0.3
#: Each prefix that is not read multiplies the average time by this, so that a slow disk is tried again.
_FORGOTTEN: Final = 0.95


class UnitTime:
    """The average seconds for one unit of work, such as a byte read; None until it is measured."""

    def __init__(self, least: int) -> None:
        """Work of fewer than `least` units is not measured."""
        self._least = least
        self.unit_s: float | None = None

    def learn(self, num_units: int, seconds: float) -> None:
        """Update the average by work on `num_units` that took `seconds`."""
        if num_units >= self._least:
            now, before = seconds / num_units, self.unit_s
            self.unit_s = now if before is None else (1 - _SHARE) * before + _SHARE * now


class RestoreTimes:
    """The times of bytes read from disk, of bytes fetched from the remote tier, and of prefilled tokens."""

    def __init__(self) -> None:
        self.restored = UnitTime(_LEAST_BYTES)
        self.fetched = UnitTime(_LEAST_BYTES)
        self.prefilled = UnitTime(_LEAST_TOKENS)

    def should_fetch(self, size_bytes: int, num_saved: int) -> bool:
        """Say whether fetching `size_bytes` is faster than prefilling `num_saved` tokens; True if unknown."""
        return self._are_faster(size_bytes, num_saved, self.fetched, self.restored)

    def should_restore(self, size_bytes: int, num_saved: int) -> bool:
        """Say whether reading `size_bytes` is faster than prefilling `num_saved` tokens; True if unknown."""
        return self._are_faster(size_bytes, num_saved, self.restored)

    def _are_faster(self, size_bytes: int, num_saved: int, first: UnitTime, *more: UnitTime) -> bool:
        """Say whether work on bytes is faster than prefilling tokens; only `first` has to be measured."""
        if first.unit_s is None or self.prefilled.unit_s is None:
            return True
        byte_s = first.unit_s + sum(one.unit_s or 0.0 for one in more)
        is_faster = size_bytes * byte_s <= num_saved * self.prefilled.unit_s
        for one in () if is_faster else (first, *more):
            one.unit_s = one.unit_s and one.unit_s * _FORGOTTEN
        return is_faster
