"""Saves KV: the device copies what the index lacks of a session's KV whenever the writer's queue has room.

Blocks are copied once they are full, and the tail (the last, partial block) when a turn ends. What then found
no room, or was not written, is copied while its session is idle, and when the worker stops. An idle session's
KV that is only on the device would be lost if the process ended.

`Cutter` copies, on the device thread, and knows no names of snapshots. `Saving` asks the index, on the event
loop.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Final

import mlx.core as mx
import structlog

from cache.kv import layers
from cache.names.blocks import Span, tail_start
from cache.names.errors import CutOffError
from cache.names.snapshot import carried
from worker.observe.traces import Phase

from . import machine
from .turn import SnapshotCut, Turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from cache.kv.size import KvSize
    from cache.names.policy import Policy
    from cache.store import Store
    from turnkeep_client.subjects import SessionKey
    from worker.batch.batch import Batch

    from .memory import Estimator
    from .residency import Residency
    from .run import Run
    from .scheduler import Step

log = structlog.get_logger()

#: How long the prompt of a paged session, which needs all its KV on disk, waits for room in the queue
#: while the disk takes nothing.
PATIENCE_S: Final = 30.0
#: How often to check whether the writer's queue has room.
_POLL_S: Final = 0.05
#: When to try again if nothing of a session could be saved, for example because the device lacks memory.
_RETRY_S: Final = 10.0


class Cutter:
    """Copies spans of KV into snapshots for the writer, a turn's spans in order. Device thread only.

    Does nothing until `room` is set, a function that returns the free bytes of the writer's queue.
    """

    def __init__(
        self,
        batch: Batch,
        estimator: Estimator,
        block: int,
        done: Callable[[SnapshotCut], None],
        *,
        trimmable: bool,
    ) -> None:
        """`done` is called with each snapshot; `trimmable` says that caches can be truncated at any token."""
        self.room: Callable[[], int] | None = None
        self._batch = batch
        self._estimator = estimator
        self._block = block
        self._done = done
        self._trimmable = trimmable

    def size_bytes(self, step: Step) -> int:
        """Return the bytes of the snapshots that `cut_blocks` may make after a step."""
        if self.room is None:
            return 0
        turns = (*step.prefill, *((turn, 0) for turn in step.decode))
        return min(self.room(), sum(self._size_bytes(turn, num) for turn, num in turns))

    def _size_bytes(self, turn: Turn, num_tokens: int) -> int:
        """Return the bytes of a turn's snapshots that are due once `num_tokens` more tokens have KV."""
        size_bytes, kv = 0, self._estimator.kv.under(turn.policy)
        for span in takewhile(lambda span: span.end <= turn.num_cached + num_tokens, turn.spans):
            more = self._carried(turn, span)
            size_bytes += kv.snapshot(span.num_tokens, at=span.end)
            size_bytes += more.num_tokens * kv.bytes_per_token if more is not None else 0
        return size_bytes

    def is_behind(self, turn: Turn, num_tokens: int) -> bool:
        """Say whether a paged session's prompt should wait for room in the writer's queue.

        It waits as long as the room changes, and then for at most 30 s.
        Without the wait, KV that later pieces need could leave the device before it is queued for the disk.
        """
        if self.room is None or not turn.policy.recall:
            return False
        self.cut(turn)
        size_bytes, room_bytes = self._size_bytes(turn, num_tokens), self.room()
        if size_bytes <= room_bytes:
            turn.behind = None
            return False
        if turn.behind is None or turn.behind[0] != room_bytes:
            turn.behind = room_bytes, time.monotonic()
        return time.monotonic() < turn.behind[1] + PATIENCE_S

    def note_block(self, turn: Turn) -> None:
        """Add the last block of an answer to its turn's spans, if the newest token has completed it."""
        if turn.num_cached % self._block == 0:
            turn.spans.append(Span(turn.num_cached - self._block, turn.num_cached))

    def cut_blocks(self, step: Step) -> None:
        """Cut the blocks of a step's turns, after the step's report and before the next step changes the KV.

        A prompt's blocks wait while copying them would delay its answer's first token.
        """
        for turn in (*step.decode, *(turn for turn, _ in step.prefill)):
            if not self._is_about_to_answer(turn):
                self.cut(turn)

    def cut_tail(self, turn: Turn) -> None:
        """Cut a turn's blocks, and the new part of its last, partial block, when it ends."""
        turn.spans = self._due(turn)
        start = turn.num_cached - turn.num_cached % self._block
        if turn.edges and turn.edges[0] == start:  # else none of this block was stored when the turn began
            start = tail_start(turn.edges, turn.num_cached)
        if start < turn.num_cached and turn.embedding is None:
            turn.spans.append(Span(start, turn.num_cached))
        self.cut(turn, is_over=True)

    def cut(self, turn: Turn, *, is_over: bool = False) -> None:
        """Cut the spans of a turn that have KV, in order, as many as the queue has room for.

        `is_over` says that the turn adds no KV. Later spans stay noted: without the earlier ones in the index
        they could not be found.
        """
        if turn.row is None and turn.caches is None:  # it has ended
            return
        for span in self._due(turn):
            if not self._cut(turn, span, is_over=is_over):
                return
            del turn.spans[0]

    def _due(self, turn: Turn) -> list[Span]:
        return list(takewhile(lambda span: span.end <= turn.num_cached, turn.spans))

    def _is_about_to_answer(self, turn: Turn) -> bool:
        """Say whether a turn's next piece ends its prompt; its snapshots can then wait for that piece."""
        begins = turn.answer is not None and turn.row is None
        return begins and self._trimmable and 0 < turn.target - turn.num_cached <= self._block

    def _cut(self, turn: Turn, span: Span, *, is_over: bool) -> bool:
        """Copy a span's KV, with the layers' states if the span ends where the KV ends; False without room.

        A turn's last snapshot is cut only with these states: stored without them, it would never get them.
        """
        row, caches = turn.row, turn.caches or []
        num_cached = turn.num_cached
        if row is not None:
            caches, num_cached = self._batch.caches(row), row.num_cached
        if self.room is None:
            return False
        if not layers.holds(caches, span.start, span.end):  # the window has moved past the span
            return True
        is_last, start_s = is_over and turn.num_cached == span.end, time.monotonic()
        try:
            tensors = layers.cut(
                caches,
                span.start,
                span.end,
                at_end=turn.num_cached == num_cached == span.end,
                # Snapshots that wait for the disk are in device memory too: they must not displace sessions.
                room_bytes=min(self.room(), self._estimator.limit_bytes - mx.get_active_memory()),
                # A state can be many times a block's KV: keep room for the one at the turn's end.
                spare_states=0 if is_last else 1,
                carried=self._carried(turn, span),
            )
        except Exception as error:
            if machine.loses_kv(error):
                raise
            log.exception("a snapshot could not be cut", session=str(turn.key))  # the answer continues
            return True
        turn.cuts.append(Phase("snapshot", start_s, time.monotonic(), span.num_tokens))
        is_whole = self._trimmable or any(tensor.of_state for tensor in tensors or ())
        if tensors is None or (is_last and not is_whole):
            return False
        self._done(SnapshotCut(turn, span, tensors))
        return True

    def _carried(self, turn: Turn, span: Span) -> Span | None:
        return carried(span, self._block) if turn.policy.recall else None


class Saving:
    """The sessions whose KV the index may lack, and the one whose KV is being copied. Event loop only."""

    def __init__(
        self,
        store: Store,
        residency: Residency,
        at_work: Callable[[], set[SessionKey]],
        copy: Callable[[Turn], None],
        kv: Callable[[Policy], KvSize],
    ) -> None:
        """`at_work` returns the sessions that are not idle, `kv` the size of a session's KV.

        `copy` lets the device copy a turn's `spans`; `save` gets the snapshots, and `end_copy` follows.
        """
        self._store = store
        self._residency = residency
        self._at_work = at_work
        self._copy_spans = copy
        self._kv = kv
        #: When to look at each session next; the least recently active session first.
        self._lacking: dict[SessionKey, float] = {}
        #: The turn that stands for an idle session while the device copies its `spans`. It never runs.
        self._copied: Turn | None = None
        self._changed = asyncio.Event()
        store.listen(self._lost)

    def save(self, cut: SnapshotCut, run: Run | None) -> None:
        """Queue a snapshot in the store; `run` is the run of its turn, None for an idle session."""
        if run.is_forgotten if run is not None else cut.turn is not self._copied:
            return  # the session may have been erased
        try:
            tokens = cut.turn.tokens(cut.span.end)
            chain = cut.turn.chain or self._store.chain(cut.turn.tenant, cut.turn.policy)
            if self._store.save(chain, tokens, cut.span, cut.tensors) and cut.turn is self._copied:
                self._lacking[cut.turn.key] = 0.0
        except Exception:
            # An exception would skip the next event of the step, which may be the turn's end.
            log.exception("a snapshot was not saved", session=str(cut.turn.key))

    def end_turn(self, turn: Turn) -> None:
        """Note the session of a turn that has ended if the index lacks some of its KV.

        The turn's `spans` that found no room in the queue count as dropped.
        """
        self.discard(turn.key)
        if turn.spans:
            self._store.skip(len(turn.spans))
        if self._missing(turn.key):
            self._note(turn.key)

    def end_copy(self, turn: Turn) -> None:
        """Note that the device has copied what it could of an idle session."""
        if turn is self._copied:
            self._copied = None
            self._changed.set()

    def discard(self, key: SessionKey) -> None:
        """Save nothing more of a session whose KV has left the device or must not be stored."""
        self._lacking.pop(key, None)
        if self._copied is not None and self._copied.key == key:
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
                while self._copied or self._due() or not self._store.is_idle:
                    if not self._copy_next():
                        await self._pause(_POLL_S)

    def unstored(self) -> list[int]:
        """Return, for each session whose KV on the device is not all on disk, how many tokens are not."""
        return [num for key in self._resident() if (num := self._num_unstored(key))]

    def _lost(self) -> None:
        """Look at every session, since a queued snapshot was not written: its file has no session's name."""
        for key in (*self._resident(), *self._at_work()):
            self._note(key)

    def _note(self, key: SessionKey) -> None:
        self._lacking.pop(key, None)
        self._lacking[key] = 0.0
        self._changed.set()

    def _resident(self) -> list[SessionKey]:
        return self._residency.oldest(sys.maxsize, ())

    def _num_unstored(self, key: SessionKey) -> int:
        tokens, policy = self._residency.tokens(key), self._residency.policy(key)
        try:
            return len(tokens) - self._store.num_stored(self._store.chain(key.tenant, policy, tokens), tokens)
        except CutOffError:
            return len(tokens)

    def _missing(self, key: SessionKey) -> list[Span]:
        """Return the spans of a session's KV on the device that are neither stored nor queued."""
        tokens, policy = self._residency.tokens(key), self._residency.policy(key)
        try:
            return self._store.wanted(self._store.chain(key.tenant, policy, tokens), tokens)
        except CutOffError:  # tokens that the model does not see any more: their KV is not on the device
            return []

    def _due(self) -> list[SessionKey]:
        """List the sessions to look at now, the most recently active one first."""
        now_s = time.monotonic()
        return [key for key, next_s in reversed(self._lacking.items()) if next_s <= now_s]

    def _copy_next(self) -> bool:
        """Let the device copy what the index lacks of an idle session; return False if it cannot now."""
        spare_bytes = self._store.spare()
        if self._copied is not None or not spare_bytes:
            return False
        busy = self._at_work()
        for key in self._due():
            if key not in busy:
                if spans := self._missing(key):
                    return self._copy(key, spans, spare_bytes)
                self.discard(key)
        return False

    def _copy(self, key: SessionKey, spans: list[Span], spare_bytes: int) -> bool:
        tokens, policy = self._residency.tokens(key), self._residency.policy(key)
        kv = self._kv(policy)
        sizes = accumulate(kv.snapshot(span.num_tokens, at=span.end) for span in spans)
        num_fitting = sum(size_bytes <= spare_bytes for size_bytes in sizes)
        if not num_fitting and not self._store.is_idle:
            return False
        chain = self._store.chain(key.tenant, policy, tokens)
        self._copied = Turn(key, tokens, policy=policy, chain=chain, spans=spans[: max(num_fitting, 1)])
        self._lacking[key] = time.monotonic() + _RETRY_S
        self._copy_spans(self._copied)
        return True

    async def _pause(self, timeout_s: float | None) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
