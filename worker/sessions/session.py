"""One session: carries out its requests in the order of the log, and commits a result for each.

An actor on the event loop. A delivery only wakes the session, which then reads its log forward, and answers
the requests that have no result, one at a time. Each commit names the sequence of the last result that the
session knows, so it fails if another worker has stored a result since.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import structlog
from anyio import Lock, sleep

from cache.names.errors import CutOffError
from turnkeep_client.checkpoints import Link
from turnkeep_client.errors import ERROR_CODES, InvalidMessageError
from turnkeep_client.log import BASE_HEADER, BUILD_HEADER, CHECKPOINT_HEADER, HISTORY_HEADER, MODEL_HEADER
from turnkeep_client.messages import (
    Append,
    Appended,
    Cancelled,
    Chunk,
    Close,
    Closed,
    DeadLetter,
    Failed,
    Generate,
    Generated,
    Open,
    Opened,
    decode_answered,
    decode_request,
    decode_result,
    encode,
    encode_repeat,
    failure,
)
from turnkeep_client.subjects import SessionKey, session_key
from worker.device.engine import DeviceFaultError, NoMemoryError, StoppingError
from worker.process.clock import monotonic, time
from worker.process.concurrency import in_thread, task_group
from worker.wire.journal import FencedError, Published, TooLargeError

from .attempts import AttemptNote
from .execution import failed, withdrawn
from .history import RefusedError
from .record import Record, pending_at
from .spans import turn_times
from .trail import Trail

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import AbstractContextManager
    from typing import Any

    from anyio.abc import TaskGroup

    from cache.names.tokens import Tokens
    from turnkeep_client.messages import ForkPoint, Request, Result
    from worker.device.engine import Engine
    from worker.observe.otlp import Traces
    from worker.observe.telemetry import Telemetry
    from worker.wire.intake import Delivery
    from worker.wire.journal import Entry, Journal
    from worker.wire.outbox import Outbox
    from worker.wire.retention import Retention

    from .answered import AnsweredAt
    from .attempts import Attempts, SharedLock
    from .checkpoint import Delta
    from .execution import Execution
    from .gate import Gate
    from .history import Fold, History
    from .record import Pending
    from .shares import Shares
    from .trail import Trails

log = structlog.get_logger()

#: Chunks that were read ahead are valid for this time, which is less than any `ack_wait_s`.
_FRESH_S: Final = 0.25
#: Pause until a replica that lags is read again.
_LAG_S: Final = 0.05
#: Memory of a session, and of each of its tokens: its id, and its text in the conversation.
_SIZE_BYTES: Final = 12_000
_TOKEN_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Services:
    """The services that all sessions of a worker share.

    `ack` acknowledges the deliveries of a session that has answered all its requests. `shares` limits how
    many sessions of a tenant work at once, `fold_gate` how many logs are read at once. `build` is a header of
    every result.
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
    device_lock: SharedLock
    model: str
    worker: str
    build: str
    traces: Traces | None = None


class AnsweredRequest(NamedTuple):
    """An answered request, read from the log, and the sequences of the request and its result."""

    request: Request
    at: AnsweredAt


class Session:
    """One session: reads its log, and answers its requests in order. Event loop only.

    `run` may be called by one task at a time, all other methods at any time.
    """

    def __init__(
        self,
        key: SessionKey,
        services: Services,
        wake: Callable[[Session], None],
        others: Callable[[SessionKey], AbstractContextManager[Session]],
        most_shared: Callable[[SessionKey, Tokens], tuple[int, Session | None]],
    ) -> None:
        """`wake(session)` starts `run` in a task unless it runs already; `others` finds sessions by name.

        `most_shared` finds the session in memory that `needed` most of a session's first tokens.
        """
        self.key = key
        self._others = others
        self._most_shared = most_shared
        self._services = services
        self._wake = wake
        self._record = Record(services.fold)
        self._trail = Trail(key, services.trails)
        self._server = services.journal.server  # that the record was read from
        self._rung_seq = 0  # the newest delivered request
        self._rung_server = self._server  # that has delivered it
        self._first_seq = 0  # earlier requests were delivered to another worker before
        self._delivered: Delivery | None = None  # the first delivery since the log was read
        self._in_doubt = False  # whether this session may have crashed a worker
        self._note = AttemptNote()  # the attempts, if in doubt
        self._tried_seq = 0  # the request whose attempt this worker has stored
        self._doubted_seq = 0  # the request that it would have refused, but another one has begun to answer
        self._num_failures = 0  # consecutive failures of this worker for unknown reasons
        self._log_lock = Lock(fast_acquire=True)  # reads and commits exclude each other
        self.active: Pending | None = None
        self.num_users = 0  # users besides its task
        self.used_s = monotonic()
        self.counted_bytes = 0  # its size as `Sessions` last counted it
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
        """Requests that were read and have no result, in order; the first may be running."""
        return tuple(self._record.pending)

    @property
    def num_answered(self) -> int:
        """Number of distinct request ids with a result."""
        return len(self._record.answered_ids)

    @property
    def has_work(self) -> bool:
        """Whether `run` has work: requests without a result, or entries to read."""
        record = self._record
        behind = self._delivered is not None or self._rung_seq > record.in_seq
        return bool(record.pending) or record.has_more or behind

    @property
    def diverged(self) -> str | None:
        """Why this worker cannot continue the session's log; None if it can."""
        return self._record.diverged

    @property
    def needed(self) -> Tokens | None:
        """The tokens whose KV this session has a use for; None if it is closed, is being closed, or unknown.

        Two sessions that are forgotten at the same time must not leave their common tokens to each other.
        """
        history = self.history
        is_closing = self.active is not None and isinstance(self.active.request, Close)
        is_known = self._record.folded and not self._is_stale and self.diverged is None
        is_needed = is_known and history.exists and not (history.closed or is_closing)
        return history.tokens if is_needed else None

    @property
    def size_bytes(self) -> int:
        """The memory that the session takes, approximately."""
        num_tokens = self.history.position - self.history.tokens.held_from
        return _SIZE_BYTES + _TOKEN_BYTES * num_tokens + self._record.answered_ids.size_bytes

    @property
    def priority(self) -> int:
        """The priority of the next request; 0 if unknown."""
        if self._record.pending:
            return self._record.pending[0].priority
        with suppress(InvalidMessageError):
            request = decode_request(self._delivered.body) if self._delivered else None
            return request.priority if isinstance(request, Append | Generate) else 0
        return 0

    def ring(self, delivery: Delivery) -> None:
        """Record that the log has a request at the delivery's sequence, and wake the session's task."""
        self._note_rung(delivery.seq)
        self._first_seq = delivery.first_seq
        self._delivered = self._delivered or delivery
        self._in_doubt = self._in_doubt or delivery.again
        self._wake(self)

    def _note_rung(self, seq: int) -> None:
        server = self._services.journal.server
        if self._rung_server != server:
            self._rung_server, self._rung_seq = server, 0  # another request may be there now
        self._rung_seq = max(self._rung_seq, seq)

    @property
    def _is_stale(self) -> bool:
        """Whether the log may differ: by another worker's result, or by a restart of the server."""
        return self._record.overtaken or self._server != self._services.journal.server

    async def run(self) -> None:
        """Answer all requests without a result. Raises `StoppingError` if the worker stops first."""
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
                        if not self.has_work:  # a delivery that came meanwhile still needs the anchor
                            await self._services.ack(self.key)
                        if not self.has_work:  # else a delivery came meanwhile
                            return
            except FencedError as error:
                log.warning("this session was changed elsewhere; reading its log anew", why=str(error))
                self.forget()
            except CutOffError:
                self._reset_record(whole=True)  # a request needs an early part of it

    def _read_ahead(self, asides: TaskGroup) -> Callable[[Pending], None]:
        """Start to read the published chunks of a delivered generate, while the log is being read.

        Returns a function that gives the chunks to a pending request. The function does nothing if the chunks
        belong to another request, or were read so long ago that another worker may have continued the answer
        since.
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
        """Read the log up to the next request without a result, or to the last delivered request.

        With `beyond_bell`, or if the log was not read before, also read requests that were not delivered yet.
        Raises `FencedError` if another worker has continued the session.
        """
        async with self._log_lock:
            record = self._record  # the pages read belong to this record, not to its replacement
            if self._is_stale:
                raise FencedError("a result is not this worker's, or the server has restarted")
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
                        self._reset_record()  # half read, answered requests would seem pending
                        raise
            elif beyond_bell or (not record.pending and self.has_work):
                await self._read_on(record)
            self._services.telemetry.ignored["result"] += record.num_foreign - num_foreign

    async def _fold(self, record: Record) -> None:
        """Read requests with their results, page by page, up to the first request without a result."""
        attempts = self._services.attempts
        if self._num_failures >= attempts.max_attempts:
            record.mark_diverged("its log cannot be read, this worker's log says why")
        if not self._in_doubt:
            await self._read_log(record, self._rung_seq)
            if not record.pending or record.pending[0].seq >= self._first_seq:
                record.last = None
                return
            # A new request came before the redelivery of the old one, which may have crashed a worker.
            self._in_doubt, self._note = True, await attempts.note(self.key)
            return
        # A dead worker may have acknowledged requests behind the delivered one.
        until = max(self._rung_seq, await self._services.journal.last_seq(self.key, "in"))
        async with attempts.reading(self.key, whole=record.whole) as (self._note, num_ended):
            if num_ended > attempts.max_attempts:
                record.mark_diverged(f"reading its log has ended {num_ended} workers")
            await self._read_log(record, until)

    async def _read_log(self, record: Record, until: int) -> None:
        """Do the work of `_fold`; `until` is the last request that is known to be in the log."""
        journal = self._services.journal
        deltas: list[Delta] = []
        first_seq = 0  # the first request that was read, or the checkpoint's
        record.has_more = more_results = True
        if record.diverged is None and (found := await self._trail.find(whole=record.whole)):
            record.resume(found.checkpoint)
            record.add_results(found.results)
            first_seq = found.checkpoint.in_seq
        while True:
            while record.has_more and not record.pending:
                requests, record.has_more = await journal.page(self.key, "in", record.in_seq, until=until)
                first_seq = first_seq or (requests[0].seq if requests else 0)
                while more_results and not all(record.has_result(entry.seq) for entry in requests):
                    results, more_results = await journal.page(self.key, "out", record.out_seq)
                    record.add_results(results)
                # Tokenises all messages of the page: too long for the event loop.
                await in_thread(record.add_requests, requests, await self._bases(record, requests))
                if record.proven_seq and (delta := record.next_delta(record.proven_seq)):
                    deltas.append(delta)
            while more_results:
                results, more_results = await journal.page(self.key, "out", record.out_seq)
                record.add_results(results)
            if record.pending or record.unread_seq <= record.in_seq:
                break
            last_seq = await journal.last_seq(self.key, "in")
            if last_seq <= until:
                break
            until, record.has_more = last_seq, True  # a replica that lags hid a request
        # A delivered request was there a moment ago.
        if record.pending and record.pending[0].seq != self._rung_seq:
            await self._check_is_there(record.pending[0].seq)
        record.end_fold()
        if first_seq and first_seq != self._rung_seq:  # removals begin with the first
            await self._check_is_there(first_seq)
        if deltas and record.diverged is None:
            for delta in deltas:
                self._trail.add(delta)
            # The next result must name it: a session may be put away after each, and would read ever more.
            await self._trail.stored()
        if not record.has_more:
            record.in_seq = max(record.in_seq, until)  # also if the entry was removed by now

    async def _bases(self, record: Record, requests: list[Entry]) -> dict[int, History | None]:
        """Read what the forks that these requests have opened took from their parents."""
        named = record.bases(requests).items()
        return {seq: await self._trail.base(Link.parse(link)) for seq, link in named}

    async def _check_is_there(self, seq: int) -> None:
        """Raise `FencedError` if a request that was read has left the log.

        A replica that lags may still show a request of a forgotten session, while another one no longer has
        its result, or later requests.
        """
        if await self._services.journal.get(seq) is None:
            await sleep(_LAG_S)
            raise FencedError(f"the request at sequence {seq} has left the log")

    async def whole_tokens(self) -> Tokens:
        """Return all tokens of the session.

        Tokens that are no longer in memory are read from a stored checkpoint, if it has them.
        """
        tokens = self.history.tokens
        whole = await self._trail.whole() if tokens.held_from else None
        return tokens.filled(whole.tokens) if whole else tokens

    async def whole_history(self) -> History:
        """Return the history with all of its tokens and all of its conversation.

        What is no longer in memory is read from a stored checkpoint. Raises `CutOffError` if that lacks it.
        """
        history = self.history
        if history.is_whole:
            return history
        whole = await self._trail.whole()
        if whole is None:
            raise CutOffError("no checkpoint has all of the session")
        return history.filled(whole)

    async def _read_on(self, record: Record) -> None:
        """Read the next requests, unless some are pending.

        Raises `FencedError` in the same case as `catch_up`.
        """
        journal, until = self._services.journal, self._rung_seq
        results, _ = await journal.page(self.key, "out", record.out_seq)
        if record.add_results(results):
            raise FencedError(f"a result up to sequence {record.out_seq} is not this worker's")
        if record.pending:
            return
        requests, record.has_more = await journal.page(self.key, "in", record.in_seq, until=until)
        # Mostly only queued, so not worth a thread; a replica that lagged may have shown results before them.
        record.add_requests(requests, await self._bases(record, requests))
        if not record.has_more:
            record.in_seq = max(record.in_seq, until)

    async def refresh(self, *, surely: bool = False) -> None:
        """Read the log to its end; with `surely`, not to the end that a replica which lags shows.

        Raises `FencedError` if a request runs here and another worker has continued the session.
        """
        while True:
            last_seq = await self._services.journal.last_seq(self.key, "out") if surely else 0
            try:
                await self.catch_up(beyond_bell=True)
            except FencedError:
                if self.active is not None:
                    raise
                self.forget()  # no request runs here that would notice
                await self.catch_up(beyond_bell=True)
            if self._record.out_seq >= last_seq:
                return
            await sleep(_LAG_S)

    async def cancel(self, request_id: str, asked: Pending | None = None) -> Cancelled | Failed:
        """Cancel a request that has no result yet; return once its result is in the log.

        `asked` is the request, if this call has already asked for its end.
        """
        try:
            await self.refresh()  # the request may be younger than its delivery
        except FencedError:
            self._stop_active()  # its result can no longer be committed
            raise
        known = await self._find_answered(request_id) is not None  # if so, the pending one is a repeat
        if known and asked is not None and asked.done.is_set():
            return Cancelled(id=request_id, was="waiting")  # the session's task has committed it
        pending = None if known else await self._find_waiting(request_id)
        if pending is None:
            why = "it was answered already" if known else "the session has no request with this id"
            return failure(request_id, "invalid_request", f"nothing to cancel under {request_id!r}: {why}")
        pending.cancelled = True
        try:
            is_begun = await self._begun(pending)
        except FencedError:  # by a worker, also this one, that has begun it meanwhile
            return await self.cancel(request_id, asked=pending)
        if not is_begun:
            result = withdrawn(pending, self.history, self._record.position)
            if await self._commit(pending, result, None):
                return Cancelled(id=request_id, was="waiting")
            if not pending.done.is_set() or await self._find_answered(request_id) is None:
                return await self.cancel(request_id)  # the log was read anew meanwhile
            return Cancelled(id=request_id, was="waiting")  # the session's task has committed it
        if pending is self.active:
            self._stop_active()
        self._wake(self)
        self._services.shares.admit(self.key)
        await pending.done.wait()
        if await self._find_answered(request_id) is None:  # the log was read anew meanwhile
            return await self.cancel(request_id)
        return Cancelled(id=request_id, was="running")

    async def waiting(self, skip: int, limit: int) -> tuple[list[str], int]:
        """Return the ids of up to `limit` waiting requests after the first `skip`, and how many wait in all.

        The number may include cancelled requests that were not read yet.
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
        """Find a request without a result: first among the pending ones, then in the rest of the log."""
        for pending in self.pending:
            if pending.id == request_id:
                return pending
        journal = self._services.journal
        after, more = self._record.in_seq, True
        until = await journal.last_seq(self.key, "in")  # a replica that lags may not show it yet
        while more:
            entries, more = await journal.page(self.key, "in", after, until=until)
            for entry in entries:
                pending = pending_at(entry)
                if pending.id == request_id and not self._record.has_result(entry.seq):
                    return pending
            after = entries[-1].seq if entries else after
        return None

    async def _find_answered(self, request_id: str) -> AnsweredRequest | None:
        """Find an id's first request and its result in the log; None if the id has no result."""
        answered = self._record.answered_ids
        while (found := answered.find(request_id)) is not None:
            body = await self._services.journal.get(found.in_seq)
            if body is not None:
                with suppress(InvalidMessageError):
                    if (request := decode_answered(body)).id == request_id:
                        return AnsweredRequest(request, found)
                return None
            if answered.find(request_id) == found:
                answered.drop(request_id)  # of a session that was forgotten
        return None

    def forget(self) -> None:
        """Drop the session's state in memory, and its KV; the next `run` reads the log again."""
        if self._server == self._services.journal.server:  # else the log is mostly the same
            self._services.engine.forget(self.key)
        self._reset_record()

    def _reset_record(self, *, whole: bool = False) -> Record:
        """Replace the record by an empty one; `whole` makes it keep the whole conversation."""
        record, self._record = self._record, Record(self._services.fold, whole=whole)
        self._trail.end()
        self._trail = Trail(self.key, self._services.trails)
        server = self._services.journal.server
        self._note_rung(record.in_seq if self._server == server else 0)
        self._server = server
        for pending in record.pending:
            pending.done.set()
        return self._record

    async def _begun(self, pending: Pending) -> bool:
        """Return whether the request was started, here or by a worker that died.

        If so, its published tokens stay. Only the next request can have been started: chunks that were
        published for another request do not come from a worker.
        """
        if pending is self.active:
            return True
        # A replica that lags may have hidden the next request itself from the record.
        is_next = all(pending.seq <= one.seq for one in self._record.pending)
        return is_next and (await self._is_streamed(pending) or pending is self.active)

    async def _is_streamed(self, pending: Pending) -> bool:
        """Return whether clients may have seen tokens of a request; if not, nobody can publish any later.

        Raises `FencedError` if another worker does so meanwhile.
        """
        published, request = await self._published(pending), pending.request
        if isinstance(request, Generate) and not published.chunks:
            await self._services.journal.seal(
                self.key, request.id, pending.seq, published.last_seq, server=self._server
            )
        return bool(published.chunks)

    def _stop_active(self) -> None:
        """End the running request as soon as possible."""
        self._services.engine.cancel(self.key)
        self._services.device_lock.recheck()

    async def _published(self, pending: Pending) -> Published:
        """Read the chunks of a request that clients may have seen."""
        request = pending.request
        if not isinstance(request, Generate):
            return Published([])
        return await self._services.journal.published(self.key, request.id, pending.seq, pending.stored)

    async def _end_last_answer(self) -> None:
        """Close the token stream of the last answer.

        The worker that committed the answer may have died before it closed the stream.
        """
        last, self._record.last = self._record.last, None
        if last is None:
            return
        _, pending, result = last
        request = pending.request
        if not isinstance(request, Generate):
            return
        tokens = result.tokens if isinstance(result, Generated) else ()
        chunks = (await self._published(pending)).chunks
        held = None
        # Only if all chunks before it are there: a client that misses chunks reads the result instead.
        if isinstance(result, Generated) and sum(len(chunk.tokens) for chunk in chunks) == len(tokens):
            text = result.text[sum(len(chunk.text) for chunk in chunks) :]
            reasoning = result.reasoning[sum(len(chunk.reasoning) for chunk in chunks) :]
            held = Chunk(len(tokens), (), text, reasoning=reasoning)
        await self._end_tokens(pending, request.id, held)

    async def _answer(self, pending: Pending, asides: TaskGroup) -> None:
        self.active = pending
        pending.after, pending.server = self._record.out_seq, self._server
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
        """End a request at its deadline, keeping its tokens so far."""
        await sleep(deadline_s - time())
        if pending is self.active:
            pending.expired = True
            self._stop_active()

    async def _attempt(self, pending: Pending) -> tuple[Result, History]:
        """Carry out a request, or give up if it has crashed too many workers."""
        attempts, device_lock = self._services.attempts, self._services.device_lock
        note, limit = self._note, attempts.max_attempts
        is_new = self._in_doubt and self._tried_seq != pending.seq  # the attempt is not stored yet
        if is_new:
            is_first = 0 < self._first_seq <= pending.seq
            note = note.then(pending.seq, await self._num_published(pending), is_first=is_first)
        if note.attempts > limit:
            return await self._give_up(pending, note.attempts - 1, "it has ended every worker that began it")
        try:
            async with device_lock.enter(lambda: pending.stopped, alone=note.attempts == limit > 1):
                if is_new:  # not earlier: a waiting request cannot crash a worker
                    self._note, self._tried_seq = await attempts.store(self.key, note), pending.seq
                return await self._result(pending)
        except (StoppingError, CutOffError):  # this worker has survived it
            num_tokens = await self._num_published(pending)
            await attempts.uncount(self.key, pending.seq, num_tokens, self._note)
            self._tried_seq = 0
            raise

    async def _clear_doubt(self) -> None:
        """Remove the note that the request may have crashed a worker: this worker has survived it."""
        if self._in_doubt:
            await self._services.attempts.end(self.key)
            self._in_doubt, self._note = False, AttemptNote()

    async def _num_published(self, pending: Pending) -> int:
        return (await self._published(pending)).num_tokens

    async def _give_up(self, pending: Pending, num_attempts: int, reason: str) -> tuple[Result, History]:
        """Give up a request: store a dead letter for the operator, and return a failure."""
        history = self.history
        log.error("giving up a request", seq=pending.seq, attempts=num_attempts, reason=reason)
        letter = DeadLetter(
            seq=pending.seq,
            id=pending.id,
            request=pending.type,
            position=self._record.position,
            attempts=num_attempts,
            reason=reason,
            worker=self._services.worker,
            model=self._services.model,
        )
        await self._services.journal.append(self.key, "dead", encode(letter))
        message = f"{reason} ({num_attempts} attempts); to try again send it under a new id"
        return failed(pending, self._record.position, "internal", message), history

    async def fail(self, error: Exception) -> None:
        """Count a failure for an unknown reason, and forget the session, so that its log is read again.

        After `max_attempts` failures the next request is given up. If reading the log itself fails so often,
        requests are answered with `history_diverged`.
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
        """Return a request's result and the history after it.

        Raises only `StoppingError`, `FencedError` and `CutOffError`; other errors become a `failed` result.
        """
        history, position = self.history, self._record.position
        try:
            return await self._try(pending, history)
        except RefusedError as error:
            if self._doubted_seq != pending.seq and await self._is_streamed(pending):
                # Once: its log may say why not, as when a closed session has left it meanwhile.
                self._doubted_seq = pending.seq
                raise FencedError("another worker has begun to answer what is refused here") from error
            return failed(pending, position, error.code, str(error)), history
        except NoMemoryError as error:
            return failed(pending, position, "memory_exceeded", str(error)), history
        except DeviceFaultError as error:
            return failed(pending, position, "internal", f"the forward pass failed: {error}"), history
        except (StoppingError, FencedError, CutOffError):
            raise
        except Exception as error:
            if self._is_stale:  # other entries may be where it has read
                raise FencedError("the server has restarted") from error
            log.exception("a request failed for an unknown reason")
            return failed(pending, position, "internal", f"{type(error).__name__}: {error}"), history

    async def _try(self, pending: Pending, history: History) -> tuple[Result, History]:
        request = pending.request
        if self._bad_name is not None:
            raise RefusedError("invalid_request", self._bad_name)
        if request is None:
            raise RefusedError("invalid_request", pending.error)
        while (known := await self._find_answered(request.id)) is not None:
            if (repeated := await self._repeated(request, pending, known)) is not None:
                return repeated, history
        if pending.cancelled and not isinstance(request, Generate):  # a generate may have published tokens
            return withdrawn(pending, history, self._record.position), history
        if pending.expired and not await self._is_streamed(pending):
            return withdrawn(pending, history, self._record.position), history
        if self._record.diverged is not None:
            raise RefusedError("history_diverged", self._record.diverged)
        self._services.fold.check(history, request)
        if isinstance(request, Open) and request.from_ is not None:
            parent = await self._parent(request.from_)
            return self._services.execution.fork(request, request.from_, pending, parent)
        if isinstance(request, Close):
            return await self._services.execution.close(self.key, request, pending, history, self._num_shared)
        return await self._services.execution.carry_out(self.key, request, pending, history)

    async def _parent(self, of: ForkPoint) -> History:
        """Return all of the history of the session that this one is forked from. Raises `RefusedError`."""
        if of.session == self.key.session:
            raise RefusedError("invalid_request", "a session cannot be forked from itself")
        with self._others(SessionKey(self.key.tenant, of.session)) as parent:
            await parent.refresh(surely=True)  # who asks may have heard of its last result
            if parent.diverged is not None:
                raise RefusedError("history_diverged", f"{of.session} cannot be forked: {parent.diverged}")
            history = parent.history
            if history.closed or not history.exists:
                gone = "was closed" if history.closed else "does not exist"
                raise RefusedError(
                    "unknown_session", f"the session {of.session} {gone}: only an open session can be forked"
                )
            try:
                return await parent.whole_history()
            except CutOffError:
                raise RefusedError(
                    "internal", f"the last checkpoint of {of.session} is not stored yet: ask again"
                ) from None

    async def _num_shared(self, history: History) -> int:
        """Count the first tokens of this session that another open session has too, until the next wait.

        Of the others it knows those in memory, and the parent, which is read for this: unless reading it may
        be what has crashed a worker.
        """
        parent = None if self._in_doubt else history.parent
        use = self._others(SessionKey(self.key.tenant, parent.session)) if parent else nullcontext()
        with use as first:
            other: Session | None = first
            read: set[Session | None] = {None}
            while True:
                if other is not None:
                    await self._read_other(other)
                    read.add(other)
                num, other = self._most_shared(self.key, history.tokens)
                if other in read:
                    return num

    async def _read_other(self, other: Session) -> None:
        """Read another session's log to its end; if that fails, `needed` is None there."""
        try:
            await other.refresh(surely=True)
        except FencedError:
            pass  # its own task reads it anew
        except Exception:
            log.exception("a session could not be read that may share tokens with a forgotten one")

    async def _repeated(self, request: Request, pending: Pending, known: AnsweredRequest) -> Result | None:
        """Answer a request whose id was used before with the first result of that id.

        Returns None if the first request has just left the log, with its session.
        """
        if request != known.request:
            raise RefusedError(
                "id_conflict",
                f"the id {request.id!r} was used before for another request (sequence {known.at.in_seq}); "
                "a new request needs a new id",
            )
        body = await self._services.journal.get(known.at.out_seq)
        if body is None and await self._services.journal.get(known.at.in_seq) is None:
            return None
        if body is None:
            raise RefusedError(
                "invalid_request", "this id was used before, and its result is gone from the log"
            )
        pending.first = body
        return msgspec.structs.replace(decode_result(body), seq=pending.seq, repeat_of=known.at.in_seq)

    async def _commit(self, pending: Pending, result: Result, history: History | None) -> bool:
        """Store a result and the history after it, then wake all who wait for the result.

        Without `history`, the result does not change the history. So a request that was cancelled while it
        waited can be committed out of order. Returns False if the request already has a result, or the log
        was read again meanwhile.
        """
        services, record = self._services, self._record
        closes = isinstance(result, Closed) and result.repeat_of is None
        if closes:
            await self._trail.finish()  # no checkpoint may be stored after the session was removed
        # If the ack of a close is late, its result must be there when it is looked for.
        removal = services.retention.lock(self.key) if closes else nullcontext()
        async with self._log_lock, removal:
            if record is not self._record or not record.lacks_result(pending):
                return False
            if self._is_stale:
                raise FencedError("a result is not this worker's, or the server has restarted")
            in_turn, history = history is not None, history or self.history
            try:
                out_seq = await self._store(pending, result, history)
            except TooLargeError as error:
                history = self.history
                message = f"the result is larger than the log takes ({error}); ask for fewer tokens at a time"
                result = failed(pending, record.position, "invalid_request", message)
                out_seq = await self._store(pending, result, history)
            record.committed(pending, result, out_seq, history)
            if in_turn and not isinstance(result, Failed) and (delta := record.next_delta(pending.seq)):
                self._trail.add(delta)
        self._count(pending, result)
        pending.done.set()
        if closes and isinstance(pending.request, Close) and pending.request.forget:
            await services.retention.forget(self.key, pending.seq, out_seq)
        if isinstance(pending.request, Generate):
            await self._end_tokens(pending, pending.request.id, pending.held)
        return True

    def _count(self, pending: Pending, result: Result) -> None:
        """Count a stored result in the metrics, and hand its turn to tracing."""
        services = self._services
        outcome = result.code if isinstance(result, Failed) else "ok"
        counted = outcome if outcome in ("ok", *ERROR_CODES) else "other"  # a repeat has any code of the log
        services.telemetry.requests[pending.type][counted] += 1
        services.telemetry.tenants.count_request(self.key.tenant, counted)
        if isinstance(result, Appended | Generated) and result.repeat_of is None:
            services.telemetry.request_duration.observe(pending.waited_s(monotonic()))
        if services.traces is not None and isinstance(pending.request, Append | Generate):
            services.traces.add(turn_times(self.key, pending, result, services.model))
        log.info(
            "answered", type=pending.type, outcome=outcome, seq=pending.seq, position=self._record.position
        )

    async def _store(self, pending: Pending, result: Result, history: History) -> int:
        """Commit a result directly after the last known one.

        If the commit is refused only because of newer messages on `out` that are not valid results of this
        session, it skips them and tries again; otherwise it raises `FencedError`.
        """
        journal, record = self._services.journal, self._record
        if result.repeat_of is None or not pending.first:
            body = encode(result)
        else:
            body = encode_repeat(pending.first, seq=pending.seq, repeat_of=result.repeat_of)
        headers = {MODEL_HEADER: self._services.model, BUILD_HEADER: self._services.build}
        if not isinstance(result, Failed):
            headers[HISTORY_HEADER] = record.digest(history)
        if self._trail.link is not None:
            headers[CHECKPOINT_HEADER] = str(self._trail.link)
        if isinstance(result, Opened) and result.parent and result.repeat_of is None:
            headers[BASE_HEADER] = str(await self._trail.store_base(pending.seq, history))
        while True:
            try:
                return await journal.commit(self.key, body, record.out_seq, headers, server=self._server)
            except FencedError:
                entries, _ = await journal.page(self.key, "out", record.out_seq)
                if not entries or record.add_results(entries) or self._is_stale:
                    raise
                self._services.telemetry.ignored["result"] += len(entries)

    async def _end_tokens(self, pending: Pending, request_id: str, held: Chunk | None) -> None:
        """Close an answer's token stream.

        Publishes what was held back until a cancel. If that were published before the commit, the answer
        could continue differently after a crash.
        """
        says = held is not None and (held.text or held.reasoning or held.tool_calls)
        rest = msgspec.structs.replace(held, seq=pending.seq) if held and says else None
        await self._services.outbox.end(self.key, request_id, pending.seq, rest)
