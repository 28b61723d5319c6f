"""The device thread: it alone touches MLX.

It owns the model, every session's KV on the device, and the batch. The event loop sends commands; once a
step the thread hands back one report. It knows neither NATS nor the log, and of a session only its key.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import structlog
from mlx_lm.models.cache import make_prompt_cache

from cache import layers
from cache.blocks import Span, tail_start
from worker.batch.batch import Batch, Piece, Row
from worker.models.quantised import unpacked_bytes

from . import machine
from .memory import Estimator, shape_of
from .pace import LEAST, Pace
from .resident import Ask, Held, Resident
from .scheduler import Scheduler, Step
from .sharing import Sharing
from .turn import (
    Cut,
    Event,
    Faulted,
    Finished,
    NoRoomError,
    Prefilled,
    Report,
    Sampled,
    Spilled,
    Starved,
    Turn,
    num_common,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from protocol.subjects import SessionKey
    from worker.models.model import LoadedModel

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Cancel:
    turn: Turn


@dataclass(frozen=True, slots=True)
class _Drop:
    key: SessionKey


@dataclass(frozen=True, slots=True)
class _Release:
    key: SessionKey


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Command = Turn | _Cancel | _Drop | Ask | _Release | _Stop


class Device:
    """The thread and its command queue. Public methods may be called from any thread."""

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        report: Callable[[Report], None],
        died: Callable[[BaseException], None],
        *,
        block_tokens: int,
        max_batch: int,
        stall_s: float,
        limit_bytes: int | None = None,
        max_draft: int = 0,
        wired_bytes: int | None = None,
    ) -> None:
        """`load` runs on the thread; `report` is called there after each step and must only hand over.

        `died` is called there if the thread ends for another reason than `stop`. `limit_bytes` is
        for all that MLX holds; None derives it from the machine. `wired_bytes` are not to be paged out.
        """
        self._load = load
        self._report = report
        self._died = died
        self._block = block_tokens
        self._room: Callable[[], int] | None = None
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[LoadedModel | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._scheduler: Scheduler[Turn] = Scheduler(max_batch, block_tokens)
        self._pace = Pace(stall_s, block_tokens)
        self._sharing = Sharing()
        self._events: list[Event] = []
        self._limit_bytes = limit_bytes
        self._wired_bytes = wired_bytes
        self._peak = 0
        self._num_decoded = 0
        self._max_draft = max_draft
        #: Known once `start` has returned: the cache class that cannot be snapshotted, the classes of all
        #: layers, whether KV can be cut and trimmed at any token, and the device.
        self.unsupported_cache: str | None = None
        self.caches = ""
        self.trimmable = True
        self.name = ""

    def start(self) -> LoadedModel:
        """Start the thread and wait until the model is loaded; raises what loading raised."""
        self._thread.start()
        loaded = self._loaded.get()
        if isinstance(loaded, BaseException):
            self._thread.join()
            raise loaded
        return loaded

    def cut_snapshots(self, room: Callable[[], int]) -> None:
        """Cut snapshots from now on, while `room()`, called on the device thread, has the bytes for one."""
        self._room = room

    def submit(self, turn: Turn) -> None:
        """Run a turn. A session has at most one under way."""
        self._commands.put(turn)

    def cancel(self, turn: Turn) -> None:
        """End a turn after the step that is running; one that is over already is left alone."""
        self._commands.put(_Cancel(turn))

    def drop(self, key: SessionKey) -> None:
        """Forget the KV of a session that has no turn under way."""
        self._commands.put(_Drop(key))

    def hold(self, key: SessionKey, num_tokens: int, answer: Callable[[bool], None]) -> None:
        """Keep room for a restore of so many tokens until the session's turn is submitted, or `release`.

        `answer` is called on the device thread once there is room; with False where there never will be.
        """
        self._commands.put(Ask(key, num_tokens, answer))

    def release(self, key: SessionKey) -> None:
        """Give up what `hold` keeps or waits for."""
        self._commands.put(_Release(key))

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End the thread after the step that is running; False if it did not end in time."""
        self._commands.put(_Stop())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # Everything below runs on the device thread.

    def _run(self) -> None:
        try:
            self._live()
        finally:
            # Streams that outlive their thread now and then abort the process at its exit ("terminate called
            # without an active exception"): 4 of 60 runs of MLX 0.32.4 that ended right after a thread did.
            mx.clear_streams()

    def _live(self) -> None:
        try:
            if self._wired_bytes is not None:
                machine.wire(self._wired_bytes)
            loaded = self._load()
            self._take_model(loaded)
        except BaseException as error:  # noqa: BLE001  # start() raises it on its caller's thread
            self._loaded.put(error)
            return
        self._loaded.put(loaded)
        try:
            while self._take_commands():
                self._step()
        except BaseException as error:  # noqa: BLE001  # nobody else would hear of it
            self._died(error)

    def _take_model(self, loaded: LoadedModel) -> None:
        machine.limit_freed()
        mx.reset_peak_memory()
        self._model = loaded.model
        caches = make_prompt_cache(loaded.model)
        mx.eval(loaded.model(mx.array([[0]]), cache=caches))
        unpacked = unpacked_bytes(caches)
        self._estimator = self.estimator = Estimator(
            shape=shape_of(loaded.config),
            limit_bytes=self._limit_bytes or machine.default_limit_bytes(),
            weight_bytes=loaded.weight_bytes,
            bytes_per_token=loaded.kv_bytes_per_token,
            fixed_bytes=loaded.kv_fixed_bytes,
            num_layers=len(caches),
            fused=not machine.on_cpu() and not unpacked,  # attention to quantised KV has no such kernel
            unpacked_bytes=unpacked if machine.on_cpu() else 0,
        )
        self._resident = Resident(self._estimator, self._block, self._left)
        self._batch = Batch(loaded.model, self._resident.make_room, max_draft=self._max_draft)
        self._vocab_size = loaded.vocab_size
        self.trimmable = layers.trimmable(caches)
        self.caches = layers.describe(caches)
        self.unsupported_cache = layers.unsupported(caches)
        self.name = str(mx.default_device())

    def _step(self) -> None:
        started = time.perf_counter()
        step, estimated = self._choose()
        before = mx.get_active_memory()
        self._peak = max(self._peak, mx.get_peak_memory())  # between two steps: what was restored, say
        mx.reset_peak_memory()
        if step:
            self._run_step(step)
        step_s = time.perf_counter() - started
        self._take_up_ready()
        self._pace.learn(len(step.decode), sum(num for _, num in step.prefill), step_s)
        measured = mx.get_peak_memory() - max(before, mx.get_active_memory())
        self._hand_over(len(step.decode), step_s, estimated, measured)

    def _choose(self) -> tuple[Step[Turn], int]:
        """Choose a step that fits into memory, and say what it is thought to need beside weights and KV.

        Where it does not, idle sessions leave first, then prompts are read in smaller pieces, then they wait
        for the answers to end. Where no answer runs, prompts that have come less far begin anew later; one
        that has the device to itself gives up.
        """
        if self._batch.is_ahead:
            return Step(self._scheduler.decoding, ()), 0
        num_rows = len(self._scheduler.decoding)
        budget = self._pace.budget(num_rows)
        while True:
            step = self._scheduler.next(budget)
            pieces = [(num, turn.num_cached + num) for turn, num in step.prefill]
            scratch = self._estimator.scratch_bytes(num_rows, pieces, self._batch.num_held)
            growing = [turn.num_cached + num for turn, num in step.prefill if _grows(turn.caches, num)]
            growth = self._estimator.growth_bytes(
                [*self._batch.growing, *growing], max((num for num, _ in pieces), default=1)
            )
            growth += self._batch.leaving_bytes + self._cut_bytes(step)
            if self._resident.make_room(scratch + growth) or not step.prefill:
                return step, scratch
            if budget > LEAST:
                budget = max(budget // 2, LEAST)
            elif num_rows:
                budget = 0
            elif len(step.prefill) > 1:
                budget = 1  # one of them
            elif self._resident.is_promised:
                self._resident.wait_for_restore()  # its turn, or its end, is the next command
                return Step((), ()), 0
            elif not self._give_way() and not self._comes_free(scratch + growth):
                turn = step.prefill[0][0]
                self._fault(turn, NoRoomError(self._no_room(turn, scratch + growth)))

    def _comes_free(self, size_bytes: int) -> bool:
        """Have what waits for the disk given up, and wait for its memory; False where that is not enough."""
        self._events.append(Starved())
        self._hand_over(0, 0.0, 0, 0)
        return self._resident.comes_free(size_bytes)

    def _cut_bytes(self, step: Step[Turn]) -> int:
        """Count the copies for the disk that a step's pieces of prompts make."""
        if self._room is None:
            return 0
        ready = (
            span.num_tokens
            for turn, num in step.prefill
            for span in turn.spans
            if span.end <= turn.num_cached + num
        )
        return sum(ready) * self._estimator.bytes_per_token

    def _give_way(self) -> bool:
        """Let the prompt that has come the least far begin anew later; False where only one holds KV.

        Those that hold each other up so are few: the ledger has room for what each of them says it needs.
        """
        holding = [turn for turn in self._scheduler.prefilling if turn.num_cached]
        if len(holding) < 2:
            return False
        turn = min(holding, key=lambda turn: turn.num_cached)
        turn.caches = make_prompt_cache(self._model)
        turn.num_cached = turn.num_reused = turn.num_prefilled = 0
        return True

    def _left(self, key: SessionKey) -> None:
        self._events.append(Spilled(key))

    def _no_room(self, turn: Turn, size_bytes: int) -> str:
        return (
            f"reading on after {turn.num_cached} of {turn.target} tokens takes {size_bytes} bytes beside the"
            f" {mx.get_active_memory()} in use, the limit of the device is {self._estimator.limit_bytes}:"
            " shorten the session, or raise device_memory"
        )

    def _take_commands(self) -> bool:
        """Apply what was sent, waiting where there is nothing to run; False when told to stop."""
        while True:
            self._take_up_ready()
            self._resident.grant(is_busy=bool(self._scheduler))
            if self._events:
                self._hand_over(0, 0.0, 0, 0)
            try:
                command = self._commands.get(block=not self._scheduler)
            except queue.Empty:
                return True
            match command:
                case Turn():
                    self._resident.arrived(command.key)
                    self._guarded(command, self._begin)
                case _Cancel(turn) if turn in self._scheduler:
                    self._leave(turn)
                case _Cancel(turn) if self._sharing.give_up(turn):
                    turn.source = None
                    self._guarded(turn, self._take_up)  # so that it keeps what it had
                    self._leave(turn)
                case _Drop(key):
                    self._resident.take(key)
                case Ask():
                    self._resident.ask(command)
                case _Release(key):
                    self._resident.release(key)
                case _Stop():
                    return False

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
        self._resident.take(turn.key)
        turn.caches = turn.row = None
        self._events.append(Faulted(turn, error))

    def _begin(self, turn: Turn) -> None:
        """Take up a turn, unless another one is about to read the tokens that both begin with."""
        # An append leaves its last token out only where KV cannot be trimmed: it could not be run again.
        turn.target = max(len(turn.context) - (turn.answer is None and not self.trimmable), 0)
        if not self.trimmable:
            turn.source = None
        if not self._sharing.begin(turn):
            self._take_up(turn)

    def _take_up_ready(self) -> None:
        """Take up the turns that need not wait for another one any more, and those that waited for them."""
        while ready := self._sharing.ready():
            for turn in ready:
                self._guarded(turn, self._take_up)

    def _take_up(self, turn: Turn) -> None:
        """Find a turn's KV, trim it to what is of use, and queue what has to be prefilled."""
        # An answer is drawn from the last token's logits, so that token has to be run, whatever is cached.
        num_context, draws = len(turn.context), turn.answer is not None
        most_reused = max(num_context - (draws or not self.trimmable), 0)
        held = self._resident.take(turn.key)
        usable = turn.num_kept
        restored = self._rebuilt(turn)
        if restored is not None:
            held, usable = restored, len(restored.tokens)
        shared = self._fork(turn, usable)
        if shared is not None:
            held, usable = shared, len(shared.tokens)
        # MLX reads beyond its table for an id that is not in it, and the process ends.
        if any(not 0 <= token < self._vocab_size for token in turn.context[usable:]):
            raise ValueError(f"a token id is outside of the model's vocabulary of {self._vocab_size}")
        turn.caches, turn.num_cached = self._trimmed(held, min(usable, most_reused))
        turn.num_reused = turn.num_cached
        if draws and turn.spans and turn.spans[-1].end == num_context and num_context % self._block:
            turn.spans.pop()  # the tail is cut when the answer is over
        self._scheduler.add(turn)
        self._cut_ready(turn)
        if turn.num_cached == turn.target:
            self._end(turn)

    def _fork(self, turn: Turn, num_own: int) -> Held | None:
        """Copy what another session's KV has of the context, if that is more than `num_own` tokens."""
        if turn.source is None:
            return None
        other = self._sharing.source(turn)
        held = self._resident.get(turn.source) if other is None else _under_way(other, self._batch)
        num_tokens = num_common(held.tokens, turn.context) if held is not None else 0
        if held is None or num_tokens <= num_own:
            return None
        if not self._resident.make_room(self._estimator.kv_bytes(num_tokens), but=turn.source):
            return None
        caches = layers.fork(held.caches, make_prompt_cache(self._model), num_tokens)
        return Held(caches, turn.context[:num_tokens])

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

    def _run_step(self, step: Step[Turn]) -> None:
        """Run one step. If it fails its prompts do, and its answers too where they cannot be rolled back."""
        started = time.perf_counter()
        try:
            # A prompt that waits, or a command, gets its turn before anything that could run ahead.
            alone = len(step.decode) == len(self._scheduler) and self._commands.empty()
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
                num_left=turn.answer.max_tokens - len(turn.answer.tokens),
                seen=set(turn.context) if turn.sampling.repetition_penalty != 1.0 else set(),
            )
        return Piece(turn.caches or [], start, turn.context[start:end].tolist(), turn.row)

    def _prefilled(self, turn: Turn, num_tokens: int, step_s: float) -> None:
        """Count a piece of a prompt, and cut the snapshots that it completes."""
        start, turn.num_cached = turn.num_cached, turn.num_cached + num_tokens
        turn.num_prefilled += max(min(turn.num_cached, turn.num_prompt) - start, 0)
        turn.prefill_s += step_s
        self._events.append(Prefilled(turn, turn.num_cached))
        self._cut_ready(turn)
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
            if turn.num_cached % self._block == 0:
                self._cut(turn, Span(turn.num_cached - self._block, turn.num_cached))
            self._sampled(turn, token)
            if turn.row is None:
                return

    def _sampled(self, turn: Turn, token: int) -> None:
        """Add a token to the answer, which may be over with it."""
        if turn.answer is None:
            raise AssertionError("only answers decode")
        index = len(turn.answer.tokens)
        self._events.append(Sampled(turn, index, token, turn.answer.push(token)))
        if turn.answer.finish_reason is not None:
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
        if turn.row is not None:
            turn.caches = self._batch.remove(turn.row)
            if turn.row.num_cached > turn.num_cached:  # it ended amid tokens that it had guessed
                layers.trim(turn.caches, turn.num_cached)
            turn.row = None
            start = self._tail_start(turn)
            if start < turn.num_cached:
                self._cut(turn, Span(start, turn.num_cached))
        caches, turn.caches = turn.caches, None
        live_bytes = 0
        if caches is not None and turn.num_cached:
            layers.shrink(caches)
            self._resident.put(turn.key, Held(caches, turn.tokens(turn.num_cached)))
            live_bytes = layers.live_bytes(caches)
        self._events.append(Finished(turn, turn.num_cached, live_bytes))

    def _tail_start(self, turn: Turn) -> int:
        """Say where the piece of the tail starts that is to be cut at the end of an answer."""
        boundary = turn.num_cached - turn.num_cached % self._block
        if not turn.edges or turn.edges[0] != boundary:
            return boundary  # nothing of this block was there when the turn began
        return tail_start(turn.edges, turn.num_cached)

    def _cut_ready(self, turn: Turn) -> None:
        """Cut the missing pieces of the prompt that KV covers by now."""
        while turn.spans and turn.spans[0].end <= turn.num_cached:
            self._cut(turn, turn.spans.pop(0))

    def _cut(self, turn: Turn, span: Span) -> None:
        """Cut a span that KV covers: with all that is needed to resume there, if that is where KV ends."""
        if self._room is None:
            return
        row, caches, at_end = turn.row, turn.caches or [], turn.num_cached == span.end
        ends_turn = span.end % self._block != 0 or (turn.answer is None and span.end == turn.target)
        if row is not None:
            caches = self._batch.caches(row)
            at_end = at_end and row.num_cached == span.end
        tensors = None
        try:
            tensors = layers.cut(
                caches,
                span.start,
                span.end,
                at_end=at_end,
                # What waits for the disk is on the device too: it must not take the place of sessions.
                room_bytes=min(self._room(), self._estimator.limit_bytes - mx.get_active_memory()),
                # A state can be many times a block's KV: the one at the turn's end is worth more than others.
                spare_states=0 if ends_turn else 1,
            )
        except Exception:
            log.exception("a snapshot could not be cut", session=str(turn.key))  # the answer goes on
        has_state = tensors is not None and any(tensor.of_state for tensor in tensors)
        self._events.append(
            Cut(turn, span, tensors, state_lost=at_end and not self.trimmable and not has_state)
        )


def _under_way(turn: Turn, batch: Batch) -> Held:
    """Show the KV that a turn has so far, to be read before the next step."""
    if turn.row is not None:
        return Held(batch.caches(turn.row), turn.tokens(turn.num_cached))
    return Held(turn.caches or [], turn.context[: turn.num_cached])


def _grows(caches: list[Any] | None, num_tokens: int) -> bool:
    """Say whether caches have to allocate for so many tokens more."""
    return not caches or layers.grows(caches[0], num_tokens) is not False
