"""Requests the KV that turns of paged sessions need from SSD, and knows which turns wait for it.

Device thread only.

Sends requests to the event loop (`Recall`, `WantsPast`), and takes the answers. Knows no steps or files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cache.kv import layers
from cache.names.blocks import Span
from cache.names.errors import LostPastError
from cache.names.policy import CHUNK, RECALLED

from .memory import PAGED_SCALE
from .turn import Recall, WantsPast

if TYPE_CHECKING:
    from collections.abc import Callable

    import mlx.core as mx

    from cache.kv.paged import Past
    from worker.batch.batch import Batch

    from .scheduler import Scheduler
    from .turn import Event, Turn

#: An answer's session asks for chunks once in so many tokens.
RECALL_EVERY: Final = 16


class Paging:
    """Requests KV on SSD for paged sessions, and keeps their waiting turns; ignores other turns."""

    def __init__(
        self, scheduler: Scheduler[Turn], batch: Batch, block: int, emit: Callable[[Event], None]
    ) -> None:
        """A waiting turn is taken out of the scheduler, and put back later; `emit` reports an event."""
        self._scheduler = scheduler
        self._batch = batch
        self._block = block
        self._emit = emit
        self._waiting: set[Turn] = set()
        #: Tokens that gave way to recalled ones.
        self.num_evicted = 0

    @property
    def is_waiting(self) -> bool:
        """Whether any turn waits for KV from SSD."""
        return bool(self._waiting)

    def __contains__(self, turn: Turn) -> bool:
        return turn in self._waiting

    def discard(self, turn: Turn) -> None:
        """Forget that a turn waits for KV from SSD; no effect if it does not wait."""
        self._waiting.discard(turn)

    def start(self, turn: Turn) -> None:
        """Prepare a new turn that has its caches and is in the scheduler; request KV that it needs."""
        if turn.caches is not None:
            turn.most_blocks = layers.most_run(turn.caches, self._block) // self._block
        if turn.policy.recall:
            turn.scale = min(turn.most_blocks, PAGED_SCALE)
        turn.asks = turn.asks and turn.num_cached < turn.target - 1  # none of its tokens can ask
        self.want_past(turn)

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

    def want_past(self, turn: Turn) -> None:
        """Request the KV that is no longer on the device, if the prompt's next piece must see it."""
        end = layers.num_passed(turn.caches or [])
        if end and turn in self._scheduler and turn.row is None:
            self._wait(turn)
            self._emit(WantsPast(turn, end))

    def give_past(self, turn: Turn, past: Past | None) -> None:
        """Continue a prompt that waited for the KV of all earlier tokens.

        Raises `LostPastError` if `past` is None.
        """
        if past is None:
            why = "the prompt needs the KV of all earlier tokens, and the disk lacks some of it"
            raise LostPastError(why)
        turn.past = past
        self._go_on(turn)
        self.recall(turn)

    def recall(self, turn: Turn) -> None:
        """Request the chunks that are not on the device although they now score high enough.

        A prompt requests them once, before its last token, and waits: they are for the answer's tokens.
        """
        is_end = turn.asks and turn.num_cached >= turn.target - 1
        is_due = is_end if turn.row is None else turn.num_cached % RECALL_EVERY == 0
        if is_due and not turn.is_recalling:
            turn.asks = False
            pages = layers.pages(self._caches(turn))
            chunks = pages.choose(turn.num_cached)[: RECALLED // CHUNK] if pages is not None else []
            if chunks:
                turn.is_recalling = True
                spans = (Span(chunk * CHUNK, (chunk + 1) * CHUNK) for chunk in sorted(chunks))
                self._emit(Recall(turn, tuple(spans)))
                if is_end:
                    self._wait(turn)

    def recalled(self, turn: Turn, spans: tuple[Span, ...], tensors: dict[str, mx.array]) -> None:
        """Make chunks that were read visible to a turn; a prompt that waited for them continues."""
        if spans:
            self.num_evicted += CHUNK * layers.recall(self._caches(turn), tensors, spans)
        if turn in self._waiting:
            self._go_on(turn)

    def _wait(self, turn: Turn) -> None:
        self._scheduler.remove(turn)
        self._waiting.add(turn)

    def _go_on(self, turn: Turn) -> None:
        self._waiting.discard(turn)
        self._scheduler.add(turn)

    def _caches(self, turn: Turn) -> list[Any]:
        """Return the caches of a running turn."""
        return (turn.caches if turn.row is None else self._batch.caches(turn.row)) or []
