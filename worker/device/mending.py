"""Saves snapshots in the store, and mends sessions: makes the snapshots that the writer's queue has dropped.

An idle session's KV that is only on the device is lost if the process ends. So once the queue is empty, turns
that add no token copy this KV into snapshots, for the most recently active sessions first. Knows which
sessions lack snapshots; the engine runs the turns. Event loop only.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog

from cache.names.blocks import Span

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cache.kv.size import KvSize
    from cache.store import Store
    from turnkeep_client.subjects import SessionKey

    from .run import Run
    from .turn import SnapshotCut, Turn

log = structlog.get_logger()

#: How often to check whether the writer's queue is empty.
_POLL_S: Final = 0.05


class Mending:
    """The sessions that lack snapshots, and the session whose missing snapshots are being made."""

    def __init__(
        self,
        store: Store,
        is_at_work: Callable[[SessionKey], bool],
        mend: Callable[[SessionKey], Awaitable[bool]],
    ) -> None:
        """`mend` makes a session's missing snapshots, as many as the queue takes; True if more remain.

        `mend` is called only for sessions for which `is_at_work` is false.
        """
        self._store = store
        self._is_at_work = is_at_work
        self._mend = mend
        self._lacking: dict[SessionKey, None] = {}  # least recently active first
        self._some = asyncio.Event()
        self._ended: dict[SessionKey, asyncio.Event] = {}

    def save(self, cut: SnapshotCut, run: Run | None) -> None:
        """Queue the snapshot `cut` in the store; `run` is the run of its turn, None if the turn has ended."""
        mends = run is not None and run.mends
        if run is not None and (run.is_forgotten or (run.mends and run.is_stopped)):
            return  # the session may have been erased
        if cut.tensors is None or cut.state_lost:
            self._store.skip(1)
            self._lacks(cut.turn.key, mends=mends)
        if cut.tensors is None:
            return
        try:
            tokens = cut.turn.tokens(cut.span.end)
            chain = cut.turn.chain or self._store.chain(cut.turn.tenant, cut.turn.policy)
            if not self._store.save(chain, tokens, cut.span, cut.tensors):
                self._lacks(cut.turn.key, mends=mends)
        except Exception:
            # An exception would skip the next event of the step, which may be the turn's end.
            log.exception("a snapshot was not saved", session=str(cut.turn.key))

    def fitting(self, turn: Turn, kv: KvSize) -> list[Span]:
        """Return the first spans of a turn that lack snapshots, as many as fit into the writer's queue."""
        left, fitting = self._store.room(), list[Span]()
        for span in turn.spans:
            left -= kv.snapshot(span.num_tokens, at=span.end)
            if left < 0:
                break
            fitting.append(span)
        return fitting

    def _lacks(self, key: SessionKey, *, mends: bool) -> None:
        if not mends:
            self.note(key)

    def note(self, key: SessionKey) -> None:
        """Record that a snapshot of a session was dropped."""
        self._lacking.pop(key, None)
        self._lacking[key] = None
        self._some.set()

    def discard(self, key: SessionKey) -> None:
        """Stop tracking a session whose KV has left the device or must not be stored."""
        self._lacking.pop(key, None)

    async def ended(self, key: SessionKey) -> None:
        """Wait while a session's missing snapshots are being made; return at once if they are not."""
        while key in self._ended:
            await self._ended[key].wait()

    async def run(self) -> None:
        """Make sessions' missing snapshots whenever the writer's queue is empty; run until cancelled."""
        while True:
            await self._some.wait()
            if not await self._next():
                await asyncio.sleep(_POLL_S)
            if not self._lacking:
                self._some.clear()

    async def finish(self, within_s: float) -> int:
        """Make missing snapshots for at most `within_s`; return how many sessions still lack some."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._lacking:
                    if not await self._next():
                        await asyncio.sleep(_POLL_S)
        return len(self._lacking)

    async def _next(self) -> bool:
        """Make the missing snapshots of the most recently active idle session that lacks some.

        Returns False if there is no such session, or if the writer's queue is in use.
        """
        free = (
            key for key in reversed(self._lacking) if not self._is_at_work(key) and key not in self._ended
        )
        key = next(free, None) if self._store.is_idle else None
        if key is None:
            return False
        self._ended[key] = ended = asyncio.Event()
        try:
            if not await self._mend(key):
                self.discard(key)  # not tried again before the session's next turn
        finally:
            del self._ended[key]
            ended.set()
        return True
