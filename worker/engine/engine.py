"""Controls the device from the event loop: which turns run, whose KV stays resident, and how turns end.

The engine owns the ledger of device memory, and the record of which sessions have KV there. For each turn,
`finding` finds stored or shared KV; the engine then submits the turn and publishes its tokens. The engine
knows nothing of messages, the log or the order of a session's requests; a session runs one turn at a time.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

import structlog

from cache.names.errors import LostPastError
from cache.names.policy import FULL
from cache.names.tokens import as_tokens
from cache.store import ErasureResult
from turnkeep_client.messages import Progress, joined
from worker.batch.rows import Embedding
from worker.device.order import place
from worker.device.request import TurnRequest
from worker.device.turn import (
    Copied,
    Dropped,
    Event,
    Faulted,
    Finished,
    LostKvError,
    NeedsKv,
    NoRoomError,
    Prefilled,
    Sampled,
    SnapshotCut,
    Starved,
    StepReport,
    Turn,
)
from worker.observe.traces import Phase
from worker.process.concurrency import task_group

from .finding import Finder
from .grants import Grants
from .port import DeviceFaultError, EnginePort, NoMemoryError, StoppingError, TurnResult
from .run import Run, on_device, resolve
from .saving import Saving
from .step_figures import StepFigures

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskGroup

    from cache.kv.size import KvSize
    from cache.names.policy import Policy
    from cache.names.tokens import Tokens
    from cache.store import Store
    from turnkeep_client.subjects import SessionKey
    from worker.device.device import Device
    from worker.observe.counters import Telemetry

    from .admission import Ledger
    from .port import Publish

log = structlog.get_logger()

#: A placeholder as last token: an append does not compute the KV of its context's last token.
_UNUSED = as_tokens([0])
#: `erase` returns within this time, so that a `close` with `forget` is answered.
_ERASE_S = 2.0


class Engine(EnginePort):
    """Runs turns on the device; event loop only."""

    def __init__(
        self,
        device: Device,
        ledger: Ledger,
        store: Store | None,
        telemetry: Telemetry,
        *,
        kv: KvSize,
        piece_tokens: int,
        max_tenant_bytes: int | None = None,
        has_unopened: bool = False,
    ) -> None:
        """`kv` computes the size of a session's KV; prompts run in pieces of up to `piece_tokens`.

        A tenant's new turns wait while they would bring it above `max_tenant_bytes`. `has_unopened` says that
        there are snapshots on disk although there is no `store`.
        """
        self.ledger = ledger
        self._device = device
        self._store = store
        self._telemetry = telemetry
        self._kv = kv
        self._has_unopened = has_unopened
        self._residency = ledger.residency
        self._grants = Grants(device, ledger, self._stop_run, kv, piece_tokens, max_tenant_bytes)
        self._runs = self._grants.runs
        self._turns: dict[Turn, Run] = {}  # turns with reserved memory, and their runs
        self._submitted: dict[Turn, None] = {}  # turns that are on the device, in order of submission
        self._finder = Finder(device, store, ledger)
        self._saving = None
        if store is not None:
            self._saving = Saving(store, self._residency, self._at_work, device.copy, device.kv)
        loop = asyncio.get_running_loop()
        device.listen(lambda report: loop.call_soon_threadsafe(self._handle, report))
        self._stopping = False
        self.steps = StepFigures(telemetry)

    @property
    def max_bytes(self) -> int:
        """The limit of device memory for all KV, in bytes."""
        return self.ledger.max_bytes

    @property
    def num_running(self) -> int:
        """Number of turns that have reserved memory."""
        return len(self._turns)

    @property
    def num_waiting(self) -> int:
        """Number of turns that wait for device memory."""
        return self._grants.num_waiting

    def refusal(self, policy: Policy) -> str | None:
        """Return why this worker cannot serve a session under a cache policy; None if it can."""
        return self._device.refusal(policy, has_disk=self._store is not None)

    def size_bytes(self, num_tokens: int, policy: Policy = FULL) -> int:
        """Return the bytes of device memory that the KV of `num_tokens` takes."""
        return self._kv.under(policy).held(num_tokens)

    def ever_fits(self, size_bytes: int) -> bool:
        """Say whether a turn of this size could run alone on the device."""
        return self.ledger.ever_fits(size_bytes)

    def live_bytes(self, key: SessionKey, tokens: Tokens, policy: Policy = FULL) -> int:
        """Count the bytes of a session's KV on the device that cover a prefix of `tokens`."""
        return self._kv.under(policy).live(self._residency.tokens(key).num_common(tokens))

    def progress(self, key: SessionKey) -> Progress | None:
        """Return the progress of a session's running turn; None if no turn runs."""
        return next((run.progress(turn) for turn, run in self._turns.items() if turn.key == key), None)

    def most_tokens(self, most: int, policy: Policy = FULL) -> int:
        """Return the largest number of tokens, at most `most`, whose KV fits into the limit of KV memory."""
        return self._kv.under(policy).most_tokens(self.ledger.max_bytes, most)

    async def run(
        self,
        asked: TurnRequest,
        cancelled: Callable[[], bool],
        publish: Publish | None = None,
        phases: list[Phase] | None = None,
    ) -> TurnResult | None:
        """Run a request in one or more turns, until it is complete or cancelled; see `EnginePort.run`."""
        run = Run(
            asked.key,
            asked.priority,
            place(monotonic(), asked.priority, asked.max_new),
            asked=asked,
            num_most=len(asked.context) + asked.max_new,
            cancelled=cancelled,
            phases=[] if phases is None else phases,
        )
        await self._run_to_end(run, publish)
        return self._result(run) if run.started_s is not None else None

    async def embed(
        self, key: SessionKey, tokens: Tokens, *, priority: int = 0, logits_of: tuple[int, ...] = ()
    ) -> bytes:
        """Run a prompt, return its embedding or some logits, and drop its KV; see `EnginePort.embed`."""
        embedding = Embedding(logits_of)
        asked = TurnRequest(key, tokens + _UNUSED, priority=priority, embedding=embedding)
        try:
            await self.run(asked, lambda: False)
        finally:
            self.forget(key)
        return embedding.vector

    async def save(self) -> None:
        """Save what the disk lacks of idle sessions when there is room to queue it; run until cancelled."""
        if self._saving is None:
            await asyncio.Event().wait()
        else:
            await self._saving.run()

    async def save_all(self, within_s: float) -> None:
        """Save what the disk lacks after `stop`, and wait until all is on disk, for at most `within_s`."""
        if self._saving is not None:
            await self._saving.finish(within_s if self._device.is_alive else 0)

    def log_unstored(self) -> None:
        """Log what a worker that ends loses: the KV that is on the device, but not on disk."""
        if self._saving is not None and (left := self._saving.unstored()):
            why = "some sessions will be prefilled again: their KV is not on disk"
            log.warning(why, sessions=len(left), tokens=sum(left))

    async def _run_to_end(self, run: Run, publish: Publish | None = None) -> None:
        """Run a request's turns, one after another, until it needs no more; then release its memory."""
        self._runs[run] = run
        try:
            await self._run_turns(run, publish)
        finally:
            if not run.is_abandoned:
                self._grants.release(run)
                del self._runs[run]

    async def _run_turns(self, run: Run, publish: Publish | None) -> None:
        is_over, context = False, run.asked.context
        while not is_over:
            asked_s = monotonic()
            if run.is_stopped or not await self._admitted(run, len(context)):
                break
            run.phases.append(Phase("queue", asked_s, monotonic()))
            turn = Turn.of(run.asked, context, run.place_s)
            is_over = await self._run_turn(run, turn, publish)
            if turn.answer is not None and not is_over:  # paused: the next turn continues from its tokens
                context = context[: turn.num_prompt] + turn.answer.tokens

    def _at_work(self) -> set[SessionKey]:
        return {run.key for run in self._runs.values()}

    def cancel(self, key: SessionKey) -> None:
        """End the session's turn after the running step."""
        for run in self._runs.values():
            if run.key == key:
                run.is_cancelled = True
                self._stop_run(run)
                resolve(run.admitted, granted=False)

    def forget(self, key: SessionKey) -> None:
        """Drop a session's KV from the device. Its snapshots stay on SSD; a turn under way makes no more."""
        for run in self._runs.values():  # also runs whose turns nobody waits for
            run.is_forgotten |= run.key == key
        if self._saving is not None:
            self._saving.discard(key)
        if self._residency.pop(key):
            self._device.drop(key)
        self._grants.decide()

    def let_go(self, is_meant: Callable[[SessionKey], bool]) -> set[SessionKey]:
        """Drop the KV on the device of all sessions for which `is_meant` is true.

        Returns those of them whose turn is under way; they keep their KV.
        """
        busy = self._at_work()
        for key in filter(is_meant, set(self._residency.sessions()) - busy):
            self.forget(key)
        return set(filter(is_meant, busy))

    async def erase(self, key: SessionKey, tokens: Tokens, shared: int) -> ErasureResult:
        """Drop a session's KV from the device and its snapshots from SSD, within 2 s.

        Keeps the snapshots of the first `shared` tokens. Everything that is not in use is dropped before the
        first await.
        """
        self.forget(key)
        if self._store is None:
            return ErasureResult(0, settled=not self._has_unopened)
        return await self._store.eraser.erase(key.tenant, tokens.packed(), _ERASE_S, shared=shared)

    def stop(self) -> None:
        """End every turn; each unfinished `run` raises `StoppingError` once its KV is copied for the SSD."""
        self._stopping = True
        for run in self._runs.values():
            self._stop_run(run)
            if run.admitted is not None and not run.admitted.done():
                run.admitted.set_exception(StoppingError())

    def _handle(self, report: StepReport) -> None:
        """Handle the device thread's report of one step."""
        self.steps.note(report)
        for event in report.events:
            self._handle_event(event)

    def _handle_event(self, event: Event) -> None:
        match event:
            case SnapshotCut():
                if self._saving is not None:
                    self._saving.save(event, self._turns.get(event.turn))
            case Copied():
                if self._saving is not None:
                    self._saving.end_copy(event.turn)
            case Starved():
                if self._store is not None:
                    self._store.queue.free_memory()
            case Dropped(keys):  # turns of these sessions that are not submitted yet reuse less
                for key in keys:
                    self._residency.pop(key)
                self._grants.decide()
            case _:
                self._handle_turn(event)

    def _handle_turn(self, event: Prefilled | Sampled | NeedsKv | Finished | Faulted) -> None:
        turn = event.turn
        run = self._turns.get(turn)
        match event:
            case Prefilled(_, num_cached):
                if run is not None:
                    run.num_cached = num_cached
                return
            case NeedsKv():
                # Not in the queue of `events`: publishing their chunks waits while NATS is away.
                if run is not None and not run.is_abandoned:
                    run.needs.put_nowait(event)
                return
            case Sampled(_, chunk):
                self._telemetry.totals.generated_tokens += 1
                self._telemetry.tenants.count_tokens("generated", turn.tenant)
                if run is not None:
                    run.num_generated = chunk.i + 1
                    run.num_lost = 0
                    self._grants.grow(run, turn.num_prompt + chunk.i + 1)
            case Finished(_, num_cached, _, earliest):
                self._residency.pop(turn.key)
                if run is not None and run.is_forgotten:
                    if sum(one.key == turn.key for one in self._submitted) == 1:
                        self._device.drop(turn.key)  # else the session's next turn has taken its KV
                elif num_cached:
                    tokens, size_bytes = turn.tokens(num_cached), self.size_bytes(num_cached, turn.policy)
                    self._residency.put(turn.key, tokens, size_bytes, earliest, turn.policy)
                    if self.ledger.is_reserved(turn.key):  # by this turn, or the session's next one
                        self._residency.use(turn.key)
                    if self._saving is not None and turn.chain is not None:
                        self._saving.end_turn(turn)
            case Faulted():
                self._residency.pop(turn.key)
        if run is None:
            return
        run.events.put_nowait(event)
        if isinstance(event, Finished | Faulted):
            resumes = isinstance(event, Finished) or run.may_start_again(event.error)
            # Release its memory at once, not only when the task that waits for the turn runs.
            self._end_turn(run, turn, resumes=resumes and not self._is_over(run, turn))

    def _is_over(self, run: Run, turn: Turn) -> bool:
        """Say whether an ended turn is complete or must not be continued."""
        answer_is_over = turn.answer is None or turn.answer.finish_reason is not None
        return self._stopping or run.is_stopped or (answer_is_over and turn.num_cached >= turn.target)

    def _end_turn(self, run: Run, turn: Turn, *, resumes: bool) -> None:
        """Release an ended turn's memory; if `resumes`, also request memory for the run's next turn."""
        del self._turns[turn]
        self._submitted.pop(turn, None)
        run.turn = None
        if resumes and not run.is_abandoned:
            num = len(turn.context) if turn.answer is None else turn.num_prompt + len(turn.answer.tokens)
            self._grants.ask(run, num)
            return
        self._grants.release(run)
        if run.is_abandoned:
            del self._runs[run]

    async def _run_turn(self, run: Run, turn: Turn, publish: Publish | None) -> bool:
        """Run a turn whose memory is granted; return False if another turn must continue its request."""
        run.turn = turn
        run.num_cached = 0
        self._turns[turn] = run
        try:
            begun_s = monotonic()
            busy = {other.key for other in self._turns}
            await self._finder.find(turn, run, busy, self._submitted)
            num_found = max(turn.num_kept, turn.num_restored)
            run.begin(num_found)
            found_s = turn.restores[0].start_s if turn.restores else monotonic()
            run.phases += [Phase("kv_search", begun_s, found_s, num_found), *turn.restores]
            num_restored = sum(phase.num_tokens for phase in turn.restores)
            self._telemetry.tenants.count_tokens("restored", turn.tenant, num_restored)
            if self._stopping:
                raise StoppingError
            if run.waits_no_more():
                self._end_turn(run, turn, resumes=not run.is_stopped)
                return run.is_stopped
            run.started_s = run.started_s or monotonic()
            turn.num_granted = run.num_granted
            async with task_group() as reads:
                reads.start_soon(self._serve, run, reads)
                is_over = await self._follow(run, turn, publish)
                reads.cancel_scope.cancel()
            return is_over
        finally:
            self._finder.release(run)
            if turn in self._submitted:  # the device has not reported its end yet
                run.is_abandoned = True
                self._device.cancel(turn)
            elif turn in self._turns:
                self._end_turn(run, turn, resumes=False)

    def _result(self, run: Run) -> TurnResult:
        result = run.result()
        num_cached, num_prefilled = result.num_cached, result.num_prefilled
        self._telemetry.totals.cached_tokens += num_cached
        self._telemetry.totals.prefilled_tokens += num_prefilled
        tenants = self._telemetry.tenants
        tenants.count_tokens("cached", run.key.tenant, num_cached)
        tenants.count_tokens("prefilled", run.key.tenant, num_prefilled)
        return result

    async def _follow(self, run: Run, turn: Turn, publish: Publish | None) -> bool:
        """Submit a turn and publish its tokens until it ends.

        Returns False if another turn must continue the request.
        """
        submitted_s, drawn_s = monotonic(), None
        self._submitted[turn] = None
        self._device.submit(turn)
        while True:
            events = [await run.events.get()]
            while not run.events.empty():
                events.append(run.events.get_nowait())
            sampled = [event for event in events if isinstance(event, Sampled)]
            if sampled:
                drawn_s = drawn_s or monotonic()
                run.first_token_s = run.first_token_s or monotonic()
                if publish is not None:
                    await publish(joined([event.chunk for event in sampled]))
            if isinstance(events[-1], Faulted | Finished):
                run.phases += on_device(turn, submitted_s, drawn_s)
            end = events[-1]
            if isinstance(end, Faulted) and isinstance(end.error, LostKvError) and self._is_over(run, turn):
                end = Finished(turn, turn.num_cached, 0)  # the answer is complete, only its KV is lost
            match end:
                case Faulted(_, NoRoomError() as error):
                    raise NoMemoryError(str(error)) from error
                case Faulted(_, LostPastError() | LostKvError()) if run.admitted is not None:
                    return False
                case Faulted(_, error):
                    raise DeviceFaultError(repr(error)) from error
                case Finished(_, num_cached, live_bytes):
                    self._finder.rates.prefilled(turn.num_prefilled, turn.prefill_s)
                    run.count(turn, num_cached, live_bytes)
                    over = turn.answer is None or turn.answer.finish_reason is not None
                    if self._stopping and not (over and run.is_complete):
                        raise StoppingError
                    return run.admitted is None

    async def _serve(self, run: Run, reads: TaskGroup) -> None:
        """Start a read from SSD for each KV request of a run's turn, until cancelled.

        Must be a task: with sniffio installed, anyio cannot start a task from a callback of the loop.
        """
        while True:
            reads.start_soon(self._read, await run.needs.get(), run)

    async def _read(self, needs: NeedsKv, run: Run) -> None:
        num_recalled = await self._finder.read(needs, run)
        self._telemetry.totals.recalled_tokens += num_recalled

    async def _admitted(self, run: Run, num_context: int) -> bool:
        """Wait for the memory that a turn is likely to need; return False if the run is cancelled."""
        if run.admitted is None:
            if self._stopping:
                raise StoppingError
            self._grants.ask(run, num_context)
        try:
            return run.admitted is not None and await run.admitted
        finally:
            run.admitted = None

    def _stop_run(self, run: Run) -> None:
        """End a run's turn and keep the tokens drawn; a turn not yet submitted is never submitted."""
        run.is_halted = True
        if run.turn in self._submitted:
            self._device.cancel(run.turn)
        resolve(run.room, granted=False)
