"""What the device thread does: it chooses a step, runs it, and brings turns to their end.

Device thread only. It owns the model, every session's KV on the device, and the batch; of commands and of the
thread itself it knows nothing.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import structlog
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from cache.kv import layers
from cache.names.snapshot import ModelLayout
from worker.batch.batch import Batch, Piece, Row
from worker.batch.trials import Trials
from worker.models.code import code_digest, package_digest
from worker.models.quantised import unpacked_bytes

from . import machine
from .cutting import Cutting
from .memory import Estimator, shape_of
from .pace import LEAST, Pace
from .room import Room
from .scheduler import Scheduler, Step
from .sharing import Sharing
from .turn import (
    Event,
    Faulted,
    Finished,
    Held,
    NoRoomError,
    Prefilled,
    Report,
    Sampled,
    Starved,
    Turn,
    num_common,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from worker.models.model import LoadedModel

log = structlog.get_logger()

#: How long a prompt that has no room waits for memory that is no session's, and how often it looks. What
#: the writer is at in that moment is not given up, and a disk may hang for longer.
_PATIENCE_S = 2.0
_LOOK_S = 0.01


def _trial_key(loaded: LoadedModel, caches: str) -> str:
    """Name all that the outcome of a trial depends on, but the weights' values."""
    model: Any = loaded.model  # mlx has no annotations here
    parameters: Any = tree_flatten(model.parameters())
    parts = (
        json.dumps(loaded.config, sort_keys=True, default=str),
        sorted({str(array.dtype) for _, array in parameters}),
        caches,
        code_digest(model),
        package_digest("worker.batch"),
        importlib.metadata.version("mlx"),
        str(mx.default_device()),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


class Runner:
    """The turns under way, and the KV of those that are not. `report` is called after each step."""

    def __init__(
        self,
        loaded: LoadedModel,
        report: Callable[[Report], None],
        *,
        block_tokens: int,
        max_batch: int,
        max_tenant_rows: int | None,
        stall_s: float,
        limit_bytes: int | None,
        max_draft: int,
        trials: Path | None = None,
    ) -> None:
        machine.limit_freed()
        mx.reset_peak_memory()
        self._model = loaded.model
        self._vocab_size = loaded.vocab_size
        self._report = report
        self._block = block_tokens
        caches = make_prompt_cache(loaded.model)
        mx.eval(loaded.model(mx.array([[0]]), cache=caches))
        #: The cache class that cannot be snapshotted, what snapshots hold where there is none, the classes of
        #: all layers, and whether KV can be cut and trimmed at any token.
        self.unsupported_cache = layers.unsupported(caches)
        self.layout = ModelLayout(())
        if self.unsupported_cache is None:
            self.layout = layers.layout(caches, partial(make_prompt_cache, loaded.model))
        self.caches = layers.describe(caches)
        self.kv_layers = layers.kinds(caches)
        self.trimmable = layers.trimmable(caches)
        unpacked = unpacked_bytes(caches)
        self.estimator = Estimator(
            shape=shape_of(loaded.config),
            limit_bytes=limit_bytes or machine.default_limit_bytes(),
            weight_bytes=loaded.weight_bytes,
            kv=loaded.kv,
            num_layers=len(caches),
            fused=not machine.on_cpu() and not unpacked,  # attention to quantised KV has no such kernel
            unpacked_bytes=unpacked if machine.on_cpu() else 0,
        )
        #: What idle sessions hold, who has room for a restore, and who waits for it.
        self.room = Room(self.estimator, block_tokens, self._emit)
        self._batch = Batch(
            loaded.model,
            self.room.has_now,
            max_draft=max_draft,
            trials=Trials(trials, _trial_key(loaded, self.caches)) if trials else None,
        )
        #: What is cut for the disk; nothing until it has `room`.
        self.cutting = Cutting(
            self._batch, self.estimator, block_tokens, self._emit, trimmable=self.trimmable
        )
        self._scheduler: Scheduler[Turn] = Scheduler(max_batch, block_tokens, max_tenant_rows)
        self._pace = Pace(stall_s, block_tokens)
        self._sharing = Sharing()
        self._short: list[Turn] = []  # whose copy of another session's KV waits for room
        self._patient_until_s: float | None = None
        self._events: list[Event] = []
        self._peak = 0
        self._num_decoded = 0

    @property
    def is_busy(self) -> bool:
        """Whether turns are under way."""
        return bool(self._scheduler)

    def step(self, *, undisturbed: bool) -> float | None:
        """Run one step and report it; `undisturbed` says that no command waits.

        Returns how many seconds there is nothing to run unless a command comes, which is mostly 0; None for
        ever.
        """
        started = time.perf_counter()
        step, estimated, pause_s = self._choose()
        before = mx.get_active_memory()
        self._peak = max(self._peak, mx.get_peak_memory())  # between two steps: what was restored, say
        mx.reset_peak_memory()
        if step:
            # The event loop's answer is a command to come; what it makes room for may change the next step.
            self._run_step(step, undisturbed=undisturbed and not self.room.is_asked)
        step_s = time.perf_counter() - started
        self._take_up_ready()
        self._pace.learn(len(step.decode), sum(num for _, num in step.prefill), step_s)
        measured = mx.get_peak_memory() - max(before, mx.get_active_memory())
        self._hand_over(len(step.decode), step_s, estimated, measured)
        self.cutting.cut()
        return pause_s

    def settle(self) -> None:
        """Do what needs no step: take up turns that need not wait any more, grant room, report it."""
        self._take_up_ready()
        self.room.grant(is_busy=self.is_busy or bool(self._short))
        if self._events:
            self._hand_over(0, 0.0, 0, 0)

    def begin(self, turn: Turn) -> None:
        """Take in a turn. One that fails costs itself and its KV, never the thread."""
        self.room.arrived(turn.key)
        self._guarded(turn, self._begin)

    def cancel(self, turn: Turn) -> None:
        """End a turn where it stands; one that is over already is left alone."""
        if turn in self._scheduler:
            self._leave(turn)
        elif self._sharing.give_up(turn) or turn in self._short:
            self._short = [one for one in self._short if one is not turn]
            turn.source = None
            self._guarded(turn, self._take_up)  # so that it keeps what it had
            self._leave(turn)

    def grant(self, turn: Turn, num_tokens: int) -> None:
        """Let a turn come to so many tokens."""
        turn.num_granted = num_tokens
        if turn.row is not None:
            turn.row.num_left = _num_left(turn)

    def _choose(self) -> tuple[Step[Turn], int, float | None]:
        """Choose a step that fits into memory. Say what it is thought to need beside weights and KV.

        If none fits, idle sessions leave first, then prompts are read in smaller pieces, then they wait for
        the answers to end. Where no answer runs, the prompt that has come the furthest goes on alone, and
        those that have come less far begin anew later; one that has the device to itself gives up.
        The third value is for how long nobody goes on, where that is what has to be waited for.
        """
        if self._batch.is_ahead:
            return Step(self._scheduler.decoding, ()), 0, 0.0
        nothing: Step[Turn] = Step((), ())
        num_rows = len(self._scheduler.decoding)
        budget = self._pace.budget(num_rows)
        only: Turn | None = None
        while True:
            step = self._scheduler.next(budget, only)
            pieces = [(num, turn.num_cached + num) for turn, num in step.prefill]
            scratch = self.estimator.scratch_bytes(num_rows, pieces, self._batch.num_held)
            growing = [turn.num_cached + num for turn, num in step.prefill if _grows(turn.caches, num)]
            growth = self.estimator.growth_bytes(
                [*self._batch.growing, *growing], max((num for num, _ in pieces), default=1)
            )
            growth += self._batch.leaving_bytes + self.cutting.size_bytes(step)
            fits = self.room.has(scratch + growth)
            if not fits and self.room.comes(scratch + growth):
                return nothing, 0, None
            if fits or not step.prefill:
                self._patient_until_s = None
                self._scheduler.taken(step)
                return step, scratch, 0.0
            if budget > LEAST:
                budget = max(budget // 2, LEAST)
            elif num_rows:
                budget = 0
            elif len(step.prefill) > 1:
                budget = 1  # one of them
            elif self.room.is_promised:
                return nothing, 0, _LOOK_S  # its turn, or its end, is the next command
            elif only is None:  # whoever else went on would take what another one needs to come to its end
                only = max(self._scheduler.prefilling, key=lambda turn: turn.num_cached)
                budget = LEAST
            elif not self._give_way(only):
                if self._is_patient():
                    return nothing, 0, _LOOK_S
                self._patient_until_s = None
                self._fault(only, NoRoomError(self._no_room(only, scratch + growth)))
                only = None

    def _is_patient(self) -> bool:
        """Have what waits for the disk given up, and say whether its memory may still come free."""
        now_s = time.monotonic()
        if self._patient_until_s is None:
            self._emit(Starved())
            self._patient_until_s = now_s + _PATIENCE_S
        return now_s < self._patient_until_s

    def _give_way(self, to: Turn) -> bool:
        """Let the prompt that has come the least far begin anew later; False where no other one holds KV.

        Those that hold each other up so are few: the ledger has room for what each of them says it needs.
        Before that, those that wait to copy another session's KV lose what they had.
        """
        for turn in (*self._sharing.following, *self._short):
            if turn.held is not None:
                turn.held = None
                return True
        holding = [turn for turn in self._scheduler.prefilling if turn.num_cached and turn is not to]
        if not holding:
            return False
        turn = min(holding, key=lambda turn: turn.num_cached)
        self.cutting.cut(turn)  # what was to be cut later
        turn.caches = make_prompt_cache(self._model)
        turn.num_cached = turn.num_reused = turn.num_prefilled = 0
        return True

    def _emit(self, event: Event) -> None:
        self._events.append(event)

    def _no_room(self, turn: Turn, size_bytes: int) -> str:
        return (
            f"reading on after {turn.num_cached} of {turn.target} tokens takes {size_bytes} bytes beside the"
            f" {mx.get_active_memory()} in use, the limit of the device is {self.estimator.limit_bytes}:"
            " shorten the session, or raise device_memory"
        )

    def _hand_over(self, num_rows: int, step_s: float, estimated: int, measured: int) -> None:
        events, self._events = tuple(self._events), []
        active = mx.get_active_memory()
        self._peak = max(self._peak, mx.get_peak_memory(), active)
        num_decoded, self._num_decoded = self._num_decoded, 0
        self._report(
            Report(
                events,
                num_rows,
                num_decoded,
                step_s,
                active,
                self._peak,
                estimated,
                measured,
                self._batch.num_drafted,
                self._batch.num_accepted,
            )
        )

    def _guarded(self, turn: Turn, action: Callable[[Turn], None]) -> None:
        """Run `action`; a failure costs this turn and its KV, never the thread."""
        try:
            action(turn)
        except Exception as error:  # noqa: BLE001  # whatever MLX or a model raises
            self._fault(turn, error)

    def _fault(self, turn: Turn, error: Exception) -> None:
        if not isinstance(error, NoRoomError):
            log.error("a turn failed on the device", session=str(turn.key), exc_info=error)
        self._scheduler.remove(turn)
        self._sharing.end(turn)
        turn.held = turn.caches = turn.row = None
        self._emit(Faulted(turn, error))

    def _begin(self, turn: Turn) -> None:
        """Take up a turn, unless another one is about to read the tokens that both begin with."""
        # An append leaves its last token to the answer that is drawn from its logits: run twice, it could
        # have other bits in memory than on disk.
        turn.target = max(len(turn.context) - (turn.answer is None), 0)
        turn.held = self.room.take(turn.key)
        if not self.trimmable:
            turn.source = None
        if not self._sharing.begin(turn):
            self._take_up(turn)

    def _take_up_ready(self) -> None:
        """Take up the turns that need not wait any more, for another one or for room."""
        if not self.room.is_asked:
            short, self._short = self._short, []
            for turn in short:
                self._guarded(turn, self._take_up)
        while ready := self._sharing.ready():
            for turn in ready:
                self._guarded(turn, self._take_up)

    def _take_up(self, turn: Turn) -> None:
        """Find a turn's KV, trim it to what is of use, and queue what has to be prefilled.

        Where a copy of another session's KV would have room once idle sessions have left, the turn waits.
        """
        # An answer is drawn from the last token's logits, so that token has to be run, whatever is cached.
        num_context, draws = len(turn.context), turn.answer is not None
        most_reused = max(num_context - 1, 0)
        usable = turn.num_kept
        source = self._source(turn)
        if source is not None and not self.room.has(size_bytes := self.estimator.kv.held(len(source.tokens))):
            if self.room.comes(size_bytes, but=turn.source):
                self._short.append(turn)
                return
            source = None
        held, turn.held = turn.held, None
        restored = self._rebuilt(turn)
        if restored is not None:
            held, usable = restored, len(restored.tokens)
        elif source is not None:
            caches = layers.fork(source.caches, make_prompt_cache(self._model), len(source.tokens))
            held, usable = Held(caches, source.tokens), len(source.tokens)
        # MLX reads beyond its table for an id that is not in it, and the process ends.
        if any(not 0 <= token < self._vocab_size for token in turn.context[usable:]):
            raise ValueError(f"a token id is outside of the model's vocabulary of {self._vocab_size}")
        turn.caches, turn.num_cached = self._trimmed(held, min(usable, most_reused))
        turn.num_reused = turn.num_cached
        if draws and turn.spans and turn.spans[-1].end == num_context and num_context % self._block:
            turn.spans.pop()  # the tail is cut when the answer is over
        self._scheduler.add(turn)
        self.cutting.prompt(turn)
        self.cutting.cut(turn)
        if turn.num_cached == turn.target:
            self._end(turn)

    def _source(self, turn: Turn) -> Held | None:
        """Show what another session's KV has of the context, if that is more than the turn's own."""
        if turn.source is None or turn.restored is not None:
            return None
        other = self._sharing.source(turn)
        held = self.room.get(turn.source) if other is None else _under_way(other, self._batch)
        num_tokens = num_common(held.tokens, turn.context) if held is not None else 0
        if held is None or num_tokens <= turn.num_kept:
            return None
        return Held(held.caches, turn.context[:num_tokens])

    def _rebuilt(self, turn: Turn) -> Held | None:
        """Make caches of what was restored; None where there is nothing, or nothing that fits the model."""
        tensors, turn.restored = turn.restored, None
        if tensors is None:
            return None
        try:
            caches = layers.rebuild(tensors, make_prompt_cache(self._model), turn.num_restored)
        except ValueError:
            log.exception("a snapshot does not fit the model", session=str(turn.key))
            return None
        return Held(caches, turn.context[: turn.num_restored])

    def _trimmed(self, held: Held | None, num_tokens: int) -> tuple[list[Any], int]:
        """Cut caches down to `num_tokens`, or start anew where that is not possible."""
        if held is None or num_tokens == 0 or (len(held.tokens) != num_tokens and not self.trimmable):
            return make_prompt_cache(self._model), 0
        if len(held.tokens) != num_tokens:
            layers.trim(held.caches, num_tokens)
        return held.caches, num_tokens

    def _run_step(self, step: Step[Turn], *, undisturbed: bool) -> None:
        """Run one step. If it fails its prompts do, and its answers too where they cannot be rolled back."""
        started = time.perf_counter()
        try:
            # A prompt that waits, or a command, gets its turn before anything that could run ahead.
            alone = undisturbed and len(step.decode) == len(self._scheduler)
            self._batch.step([self._piece(turn, num) for turn, num in step.prefill], go_on=alone)
        except Exception as error:  # noqa: BLE001  # whatever MLX or a model raises
            prompts = tuple(turn for turn, _ in step.prefill)
            if prompts and self._batch.roll_back():
                for turn in prompts:
                    self._fault(turn, error)
            else:
                self._fault_all((*step.decode, *prompts), error)
            return
        step_s = time.perf_counter() - started
        for turn, num in step.prefill:
            self._guarded(turn, lambda turn, num=num: self._prefilled(turn, num, step_s))  # type: ignore[misc]
        for turn in step.decode:
            if turn in self._scheduler:  # else it was lost with another one's leaving
                self._decoded(turn)

    def _piece(self, turn: Turn, num_tokens: int) -> Piece:
        start, end = turn.num_cached, turn.num_cached + num_tokens
        if end == turn.target and turn.answer is not None:
            turn.row = Row(
                caches=turn.caches,
                known=turn.context[:],
                sampling=turn.sampling,
                num_drawn=len(turn.answer.tokens),
                num_cached=end,
                num_left=_num_left(turn),
                seen=set(turn.context) if turn.sampling.repetition_penalty != 1.0 else set(),
            )
        return Piece(turn.caches or [], start, turn.context[start:end].tolist(), turn.row)

    def _prefilled(self, turn: Turn, num_tokens: int, step_s: float) -> None:
        """Count a piece of a prompt, and begin the answer or end the turn where it was the last one."""
        start, turn.num_cached = turn.num_cached, turn.num_cached + num_tokens
        turn.num_prefilled += max(min(turn.num_cached, turn.num_prompt) - start, 0)
        turn.prefill_s += step_s
        self._emit(Prefilled(turn, turn.num_cached))
        self.cutting.prompt(turn)
        if turn.row is not None:
            turn.caches = None
            self._scheduler.begun(turn)
            self._sampled(turn, turn.row.drawn[0])
        elif turn.num_cached == turn.target:
            self._end(turn)

    def _decoded(self, turn: Turn) -> None:
        """Take over what a step has drawn for a row, up to the answer's end."""
        for token in turn.row.drawn if turn.row is not None else ():
            turn.num_cached += 1
            self._num_decoded += 1
            self.cutting.block(turn)
            self._sampled(turn, token)
            if turn.row is None:
                return

    def _sampled(self, turn: Turn, token: int) -> None:
        """Add a token to the answer, which may be over with it."""
        if turn.answer is None:
            raise AssertionError("only answers decode")
        index = len(turn.answer.tokens)
        self._emit(Sampled(turn, index, token, turn.answer.push(token)))
        if turn.answer.finish_reason is not None or _num_left(turn) <= 0:
            self._leave(turn)

    def _leave(self, turn: Turn) -> None:
        """End a turn that may be in the batch. If that fails, the merged KV is half changed: all is lost."""
        try:
            self._end(turn)
        except Exception as error:  # noqa: BLE001  # whatever MLX raises
            self._fault_all((turn, *self._scheduler.decoding), error)

    def _fault_all(self, turns: Iterable[Turn], error: Exception) -> None:
        self._batch.clear()
        for turn in turns:
            self._fault(turn, error)

    def _end(self, turn: Turn) -> None:
        """Leave the device: the KV stays resident, and the tail is cut for the disk."""
        self._scheduler.remove(turn)
        self._sharing.end(turn)
        self.cutting.cut(turn)
        if turn.row is not None:
            turn.caches = self._batch.remove(turn.row)
            if turn.row.num_cached > turn.num_cached:  # it ended amid tokens that it had guessed
                layers.trim(turn.caches, turn.num_cached)
            turn.row = None
            self.cutting.tail(turn)
        caches, turn.caches = turn.caches, None
        live_bytes = 0
        if caches is not None and turn.num_cached:
            layers.shrink(caches)
            self.room.put(turn.key, Held(caches, turn.tokens(turn.num_cached)))
            live_bytes = layers.live_bytes(caches)
        self._emit(Finished(turn, turn.num_cached, live_bytes))


def _under_way(turn: Turn, batch: Batch) -> Held:
    """Show the KV that a turn has so far, to be read before the next step."""
    if turn.row is not None:
        return Held(batch.caches(turn.row), turn.tokens(turn.num_cached))
    return Held(turn.caches or [], turn.context[: turn.num_cached])


def _num_left(turn: Turn) -> int:
    """Count the tokens that a turn's answer may still get: up to its end, or to what is granted."""
    if turn.answer is None:
        return 0
    most = min(turn.answer.max_tokens, turn.num_granted - turn.num_prompt)
    return most - len(turn.answer.tokens)


def _grows(caches: list[Any] | None, num_tokens: int) -> bool:
    """Say whether caches have to allocate for so many tokens more."""
    return not caches or layers.grows(caches[0], num_tokens) is not False
