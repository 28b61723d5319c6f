"""Saves KV: the device copies what the index lacks of a session's KV whenever the writer's queue has room.

Blocks are copied once they are full, and the tail (the last, partial block) when a turn ends. What then found
no room, or was not written, is copied while its session is idle, and when the worker stops. An idle session's
KV that is only on the device would be lost if the process ended. For it only KV of earlier turns is evicted:
otherwise idle sessions would evict each other's without end if the disk has no room for all.

A snapshot is saved only of tokens that the log has: otherwise no session might have these tokens, and no
`forget` would erase them. An answer's snapshots wait until its tokens are published.

The device thread copies (`cutter`); this module asks the index, on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import structlog

from worker.device.request import TurnRequest
from worker.device.turn import DeviceTurn, SnapshotCut, TurnPlan

from .kv_on_device import NO_KV

if TYPE_CHECKING:
    from collections.abc import Callable

    from cache.kv.size import KvSize
    from cache.names.blocks import Span
    from cache.names.policy import Policy
    from cache.store import Store
    from turnkeep_client.subjects import SessionKey

    from .kv_on_device import KvOnDevice
    from .run import Run

log = structlog.get_logger()

#: How often to check whether the writer's queue has room.
_POLL_S: Final = 0.05
#: When to try again if nothing of a session could be saved, for example because the device lacks memory.
_RETRY_S: Final = 10.0


class UnsavedKv:
    """The sessions whose KV the index may lack, and the one whose KV is being copied. Event loop only."""

    def __init__(
        self,
        store: Store,
        kv_on_device: dict[SessionKey, KvOnDevice],
        at_work: Callable[[], set[SessionKey]],
        copy: Callable[[DeviceTurn], None],
        kv: Callable[[Policy], KvSize],
    ) -> None:
        """`at_work` returns the sessions that are not idle, `kv` the size of a session's KV.

        `copy` lets the device copy a turn's `spans`; `save` gets the snapshots, and `end_copy` follows.
        """
        self._store = store
        self._kv_on_device = kv_on_device
        self._at_work = at_work
        self._copy_spans = copy
        self._kv = kv
        #: When to look at each session next, 0 unless its last copy was not saved; the least recently active
        #: session first.
        self._lacking: dict[SessionKey, float] = {}
        #: The turn that stands for an idle session while the device copies its `spans`. It never runs.
        self._copied: DeviceTurn | None = None
        #: Snapshots, in order, some of whose tokens the log does not have yet, each with the run of its turn.
        self._early: list[tuple[SnapshotCut, Run]] = []
        self._changed = asyncio.Event()
        store.listen(self._lost)

    def save(self, cut: SnapshotCut, run: Run | None) -> None:
        """Queue a snapshot in the store once the log has its tokens; drop it if the session was forgotten.

        `run` is the run of its turn, None for an idle session. Errors are only logged.
        """
        if run.is_forgotten if run is not None else cut.turn is not self._copied:
            return  # the session may have been erased
        if not cut.turn.request.policy.has_snapshots:
            return
        if run is not None and cut.span.end > run.num_logged:
            self._early.append((cut, run))
            self._store.queue.announced_bytes += cut.size_bytes
            return
        request, chain = cut.turn.request, cut.turn.plan.chain
        try:
            tokens = request.tokens(cut.span.end)
            used = None if run is not None else self._kv_on_device.get(request.key, NO_KV).used
            is_queued = chain is not None and self._store.kv.save(chain, tokens, cut.span, cut.tensors, used)
            if is_queued and cut.turn is self._copied:
                self._lacking[request.key] = 0.0
        except Exception:
            # An exception would skip the next event of the step, which may be the turn's end.
            log.exception("a snapshot was not saved", session=str(request.key))

    def save_logged(self) -> None:
        """Save the snapshots whose tokens the log has by now; drop those of forgotten sessions."""
        for cut, run in self._take_early():
            self.save(cut, run)

    def free_memory(self) -> None:
        """Drop the snapshots that wait for the disk or the log, to free their memory on the device."""
        self._store.queue.free_memory()
        self._store.queue.drop("memory", len(self._take_early()))

    def _take_early(self) -> list[tuple[SnapshotCut, Run]]:
        early, self._early = self._early, []
        self._store.queue.announced_bytes = 0
        return early

    def end_turn(self, key: SessionKey, num_uncut: int) -> None:
        """Note a session whose turn has ended if the index lacks some of its KV.

        The turn's `num_uncut` snapshots that found no room in the queue count as dropped.
        """
        self.discard(key)
        if num_uncut:
            self._store.queue.skip(num_uncut)
        if self._missing(key):
            self._note(key)

    def end_copy(self, turn: DeviceTurn) -> None:
        """Note that the device has copied what it could of an idle session."""
        if turn is self._copied:
            self._copied = None
            self._changed.set()

    def discard(self, key: SessionKey) -> None:
        """Save nothing more of a session whose KV has left the device or must not be stored."""
        self._lacking.pop(key, None)
        if self._copied is not None and self._copied.request.key == key:
            self._copied = None

    async def run(self) -> None:
        """Save what the index lacks of idle sessions whenever the queue has room; run until cancelled."""
        while True:
            if not self._copy_next():
                await self._pause(_POLL_S if self._lacking else None)

    async def finish(self, within_s: float) -> None:
        """Save what the index lacks and wait until it is on disk, for at most `within_s`."""
        self._lacking = dict.fromkeys(self._lacking, 0.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._copied or self._due() or not self._store.queue.is_idle:
                    if not self._copy_next():
                        await self._pause(_POLL_S)

    def unstored(self) -> list[int]:
        """Return, for each session whose KV on the device is not all on disk, how many tokens are not."""
        found = [(key, held) for key, held in self._kv_on_device.items() if held.policy.has_snapshots]
        return [num for key, held in found if (num := self._num_unstored(key, held))]

    def _lost(self) -> None:
        """Look at every session, since snapshots are missing: their files have no session's name."""
        for key in (*self._kv_on_device, *self._at_work()):
            self._note(key)

    def _note(self, key: SessionKey) -> None:
        self._lacking.pop(key, None)
        self._lacking[key] = 0.0
        self._changed.set()

    def _num_unstored(self, key: SessionKey, held: KvOnDevice) -> int:
        chain = self._store.kv.chain(key.tenant, held.policy, held.tokens)
        return len(held.tokens) - self._store.kv.find(chain, held.tokens).num_tokens

    def _missing(self, key: SessionKey) -> list[Span]:
        """Return the spans of a session's KV on the device that are neither stored nor queued."""
        held = self._kv_on_device.get(key, NO_KV)
        if not held.policy.has_snapshots:
            return []
        return self._store.kv.wanted(self._store.kv.chain(key.tenant, held.policy, held.tokens), held.tokens)

    def _due(self) -> list[SessionKey]:
        """List the sessions to look at now, the most recently active one first."""
        now_s = time.monotonic()
        return [key for key, next_s in reversed(self._lacking.items()) if next_s <= now_s]

    def _copy_next(self) -> bool:
        """Let the device copy what the index lacks of an idle session; return False if it cannot now."""
        spare_bytes = self._store.queue.spare_bytes()
        if self._copied is not None or not spare_bytes:
            return False
        busy, due = self._at_work(), self._due()
        for i, key in enumerate(due):
            if key in busy:
                continue
            if not (spans := self._missing(key)):
                self.discard(key)
                continue
            held = self._kv_on_device[key]
            kv = self._kv(held.policy)
            sizes = [kv.snapshot(span.num_tokens, at=span.end) for span in spans]
            if self._store.quota.has_room(min(sizes), held.used):
                return self._copy(key, held, spans, sizes, spare_bytes)
            # Nor is there room for the other sessions, which were used earlier.
            self._lacking |= dict.fromkeys(due[i:], time.monotonic() + _RETRY_S)
            break
        return False

    def _copy(
        self, key: SessionKey, held: KvOnDevice, spans: list[Span], sizes: list[int], spare_bytes: int
    ) -> bool:
        num_fitting = sum(size_bytes <= spare_bytes for size_bytes in accumulate(sizes))
        if not num_fitting and not self._store.queue.is_idle:
            return False
        chain = self._store.kv.chain(key.tenant, held.policy, held.tokens)
        plan = TurnPlan(chain=chain, spans=tuple(spans[: max(num_fitting, 1)]))
        self._copied = DeviceTurn(TurnRequest(key, held.tokens, held.policy), plan)
        self._lacking[key] = time.monotonic() + _RETRY_S
        self._copy_spans(self._copied)
        return True

    async def _pause(self, timeout_s: float | None) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
