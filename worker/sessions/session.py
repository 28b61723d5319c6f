"""One session at work: its requests in the order of the log, each to a committed result.

An actor on the event loop. Deliveries only ring its bell; it reads its log forward and answers what has no
result yet, one request at a time. The sequence of its last result fences it against other workers.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic, time
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.log import HISTORY_HEADER, MODEL_HEADER
from turnkeep_client.messages import (
    Cancelled,
    Chunk,
    Failed,
    Generate,
    Generated,
    decode_request,
    decode_result,
    failure,
)
from turnkeep_client.subjects import session_key
from worker.device.engine import DeviceFaultError, NoMemoryError, StoppingError
from worker.wire.journal import FencedError, TooLargeError

from .execution import failed, withdrawn
from .history import RefusedError
from .record import Record, request_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from typing import Any

    from turnkeep_client.messages import Request, Result
    from turnkeep_client.subjects import SessionKey
    from worker.device.engine import Engine
    from worker.telemetry import Telemetry
    from worker.wire.journal import Journal
    from worker.wire.outbox import Outbox

    from .execution import Execution
    from .history import Folder, History
    from .record import Answered, Pending

log = structlog.get_logger()

#: What was read of the token stream counts for so long: less than any `ack_wait_s`.
_FRESH_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Services:
    """What all sessions of a worker share. `settle` is told each request whose result is in the log."""

    journal: Journal
    outbox: Outbox
    engine: Engine
    execution: Execution
    folder: Folder
    telemetry: Telemetry
    settle: Callable[[int], Coroutine[Any, Any, None]]
    model: str


class Session:
    """See the module. `ring` and `cancel` may be called at any time; `run` by one task at a time."""

    def __init__(self, key: SessionKey, services: Services, wake: Callable[[Session], None]) -> None:
        """`wake` is to see to it that `run` runs."""
        self.key = key
        self._services = services
        self._wake = wake
        self._record = Record(services.folder)
        self._rung: set[int] = set()  # deliveries that the record has not been asked about yet
        self._delivered = b""  # the first of them
        self._log_lock = asyncio.Lock()  # reading and committing must not overtake each other
        self.active: Pending | None = None
        self.used_s = monotonic()
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
        return len(self._record.answered)

    @property
    def has_work(self) -> bool:
        """Whether `run` has something to do."""
        return bool(self._record.pending or self._rung)

    def ring(self, seq: int, body: bytes) -> None:
        """Take a delivery: the log has an entry at `seq`, which is to be settled once it has its result."""
        self._rung.add(seq)
        self._delivered = self._delivered or body
        self._wake(self)

    async def run(self) -> None:
        """Answer what there is to answer. Raises `StoppingError` where the worker stops first."""
        while True:
            try:
                with self._reading_ahead() as give:
                    await self.catch_up()
                    await self._settle_answered()
                    if self._record.pending:
                        give(self._record.pending[0])
                        await self._answer(self._record.pending[0])
                    elif not self.has_work:
                        return
            except FencedError as error:
                log.warning("another worker went on with this session; reading its log anew", why=str(error))
                self.forget()

    @contextmanager
    def _reading_ahead(self) -> Iterator[Callable[[Pending], None]]:
        """Look for published tokens of the generate that was delivered, beside reading the log.

        They are given to the request if that is the next one, and if the log did not take so long that
        another worker may have gone on with it since.
        """
        body, self._delivered = self._delivered, b""
        request = None
        with suppress(InvalidMessageError):
            request = decode_request(body) if body and not self._record.pending else None
        if not isinstance(request, Generate) or self._bad_name is not None:
            yield lambda _: None
            return
        begun_s, name = monotonic(), request.id
        reading = asyncio.create_task(self._services.journal.published(self.key, name))

        def give(pending: Pending) -> None:
            if pending.id == name and monotonic() - begun_s < _FRESH_S:
                pending.published = reading

        try:
            yield give
        finally:
            reading.cancel()

    async def catch_up(self, *, beyond_bell: bool = False) -> None:
        """Read the log as far as deliveries have told of it; the first time, or if asked to, all of it.

        Raises `FencedError` where another worker has gone on with the session.
        """
        async with self._log_lock:
            record = self._record  # the entries are its successors, and not those of one that replaces it
            until = max(self._rung, default=0)
            if 0 < record.read_seq >= until and not beyond_bell:
                return
            entries = await self._services.journal.read(self.key, record.read_seq, until)
            if record.read_seq:
                record.take(entries)  # requests to be queued: a thread would take longer to begin
            else:
                # A fold tokenises everything that was ever said; that is not for the event loop.
                await asyncio.to_thread(record.take, entries)
            record.read_seq = max(record.read_seq, until)  # also where the entry itself is gone by now

    async def cancel(self, request_id: str) -> Cancelled | Failed:
        """Stop a request that has no result yet; returns when its result is in the log."""
        try:
            await self.catch_up(beyond_bell=True)  # the request may be younger than its delivery
        except FencedError:
            if self.active is not None:
                self._services.engine.cancel(self.key)  # its result has lost the fence already
                raise
            self.forget()  # nothing is under way here, so nobody else would find out
            await self.catch_up(beyond_bell=True)
        known = request_id in self._record.answered  # then what is pending is a repeat of it
        pending = next((pending for pending in self.pending if pending.id == request_id), None)
        if pending is None or known:
            why = "it was answered already" if known else "the session has no request with this id"
            return failure(request_id, "invalid_request", f"nothing to cancel under {request_id!r}: {why}")
        pending.cancelled = True
        if pending is not self.active and not await self._begun(pending):
            await self._commit(pending, withdrawn(pending, self.history), None)
            return Cancelled(id=request_id, was="waiting")
        self._services.engine.cancel(self.key)
        self._wake(self)
        await pending.done.wait()
        if request_id not in self._record.answered:  # the record was given up meanwhile
            return await self.cancel(request_id)
        return Cancelled(id=request_id, was="running")

    def forget(self) -> None:
        """Drop everything that is in memory; the log is read anew when the session goes on."""
        record, self._record = self._record, Record(self._services.folder)
        self._rung.update(pending.seq for pending in record.pending)
        self._services.engine.forget(self.key)
        for pending in record.pending:
            pending.done.set()

    async def _begun(self, pending: Pending) -> bool:
        """Say whether a request was begun, here or by a worker that died: its tokens so far have to stay."""
        if pending is self.active or not isinstance(pending.request, Generate):
            return pending is self.active
        return await self._published(pending.request)

    async def _published(self, request: Generate) -> bool:
        """Say whether clients may have seen tokens of a request."""
        return bool(await self._services.journal.published(self.key, request.id))

    async def _settle_answered(self) -> None:
        """Settle deliveries of requests that had their result when they were read: somebody died before this.

        Those that are pending are settled with their result.
        """
        pending = {pending.seq for pending in self._record.pending}
        read = {seq for seq in self._rung if seq <= self._record.read_seq}
        self._rung -= read
        for seq in sorted(read - pending):
            await self._end_again(seq)
            await self._services.settle(seq)

    async def _end_again(self, seq: int) -> None:
        """Close the token stream of an answered generate: who answered it may have died before it could."""
        journal = self._services.journal
        answered = next(
            (found for found in list(self._record.answered.values()) if found.in_seq == seq), None
        )
        body, recorded = await journal.get(seq), await journal.get(answered.out_seq) if answered else None
        if body is None or recorded is None:
            return
        request, result = decode_request(body), decode_result(recorded)
        if isinstance(request, Generate):
            tokens = result.tokens if isinstance(result, Generated) else ()
            chunks = await journal.published(self.key, request.id)
            held_text = ""
            # Only behind all the others: who has lost chunks reads the record.
            if isinstance(result, Generated) and sum(len(chunk.tokens) for chunk in chunks) == len(tokens):
                held_text = result.text[sum(len(chunk.text) for chunk in chunks) :]
            await self._end_tokens(request.id, len(tokens), held_text)

    async def _answer(self, pending: Pending) -> None:
        self.active = pending
        alarm = self._set_alarm(pending)
        try:
            with structlog.contextvars.bound_contextvars(session=str(self.key), request=pending.id):
                result, history = await self._result(pending)
                await self._commit(pending, result, history)
        finally:
            if alarm is not None:
                alarm.cancel()
            self.active = None
            self.used_s = monotonic()

    def _set_alarm(self, pending: Pending) -> asyncio.TimerHandle | None:
        """See to it that a request ends at its deadline."""
        if pending.deadline_s is None:
            return None
        left_s = pending.deadline_s - time()
        if left_s <= 0:
            pending.expired = True
            return None

        def expire() -> None:
            pending.expired = True
            self._services.engine.cancel(self.key)

        return asyncio.get_running_loop().call_later(left_s, expire)

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
        except (StoppingError, FencedError):
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
        answered = self._record.answered.get(request.id)
        if answered is not None:
            return await self._repeated(request, pending, answered), history
        if pending.cancelled and not isinstance(request, Generate):  # a generate may have tokens out
            return withdrawn(pending, history), history
        if pending.expired and not (isinstance(request, Generate) and await self._published(request)):
            return withdrawn(pending, history), history
        if self._record.diverged is not None:
            raise RefusedError("history_diverged", self._record.diverged)
        self._services.folder.check(history, request)
        return await self._services.execution.carry_out(self.key, request, pending, history)

    async def _repeated(self, request: Request, pending: Pending, answered: Answered) -> Result:
        """Answer an id that was answered before from the record."""
        if request_digest(request) != answered.digest:
            raise RefusedError(
                "id_conflict",
                f"the id {request.id!r} was used before for another request (sequence {answered.in_seq}); "
                "a new request needs a new id",
            )
        body = await self._services.journal.get(answered.out_seq)
        if body is None:
            raise RefusedError(
                "invalid_request", "this id was used before, and its result is gone from the log"
            )
        first = decode_result(body)
        return msgspec.structs.replace(first, seq=pending.seq, repeat_of=answered.in_seq)

    async def _commit(self, pending: Pending, result: Result, history: History | None) -> None:
        """Store a result and the history after it, then tell everybody who waits for it.

        Without a history the result changes none: so may a request that was cancelled while it waited be
        committed out of turn.
        """
        services = self._services
        async with self._log_lock:
            if pending not in self._record.pending:
                return
            history = history or self.history
            try:
                out_seq = await self._store(result, history)
            except TooLargeError as error:
                history = self.history
                message = f"the result is larger than the log takes ({error}); ask for fewer tokens at a time"
                result = failed(pending, history, "invalid_request", message)
                out_seq = await self._store(result, history)
            self._record.committed(pending, out_seq, history)
        outcome = result.code if isinstance(result, Failed) else "ok"
        services.telemetry.requests[pending.type][outcome] += 1
        log.info("answered", type=pending.type, outcome=outcome, seq=pending.seq, position=history.position)
        pending.done.set()
        if isinstance(pending.request, Generate):
            num_tokens = len(result.tokens) if isinstance(result, Generated) else 0
            await self._end_tokens(pending.request.id, num_tokens, pending.held_text)
        await services.settle(pending.seq)

    async def _store(self, result: Result, history: History) -> int:
        headers = {MODEL_HEADER: self._services.model}
        if not isinstance(result, Failed):
            headers[HISTORY_HEADER] = history.digest()
        return await self._services.journal.commit(self.key, result, self._record.out_seq, headers)

    async def _end_tokens(self, request_id: str, num_tokens: int, held_text: str) -> None:
        """Close an answer's token stream.

        Text that a cancel has set free is published only now: before the commit, a crash would have let the
        answer go on differently.
        """
        if held_text:
            await self._services.outbox.tokens(self.key, request_id, Chunk(num_tokens, (), held_text))
        await self._services.outbox.end(self.key, request_id)
