"""One session at work: its requests in the order of the log, each to a committed result.

An actor on the event loop. Deliveries only ring its bell; it reads its log forward and answers what has no
result yet, one request at a time. The sequence of its last result fences it against other workers.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, time
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import structlog
from anyio import Lock, sleep

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.log import CHECKPOINT_HEADER, HISTORY_HEADER, MODEL_HEADER
from turnkeep_client.messages import (
    Append,
    Cancelled,
    Chunk,
    Close,
    Closed,
    DeadLetter,
    Failed,
    Generate,
    Generated,
    decode_request,
    decode_result,
    encode,
    failure,
)
from turnkeep_client.subjects import session_key
from worker.concurrency import in_thread, task_group
from worker.device.engine import DeviceFaultError, NoMemoryError, StoppingError
from worker.text.templates import CutOffError
from worker.wire.journal import FencedError, TooLargeError

from .attempts import AttemptNote
from .execution import failed, withdrawn
from .history import RefusedError
from .record import Record, pending_at
from .trail import Trail

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from anyio.abc import TaskGroup

    from turnkeep_client.messages import Request, Result
    from turnkeep_client.subjects import SessionKey
    from worker.device.engine import Engine
    from worker.telemetry import Telemetry
    from worker.wire.intake import Delivery
    from worker.wire.journal import Journal
    from worker.wire.outbox import Outbox
    from worker.wire.retention import Retention

    from .answered import AnsweredAt
    from .attempts import Attempts, DeviceLock
    from .checkpoint import Delta
    from .execution import Execution
    from .gate import Gate
    from .history import Fold, History
    from .record import Pending
    from .shares import Shares
    from .trail import Trails

log = structlog.get_logger()

#: What was read of the token stream counts for so long: less than any `ack_wait_s`.
_FRESH_S: Final = 0.25
#: What a session in memory takes, and each of its tokens: its id, and what the template keeps of its text.
_SIZE_BYTES: Final = 12_000
_TOKEN_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Services:
    """What all sessions of a worker share.

    `ack` is told of a session with nothing left to answer; `shares` bounds how many of a tenant's
    sessions are at work, and `fold_gate` how many logs are read from their beginning at a time.
    """

    journal: Journal
    outbox: Outbox
    engine: Engine
    execution: Execution
    fold: Fold
    telemetry: Telemetry
    trails: Trails
    ack: Callable[[SessionKey], Coroutine[Any, Any, None]]
    fold_gate: Gate
    shares: Shares
    attempts: Attempts
    retention: Retention
    device_lock: DeviceLock
    model: str
    worker: str


class AnsweredRequest(NamedTuple):
    """A request that was answered, as the log has it."""

    request: Request
    at: AnsweredAt


class Session:
    """See the module. `ring` and `cancel` may be called at any time; `run` by one task at a time."""

    def __init__(self, key: SessionKey, services: Services, wake: Callable[[Session], None]) -> None:
        """`wake` is to see to it that `run` runs."""
        self.key = key
        self._services = services
        self._wake = wake
        self._record = Record(services.fold)
        self._trail = Trail(key, services.trails)
        self._rung_seq = 0  # the newest request that was delivered
        self._first_seq = 0  # requests below it were delivered to another worker before
        self._delivered: Delivery | None = None  # the first one since the log was read
        self._in_doubt = False  # whether a worker may have died over this session
        self._note = AttemptNote()  # of the attempts, where in doubt
        self._tried_seq = 0  # the request that this worker has noted
        self._num_failures = 0  # of this worker, for reasons that it does not know
        self._log_lock = Lock(fast_acquire=True)  # reading and committing must not overtake each other
        self.active: Pending | None = None
        self.num_users = 0  # who use it beside its task
        self.used_s = monotonic()
        self.counted_bytes = 0  # of its size, by who holds the sessions
        try:
            session_key(key.tenant, key.session)
        except InvalidMessageError as error:
            self._bad_name: str | None = str(error)
        else:
            self._bad_name = None

    @property
    def history(self) -> History:
        """The session's state after its last result."""
        return self._record.history

    @property
    def pending(self) -> tuple[Pending, ...]:
        """Requests without a result, in order; the first may be under way."""
        return tuple(self._record.pending)

    @property
    def num_answered(self) -> int:
        """Distinct request ids with a result."""
        return len(self._record.answered_ids)

    @property
    def has_work(self) -> bool:
        """Whether `run` has something to do."""
        record = self._record
        behind = self._delivered is not None or self._rung_seq > record.in_seq
        return bool(record.pending) or record.has_more or behind

    @property
    def size_bytes(self) -> int:
        """About what the session takes in memory."""
        return _SIZE_BYTES + _TOKEN_BYTES * self.history.position + self._record.answered_ids.size_bytes

    @property
    def priority(self) -> int:
        """How much its next request is to be preferred, as far as that is known."""
        if self._record.pending:
            return self._record.pending[0].priority
        with suppress(InvalidMessageError):
            request = decode_request(self._delivered.body) if self._delivered else None
            return request.priority if isinstance(request, Append | Generate) else 0
        return 0

    def ring(self, delivery: Delivery) -> None:
        """Take a delivery: the log has a request at its sequence."""
        self._rung_seq = max(self._rung_seq, delivery.seq)
        self._first_seq = delivery.first_seq
        self._delivered = self._delivered or delivery
        self._in_doubt = self._in_doubt or delivery.again
        self._wake(self)

    async def run(self) -> None:
        """Answer what there is to answer. Raises `StoppingError` where the worker stops first."""
        while True:
            try:
                is_stopped = bool(self._record.pending) and self._record.pending[0].stopped
                async with self._services.shares.enter(self.key, self.priority, at_once=is_stopped):
                    async with task_group() as asides:
                        give = self._read_ahead(asides)
                        await self.catch_up()
                        await self._end_last_answer()
                        if self._record.pending:
                            give(self._record.pending[0])
                            await self._answer(self._record.pending[0], asides)
                            await self._clear_doubt()
                            self._num_failures = 0
                        asides.cancel_scope.cancel()
                    if not self.has_work:
                        await self._clear_doubt()
                        if not self.has_work:  # a delivery that came meanwhile has no cover but the anchor
                            await self._services.ack(self.key)
                        if not self.has_work:  # else it was rung meanwhile
                            return
            except FencedError as error:
                log.warning("another worker went on with this session; reading its log anew", why=str(error))
                self.forget()
            except CutOffError:
                self._reset_record(whole=True)  # with all that was said, for a request that goes far back

    def _read_ahead(self, asides: TaskGroup) -> Callable[[Pending], None]:
        """Look for published tokens of the generate that was delivered, beside reading the log.

        What is returned gives them to a request, if that is the one, and if the log did not take so long that
        another worker may have gone on with it since.
        """
        delivery, self._delivered = self._delivered, None
        request = None
        with suppress(InvalidMessageError):
            request = decode_request(delivery.body) if delivery and not self._record.pending else None
        if delivery is None or not isinstance(request, Generate) or self._bad_name is not None:
            return lambda _: None
        begun_s = monotonic()
        reading = asides.start_soon(
            self._services.journal.published, self.key, request.id, delivery.seq, delivery.stored
        )

        def give(pending: Pending) -> None:
            if pending.seq == delivery.seq and monotonic() - begun_s < _FRESH_S:
                pending.published = reading

        return give

    async def catch_up(self, *, beyond_bell: bool = False) -> None:
        """Read the log until there is a request to answer, or as far as deliveries have told of it.

        The first time, or if asked to, beyond that too. Raises `FencedError` where another worker has gone on
        with the session.
        """
        async with self._log_lock:
            record = self._record  # the entries are its successors, and not those of one that replaces it
            if record.overtaken:
                raise FencedError("a result is not this worker's")
            num_foreign = record.num_foreign
            if not record.folded:
                services, key = self._services, self.key
                async with services.fold_gate.enter(key.tenant), services.retention.lock(key):
                    try:
                        try:
                            await self._fold(record)
                        except CutOffError:
                            record = self._reset_record(whole=True)
                            await self._fold(record)
                    except BaseException:
                        self._reset_record()  # what is half read would be taken for unanswered
                        raise
            elif beyond_bell or (not record.pending and self.has_work):
                await self._read_on(record)
            self._services.telemetry.ignored["result"] += record.num_foreign - num_foreign

    async def _fold(self, record: Record) -> None:
        """Read results and the requests that they answer, page by page, up to what waits for an answer."""
        journal, until = self._services.journal, self._rung_seq
        if self._num_failures >= self._services.attempts.max_attempts:
            record.mark_diverged("its log cannot be read, this worker's log says why")
        if self._in_doubt:
            # A dead worker may have acknowledged what came behind the delivery.
            until = max(until, await journal.last_seq(self.key, "in"))
            if not self._note.reads:  # else it was counted, and this worker lives
                self._note = await self._services.attempts.begin_reading(self.key)
            if self._note.reads > self._services.attempts.max_attempts:
                record.mark_diverged(f"reading its log has ended {self._note.reads - 1} workers")
        if record.diverged is None and (checkpoint := await self._trail.find(whole=record.whole)):
            record.resume(checkpoint)
        deltas: list[Delta] = []
        record.has_more = more_results = True
        while record.has_more and not record.pending:
            requests, record.has_more = await journal.page(self.key, "in", record.in_seq, until=until)
            while more_results and not all(record.has_result(entry.seq) for entry in requests):
                results, more_results = await journal.page(self.key, "out", record.out_seq)
                record.add_results(results)
            # A fold tokenises everything that was ever said; that is not for the event loop.
            await in_thread(record.add_requests, requests)
            if record.proven_seq == record.in_seq and (delta := record.next_delta(record.in_seq)):
                deltas.append(delta)
        while more_results:
            results, more_results = await journal.page(self.key, "out", record.out_seq)
            record.add_results(results)
        if not self._in_doubt and record.pending and record.pending[0].seq < self._first_seq:
            # A new request came sooner than the old one comes again, over which a worker may have died.
            self._in_doubt = True
            self._note = await self._services.attempts.begin_reading(self.key)
        record.end_fold()
        for delta in deltas if record.diverged is None else ():
            self._trail.add(delta)
        if not self._in_doubt:
            record.last = None
        if not record.has_more:
            record.in_seq = max(record.in_seq, until)  # also where the entry itself is gone by now

    async def _read_on(self, record: Record) -> None:
        """Read the next requests, unless some wait already; and whether another worker has answered any."""
        journal, until = self._services.journal, self._rung_seq
        results, _ = await journal.page(self.key, "out", record.out_seq)
        if record.add_results(results):
            raise FencedError(f"a result up to sequence {record.out_seq} is not this worker's")
        if record.pending:
            return
        requests, record.has_more = await journal.page(self.key, "in", record.in_seq, until=until)
        record.add_requests(requests)  # to be queued: a thread would take longer to begin
        if not record.has_more:
            record.in_seq = max(record.in_seq, until)

    async def refresh(self) -> None:
        """Read the log as far as it goes. Raises `FencedError` where what is under way has lost the fence."""
        try:
            await self.catch_up(beyond_bell=True)
        except FencedError:
            if self.active is not None:
                raise
            self.forget()  # nothing is under way here, so nobody else would find out
            await self.catch_up(beyond_bell=True)

    async def cancel(self, request_id: str) -> Cancelled | Failed:
        """Stop a request that has no result yet; returns when its result is in the log."""
        try:
            await self.refresh()  # the request may be younger than its delivery
        except FencedError:
            self._stop_active()  # its result has lost the fence already
            raise
        known = await self._find_answered(request_id) is not None  # then what is pending is a repeat of it
        pending = None if known else await self._find_waiting(request_id)
        if pending is None:
            why = "it was answered already" if known else "the session has no request with this id"
            return failure(request_id, "invalid_request", f"nothing to cancel under {request_id!r}: {why}")
        pending.cancelled = True
        if not await self._begun(pending):
            if await self._commit(pending, withdrawn(pending, self.history), None):
                return Cancelled(id=request_id, was="waiting")
            if not pending.done.is_set() or await self._find_answered(request_id) is None:
                return await self.cancel(request_id)  # it was read meanwhile
            return Cancelled(id=request_id, was="waiting")  # the session's task has found it cancelled
        if pending is self.active:
            self._stop_active()
        self._wake(self)
        self._services.shares.admit(self.key)
        await pending.done.wait()
        if await self._find_answered(request_id) is None:  # the record was given up meanwhile
            return await self.cancel(request_id)
        return Cancelled(id=request_id, was="running")

    async def waiting(self, skip: int, limit: int) -> tuple[list[str], int]:
        """Name `limit` of the requests that wait for others, behind the first `skip`, and count them all.

        Those that were not read yet are counted with the few that were called off.
        """
        names = [pending.id or "" for pending in self.pending if pending is not self.active]
        after, num_more = self._record.in_seq, int(bool(self.pending))
        while num_more:
            entries, num_more = await self._services.journal.backlog(self.key, after)
            names += [
                pending_at(entry).id or "" for entry in entries if not self._record.has_result(entry.seq)
            ]
            after = entries[-1].seq if entries else after
            if len(names) >= skip + limit:
                break
        return names[skip:][:limit], len(names) + num_more

    async def _find_waiting(self, request_id: str) -> Pending | None:
        """Find a request without a result: among those that were read, then in the rest of the log."""
        for pending in self.pending:
            if pending.id == request_id:
                return pending
        after, more = self._record.in_seq, True
        while more:
            entries, more = await self._services.journal.page(self.key, "in", after)
            for entry in entries:
                pending = pending_at(entry)
                if pending.id == request_id and not self._record.has_result(entry.seq):
                    return pending
            after = entries[-1].seq if entries else after
        return None

    async def _find_answered(self, request_id: str) -> AnsweredRequest | None:
        """Find an id's first request and result in the log; None where it has none."""
        found = self._record.answered_ids.find(request_id)
        if found is None:
            return None
        body = await self._services.journal.get(found.in_seq)
        with suppress(InvalidMessageError):
            if body is not None and (request := decode_request(body)).id == request_id:
                return AnsweredRequest(request, found)
        return None

    def forget(self) -> None:
        """Drop everything that is in memory; the log is read anew when the session goes on."""
        self._services.engine.forget(self.key)
        self._reset_record()

    def _reset_record(self, *, whole: bool = False) -> Record:
        """Begin with an empty record; `whole` for one that leaves out nothing of the conversation."""
        record, self._record = self._record, Record(self._services.fold, whole=whole)
        self._trail.end()
        self._trail = Trail(self.key, self._services.trails)
        self._rung_seq = max(self._rung_seq, record.in_seq)
        for pending in record.pending:
            pending.done.set()
        return self._record

    async def _begun(self, pending: Pending) -> bool:
        """Say whether a request was begun, here or by a worker that died: its tokens so far have to stay.

        None was that is not the next one, whatever was published as its tokens.
        """
        if pending is self.active:
            return True
        is_next = bool(self._record.pending) and pending is self._record.pending[0]
        return is_next and bool(await self._published(pending))

    def _stop_active(self) -> None:
        """End what is under way as soon as it can be."""
        self._services.engine.cancel(self.key)
        self._services.device_lock.recheck()

    async def _published(self, pending: Pending) -> list[Chunk]:
        """Read what clients may have seen of a request's tokens."""
        request = pending.request
        if not isinstance(request, Generate):
            return []
        return await self._services.journal.published(self.key, request.id, pending.seq, pending.stored)

    async def _end_last_answer(self) -> None:
        """Close the token stream of the last answer: who committed it may have died before it could."""
        last, self._record.last = self._record.last, None
        if last is None:
            return
        _, pending, result = last
        request = pending.request
        if not isinstance(request, Generate):
            return
        tokens = result.tokens if isinstance(result, Generated) else ()
        chunks = await self._published(pending)
        held_text = ""
        # Only behind all the others: who has lost chunks reads the record.
        if isinstance(result, Generated) and sum(len(chunk.tokens) for chunk in chunks) == len(tokens):
            held_text = result.text[sum(len(chunk.text) for chunk in chunks) :]
        await self._end_tokens(pending, request.id, len(tokens), held_text)

    async def _answer(self, pending: Pending, asides: TaskGroup) -> None:
        self.active = pending
        if pending.deadline_s is not None and pending.deadline_s <= time():
            pending.expired = True
        elif pending.deadline_s is not None:
            asides.start_soon(self._expire, pending, pending.deadline_s)
        try:
            with structlog.contextvars.bound_contextvars(session=str(self.key), request=pending.id):
                result, history = await self._attempt(pending)
                await self._commit(pending, result, history)
        finally:
            self.active = None
            self.used_s = monotonic()

    async def _expire(self, pending: Pending, deadline_s: float) -> None:
        """End a request at its deadline, with what there is."""
        await sleep(deadline_s - time())
        if pending is self.active:
            pending.expired = True
            self._stop_active()

    async def _attempt(self, pending: Pending) -> tuple[Result, History]:
        """Carry a request out, unless it has ended too many workers; in doubt, it is counted before."""
        attempts, device_lock = self._services.attempts, self._services.device_lock
        note, limit = self._note, attempts.max_attempts
        is_new = self._in_doubt and self._tried_seq != pending.seq  # to this worker
        if is_new:
            note = note.then(pending.seq, await self._num_published(pending))
        if note.attempts > limit:
            return await self._give_up(pending, note.attempts - 1, "it has ended every worker that began it")
        try:
            async with device_lock.enter(lambda: pending.stopped, alone=note.attempts == limit > 1):
                if is_new:  # not before: what only waits for its turn ends nobody
                    self._note, self._tried_seq = await attempts.store(self.key, note), pending.seq
                return await self._result(pending)
        except StoppingError:
            num_tokens = await self._num_published(pending)
            await attempts.uncount(self.key, pending.seq, num_tokens, self._note)
            raise

    async def _clear_doubt(self) -> None:
        """Note that what may have ended a worker has not ended this one."""
        if self._in_doubt:
            await self._services.attempts.end(self.key)
            self._in_doubt, self._note = False, AttemptNote()

    async def _num_published(self, pending: Pending) -> int:
        return sum(len(chunk.tokens) for chunk in await self._published(pending))

    async def _give_up(self, pending: Pending, num_attempts: int, reason: str) -> tuple[Result, History]:
        """Leave a request unanswered but for a failure, and a note of it where an operator finds it."""
        history = self.history
        log.error("giving up a request", seq=pending.seq, attempts=num_attempts, reason=reason)
        letter = DeadLetter(
            seq=pending.seq,
            id=pending.id,
            request=pending.type,
            position=history.position,
            attempts=num_attempts,
            reason=reason,
            worker=self._services.worker,
            model=self._services.model,
        )
        await self._services.journal.append(self.key, "dead", encode(letter))
        message = f"{reason} ({num_attempts} attempts); to try again send it under a new id"
        return failed(pending, history, "internal", message), history

    async def fail(self, error: Exception) -> None:
        """Note a failure for an unknown reason; after some of them the request that is next is given up.

        The log is to be read anew. Where reading it is what fails, the session is `history_diverged` in the
        end.
        """
        self._num_failures += 1
        record = self._record
        if self._num_failures >= self._services.attempts.max_attempts and record.folded and record.pending:
            pending = record.pending[0]
            reason = f"it failed for an unknown reason: {type(error).__name__}: {error}"
            await self._commit(pending, *await self._give_up(pending, self._num_failures, reason))
            self._num_failures = 0
        self.forget()

    async def _result(self, pending: Pending) -> tuple[Result, History]:
        """Work out a request's result and the history after it; only a stop or a fence gets in the way."""
        history = self.history
        try:
            return await self._try(pending, history)
        except RefusedError as error:
            return failed(pending, history, error.code, str(error)), history
        except NoMemoryError as error:
            return failed(pending, history, "memory_exceeded", str(error)), history
        except DeviceFaultError as error:
            return failed(pending, history, "internal", f"the forward pass failed: {error}"), history
        except (StoppingError, FencedError, CutOffError):
            raise
        except Exception as error:
            log.exception("a request failed for an unknown reason")
            return failed(pending, history, "internal", f"{type(error).__name__}: {error}"), history

    async def _try(self, pending: Pending, history: History) -> tuple[Result, History]:
        request = pending.request
        if self._bad_name is not None:
            raise RefusedError("invalid_request", self._bad_name)
        if request is None:
            raise RefusedError("invalid_request", pending.error)
        known = await self._find_answered(request.id)
        if known is not None:
            return await self._repeated(request, pending, known), history
        if pending.cancelled and not isinstance(request, Generate):  # a generate may have tokens out
            return withdrawn(pending, history), history
        if pending.expired and not await self._published(pending):
            return withdrawn(pending, history), history
        if self._record.diverged is not None:
            raise RefusedError("history_diverged", self._record.diverged)
        self._services.fold.check(history, request)
        return await self._services.execution.carry_out(self.key, request, pending, history)

    async def _repeated(self, request: Request, pending: Pending, known: AnsweredRequest) -> Result:
        """Answer an id that was answered before from the record."""
        if request != known.request:
            raise RefusedError(
                "id_conflict",
                f"the id {request.id!r} was used before for another request (sequence {known.at.in_seq}); "
                "a new request needs a new id",
            )
        body = await self._services.journal.get(known.at.out_seq)
        if body is None:
            raise RefusedError(
                "invalid_request", "this id was used before, and its result is gone from the log"
            )
        first = decode_result(body)
        return msgspec.structs.replace(first, seq=pending.seq, repeat_of=known.at.in_seq)

    async def _commit(self, pending: Pending, result: Result, history: History | None) -> bool:
        """Store a result and the history after it, then tell everybody who waits for it.

        False where the request has a result by now, or was read anew.

        Without a history the result changes none: so may a request that was cancelled while it waited be
        committed out of turn.
        """
        services, record = self._services, self._record
        closes = isinstance(result, Closed) and result.repeat_of is None
        if closes:
            await self._trail.finish()  # what was said leaves the log sooner or later, and must not come back
        async with self._log_lock:
            if record is not self._record or not record.lacks_result(pending):
                return False
            if record.overtaken:
                raise FencedError("a result is not this worker's")
            in_turn, history = history is not None, history or self.history
            try:
                out_seq = await self._store(result, history)
            except TooLargeError as error:
                history = self.history
                message = f"the result is larger than the log takes ({error}); ask for fewer tokens at a time"
                result = failed(pending, history, "invalid_request", message)
                out_seq = await self._store(result, history)
            record.committed(pending, out_seq, history)
            if in_turn and not isinstance(result, Failed) and (delta := record.next_delta(pending.seq)):
                self._trail.add(delta)
        outcome = result.code if isinstance(result, Failed) else "ok"
        services.telemetry.requests[pending.type][outcome] += 1
        log.info("answered", type=pending.type, outcome=outcome, seq=pending.seq, position=history.position)
        pending.done.set()
        if closes and isinstance(pending.request, Close) and pending.request.forget:
            await services.retention.forget(self.key, pending.seq, out_seq)
        if isinstance(pending.request, Generate):
            num_tokens = len(result.tokens) if isinstance(result, Generated) else 0
            await self._end_tokens(pending, pending.request.id, num_tokens, pending.held_text)
        return True

    async def _store(self, result: Result, history: History) -> int:
        """Commit a result behind the last one; what is no result of this session is no fence either."""
        journal, record = self._services.journal, self._record
        headers = {MODEL_HEADER: self._services.model}
        if not isinstance(result, Failed):
            headers[HISTORY_HEADER] = history.digest()
        if self._trail.link is not None:
            headers[CHECKPOINT_HEADER] = str(self._trail.link)
        while True:
            try:
                return await journal.commit(self.key, result, record.out_seq, headers)
            except FencedError:
                entries, _ = await journal.page(self.key, "out", record.out_seq)
                if not entries or record.add_results(entries):
                    raise
                self._services.telemetry.ignored["result"] += len(entries)

    async def _end_tokens(self, pending: Pending, request_id: str, num_tokens: int, held_text: str) -> None:
        """Close an answer's token stream.

        Text that a cancel has set free is published only now: before the commit, a crash would have let the
        answer go on differently.
        """
        rest = Chunk(num_tokens, (), held_text, pending.seq) if held_text else None
        await self._services.outbox.end(self.key, request_id, rest)
