"""Hands snapshots to the store, and makes good those that the full queue of its writer has dropped.

The KV of an idle session that is only on the device is lost with the process. Once the queue is empty, the
session's missing blocks are cut again, in turns that add no token, most recently active sessions first. Knows
which sessions lack snapshots; the engine runs the turns. Event loop only.
"""

from __future__ import annotations

import asyncio
from time import monotonic
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

#: How often to look whether the writer's queue is empty.
_POLL_S: Final = 0.05


class Mending:
    """The sessions that lack snapshots, and the one that is being mended."""

    def __init__(
        self,
        store: Store,
        is_at_work: Callable[[SessionKey], bool],
        mend: Callable[[SessionKey], Awaitable[bool]],
    ) -> None:
        """`mend` cuts what fits into the empty queue, and returns True if more is missing.

        It is called for sessions that are not at work.
        """
        self._store = store
        self._is_at_work = is_at_work
        self._mend = mend
        self._lacking: dict[SessionKey, None] = {}  # least recently active first
        self._some = asyncio.Event()
        self._ended: dict[SessionKey, asyncio.Event] = {}

    def save(self, cut: SnapshotCut, run: Run | None) -> None:
        """Hand a snapshot to the store; `run` is that of its turn, if the turn is not over."""
        mends = run is not None and run.mends
        if run is not None and run.mends and run.is_stopped:
            return  # what is mended may have been forgotten
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
            # The turn's end may be the next event, and must not get lost with a snapshot.
            log.exception("a snapshot was not saved", session=str(cut.turn.key))

    def fitting(self, turn: Turn, kv: KvSize) -> list[Span]:
        """Return the first missing spans of a turn that fit together into the writer's queue."""
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
        """Forget a session: its KV has left the device or must not be stored. Also while it is mended."""
        self._lacking.pop(key, None)

    async def ended(self, key: SessionKey) -> None:
        """Wait until the session is not being mended."""
        while key in self._ended:
            await self._ended[key].wait()

    async def run(self) -> None:
        """Mend sessions whenever the queue is empty, until cancelled."""
        while True:
            await self._some.wait()
            if not await self._next():
                await asyncio.sleep(_POLL_S)
            if not self._lacking:
                self._some.clear()

    async def finish(self, within_s: float) -> int:
        """Mend all sessions, or as many as time allows; return how many still lack snapshots."""
        until_s = monotonic() + within_s
        while self._lacking and monotonic() < until_s:
            if not await self._next():
                await asyncio.sleep(_POLL_S)
        return len(self._lacking)

    async def _next(self) -> bool:
        """Mend the most recently active idle session; False if there is none, or the queue is not empty."""
        free = (
            key for key in reversed(self._lacking) if not self._is_at_work(key) and key not in self._ended
        )
        key = next(free, None) if self._store.is_idle else None
        if key is None:
            return False
        self._ended[key] = ended = asyncio.Event()
        try:
            if not await self._mend(key):
                self.discard(key)  # what could not be cut is not tried again before the session's next turn
        finally:
            del self._ended[key]
            ended.set()
        return True
