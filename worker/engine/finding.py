"""Finds the KV that a turn can reuse: its own or another session's KV on the device, or a prefix on SSD.

Owns the resources of a turn until the turn ends: snapshots protected from eviction from disk, and device
memory reserved for a restore. Event loop only.
"""

from __future__ import annotations

import asyncio
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING, Final

from cache.names.blocks import Span
from worker.device.memory import GROWTH_TOKENS
from worker.device.turn import KvRead
from worker.observe.traces import Phase

from .rates import Rates
from .residency import LEAST_SHARED
from .run import resolve

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import mlx.core as mx

    from cache.names.policy import Policy
    from cache.names.tokens import Chain
    from cache.store import Store
    from turnkeep_client.subjects import SessionKey
    from worker.device.device import Device
    from worker.device.turn import NeedsKv, Turn

    from .admission import Ledger
    from .run import Run

#: A restore reads the whole prefix from SSD, so that prefix must be longer than the one on the device by more
#: than 1/16 of the latter. If it is, the measured `Rates` decide.
_RESTORE_GAIN: Final = 16
#: How long a turn waits for blocks being written, rather than prefill their tokens again.
SETTLE_S: Final = 5.0
#: How long a turn waits for blocks that it needs while the disk takes none.
PATIENCE_S: Final = 30.0
#: If a file is corrupt or missing, a second try restores the prefix before it.
_RESTORE_TRIES: Final = 2


class Finder:
    """Finds reusable KV for the turns of one device."""

    def __init__(self, device: Device, store: Store | None, ledger: Ledger) -> None:
        self._device = device
        self._store = store
        self._ledger = ledger
        self._residency = ledger.residency
        #: The measured speeds of restoring and prefilling.
        self.rates = Rates()

    def release(self, run: Run) -> None:
        """End a run's protection of snapshots on disk, and its reservation of device memory."""
        if self._store is not None and run.past is not None:
            self._store.kv.end_past(run.past)
        if self._store is not None and run.prefix is not None:
            self._store.kv.release(run.prefix)
        if run.room is not None:
            self._device.release_room(run.key)
        run.prefix = run.past = run.room = None

    async def find(
        self, turn: Turn, run: Run, busy: Collection[SessionKey], submitted: Iterable[Turn]
    ) -> None:
        """Find the longest reusable KV for a turn, restore it if it is on SSD, and set the turn's fields.

        `busy` are the sessions whose turns have reserved memory; `submitted` are the turns on the device.
        """
        resident = self._residency.tokens(turn.key)
        # KV that cannot be trimmed must leave the context's last token for the turn to run.
        num_usable = len(turn.context) - (not self._device.kv(turn.policy).is_plain)
        num_usable = min(num_usable, len(turn.reusable))
        num_kept = min(resident.num_common(turn.context), num_usable)
        turn.num_kept = self._residency.num_usable(turn.key, num_kept, turn.policy)
        turn.source, num_shared = self._find_source(turn, busy, submitted)
        if self._store is None or turn.embedding is not None:
            return
        found = max(turn.num_kept, num_shared)
        least = _least(found)
        turn.chain = self._store.kv.chain(turn.key.tenant, turn.policy, turn.context)
        if num_usable > least and not self._device.kv(turn.policy).is_plain:  # for example after a rewind
            usable = turn.context[:num_usable]
            await self._store.kv.settle(turn.chain, usable, least, SETTLE_S, run.waits_no_more)
        if num_usable > least:
            await self._fetch(self._store, turn.chain, turn, num_usable, found)
            await self._restore(self._store, turn.chain, turn, run, num_usable, found)
        self._hold(self._store, turn.chain, turn, run)

    async def _restore(
        self, store: Store, chain: Chain, turn: Turn, run: Run, num_usable: int, num_found: int
    ) -> None:
        """Restore the longest stored prefix, if that is faster than prefilling its tokens that lack KV."""
        for _ in range(_RESTORE_TRIES):
            match = store.kv.match(chain, turn.context[:num_usable])
            found_s = monotonic()
            # Includes memory for the turn's first tokens, so that the caches need not be copied to grow.
            capacity_tokens = min(len(turn.context) + 1, match.num_tokens + GROWTH_TOKENS)
            size_bytes = self._device.kv(turn.policy).held(match.num_tokens)
            is_better = match.num_tokens > _least(num_found) and self.rates.should_restore(
                size_bytes, match.num_tokens - num_found
            )
            has_room = False
            try:
                has_room = is_better and await self._has_room(run, turn.policy, capacity_tokens)
            finally:  # the wait may be cancelled
                if not has_room:
                    store.kv.release(match)
            if not has_room:
                return
            restored = await store.kv.load(match, capacity_tokens=capacity_tokens)
            if restored is not None:
                self.rates.restored(restored.size_bytes, restored.seconds)
                turn.restores.append(Phase("restore", found_s, monotonic(), restored.num_tokens))
                if restored.num_tokens > num_found:
                    turn.restored, turn.num_restored = restored.tensors, restored.num_tokens
                    turn.source = None
                return

    async def _fetch(self, store: Store, chain: Chain, turn: Turn, num_usable: int, num_found: int) -> None:
        """Fetch blocks of the context that only the remote tier has, if that is faster than prefilling."""
        asked_s = monotonic()
        there = await store.kv.find_remote(chain, turn.context[:num_usable])
        if store.remote is None or there is None:
            return
        held = self._device.kv(turn.policy).held
        size_bytes = held(there.num_tokens) - held(there.num_stored)
        if self.rates.should_fetch(size_bytes, there.num_tokens - max(there.num_stored, num_found)):
            num_bytes, seconds = await store.remote.fetch(there)
            self.rates.fetched(num_bytes, seconds)
            turn.restores.append(Phase("fetch", asked_s, monotonic()))

    def _hold(self, store: Store, chain: Chain, turn: Turn, run: Run) -> None:
        """Protect a context's stored blocks from eviction until the turn ends; set which blocks to store."""
        run.prefix = store.kv.hold(chain, turn.context)
        turn.edges = run.prefix.edges
        end = len(turn.context) - (turn.answer is None)  # an append does not run its last token
        turn.spans = store.kv.wanted(chain, turn.context[: end - end % chain.block])

    async def read(self, needs: NeedsKv, run: Run) -> int:
        """Read from SSD the KV that a running turn requests; return how many tokens of chunks were read.

        The snapshots that the prompt reads are protected from eviction until the turn ends.
        """
        turn, past, spans = needs.turn, None, tuple[Span, ...]()
        tensors: dict[str, mx.array] = {}
        try:
            if self._store is None or turn.chain is None:
                raise AssertionError("without a store no turn needs KV from it")
            if needs.num_past:
                past = await self._store.kv.past(turn.chain, turn.context, needs.num_past, PATIENCE_S)
                held = self._store.kv.hold(turn.chain, turn.context)
                self.release(run)
                run.prefix, run.past = held, past
            if needs.spans:
                tokens = turn.tokens(needs.spans[-1].end)
                spans, tensors = await self._store.kv.recall(turn.chain, tokens, needs.spans)
        finally:
            self._device.give(turn, KvRead(past, spans, tensors))  # even after an error: a prompt waits
        return sum(span.num_tokens for span in spans)

    def _find_source(
        self, turn: Turn, busy: Collection[SessionKey], submitted: Iterable[Turn]
    ) -> tuple[SessionKey | None, int]:
        """Find the tenant's session whose KV, on the device or in prefill, covers the longest common prefix.

        Returns the session's key and the prefix's length; (None, 0) if the turn's own KV is about as long.
        Of equal sessions, an idle one is preferred, then the one submitted first.
        """
        if not self._device.trimmable:  # such KV cannot be truncated to a prefix
            return None, 0
        found, most, context = None, turn.num_kept + LEAST_SHARED - 1, turn.reusable
        if len(context) <= most:
            return None, 0
        alike = self._residency.alike(turn.key.tenant, context)
        idle = ((key, self._residency.tokens(key)) for key in alike if key not in busy)
        others = (other for other in submitted if other.key != turn.key)  # not its own abandoned turn
        running = ((other.key, other.context) for other in others if other.policy == turn.policy)
        for key, tokens in chain(idle, running):
            if key.tenant != turn.key.tenant or min(len(tokens), len(context)) <= most:
                continue
            # Compare one token first: most sessions differ there.
            if tokens[most] != context[most] or (num := tokens.num_common(context)) <= most:
                continue
            if key in busy or self._residency.num_usable(key, num, turn.policy):
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
