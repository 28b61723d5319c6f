"""Controls the device from the event loop: which turns run, whose KV stays resident, and how turns end.

The engine owns the ledger of device memory, and the record of which sessions have KV there. For each turn,
`kv_lookup` finds stored or shared KV; the engine then submits the turn and publishes its tokens. The engine
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
from worker.device.request import NoMemoryError, TurnRequest, place
from worker.device.turn import (
    CopiedSession,
    DeviceTurn,
    DroppedKv,
    Event,
    FaultedTurn,
    FinishedTurn,
    ImageRequest,
    KvRequest,
    LostKvError,
    PrefilledPiece,
    SampledTokens,
    SnapshotCut,
    Starvation,
    StepReport,
)
from worker.observe.traces import Phase
from worker.process.concurrency import task_group

from .audit import Audit
from .grants import Grants
from .kv_lookup import KvFinder
from .kv_on_device import NO_KV, KvOnDevice
from .needs import NeedsReader
from .port import DeviceFaultError, EnginePort, StoppingError, TurnResult
from .run import Run, phases_of, resolve
from .unsaved_kv import UnsavedKv

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cache.names.policy import Policy
    from cache.names.tokens import Tokens
    from cache.store import Store
    from turnkeep_client.subjects import SessionKey
    from worker.device.device import Device
    from worker.observe.telemetry import Telemetry

    from .ledger import Ledger
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
        piece_tokens: int,
        max_tenant_bytes: int | None = None,
        has_unopened: bool = False,
    ) -> None:
        """Prompts run in pieces of up to `piece_tokens`.

        A tenant's new turns wait while they would bring it above `max_tenant_bytes`. `has_unopened`: there
        are snapshots on disk although there is no `store`.
        """
        self.ledger = ledger
        self._device = device
        self._store = store
        self._telemetry = telemetry
        self._has_unopened = has_unopened
        self._kv_on_device = ledger.kv_on_device
        self._grants = Grants(device, ledger, piece_tokens, max_tenant_bytes)
        self._runs = self._grants.runs
        self._turns: dict[DeviceTurn, Run] = {}  # turns on the device, in order of submission, and their runs
        self._finder = KvFinder(device, store, ledger)
        self._needs = NeedsReader(device, telemetry)
        self._saving, self._audit = None, None
        if store is not None:
            self._audit = Audit(self, store, telemetry, self._is_idle, self._has_spare)
            self._saving = UnsavedKv(store, self._kv_on_device, self._at_work, device.copy, device.kv)
        loop = asyncio.get_running_loop()
        device.listen(lambda report: loop.call_soon_threadsafe(self._handle, report))
        self._stopping = False
        #: The last report of the device.
        self.report = StepReport()

    @property
    def max_bytes(self) -> int:
        """The limit of device memory for all KV, in bytes."""
        return self.ledger.max_bytes

    @property
    def num_running(self) -> int:
        """Number of turns that have reserved memory."""
        return len(self.ledger.running)

    @property
    def num_unplaced(self) -> int:
        """Number of running turns that are prefilled, and wait for one of `max_batch` places."""
        return sum(run.unplaced_since is not None for run in self._runs.values() if self.ledger.reserved(run))

    @property
    def num_waiting(self) -> int:
        """Number of turns that wait for device memory and have reserved none."""
        return self._grants.admission.num_waiting

    def refusal(self, policy: Policy) -> str | None:
        """Return why this worker cannot serve a session under a cache policy; None if it can."""
        return self._device.served.refusal(policy, has_disk=self._store is not None)

    def size_bytes(self, num_tokens: int, policy: Policy = FULL) -> int:
        """Return the bytes of device memory that the KV of `num_tokens` takes."""
        return self._device.kv(policy).held(num_tokens)

    def live_bytes(self, key: SessionKey, tokens: Tokens, policy: Policy = FULL) -> int:
        """Count the bytes of a session's KV on the device that cover a prefix of `tokens`."""
        held = self._kv_on_device.get(key, NO_KV)
        return self._device.kv(policy).live(held.tokens.num_common(tokens))

    def progress(self, key: SessionKey) -> Progress | None:
        """Return the progress of a session's running turn; None if no turn runs."""
        running = (run for run in self._runs.values() if run.key == key and self.ledger.reserved(run))
        return next((run.progress for run in running), None)

    def most_tokens(self, most: int, policy: Policy = FULL) -> int:
        """Return the largest number of tokens, at most `most`, whose KV fits into the limit of KV memory."""
        return self._device.kv(policy).most_tokens(self.ledger.max_bytes, most)

    async def run(
        self,
        request: TurnRequest,
        cancelled: Callable[[], bool],
        publish: Publish | None = None,
        phases: list[Phase] | None = None,
    ) -> TurnResult | None:
        """Run a request in one or more turns, until it is complete or cancelled; see `EnginePort.run`."""
        run = Run(
            request.key,
            request.priority,
            place(monotonic(), request.priority, request.max_new),
            request=request,
            num_most=len(request.context) + request.max_new,
            num_logged=len(request.context),
            cancelled=cancelled,
            phases=[] if phases is None else phases,
        )
        self._runs[run] = run
        if self._audit is not None and request.audited is None:
            self._audit.interrupt()
        is_over = False
        try:
            while not is_over and await self._admitted(run):
                is_over = await self._run_turn(run, publish)
        finally:
            if run.turn is not None:  # the device has not reported its end yet, which then ends the run
                run.is_abandoned = True
                self._device.cancel(run.turn)
            else:
                self._leave(run)
        return self._result(run) if run.started_s is not None else None

    async def embed(
        self, key: SessionKey, tokens: Tokens, *, priority: int = 0, logits_of: tuple[int, ...] = ()
    ) -> bytes:
        """Run a prompt, return its vector or some logits, and drop its KV; see `EnginePort.embed`."""
        embedding = Embedding(logits_of)
        request = TurnRequest(key, tokens + _UNUSED, priority=priority, embedding=embedding)
        try:
            await self.run(request, lambda: False)
        finally:
            self.forget(key)
        return embedding.vector

    @property
    def chores(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Functions to run beside the turns until they are cancelled, by name: none without a store.

        They save what the disk lacks of idle sessions, and compute some of the restored KV again.
        """
        parts = {"saving": self._saving, "audit": self._audit}
        return {name: part.run for name, part in parts.items() if part is not None}

    async def save_all(self, within_s: float) -> None:
        """Save what the disk lacks after `stop`, and wait until all is on disk, for at most `within_s`."""
        if self._saving is not None:
            await self._saving.finish(within_s if self._device.is_alive else 0)

    def log_unstored(self) -> None:
        """Log what a worker that ends loses: the KV that is on the device, but not on disk."""
        if self._saving is not None and (left := self._saving.unstored()):
            why = "some sessions will be prefilled again: their KV is not on disk"
            log.warning(why, sessions=len(left), tokens=sum(left))

    def _at_work(self) -> set[SessionKey]:
        return {run.key for run in self._runs.values()}

    def _is_idle(self) -> bool:
        """Whether no request runs or waits, other than an audit."""
        return all(run.request.audited is not None for run in self._runs.values())

    def _has_spare(self, num_tokens: int, policy: Policy) -> bool:
        """Whether the KV of `num_tokens` tokens fits beside that of all idle sessions."""
        return self.ledger.used_bytes + self.size_bytes(num_tokens, policy) <= self.ledger.max_bytes

    def cancel(self, key: SessionKey) -> None:
        """End the session's turn after the running step."""
        for run in self._runs.values():
            if run.key == key:
                run.is_cancelled = True
                self._grants.stop(run)
                resolve(run.admitted, granted=False)

    def forget(self, key: SessionKey) -> None:
        """Drop a session's KV from the device. Its snapshots stay on SSD; a turn under way makes no more."""
        for run in self._runs.values():  # also runs whose turns nobody waits for
            run.is_forgotten |= run.key == key
        if self._saving is not None:
            self._saving.discard(key)
            self._saving.save_logged()
        if self._kv_on_device.pop(key, None) is not None:
            self._device.drop(key)

    def let_go(self, is_meant: Callable[[SessionKey], bool]) -> set[SessionKey]:
        """Drop the KV on the device of the sessions that are meant; see `EnginePort.let_go`."""
        busy = self._at_work()
        for key in filter(is_meant, set(self._kv_on_device) - busy):
            self.forget(key)
        return set(filter(is_meant, busy))

    async def erase(self, key: SessionKey, tokens: Tokens, shared: int) -> ErasureResult:
        """Drop a session's KV from the device and its snapshots from SSD; see `EnginePort.erase`."""
        self.forget(key)
        if tokens.spans:
            self._device.forget_images({span.fingerprint for span in tokens.spans})
        if self._store is None:
            return ErasureResult(0, settled=not self._has_unopened)
        return await self._store.eraser.erase(key.tenant, tokens.packed(), _ERASE_S, shared=shared)

    def stop(self) -> None:
        """End every turn; each unfinished `run` raises `StoppingError` once its KV is copied for the SSD."""
        self._stopping = True
        for run in self._runs.values():
            self._grants.stop(run)
            if run.admitted is not None and not run.admitted.done():
                run.admitted.set_exception(StoppingError())

    def _handle(self, report: StepReport) -> None:
        """Handle the device thread's report of one step."""
        self.report, telemetry = report, self._telemetry
        if report.num_rows:
            telemetry.batch_size.observe(report.num_rows)
            telemetry.totals.decoding_s += report.step_s
            per_token_s = report.step_s * report.num_rows / max(report.num_decoded, 1)
            telemetry.time_per_output_token.observe(per_token_s, report.num_decoded)
        telemetry.totals.draft_tokens = report.num_drafted
        telemetry.totals.accepted_draft_tokens = report.num_accepted
        telemetry.totals.draft_saved_s = report.saved_s
        for event in report.events:
            self._handle_event(event)
        self._device.take(report)

    def _handle_event(self, event: Event) -> None:
        match event:
            case PrefilledPiece(turn, num_cached, num_prompt):
                self._turns[turn].note_prefilled(num_cached)
                if turn.request.audited is None:
                    self._telemetry.totals.prefilled_tokens += num_prompt
                    self._telemetry.tenants.count_tokens("prefilled", turn.request.tenant, num_prompt)
            case SampledTokens():
                self._sampled(event)
            case KvRequest(turn) | ImageRequest(
                turn
            ):  # not in the queue of `events`: publishing those waits while NATS is away
                self._turns[turn].needs.put_nowait(event)
            case FinishedTurn() | FaultedTurn():
                self._end_turn(event)
            case DroppedKv(keys):  # turns of these sessions that are not submitted yet reuse less
                for key in keys:
                    self._kv_on_device.pop(key, None)
            case SnapshotCut(turn, span) if (audited := turn.request.audited) is not None:
                if span == audited.span:
                    audited.tensors = event.tensors
            case SnapshotCut(turn) if self._saving is not None:
                self._saving.save(event, self._turns.get(turn))
            case CopiedSession(turn) if self._saving is not None:
                self._saving.end_copy(turn)
            case Starvation() if self._saving is not None:
                self._saving.free_memory()

    def _sampled(self, event: SampledTokens) -> None:
        run, request, chunk = self._turns[event.turn], event.turn.request, event.chunk
        self._telemetry.totals.generated_tokens += len(chunk.tokens)
        self._telemetry.tenants.count_tokens("generated", request.tenant, len(chunk.tokens))
        num_drawn = chunk.i + len(chunk.tokens)
        run.note_drawn(num_drawn)
        self._grants.grow(run, request.num_prompt + num_drawn)
        run.events.put_nowait(event)

    def _end_turn(self, end: FinishedTurn | FaultedTurn) -> None:
        """Release an ended turn's memory at once; if its run goes on, request memory for its next turn."""
        run, request = self._turns.pop(end.turn), end.turn.request
        self._kv_on_device.pop(request.key, None)
        if isinstance(end, FinishedTurn):
            self._keep(run, end)
        run.turn = None
        run.events.put_nowait(end)
        goes_on = isinstance(end, FinishedTurn) or run.may_start_again(end.error)
        if run.is_abandoned:
            self._leave(run)
        elif goes_on and not self._is_over(run, end):
            run.request = request.continued()
            self._grants.ask(run)
        else:
            self._grants.release(run)

    def _keep(self, run: Run, end: FinishedTurn) -> None:
        """Record the KV that a turn has left on the device; drop it if its session was forgotten."""
        request, num_cached = end.turn.request, end.cost.num_cached
        if run.is_forgotten:
            if not any(turn.request.key == request.key for turn in self._turns):
                self._device.drop(request.key)  # else the session's next turn has taken its KV
        elif num_cached:
            size_bytes = self.size_bytes(num_cached, request.policy)
            tokens = request.tokens(num_cached)
            used = 0 if self._store is None else self._store.kv.next_use()
            held = KvOnDevice(tokens, size_bytes, end.earliest, request.policy, used)
            self._kv_on_device[request.key] = held
            if self._saving is not None and end.turn.plan.chain is not None:
                self._saving.end_turn(request.key, end.cost.num_uncut)

    def _is_over(self, run: Run, end: FinishedTurn | FaultedTurn) -> bool:
        """Say whether an ended turn is complete or must not be continued."""
        request = end.turn.request
        is_complete = request.is_drawn and end.cost.num_cached >= request.target
        return self._stopping or run.is_stopped or is_complete

    def _leave(self, run: Run) -> None:
        """Release the memory of a run that needs no more."""
        self._grants.release(run)
        del self._runs[run]

    async def _admitted(self, run: Run) -> bool:
        """Wait for the memory that a turn is likely to need; return False if the run is cancelled."""
        asked_s = monotonic()
        if run.is_stopped:
            return False
        if run.admitted is None:
            if self._stopping:
                raise StoppingError
            self._grants.ask(run)
        if is_admitted := await self._grants.wait(run):
            run.phases.append(Phase("queue", asked_s, monotonic()))
        return is_admitted

    async def _run_turn(self, run: Run, publish: Publish | None) -> bool:
        """Run a turn whose memory is granted; return False if another turn must continue its request."""
        begun_s = monotonic()
        run.begin(0)
        async with self._finder.prepare(run, self._turns) as (turn, snapshots):
            restores, num_found = turn.plan.restores, max(turn.plan.num_kept, turn.plan.num_restored)
            run.begin(num_found)
            found_s = restores[0].start_s if restores else monotonic()
            run.phases += [Phase("kv_search", begun_s, found_s, num_found), *restores]
            num_restored = sum(phase.num_tokens for phase in restores)
            if run.request.audited is None:
                self._telemetry.tenants.count_tokens("restored", run.key.tenant, num_restored)
                if self._audit is not None:
                    self._audit.note(run.request, num_restored)
            if self._stopping:
                raise StoppingError
            if run.must_stop_waiting():
                if not run.is_stopped:
                    self._grants.ask(run)
                return run.is_stopped
            run.started_s = run.started_s or monotonic()
            async with task_group() as reads:
                if snapshots is not None or turn.request.context.spans:
                    reads.start_soon(self._needs.serve, run, snapshots, reads)
                try:
                    end = await self._follow(run, turn, publish)
                except BaseException:
                    self._forget_unlogged(run)
                    raise
                reads.cancel_scope.cancel()
        return self._settled(run, end)

    async def _follow(
        self, run: Run, turn: DeviceTurn, publish: Publish | None
    ) -> FinishedTurn | FaultedTurn:
        """Submit a turn and publish its tokens until it ends; return how it has ended."""
        submitted_s, drawn_s = monotonic(), None
        run.turn, self._turns[turn] = turn, run
        self._device.submit(turn)
        while True:
            events = [await run.events.get()]
            while not run.events.empty():
                events.append(run.events.get_nowait())
            chunks = [event.chunk for event in events if isinstance(event, SampledTokens)]
            if chunks:
                drawn_s = drawn_s or monotonic()
                run.first_token_s = run.first_token_s or monotonic()
                if publish is not None and not await publish(joined(chunks)):
                    self._forget_unlogged(run)
                run.num_logged += sum(len(chunk.tokens) for chunk in chunks)
                if self._saving is not None:
                    self._saving.save_logged()
            end = events[-1]
            if not isinstance(end, SampledTokens):
                run.phases += phases_of(turn.request, end.cost, submitted_s, drawn_s)
                return end

    def _forget_unlogged(self, run: Run) -> None:
        """Save no more of an answer's KV, and drop it: the log may lack some of the answer's tokens."""
        if self._saving is not None and run.request.draws and run.request.policy.has_snapshots:
            self.forget(run.key)

    def _settled(self, run: Run, end: FinishedTurn | FaultedTurn) -> bool:
        """Count an ended turn, or raise its error; return False if another turn must continue its request."""
        request, cost = end.turn.request, end.cost
        live_bytes = end.live_bytes if isinstance(end, FinishedTurn) else 0
        if isinstance(end, FaultedTurn) and not (
            isinstance(end.error, LostKvError | LostPastError) and self._is_over(run, end)
        ):
            if run.admitted is not None:
                return False
            if isinstance(end.error, NoMemoryError):
                raise end.error
            raise DeviceFaultError(repr(end.error)) from end.error
        self._finder.rates.prefilled.learn(cost.num_prefilled, cost.prefill_s)
        run.count(request, cost, live_bytes)
        if self._stopping and not (request.is_drawn and run.is_complete):
            raise StoppingError
        return run.admitted is None

    def _result(self, run: Run) -> TurnResult:
        result = run.result()
        if run.request.audited is not None:
            return result
        self._telemetry.totals.cached_tokens += result.num_cached
        self._telemetry.tenants.count_tokens("cached", run.key.tenant, result.num_cached)
        return result
