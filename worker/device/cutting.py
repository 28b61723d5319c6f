"""Cuts snapshots: copies the KV of spans of tokens into arrays that the writer thread stores on disk.

Each block is copied once it is full, and at a turn's end the new part of the last, partial block (the tail).

Device thread only. Knows the turns' progress and how much memory a copy may take, but no names of snapshots.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import mlx.core as mx
import structlog

from cache.kv import layers
from cache.names.blocks import Span, tail_start
from cache.names.snapshot import carried
from worker.observe.traces import Phase

from . import machine
from .scheduler import Step
from .turn import SnapshotCut

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.batch.batch import Batch

    from .memory import Estimator
    from .turn import Turn

log = structlog.get_logger()

#: How long a prompt that needs all earlier KV on disk waits for room in the queue while the disk takes
#: nothing.
PATIENCE_S: Final = 30.0


class Cutting:
    """Copies spans of turns' KV into snapshots for the writer.

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
        self._due: list[tuple[Turn, Span]] = []

    def size_bytes(self, step: Step) -> int:
        """Count the bytes of the snapshots that `cut_noted` will make after a step.

        They cover the spans that the step's prompt pieces complete, and the spans already noted.
        """
        if self.room is None:
            return 0
        ready = [
            (turn, span)
            for turn, num in step.prefill
            for span in turn.spans
            if span.end <= turn.num_cached + num
        ]
        size_bytes = 0
        for turn, span in (*ready, *self._due):
            kv, more = self._estimator.kv.under(turn.policy), self._carried(turn, span)
            size_bytes += kv.snapshot(span.num_tokens, at=span.end)
            size_bytes += more.num_tokens * kv.bytes_per_token if more is not None else 0
        return size_bytes

    def is_behind(self, turn: Turn, num_tokens: int) -> bool:
        """Say whether a prompt that reads earlier KV from disk should wait for room in the writer's queue.

        It waits as long as the room changes, and then for at most 30 s.
        Without the wait, KV that later pieces need could leave the device before it is queued for the disk.
        """
        if self.room is None or not turn.policy.recall:
            return False
        size_bytes, room_bytes = self.size_bytes(Step((), ((turn, num_tokens),))), self.room()
        if size_bytes <= room_bytes:
            turn.behind = None
            return False
        if turn.behind is None or turn.behind[0] != room_bytes:
            turn.behind = room_bytes, time.monotonic()
        return time.monotonic() < turn.behind[1] + PATIENCE_S

    def note_prompt(self, turn: Turn) -> None:
        """Note, for `cut_noted`, the spans of a prompt that lack a snapshot and are now fully prefilled."""
        while turn.spans and turn.spans[0].end <= turn.num_cached:
            self._due.append((turn, turn.spans.pop(0)))

    def note_block(self, turn: Turn) -> None:
        """Note the last block of an answer for `cut_noted`, if the newest token has completed the block."""
        if turn.num_cached % self._block == 0:
            self._due.append((turn, Span(turn.num_cached - self._block, turn.num_cached)))

    def clear(self) -> None:
        """Forget all noted spans, because the device has lost their KV."""
        self._due.clear()

    def cut_tail(self, turn: Turn) -> None:
        """Copy the new part of an ended answer's last, partial block into a snapshot."""
        start = self._tail_start(turn)
        if start < turn.num_cached:
            self._cut(turn, Span(start, turn.num_cached))

    def cut_noted(self, only: Turn | None = None) -> None:
        """Copy the noted spans of all turns, or only of the turn `only`, into snapshots.

        Call this after the step's report and before the next step changes the KV.

        A span stays noted while copying it would delay an answer's first token. Spans of failed turns are
        skipped.
        """
        due, self._due = self._due, []
        for turn, span in due:
            if turn is not only and (only is not None or self._is_about_to_answer(turn)):
                self._due.append((turn, span))
            elif turn.row is not None or turn.caches is not None:
                self._cut(turn, span)

    def _is_about_to_answer(self, turn: Turn) -> bool:
        """Say whether a turn's next piece ends its prompt; its snapshots can then wait for that piece."""
        begins = turn.answer is not None and turn.row is None
        return begins and self._trimmable and 0 < turn.target - turn.num_cached <= self._block

    def _cut(self, turn: Turn, span: Span) -> None:
        """Copy a span's KV into a snapshot, with the layers' states if the span ends where the KV ends."""
        if self.room is None:
            return
        row, caches, at_end = turn.row, turn.caches or [], turn.num_cached == span.end
        if row is not None:
            caches = self._batch.caches(row)
        if not layers.holds(caches, span.start, span.end):  # the window has moved past the span
            return
        ends_turn = span.end % self._block != 0 or (turn.answer is None and span.end == turn.target)
        if row is not None:
            at_end = at_end and row.num_cached == span.end
        tensors, start_s = None, time.monotonic()
        try:
            tensors = layers.cut(
                caches,
                span.start,
                span.end,
                at_end=at_end,
                # Snapshots that wait for the disk are in device memory too: they must not displace sessions.
                room_bytes=min(self.room(), self._estimator.limit_bytes - mx.get_active_memory()),
                # A state can be many times a block's KV: keep room for the one at the turn's end.
                spare_states=0 if ends_turn else 1,
                carried=self._carried(turn, span),
            )
        except Exception as error:
            if machine.loses_kv(error):
                raise
            log.exception("a snapshot could not be cut", session=str(turn.key))  # the answer continues
        turn.cuts.append(Phase("snapshot", start_s, time.monotonic(), span.num_tokens))
        is_whole = self._trimmable or any(tensor.of_state for tensor in tensors or ())
        state_lost = at_end and not is_whole
        if ends_turn and state_lost:
            tensors = None  # if it were stored without its state, the state would never be added
        self._done(SnapshotCut(turn, span, tensors, state_lost=state_lost))

    def _carried(self, turn: Turn, span: Span) -> Span | None:
        return carried(span, self._block) if turn.policy.recall else None

    def _tail_start(self, turn: Turn) -> int:
        """Return the token at which the next snapshot of a turn's last, partial block starts."""
        boundary = turn.num_cached - turn.num_cached % self._block
        if not turn.edges or turn.edges[0] != boundary:
            return boundary  # none of this block was stored when the turn began
        return tail_start(turn.edges, turn.num_cached)
