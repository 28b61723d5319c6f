"""Holds the state of one call of `Engine.run`: its request, memory and events. Event loop only.

The engine owns the runs. `admission` orders them as `Claim`s, `grants` gives them memory, `kv_lookup` finds
their KV.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Final

from cache.names.errors import LostPastError
from turnkeep_client.messages import Progress
from worker.device.turn import LostKvError
from worker.observe.traces import Phase

from .ledger import Claim
from .port import TurnResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.device.request import TurnRequest
    from worker.device.turn import DeviceTurn, ImageRequest, KvRequest, TurnCost, TurnEvent

#: How often a turn may start again after failed evaluations, if no token was drawn in between; or because the
#: disk lacks KV, if no more of it was found in between.
_MOST_LOST: Final = 3


def resolve(waiting: asyncio.Future[bool] | None, *, granted: bool) -> None:
    """Set a future's result to `granted`, unless the future is None or done."""
    if waiting is not None and not waiting.done():
        waiting.set_result(granted)


@dataclass(slots=True, eq=False, kw_only=True)
class Run(Claim):
    """A request's turn on the device, or several turns if it is paused and continued."""

    request: TurnRequest  # what is left to do
    num_most: int  # tokens to which the session may grow
    num_logged: int  # tokens that the log has: the context, and of the answer what is published
    cancelled: Callable[[], bool]
    phases: list[Phase]
    num_asked: int = 0  # tokens for which it requests memory
    num_granted: int = 0  # tokens for which it has memory
    admitted: asyncio.Future[bool] | None = None  # the request for that memory: True grants it
    room: asyncio.Future[bool] | None = None  # the request for a restore's memory, in the same way
    turn: DeviceTurn | None = None  # the turn on the device
    events: asyncio.Queue[TurnEvent] = field(default_factory=asyncio.Queue)  # not handled yet
    needs: asyncio.Queue[KvRequest | ImageRequest] = field(default_factory=asyncio.Queue)  # not read yet
    num_cached: int = 0  # tokens of the turn's context that have KV
    num_generated: int = 0
    is_halted: bool = False  # must end, or pause
    is_cancelled: bool = False
    is_forgotten: bool = False  # it makes no more snapshots, and the KV that it leaves must be dropped
    is_abandoned: bool = False  # no task waits for the turn's end
    is_complete: bool = False  # the whole context has its KV
    num_found: int = 0  # the most tokens that had KV when a turn of it began
    num_gaps: int = 0  # how often needed KV was missing on disk since then
    num_lost: int = 0  # failed evaluations since the last token, by `LostKvError.weight`
    num_reused: int | None = None  # prompt tokens that were not prefilled in any turn
    num_covered: int = 0
    live_bytes: int = 0
    prefill_s: float = 0.0
    started_s: float | None = None
    first_token_s: float | None = None
    unplaced_since: float | None = None  # since when it is prefilled, and lacks a place in the batch
    unplaced_s: float = 0.0  # how long it has lacked one

    @property
    def is_stopped(self) -> bool:
        """Whether the run was cancelled and must end."""
        return self.is_cancelled or self.cancelled()

    @property
    def progress(self) -> Progress:
        """The progress of the run's turn: its tokens with KV, and its drawn tokens."""
        return Progress(
            cached_tokens=self.num_cached,
            context_tokens=len(self.request.context),
            generated_tokens=self.num_generated,
        )

    def begin(self, num_found: int) -> None:
        """Note that a turn of the run begins with the KV of `num_found` tokens."""
        self.note_prefilled(num_found)
        if num_found > self.num_found:
            self.num_found, self.num_gaps = num_found, 0

    def note_prefilled(self, num_cached: int) -> None:
        """Note that the first `num_cached` tokens of the context have KV by now."""
        self.num_cached = num_cached
        self._note_place(is_missing=self.request.draws and num_cached == self.request.target - 1)

    def note_drawn(self, num_drawn: int) -> None:
        """Note that the device has drawn the first `num_drawn` tokens of the answer."""
        self.num_generated, self.num_lost = num_drawn, 0
        self._note_place(is_missing=False)

    def _note_place(self, *, is_missing: bool) -> None:
        """Note whether the turn is prefilled but lacks a place in the batch; count how long it did."""
        now_s = monotonic()
        self.unplaced_s += now_s - (self.unplaced_since or now_s)
        self.unplaced_since = now_s if is_missing else None

    def must_stop_waiting(self) -> bool:
        """Whether the run must end or pause, and so wait for nothing any more."""
        return self.is_halted or self.is_stopped

    def count(self, request: TurnRequest, cost: TurnCost, live_bytes: int) -> None:
        """Add an ended turn to the run's cost. Tokens that are prefilled again after a pause count once."""
        self._note_place(is_missing=False)
        if self.num_covered < request.num_prompt:
            num_reused = min(cost.num_reused, request.num_prompt)
            self.num_reused = num_reused if self.num_reused is None else min(self.num_reused, num_reused)
            self.num_covered = max(self.num_covered, min(cost.num_cached, request.num_prompt))
        self.prefill_s += cost.prefill_s
        self.live_bytes = live_bytes
        self.is_complete = cost.num_cached >= request.target

    def may_start_again(self, error: Exception) -> bool:
        """Count a failed turn's error; return whether the turn may start again.

        If stored KV was missing, the turn may start again three times until it begins with more KV than ever.
        After failed evaluations it may start again three times without a token drawn in between, but only
        once if its own prompt was in the failed step. A failure that shortens later pieces does not count.
        """
        if isinstance(error, LostPastError):
            self.num_gaps += 1
            return self.num_gaps <= _MOST_LOST
        if isinstance(error, LostKvError):
            self.num_lost += error.weight
            return self.num_lost <= _MOST_LOST
        return False

    def result(self) -> TurnResult:
        """Return the run's result, with its cost."""
        num_cached = self.num_reused or 0
        return TurnResult(
            complete=self.is_complete,
            num_cached=num_cached,
            num_prefilled=self.num_covered - num_cached,
            live_bytes=self.live_bytes,
            prefill_s=self.prefill_s,
            started_s=(self.started_s or monotonic()) + self.unplaced_s,
            first_token_s=self.first_token_s or monotonic(),
        )


def phases_of(request: TurnRequest, cost: TurnCost, submitted_s: float, drawn_s: float | None) -> list[Phase]:
    """List an ended turn's phases on the device, for traces; its first token was drawn at `drawn_s`."""
    now_s = monotonic()
    phases = [Phase("prefill", submitted_s, drawn_s or now_s, cost.num_prefilled)]
    if drawn_s is not None and request.answer is not None:
        num_forced = len(request.context) - request.num_prompt
        phases.append(Phase("decode", drawn_s, now_s, len(request.answer.tokens) - num_forced))
    return [*phases, *cost.cuts]
