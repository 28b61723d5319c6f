"""Runs turns on the device thread: `step_chooser` chooses a step, the runner runs it and ends turns.

The runner owns the model and the batch; `starting_kv` provides the KV of turns. The runner knows nothing of
commands or of the thread. Device thread only.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import mlx.core as mx
import structlog

from cache.kv import layers
from cache.names.errors import LostPastError
from cache.names.policy import FULL
from turnkeep_client.messages import joined
from worker.batch import plane
from worker.batch.rows import PrefillPiece, UnsoundError

from . import machine
from .cutter import Cutter
from .idle_kv import IdleKv, MemoryRequest
from .paging import Paging
from .prefill_budget import PrefillBudget
from .request import NoMemoryError
from .scheduler import Scheduler
from .served_model import ServedModel
from .starting_kv import StartingKv, TurnSharing
from .step_chooser import StepChooser
from .step_figures import StepFigures
from .turn import (
    CopiedSession,
    DeviceTurn,
    DroppedKv,
    Event,
    FaultedTurn,
    FinishedTurn,
    LostKvError,
    PrefilledPiece,
    ResidentKv,
    SampledTokens,
)
from .vision import Vision

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from cache.names.policy import Policy
    from turnkeep_client.subjects import SessionKey
    from worker.models.model import LoadedModel

    from .scheduler import Step
    from .served_model import DeviceOptions
    from .step_chooser import ChosenStep
    from .turn import ImageViews, KvRead, StepReport

log = structlog.get_logger()

#: How many evaluations may fail, without a step that succeeds in between, before the worker ends.
_MOST_LOST: Final = 3
#: Tokens of an answer are reported, and so published, together if they are drawn within so many seconds: each
#: chunk takes the event loop 0.2 ms, in which this thread may have to wait for the interpreter lock.
_CHUNK_S: Final = 0.04
#: The image tower's share of the time that answers may stall; prompts get the rest.
_TOWER_SHARE: Final = 0.5


class Runner:
    """Runs all submitted turns, keeps the KV of idle sessions, and calls `report` after each step."""

    def __init__(
        self, loaded: LoadedModel, report: Callable[[StepReport], None], options: DeviceOptions
    ) -> None:
        machine.prepare()
        mx.reset_peak_memory()
        self._report = report
        block_tokens = options.block_tokens
        self.served = ServedModel(
            loaded,
            lambda num_bytes: self.idle_kv.make_room(num_bytes),  # noqa: PLW0108  # made below
            options,
        )
        self._batch = self.served.batch
        #: Idle sessions' KV, and the restores that wait for memory or have been promised memory.
        self.idle_kv = IdleKv(self.served.estimator, block_tokens, self._dropped)
        #: Copies KV into snapshots for the disk, once its `room` is set.
        self.cutter = Cutter(self.served, block_tokens, self._emit)
        limits = options.max_batch, block_tokens, options.max_tenant_rows
        self._scheduler = Scheduler(*limits, joins_images=bool(self.served.most_joint))
        device = machine.profile()
        most_tokens = block_tokens * device.prompt_blocks
        self._prefill_budget = PrefillBudget(options.stall_s, most_tokens, device.longest_s)
        self._sharing = TurnSharing()
        self._starting_kv = StartingKv(self.served, self.idle_kv, self._sharing)
        parts = (self._batch, self.cutter, self._starting_kv)
        self._chooser = StepChooser(self._scheduler, self._prefill_budget, self.idle_kv, *parts, self._emit)
        self._paging = Paging(self._scheduler, self._batch, self.cutter, block_tokens, self._emit)
        self._vision = Vision(self.served.vision_model, self.idle_kv, self._emit)
        self._events: list[Event] = []
        self._turns: dict[DeviceTurn, None] = {}  # submitted and not ended, in order of submission
        self._figures = StepFigures(self._batch.speculation)
        self._num_lost = 0  # failed evaluations since the last step that succeeded
        if device.warms_up:
            self.served.warm_up(block_tokens)

    def _dropped(self, keys: tuple[SessionKey, ...]) -> None:
        """Tell the event loop that idle sessions have lost their KV."""
        for key in keys:
            self._batch.speculation.forget(key)
        self._emit(DroppedKv(keys))

    @property
    def is_busy(self) -> bool:
        """Whether any turn runs, or the image tower has something to run."""
        return bool(self._scheduler) or self._vision.is_pending

    def step(self, *, undisturbed: bool) -> float:
        """Run one step and report it; `undisturbed` says that no command is queued.

        Returns how many seconds the thread may wait for a command before the next call: mostly 0.
        """
        try:
            return self._step(undisturbed=undisturbed)
        except RuntimeError as error:
            self._survive(error)
            return 0.0

    def _step(self, *, undisturbed: bool) -> float:
        """Choose, run and report a step; then make snapshots while the event loop publishes the tokens."""
        started_s = time.monotonic()
        pause_s = self._see()
        self._figures.begin()
        choice = self._chooser.choose(time.monotonic() - started_s)
        self._run_step(choice.step, undisturbed=undisturbed)
        self._give_up(choice)
        step_s = self._figures.step_s
        self._start_ready()
        measured_bytes = self._figures.measured_bytes()
        self._learn(choice, step_s, measured_bytes)
        self._hand_over(choice, step_s, measured_bytes)
        self.cutter.cut_blocks(choice.step)
        self._ask(choice.step)
        return choice.pause_s or pause_s * (not choice.step)

    def _see(self) -> float:
        """Run layers of the image tower; return how many seconds to wait before the next ones: mostly 0."""
        if not self._vision.is_pending:
            return 0.0
        ready, failed, pause_s = self._vision.step(self._prefill_budget.stall_s * _TOWER_SHARE)
        for turn in ready:
            self._guarded(turn, self._schedule)
        for turn, error in failed.items():
            self._fault(turn, error)
        return pause_s

    def _ask(self, step: Step) -> None:
        """Request KV on SSD for a step's turns, after their snapshots, which they may need at once."""
        for turn in (*step.decode, *(turn for turn, _ in step.prefill)):
            if turn.request.policy.recall and turn in self._scheduler:
                self._guarded(turn, self._paging.ask)

    def _learn(self, choice: ChosenStep, step_s: float, measured_bytes: int) -> None:
        """Correct later estimates by a step's time and memory."""
        num_tokens = sum(num for _, num in choice.step.prefill)
        if num_tokens or not self._batch.has_drafted:  # a step with prompts has no costly drafts
            self._prefill_budget.learn(len(choice.step.decode), num_tokens, step_s)
        self._chooser.learn(choice, measured_bytes)

    def _give_up(self, choice: ChosenStep) -> None:
        """Fail the prompt `choice.hopeless`, if there is one, since it can never fit into memory."""
        if choice.hopeless is not None:
            turn, needed_bytes = choice.hopeless
            self._fault(turn, NoMemoryError(self._no_room(turn, needed_bytes)))

    def serve_waiting(self) -> None:
        """Start turns that no longer wait, grant memory to restores, and report events, between two steps."""
        self._start_ready()
        is_busy = self.is_busy or self._paging.is_waiting
        try:
            self.idle_kv.grant_requests(is_busy=is_busy)
        except RuntimeError as error:
            self._survive(error)
        if self._events:
            self._hand_over()

    def report(self) -> None:
        """Report the memory in use."""
        self._hand_over()

    def submit(self, turn: DeviceTurn) -> None:
        """Add a turn. An error fails the turn and drops its KV; it never ends the thread."""
        self.idle_kv.end_promise(turn.request.key)
        self._turns[turn] = None
        self._guarded(turn, self._submit)

    def drop(self, key: SessionKey) -> None:
        """Drop the KV of a session that has no turn under way."""
        self.idle_kv.pop(key)
        self._batch.speculation.forget(key)

    def forget_images(self, fingerprints: Collection[bytes]) -> None:
        """Drop the rows of images that are kept for later turns."""
        self._vision.forget(fingerprints)

    def copy(self, turn: DeviceTurn) -> None:
        """Cut the spans of an idle session's KV for which `turn` stands; the turn does not run."""
        resident = self.idle_kv.get(turn.request.key)
        if resident is not None and resident.tokens == turn.request.context:
            turn.caches, turn.num_cached = resident.caches, len(resident.tokens)
            try:
                self.cutter.cut(turn, is_over=True)
            except RuntimeError as error:
                self._survive(error)
            turn.caches = None
        self._emit(CopiedSession(turn))

    def reserve_room(
        self, key: SessionKey, num_tokens: int, reply: Callable[[bool], None], policy: Policy = FULL
    ) -> None:
        """Reserve memory for a restore of `num_tokens` until the session's next `submit` or `release_room`.

        `reply` is called with True once the memory is reserved, with False if it never can be.
        """
        self.idle_kv.request(MemoryRequest(key, num_tokens, reply, policy))

    def release_room(self, key: SessionKey) -> None:
        """Release the memory that `reserve_room` has reserved, or withdraw the request for it."""
        self.idle_kv.release(key)

    def cancel(self, turn: DeviceTurn) -> None:
        """End a turn and keep its tokens so far; no effect on a turn that has ended."""
        if turn in self._scheduler or turn in self._paging or turn in self._vision:
            self._guarded(turn, self._end, leaves_batch=True)
        elif self._sharing.stop_waiting(turn):
            self._guarded(turn, self._start)  # so that the session's KV stays resident
            self._guarded(turn, self._end, leaves_batch=True)

    def grant(self, turn: DeviceTurn, num_tokens: int) -> None:
        """Let a turn grow to `num_tokens` tokens."""
        turn.num_granted = num_tokens
        if turn.row is not None:
            turn.row.num_left = turn.num_left

    def give(self, turn: DeviceTurn, kv: KvRead) -> None:
        """Give a turn the KV that it has requested; no effect on a turn that has ended."""
        if turn in self._paging:
            self._guarded(turn, lambda turn: self._paging.take(turn, kv))

    def show(self, turn: DeviceTurn, fingerprint: bytes, views: ImageViews) -> None:
        """Give a turn the image that it has requested, or why there is none; see `Vision.show`."""
        self._guarded(turn, lambda turn: self._vision.show(turn, fingerprint, views))

    def _emit(self, event: Event) -> None:
        self._events.append(event)

    def _no_room(self, turn: DeviceTurn, size_bytes: int) -> str:
        limit_bytes = self.served.estimator.limit_bytes
        return (
            f"after {turn.num_cached} of {turn.request.target} tokens the next piece takes {size_bytes} bytes"
            f" beside the {mx.get_active_memory()} in use, the limit of the device is {limit_bytes};"
            " shorten the session, or raise device_memory"
        )

    def _hand_over(self, choice: ChosenStep | None = None, step_s: float = 0.0, measured: int = 0) -> None:
        report = self._figures.report(self._events, choice, step_s, measured)
        self._events.clear()
        self._report(report)

    def _guarded(
        self, turn: DeviceTurn, action: Callable[[DeviceTurn], None], *, leaves_batch: bool = False
    ) -> None:
        """Run `action` on a turn. An error fails the turn and drops its KV; it never ends the thread.

        If the turn leaves the batch, the error fails all running answers: merged KV may be half changed.
        """
        if turn not in self._turns:  # it failed when another turn's evaluation failed
            return
        try:
            action(turn)
        except machine.DeviceError:
            raise
        except Exception as error:  # noqa: BLE001  # whatever MLX or a model raises
            turns = (turn, *self._scheduler.decoding) if leaves_batch else (turn,)
            if leaves_batch:
                self._batch.clear()
            self._fault_all(turns, error)

    def _survive(self, error: RuntimeError) -> None:
        """Drop all KV if the error means that KV is lost; otherwise raise it, which ends the thread."""
        if not machine.loses_kv(error):
            raise error
        self._lose_kv(error)

    def _lose_kv(self, error: Exception, pieces: Mapping[DeviceTurn, PrefillPiece] | None = None) -> None:
        """Drop all KV after a failed evaluation, and fail every turn; the event loop starts the turns again.

        Idle sessions' KV is dropped too: a step in flight when an answer ended has written to the answer's
        caches. `pieces` are the prompts in the failed step. If they may have been too long for the device,
        later ones are shorter, and the failure counts against nobody.

        Raises `DeviceError` if the device does not work any more: then no turn has failed.
        """
        pieces, small = pieces or {}, False
        if pieces and machine.was_too_much(error):
            small = self._prefill_budget.shrink(sum(len(piece.tokens) for piece in pieces.values()))
        log.error(
            "an evaluation failed on the device; its turns start again from SSD",
            most_prompt_tokens=self._prefill_budget.most,
            exc_info=error,
        )
        self._num_lost += not small
        self._batch.clear()
        self._vision.clear()
        self.idle_kv.clear()
        for turn in tuple(self._turns):
            self._fault(turn, LostKvError(error, weight=0 if small else 2 if turn in pieces else 1))
        if self._num_lost >= _MOST_LOST or not self.served.recovers():
            raise machine.DeviceError(
                f"the GPU has failed and does not recover: {error}; start the worker again"
            )

    def _fault(self, turn: DeviceTurn, error: Exception) -> None:
        if turn not in self._turns:  # it has ended
            return
        del self._turns[turn]
        self._say(turn)
        if isinstance(error, LostPastError):
            log.warning("a turn lacks KV on disk", session=str(turn.request.key), error=str(error))
        elif not isinstance(error, NoMemoryError | LostKvError):
            log.error("a turn failed on the device", session=str(turn.request.key), exc_info=error)
        self._scheduler.remove(turn)
        self._paging.discard(turn)
        self._vision.discard(turn)
        self._sharing.remove(turn)
        self._batch.speculation.forget(turn.request.key)
        turn.resident = turn.caches = turn.row = None
        self._emit(FaultedTurn(turn, error, turn.cost))

    def _submit(self, turn: DeviceTurn) -> None:
        """Start a turn, unless it must wait for another turn to prefill their common prefix."""
        if self._starting_kv.add(turn):
            self._start(turn)

    def _start_ready(self) -> None:
        """Start the turns that no longer wait, then the turns that waited for these turns."""
        while ready := self._sharing.ready():
            for turn in ready:
                self._guarded(turn, self._start)

    def _start(self, turn: DeviceTurn) -> None:
        """Give a turn its KV, and queue it for prefill once it has the rows of its images."""
        self._starting_kv.acquire(turn)
        if self._vision.gives_rows(turn):
            self._schedule(turn)

    def _schedule(self, turn: DeviceTurn) -> None:
        self._scheduler.add(turn)
        self.cutter.cut(turn)
        if turn.num_cached == turn.request.target:
            self._end(turn)
        self._paging.start(turn)

    def _run_step(self, step: Step, *, undisturbed: bool) -> None:
        """Run one step.

        If the step fails, its prompts fail. Its answers fail too, unless the step can be undone for them.
        """
        started = time.perf_counter()
        pieces: dict[DeviceTurn, PrefillPiece] = {}
        for turn, num in step.prefill:
            self._guarded(turn, lambda turn, num=num: pieces.update({turn: self._piece(turn, num)}))  # type: ignore[misc]
        if not pieces and not step.decode:
            return
        try:
            # A waiting prompt or command comes before a step that runs ahead.
            alone = undisturbed and len(step.decode) == len(self._scheduler)
            self._run_passes([*pieces.values()], run_ahead=alone)
        except Exception as error:  # noqa: BLE001  # whatever MLX or a model raises
            if machine.loses_kv(error):
                self._lose_kv(error, pieces)
            elif pieces and self._batch.roll_back():
                for turn in pieces:
                    self._fault(turn, error)
            else:
                self._batch.clear()
                self._fault_all((*step.decode, *pieces), error)
            return
        self._num_lost = 0
        step_s = time.perf_counter() - started
        for turn, num in step.prefill:
            if turn in pieces:
                self._guarded(turn, lambda turn, num=num: self._prefilled(turn, num, step_s))  # type: ignore[misc]
        for turn in step.decode:
            if turn in self._scheduler:  # otherwise it failed when another turn ended
                self._add_drawn(turn, num_decoded=1, may_wait=alone)

    def _run_passes(self, pieces: Sequence[PrefillPiece], *, run_ahead: bool) -> None:
        """Run the pieces that need embeddings, then the other pieces together with the answers."""
        if embedded := [piece for piece in pieces if piece.embedding is not None]:
            self._batch.embed(embedded)
        self._batch.step([piece for piece in pieces if piece.embedding is None], run_ahead=run_ahead)

    def _piece(self, turn: DeviceTurn, num_tokens: int) -> PrefillPiece:
        request, context = turn.request, turn.request.context
        start, end = turn.num_cached, turn.num_cached + num_tokens
        if end == request.target and request.draws:
            turn.row = turn.make_row()
        self._paging.begin_piece(turn)
        embedding = request.embedding if end == request.target else None
        tokens, images = context.ids(start, end).tolist(), self._vision.rows(turn, start, end)
        positions = plane.positions(context.spans, start, end)
        return PrefillPiece(turn.caches or [], start, tokens, turn.row, embedding, images, positions)

    def _prefilled(self, turn: DeviceTurn, num_tokens: int, step_s: float) -> None:
        """Count a piece of a prompt as done; after the last piece, begin the answer or end the turn.

        Raises `UnsoundError` if its vector is not finite.
        """
        if turn.request.embedding is not None and not turn.request.embedding.is_sound:
            raise UnsoundError
        start, turn.num_cached = turn.num_cached, turn.num_cached + num_tokens
        num_prompt = max(min(turn.num_cached, turn.request.num_prompt) - start, 0)
        turn.num_prefilled += num_prompt
        turn.prefill_s += step_s
        self._emit(PrefilledPiece(turn, turn.num_cached, num_prompt))
        self._paging.end_piece(turn)
        if turn.row is not None:
            turn.caches = None
            turn.rows.clear()
            self._scheduler.start_decoding(turn)
            self._add_drawn(turn)
        elif turn.num_cached == turn.request.target:
            self._end(turn)

    def _add_drawn(self, turn: DeviceTurn, num_decoded: int = 0, *, may_wait: bool = False) -> None:
        """Add the tokens that a step has drawn for a row to its answer, and end the turn at the answer's end.

        For each of them, `num_decoded` tokens before it got KV: none before the first token of an answer.
        Tokens that `may_wait`, as the next step comes soon, are reported once it is time for a chunk.
        """
        row, answer = turn.row, turn.request.answer
        if row is None or answer is None:
            return
        if not row.is_sound:  # its tokens were drawn from NaN or infinite logits
            self._guarded(turn, self._break_off, leaves_batch=True)
            return
        for drawn in row.drawn:
            turn.num_cached += num_decoded
            self._figures.num_decoded += num_decoded
            if num_decoded:
                self.cutter.note_block(turn)
            turn.unsaid.append(answer.push(*drawn))
            if answer.finish_reason is not None or turn.num_left <= 0:
                self._guarded(turn, self._end, leaves_batch=True)
                return
        if not may_wait or time.monotonic() - turn.said_s >= _CHUNK_S:
            self._say(turn)

    def _say(self, turn: DeviceTurn) -> None:
        """Report the drawn tokens that were not reported yet, as one chunk."""
        if turn.unsaid:
            self._emit(SampledTokens(turn, joined(turn.unsaid)))
            turn.unsaid.clear()
            turn.said_s = time.monotonic()

    def _break_off(self, turn: DeviceTurn) -> None:
        if turn.row is not None:
            self._batch.remove(turn.row)
        self._fault(turn, UnsoundError())

    def _fault_all(self, turns: Iterable[DeviceTurn], error: Exception) -> None:
        """Fail `turns`; after an error that loses KV, fail every turn and drop all KV."""
        if machine.loses_kv(error):
            self._lose_kv(error)
            return
        for turn in turns:
            self._fault(turn, error)

    def _end(self, turn: DeviceTurn) -> None:
        """End a turn; keep its KV on the device, and copy what the disk lacks of it into snapshots."""
        self._say(turn)
        self._scheduler.remove(turn)
        self._paging.discard(turn)
        self._vision.discard(turn)
        self._sharing.remove(turn)
        if turn.row is not None:
            turn.caches = self._batch.remove(turn.row)
            if turn.row.num_cached > turn.num_cached:  # the answer ended within a draft
                layers.trim(turn.caches, turn.num_cached)
            turn.row = None
        self.cutter.cut_tail(turn)
        caches, turn.caches = turn.caches, None
        live_bytes, earliest = 0, None
        if caches is not None and turn.num_cached:
            layers.shrink(caches)
            tokens = turn.request.tokens(turn.num_cached)
            self.idle_kv.put(turn.request.key, ResidentKv(caches, tokens, turn.request.policy))
            live_bytes, earliest = layers.live_bytes(caches), layers.earliest(caches)
        del self._turns[turn]
        self._emit(
            FinishedTurn(turn, turn.cost, live_bytes, turn.num_cached if earliest is None else earliest)
        )
