"""Saves snapshots in the store, and mends sessions: makes the snapshots that were dropped or not written.

An idle session's KV that is only on the device is lost if the process ends. So once the writer's queue has
room, turns that add no token copy this KV into snapshots, for the most recently active sessions first. Knows
which sessions may lack snapshots; the engine runs the turns. Event loop only.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Final

import structlog

from cache.names.blocks import Span
from cache.names.errors import CutOffError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cache.kv.size import KvSize
    from cache.names.policy import Policy
    from cache.names.tokens import Tokens
    from cache.store import Store
    from turnkeep_client.subjects import SessionKey

    from .residency import Residency
    from .run import Run
    from .turn import SnapshotCut, Turn

log = structlog.get_logger()

#: How often to check whether the writer's queue has room.
_POLL_S: Final = 0.05
#: When to try again if no missing snapshot could be made, for example because the device lacks memory.
_RETRY_S: Final = 10.0


class Mending:
    """The sessions that may lack snapshots, and the session whose missing snapshots are being made."""

    def __init__(
        self,
        store: Store,
        residency: Residency,
        at_work: Callable[[], set[SessionKey]],
        mend: Callable[[SessionKey, Tokens, Policy], Awaitable[Run]],
        kv: Callable[[Policy], KvSize],
    ) -> None:
        """`mend` runs a turn that makes an idle session's missing snapshots, as many as the queue takes.

        It is called only for sessions that are not `at_work`. `kv` returns the size of a session's KV.
        """
        self._store = store
        self._residency = residency
        self._at_work = at_work
        self._mend = mend
        self._kv = kv
        #: When to look at each session next; the least recently active session first.
        self._lacking: dict[SessionKey, float] = {}
        self._some = asyncio.Event()
        self._ended: dict[SessionKey, asyncio.Event] = {}
        store.listen(self._lost)

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

    def limit(self, turn: Turn, *, mends: bool) -> None:
        """Limit the snapshots that a turn makes: none while writing is paused; if it `mends`, what fits."""
        if self._store.is_paused:
            turn.spans = []
            self.note(turn.key)
        elif mends:
            left, fitting = self._store.spare(), list[Span]()
            for span in turn.spans:
                left -= self._size_bytes(span, turn.policy)
                if left < 0:
                    break
                fitting.append(span)
            turn.spans = fitting

    def _size_bytes(self, span: Span, policy: Policy) -> int:
        return self._kv(policy).snapshot(span.num_tokens, at=span.end)

    def _lacks(self, key: SessionKey, *, mends: bool) -> None:
        if not mends:
            self.note(key)

    def note(self, key: SessionKey) -> None:
        """Record that a session may lack snapshots."""
        self._lacking.pop(key, None)
        self._lacking[key] = 0.0
        self._some.set()

    def touch(self, key: SessionKey) -> None:
        """Record that a session is active: if it lacks snapshots, they are made before those of others."""
        if key in self._lacking:
            self.note(key)

    def discard(self, key: SessionKey) -> None:
        """Stop tracking a session whose KV has left the device or must not be stored."""
        self._lacking.pop(key, None)

    def _lost(self) -> None:
        """Look at every session, since a queued snapshot was not written: its file has no session's name."""
        for key in (*self._resident(), *self._at_work()):
            self.note(key)

    async def ended(self, key: SessionKey) -> None:
        """Wait while a session's missing snapshots are being made; return at once if they are not."""
        while key in self._ended:
            await self._ended[key].wait()

    async def run(self) -> None:
        """Make sessions' missing snapshots whenever the writer's queue has room; run until cancelled."""
        while True:
            if await self._next():
                await asyncio.sleep(0)
                continue
            self._some.clear()
            pauses_s = [max(next_s - monotonic(), _POLL_S) for next_s in self._lacking.values()]
            with suppress(TimeoutError):
                async with asyncio.timeout(min(pauses_s, default=None)):
                    await self._some.wait()

    async def finish(self, within_s: float) -> None:
        """Make missing snapshots and wait until they are on disk, for at most `within_s`."""
        self._lacking = dict.fromkeys(self._lacking, 0.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._is_due() or not self._store.is_idle:
                    if not await self._next():
                        await asyncio.sleep(_POLL_S)

    def unstored(self) -> list[int]:
        """Return, for each session whose KV on the device is not all on disk, how many tokens are not."""
        return [num for key in self._resident() if (num := self._num_unstored(key))]

    def _resident(self) -> list[SessionKey]:
        return self._residency.oldest(sys.maxsize, ())

    def _num_unstored(self, key: SessionKey) -> int:
        tokens, policy = self._residency.tokens(key), self._residency.policy(key)
        try:
            return len(tokens) - self._store.num_stored(self._store.chain(key.tenant, policy, tokens), tokens)
        except CutOffError:
            return len(tokens)

    def _is_due(self) -> bool:
        return any(next_s <= monotonic() for next_s in self._lacking.values())

    async def _next(self) -> bool:
        """Make the missing snapshots of the most recently active idle session that may lack some.

        Returns False if there is no such session, or if nothing can be made now.
        """
        if not self._store.spare():
            return False
        now_s, busy = monotonic(), self._at_work().union(self._ended)
        due = (key for key, next_s in reversed(self._lacking.items()) if next_s <= now_s and key not in busy)
        key = next(due, None)
        if key is None:
            return False
        self._ended[key] = ended = asyncio.Event()
        try:
            pause_s = await self._make(key)
            if pause_s is None:
                self.discard(key)
            elif key in self._lacking:
                self._lacking[key] = monotonic() + pause_s
        finally:
            del self._ended[key]
            ended.set()
        return not pause_s

    async def _make(self, key: SessionKey) -> float | None:
        """Make an idle session's missing snapshots; return when to look again, None if nothing is missing."""
        tokens, policy = self._residency.tokens(key), self._residency.policy(key)
        chain = self._store.chain(key.tenant, policy, tokens)

        def missing() -> list[Span]:
            return self._store.wanted(chain, tokens, 0, len(tokens))

        try:
            before = missing()
            if not before:
                return None
            if not self._store.is_idle and self._size_bytes(before[0], policy) > self._store.spare():
                return _POLL_S
            run = await self._mend(key, tokens, policy)
            after = missing()
        except CutOffError:  # tokens that the model does not see any more: their KV is not on the device
            return None
        if not after or run.is_forgotten:
            return None
        return 0.0 if run.is_stopped or len(after) < len(before) else _RETRY_S
