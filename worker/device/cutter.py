"""Cuts snapshots: copies spans of a session's KV for the writer, where its queue has room.

It knows no names of snapshots; `unsaved_kv` says what the disk lacks of an idle session's KV.
"""

from __future__ import annotations

import sys
import time
from itertools import takewhile
from typing import TYPE_CHECKING, Final

import mlx.core as mx
import structlog

from cache.kv import layers
from cache.names.blocks import Span, tail_start
from cache.names.snapshot import CARRIER, carried
from worker.observe.traces import Phase

from . import machine
from .turn import DeviceTurn, SnapshotCut

if TYPE_CHECKING:
    from collections.abc import Callable

    from .scheduler import Step
    from .served_model import ServedModel

log = structlog.get_logger()

#: How long a prompt that needs all earlier KV on disk waits for room in the queue while the disk takes
#: nothing.
PATIENCE_S: Final = 30.0


class Cutter:
    """Copies spans of KV into snapshots for the writer, a turn's spans in order. Device thread only.

    Does nothing until `room` is set, a function that returns the free bytes of the writer's queue, which
    takes up to `queue_bytes`.
    """

    def __init__(self, served: ServedModel, block: int, done: Callable[[SnapshotCut], None]) -> None:
        """`done` is called with each snapshot."""
        self.room: Callable[[], int] | None = None
        self.queue_bytes = sys.maxsize
        #: Bytes of all snapshots that the event loop has queued for the disk or dropped. It writes them here.
        self.taken_bytes = 0
        self._cut_bytes = 0  # of all snapshots
        self._batch = served.batch
        self._estimator = served.estimator
        self._trimmable = served.trimmable
        self._block = block
        self._done = done

    def size_bytes(self, step: Step) -> int:
        """Return the bytes of the snapshots that `cut_blocks` may make after a step."""
        turns = (*step.prefill, *((turn, 0) for turn in step.decode))
        return min(self._room(), sum(self._size_bytes(turn, num) for turn, num in turns))

    def _room(self) -> int:
        """Return the bytes of further snapshots that the queue has room for."""
        # Read before the queue's room: snapshots that are queued in between count twice, else they would not
        # count at all.
        taken_bytes = self.taken_bytes
        return 0 if self.room is None else max(0, self.room() - (self._cut_bytes - taken_bytes))

    def _size_bytes(self, turn: DeviceTurn, num_tokens: int) -> int:
        """Return the bytes of a turn's snapshots that are due once `num_tokens` more tokens have KV."""
        size_bytes, kv = 0, self._estimator.kv.under(turn.request.policy)
        for span in takewhile(lambda span: span.end <= turn.num_cached + num_tokens, turn.spans):
            more = self._carried(turn, span)
            size_bytes += kv.snapshot(span.num_tokens, at=span.end)
            size_bytes += more.num_tokens * kv.bytes_per_token if more is not None else 0
        return size_bytes

    def most_blocks(self, turn: DeviceTurn) -> int:
        """Return how many blocks a piece of a turn's prompt may have: at least 1.

        Of a paged session's prompt, the snapshots of a piece fit into half of the writer's queue: the disk
        writes them while the next piece runs.
        """
        if not turn.request.policy.recall:
            return sys.maxsize
        kv, block = self._estimator.kv.under(turn.request.policy), self._block
        left_bytes = self.queue_bytes // 2 - CARRIER * block * kv.bytes_per_token
        return max(left_bytes // kv.snapshot(block, at=turn.request.target), 1)

    def is_behind(self, turn: DeviceTurn, num_tokens: int) -> bool:
        """Cut what has room; return whether a paged session's prompt should wait for room in the queue.

        It waits as long as the room changes, and then for at most 30 s.
        Without the wait, KV that later pieces need could leave the device before it is queued for the disk.
        """
        if self.room is None or not turn.request.policy.recall:
            return False
        self.cut(turn)
        size_bytes, room_bytes = self._size_bytes(turn, num_tokens), self._room()
        if size_bytes <= room_bytes:
            turn.behind = None
            return False
        if turn.behind is None or turn.behind[0] != room_bytes:
            turn.behind = room_bytes, time.monotonic()
        return time.monotonic() < turn.behind[1] + PATIENCE_S

    def note_block(self, turn: DeviceTurn) -> None:
        """Add the last block of an answer to its turn's spans, if the newest token has completed it."""
        if turn.num_cached % self._block == 0 and turn.request.policy.has_snapshots:
            turn.spans.append(Span(turn.num_cached - self._block, turn.num_cached))

    def cut_blocks(self, step: Step) -> None:
        """Cut the blocks of a step's turns, after the step's report and before the next step changes the KV.

        A prompt's blocks wait while copying them would delay its answer's first token.
        """
        for turn in (*step.decode, *(turn for turn, _ in step.prefill)):
            if not self._is_about_to_answer(turn):
                self.cut(turn)

    def cut_tail(self, turn: DeviceTurn) -> None:
        """Cut a turn's blocks, and the new part of its last, partial block, when it ends."""
        turn.spans = self._due(turn)
        start = turn.num_cached - turn.num_cached % self._block
        edges = turn.plan.edges
        if edges and edges[0] == start:  # else none of this block was stored when the turn began
            start = tail_start(edges, turn.num_cached)
        is_wanted = turn.request.embedding is None and turn.request.policy.has_snapshots
        if start < turn.num_cached and is_wanted:
            turn.spans.append(Span(start, turn.num_cached))
        self.cut(turn, is_over=True)

    def cut(self, turn: DeviceTurn, *, is_over: bool = False) -> None:
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

    def _due(self, turn: DeviceTurn) -> list[Span]:
        return list(takewhile(lambda span: span.end <= turn.num_cached, turn.spans))

    def _is_about_to_answer(self, turn: DeviceTurn) -> bool:
        """Say whether a turn's next piece ends its prompt; its snapshots can then wait for that piece."""
        begins = turn.request.answer is not None and turn.row is None
        return begins and self._trimmable and 0 < turn.request.target - turn.num_cached <= self._block

    def _cut(self, turn: DeviceTurn, span: Span, *, is_over: bool) -> bool:
        """Copy a span's KV, with the layers' states if the span ends where the KV ends; False without room.

        A turn's last snapshot is cut only with these states: stored without them, it would never get them.
        """
        caches = turn.current_caches(self._batch)
        num_cached = turn.num_cached if turn.row is None else turn.row.num_cached
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
                most_bytes=min(self._room(), self._estimator.limit_bytes - mx.get_active_memory()),
                # A state can be many times a block's KV: keep room for the one at the turn's end.
                spare_states=0 if is_last else 1,
                carried=self._carried(turn, span),
            )
        except Exception as error:
            if machine.loses_kv(error):
                raise
            # The answer continues.
            log.exception("a snapshot could not be cut", session=str(turn.request.key))
            return True
        turn.cuts.append(Phase("snapshot", start_s, time.monotonic(), span.num_tokens))
        is_whole = self._trimmable or any(tensor.of_state for tensor in tensors or ())
        if tensors is None or (is_last and not is_whole):
            return False
        cut = SnapshotCut(turn, span, tensors)
        self._cut_bytes += cut.size_bytes
        self._done(cut)
        return True

    def _carried(self, turn: DeviceTurn, span: Span) -> Span | None:
        return carried(span, self._block) if turn.request.policy.recall else None
