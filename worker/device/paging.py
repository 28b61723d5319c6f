"""Requests KV on SSD for turns of paged sessions, which keep only part of their KV on the device.

Device thread only.

Sends `KvRequest` to the event loop, and tracks which turns wait for its answer. Knows no steps or files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cache.kv import layers, paged
from cache.names.blocks import Span
from cache.names.errors import LostPastError
from cache.names.policy import CHUNK, RECALLED

from .turn import KvRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.batch.batch import Batch

    from .cutter import Cutter
    from .scheduler import Scheduler
    from .turn import DeviceTurn, Event, KvRead

#: An answer of a paged session requests chunks once every this many tokens.
RECALL_EVERY: Final = 16


class Paging:
    """Requests KV on SSD for turns of paged sessions, and lets prompts wait for it; ignores other turns."""

    def __init__(
        self,
        scheduler: Scheduler,
        batch: Batch,
        cutter: Cutter,
        block: int,
        emit: Callable[[Event], None],
    ) -> None:
        """A prompt is removed from `scheduler` while it waits; `emit` sends an event to the event loop."""
        self._scheduler = scheduler
        self._batch = batch
        self._cutter = cutter
        self._block = block
        self._emit = emit
        self._asked: set[DeviceTurn] = set()

    @property
    def is_waiting(self) -> bool:
        """Whether any prompt waits for KV from SSD."""
        return any(turn.row is None for turn in self._asked)

    def __contains__(self, turn: DeviceTurn) -> bool:
        """Whether a turn has requested KV and not received it yet."""
        return turn in self._asked

    def discard(self, turn: DeviceTurn) -> None:
        """Withdraw the request of a turn that has ended."""
        self._asked.discard(turn)

    def start(self, turn: DeviceTurn) -> None:
        """Set a new, scheduled turn's largest pieces, and request the KV that it needs."""
        if turn.caches is not None:
            most_run = layers.most_run(turn.caches, self._block) // self._block
            turn.most_blocks = min(most_run, self._cutter.most_blocks(turn))
        target, policy = turn.request.target, turn.request.policy
        if turn.request.draws and policy.recall and policy.visible_from(target):
            turn.asks = turn.num_cached < target - 1  # else no query is left to choose chunks
        self.ask(turn)

    def begin_piece(self, turn: DeviceTurn) -> None:
        """Let a prompt's next piece attend to all earlier KV.

        Also sets from which token on the queries score chunks.
        """
        if (cache := paged.first(turn.caches or [])) is not None:
            cache.pages.asks_from = turn.request.target - 1 - self._block
            cache.pages.sees_all, cache.pages.past = True, turn.past

    def end_piece(self, turn: DeviceTurn) -> None:
        """Update the chunks' scores after a piece, and limit attention to the KV on the device again."""
        if (cache := paged.first(turn.caches or [])) is not None:
            cache.pages.settle()
            cache.pages.sees_all, cache.pages.past = False, None

    def ask(self, turn: DeviceTurn) -> None:
        """Request the KV on SSD to which a turn's next tokens attend; a prompt waits for this KV.

        A prompt requests chunks once, before its last token, for the tokens of its answer.
        """
        if turn in self._asked:
            return
        if turn.row is None:
            cache = paged.first(turn.caches or [])
            num_past = 0 if cache is None else cache.num_passed
            is_due = turn.asks and turn.num_cached >= turn.request.target - 1
            turn.asks = turn.asks and not is_due
        else:
            num_past, is_due = 0, turn.num_cached % RECALL_EVERY == 0
            cache = paged.first(turn.current_caches(self._batch)) if is_due else None
        chunks = cache.pages.choose(turn.num_cached)[: RECALLED // CHUNK] if cache and is_due else []
        if num_past or chunks:
            self._asked.add(turn)
            if turn.row is None:
                self._scheduler.remove(turn)
            spans = tuple(Span(chunk * CHUNK, (chunk + 1) * CHUNK) for chunk in sorted(chunks))
            self._emit(KvRequest(turn, num_past, spans))

    def take(self, turn: DeviceTurn, kv: KvRead) -> None:
        """Give a turn the KV that was read for it; a waiting prompt continues.

        Raises `LostPastError` if KV of earlier tokens that the prompt's next piece needs is missing.
        """
        self._asked.discard(turn)
        if kv.spans:
            paged.recall(turn.current_caches(self._batch), kv.tensors, kv.spans)
        if turn.row is None:
            cache = paged.first(turn.caches or [])
            if kv.past is None and cache is not None and cache.num_passed:
                why = "the prompt needs the KV of all earlier tokens, and the disk lacks some of it"
                raise LostPastError(why)
            turn.past = kv.past
            self._scheduler.add(turn)
