"""Asks for the KV that turns of paged sessions need from SSD, and knows which turns wait for it.

Device thread only.

Sends `NeedsKv` to the event loop, and takes the answer. Knows no steps or files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cache.kv import layers
from cache.names.blocks import Span
from cache.names.errors import LostPastError
from cache.names.policy import CHUNK, RECALLED

from .memory import PAGED_SCALE
from .turn import NeedsKv

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.batch.batch import Batch

    from .scheduler import Scheduler
    from .turn import Event, KvRead, Turn

#: An answer's session asks for chunks once in so many tokens.
RECALL_EVERY: Final = 16


class Paging:
    """Asks for KV on SSD for paged sessions, and keeps their waiting prompts; ignores other turns."""

    def __init__(self, scheduler: Scheduler, batch: Batch, block: int, emit: Callable[[Event], None]) -> None:
        """A waiting prompt is taken out of the scheduler, and put back later; `emit` reports an event."""
        self._scheduler = scheduler
        self._batch = batch
        self._block = block
        self._emit = emit
        self._asked: set[Turn] = set()
        #: Tokens that gave way to recalled ones.
        self.num_evicted = 0

    @property
    def is_waiting(self) -> bool:
        """Whether any prompt waits for KV from SSD."""
        return any(turn.row is None for turn in self._asked)

    def __contains__(self, turn: Turn) -> bool:
        """Whether a turn has asked for KV, and has not got it yet."""
        return turn in self._asked

    def discard(self, turn: Turn) -> None:
        """Forget what a turn that is over has asked for."""
        self._asked.discard(turn)

    def start(self, turn: Turn) -> None:
        """Prepare a new turn that has its caches and is in the scheduler; ask for KV that it needs."""
        if turn.caches is not None:
            turn.most_blocks = layers.most_run(turn.caches, self._block) // self._block
        if turn.policy.recall:
            turn.scale = min(turn.most_blocks, PAGED_SCALE)
        turn.asks = turn.asks and turn.num_cached < turn.target - 1  # none of its tokens can ask
        self.ask(turn)

    def begin_piece(self, turn: Turn) -> None:
        """Set which KV a prompt's next piece sees, and which of its tokens' queries score chunks."""
        if (pages := layers.pages(turn.caches or [])) is not None:
            pages.asks_from = turn.target - 1 - self._block
            pages.sees_all, pages.past = True, turn.past

    def end_piece(self, turn: Turn) -> None:
        """Update the chunks' scores after a piece; later tokens see only the KV on the device."""
        if (pages := layers.pages(turn.caches or [])) is not None:
            pages.settle()
            pages.sees_all, pages.past = False, None

    def ask(self, turn: Turn) -> None:
        """Ask for the KV on SSD that a turn's next tokens see; a prompt waits for it.

        A prompt asks for chunks once, before its last token: they are for the answer's tokens.
        """
        if turn in self._asked:
            return
        if turn.row is None:
            num_past = layers.num_passed(turn.caches or [])
            is_due = turn.asks and turn.num_cached >= turn.target - 1
            turn.asks = turn.asks and not is_due
        else:
            num_past, is_due = 0, turn.num_cached % RECALL_EVERY == 0
        pages = layers.pages(self._caches(turn)) if is_due else None
        chunks = pages.choose(turn.num_cached)[: RECALLED // CHUNK] if pages is not None else []
        if num_past or chunks:
            self._asked.add(turn)
            if turn.row is None:
                self._scheduler.remove(turn)
            spans = tuple(Span(chunk * CHUNK, (chunk + 1) * CHUNK) for chunk in sorted(chunks))
            self._emit(NeedsKv(turn, num_past, spans))

    def take(self, turn: Turn, kv: KvRead) -> None:
        """Give a turn the KV that was read for it; a prompt that waited for it continues.

        Raises `LostPastError` if the prompt's next piece cannot see all earlier tokens.
        """
        self._asked.discard(turn)
        if kv.spans:
            self.num_evicted += CHUNK * layers.recall(self._caches(turn), kv.tensors, kv.spans)
        if turn.row is None:
            if kv.past is None and layers.num_passed(turn.caches or []):
                why = "the prompt needs the KV of all earlier tokens, and the disk lacks some of it"
                raise LostPastError(why)
            turn.past = kv.past
            self._scheduler.add(turn)

    def _caches(self, turn: Turn) -> list[Any]:
        """Return the caches of a running turn."""
        return (turn.caches if turn.row is None else self._batch.caches(turn.row)) or []
