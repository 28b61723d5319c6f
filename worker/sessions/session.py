"""One session: carries out its requests in the order of the log, and commits a result for each.

An actor on the event loop. A delivery only wakes the session, which then reads its log forward
(`session_log`), and answers the requests that have no result, one at a time. Each commit names the sequence
of the last result that the session knows, so it fails if another worker has stored a result since.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import structlog
from anyio import sleep

from cache.names.errors import CutOffError
from turnkeep_client.errors import ERROR_CODES, InvalidMessageError
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
    decode_result,
    encode,
    failure,
)
from turnkeep_client.subjects import session_key
from worker.engine.port import DeviceFaultError, NoMemoryError, StoppingError
from worker.process.clock import monotonic, time
from worker.process.concurrency import task_group
from worker.wire.chunks import Published
from worker.wire.fence import FencedError

from .attempts import Doubt
from .history import RefusedError
from .record import Pending
from .results import failed, withdrawn
from .session_log import SessionLog
from .spans import turn_times

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup

    from cache.names.tokens import Tokens
    from turnkeep_client.errors import ErrorCode
    from turnkeep_client.messages import ForkPoint, Parent, Request, Result
    from turnkeep_client.subjects import SessionKey
    from worker.wire.intake import Delivery

    from .history import History
    from .services import Services
    from .session_log import AnsweredRequest

log = structlog.get_logger()

#: Approximate bytes of a session, and of each token (its id, and its text in the conversation).
_SIZE_BYTES: Final = 12_000
_TOKEN_BYTES: Final = 8
#: How often to look at the wall clock while waiting for a deadline.
_LOOK_S: Final = 1.0
#: Most characters of the reason why an answer was given up.
_MAX_WHY: Final = 500


class Session:
    """One session: reads its log, and answers its requests in order. Event loop only.

    `run` may be called by one task at a time, all other methods at any time.
    """

    def __init__(
        self,
        key: SessionKey,
        services: Services,
        wake: Callable[[Session], None],
        parent: Callable[[SessionKey, ForkPoint], Awaitable[History]],
        num_shared: Callable[[SessionKey, Tokens, Parent | None], Awaitable[int]],
    ) -> None:
        """`wake(session)` starts `run` in a task unless it runs already.

        `parent` returns the history of a fork's parent; `num_shared` counts the first tokens that another
        session has too.
        """
        self.key = key
        self._parent = parent
        self._num_shared = num_shared
        self._services = services
        self._wake = wake
        self._doubt = Doubt(key, services.attempts)
        self._doubted_seq = 0  # a request that this worker would refuse, but another has begun
        self.log = SessionLog(key, services, self._doubt)
        self.active: Pending | None = None
        self._closing_seq = 0  # the log's last note that a worker is about to close the session
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
        return self.log.record.history

    @property
    def pending(self) -> tuple[Pending, ...]:
        """Requests that were read and have no result, in order; the first may be running."""
        return tuple(self.log.record.pending)

    @property
    def num_answered(self) -> int:
        """Number of distinct request ids with a result."""
        return len(self.log.record.answered_ids)

    @property
    def has_work(self) -> bool:
        """Whether `run` has work: requests without a result, or entries to read."""
        return self.log.has_work

    @property
    def diverged(self) -> str | None:
        """Why this worker cannot continue the session's log; None if it can."""
        return self.log.record.diverged

    @property
    def needed(self) -> Tokens | None:
        """The tokens whose KV this session still needs; None if it is closed, closing, or not read.

        If closing sessions needed tokens, two sessions that are forgotten at the same time would both keep
        the KV that they share. `read_closing` shows whether another worker is closing it.
        """
        history = self.history
        is_closing = self.active is not None and isinstance(self.active.request, Close)
        is_closing = is_closing or self._closing_seq > self.log.record.out_seq
        is_needed = self.is_read and history.exists and not (history.closed or is_closing)
        return history.tokens if is_needed else None

    @property
    def is_read(self) -> bool:
        """Whether `history` is what the log says, as far as this worker knows."""
        return self.log.record.folded and not self.log.is_stale and self.diverged is None

    @property
    def size_bytes(self) -> int:
        """The memory that the session takes, approximately."""
        return _SIZE_BYTES + _TOKEN_BYTES * self.history.position + self.log.record.answered_ids.size_bytes

    @property
    def next_request(self) -> Request | None:
        """The first unanswered request that was read, else the delivered one; None if it is invalid."""
        if self.log.record.pending:
            return self.log.record.pending[0].request
        return self.log.delivered.request if self.log.delivered else None

    @property
    def first_waiting(self) -> int | None:
        """The sequence of the first request without a result; None if an attempt at it may count."""
        seq = self.log.next_seq
        return None if seq is None or self._doubt.may_count(seq) else seq

    @property
    def _left_s(self) -> float | None:
        """The seconds until the deadline of `next_request`; None without one."""
        deadline_s = None
        if self.log.record.pending:
            deadline_s = self.log.record.pending[0].deadline_s
        elif (one := self.log.delivered) is not None:
            deadline_s = Pending(one.seq, self.next_request, None, one.stored).deadline_s
        return None if deadline_s is None else max(deadline_s - time(), 0.0)

    def ring(self, delivery: Delivery) -> None:
        """Note that the log has a request at the delivery's sequence, and start the session's task."""
        self.log.ring(delivery)
        self._doubt.ring(delivery)
        self._end_before(delivery)
        self._wake(self)

    def _end_before(self, delivery: Delivery) -> None:
        """If the delivery is a close with `cancel`, cancel the requests before it, also those being read."""
        request = delivery.request
        if not (isinstance(request, Close) and request.cancel):
            return
        self.log.record.cancel_before(delivery.seq)
        if self.active is not None and self.active.cancelled:
            self._stop_active()
        if self.log.record.pending and self.log.record.pending[0].stopped:
            self._services.shares.admit(self.key)

    async def run(self) -> None:
        """Answer all requests without a result. Raises `StoppingError` if the worker stops first."""
        while True:
            try:
                is_stopped = bool(self.log.record.pending) and self.log.record.pending[0].stopped
                request = self.next_request
                share = self._services.shares.enter(
                    self.key,
                    request.priority if isinstance(request, Append | Generate) else 0,
                    at_once=is_stopped,
                    max_new=request.max_tokens if isinstance(request, Generate) else 0,
                    most_s=self._left_s,
                )
                async with share:
                    async with task_group() as asides:
                        self.log.delivered = None
                        await self.log.catch_up()
                        record = self.log.record
                        await self._end_last_answer()
                        if self.log.record.pending:
                            await self._answer(self.log.record.pending[0], asides)
                            await self._doubt.clear()
                            self._doubt.num_failures = 0
                        asides.cancel_scope.cancel()
                    if not self.has_work:
                        await self._doubt.clear()
                        self.log.check_fresh()  # no ack if the server lost the result: it would not redeliver
                        if record is not self.log.record:  # another task reads it anew, and may find more
                            continue
                        if not self.has_work:  # a delivery that came meanwhile still needs the anchor
                            await self._services.ack(self.key)
                        if not self.has_work:  # else a delivery came meanwhile
                            return
            except FencedError as error:
                if await self._services.is_elsewhere(self.key):  # else both would answer it, by turns
                    log.warning("another worker has taken this session over", why=str(error))
                    self.forget()
                    self.log.unring()
                    await self._services.give_back(self.key)
                    if not self.has_work:  # else a delivery came meanwhile
                        return
                else:
                    log.warning("this session was changed elsewhere; reading its log anew", why=str(error))
                    self._drop_state()
            except CutOffError:
                self.log.reset(whole=True)  # a request needs an early part of the session

    async def refresh(self) -> None:
        """Read the log to its end.

        Raises `FencedError` if a request runs here and another worker has continued the session.
        """
        while True:
            try:
                await self.log.catch_up(beyond_bell=True)
            except FencedError:
                if self.active is not None:
                    raise
                self.forget()  # no request runs here that would notice
            if self.log.record.folded:  # else another task has dropped it meanwhile
                return

    async def read_closing(self) -> None:
        """Read the log to its end, and whether any worker is closing the session. Raises as `refresh` does.

        A worker stores a note of a close before it counts which tokens other sessions need. So of two
        sessions that are closed at the same time, at two workers, the later one sees the note of the other.
        """
        await self.refresh()
        self._closing_seq = await self._services.journal.last_seq(self.key, "closed")

    async def cancel(self, request_id: str, asked: Pending | None = None) -> Cancelled | Failed:
        """Cancel a request that has no result yet; return once its result is in the log.

        `asked` is the request, if an earlier try of this call has already marked it as cancelled.
        """
        try:
            await self.refresh()  # the request may be in the log before it is delivered
        except FencedError:
            self._stop_active()  # its result can no longer be committed
            raise
        record = self.log.record
        known = await self.log.find_answered(request_id)  # if so, a pending request with this id is a repeat
        if known and asked is not None and asked.done.is_set():
            return await self._ended(known, "waiting")  # the session's task has committed it
        pending = None if known else await self.log.find_waiting(request_id)
        if record is not self.log.record or (pending and not record.lacks_result(pending)):
            return await self.cancel(request_id, asked)  # the log was read anew, or further, meanwhile
        if pending is None:
            return _no_cancel(request_id, is_answered=known is not None)
        pending.cancelled, waits = True, not record.is_next(pending)
        try:
            is_begun = await self._begun(pending)
        except FencedError:  # a worker, perhaps this one, has begun it meanwhile
            return await self.cancel(request_id, asked=pending)
        if not is_begun:
            if await self._commit(pending, None, waits=waits):
                return Cancelled(id=request_id, was="waiting")
            if not pending.done.is_set() or (known := await self.log.find_answered(request_id)) is None:
                return await self.cancel(request_id)  # the log was read anew meanwhile
            return await self._ended(known, "waiting")  # the session's task has committed it
        if pending is self.active:
            self._stop_active()
        self._wake(self)
        self._services.shares.admit(self.key)
        if pending in record.pending:  # else the session's task has read or answered it meanwhile
            await pending.done.wait()
        if (known := await self.log.find_answered(request_id)) is None:  # the log was read anew meanwhile
            return await self.cancel(request_id)
        return await self._ended(known, "running")

    async def _ended(self, known: AnsweredRequest, was: Literal["running", "waiting"]) -> Cancelled | Failed:
        """Return a cancel's reply: `Cancelled` if the request ended early, `Failed` if it was complete."""
        body, result = await self._services.journal.get(known.at.out_seq), None
        with suppress(InvalidMessageError):
            result = decode_result(body) if body is not None else None
        if body is not None and (result is None or result.seq != known.at.in_seq):
            raise FencedError("the server has lost the result, and has something else in its place")
        how = result.finish_reason if isinstance(result, Generated) else getattr(result, "code", "")
        if how in ("cancelled", "expired"):
            return Cancelled(id=known.request.id, was=was)
        return _no_cancel(known.request.id, is_answered=True)

    def forget(self) -> None:
        """Drop what this worker has of the session, and its ownership; the next `run` reads the log again."""
        self._services.disown(self.key)
        self._drop_state()

    def _drop_state(self) -> None:
        """Drop the session's state in memory and its KV on the device."""
        if self.log.server == self._services.journal.server:  # after a restart the log is mostly the same
            self._services.engine.forget(self.key)
        self.log.reset()

    async def _begun(self, pending: Pending) -> bool:
        """Return whether the request was started, here or by a worker that died.

        If it was, its published tokens stay. Only the first pending request can have been started, unless the
        server has lost results. So chunks of any other request do not come from a worker, unless they name
        the digest of the session before the answer.
        """
        if pending is self.active:
            return True
        if self.log.record.is_next(pending):
            return await self._is_streamed(pending) or pending is self.active
        return bool((await self._published(pending)).base)

    async def _is_streamed(self, pending: Pending) -> bool:
        """Return whether clients may have seen tokens of a request; if not, seal its token stream.

        After the seal no worker can publish any. Raises `FencedError` if another worker does so meanwhile.
        """
        published, request = await self._published(pending), pending.request
        if isinstance(request, Generate) and not published.chunks:
            await self._services.journal.chunks.seal(
                self.key, request.id, pending.seq, published.last_seq, server=self.log.server
            )
        return bool(published.chunks)

    def _stop_active(self) -> None:
        """End the running request as soon as possible."""
        self._services.engine.cancel(self.key)
        self._services.device_lock.recheck()

    async def _published(self, pending: Pending) -> Published:
        """Read a request's published chunks, which clients may have seen; only a generate has any."""
        request = pending.request
        if not isinstance(request, Generate):
            return Published([])
        return await self._services.journal.chunks.read(self.key, request.id, pending.seq, pending.stored)

    async def _end_last_answer(self) -> None:
        """Close the token stream of the last answer.

        The worker that committed the answer may have died before it closed the stream.
        """
        last, self.log.record.last = self.log.record.last, None
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
        pending.after, pending.server = self.log.record.out_seq, self.log.server
        if pending.deadline_s is not None and pending.deadline_s <= time():
            pending.expired = True
        elif pending.deadline_s is not None:
            asides.start_soon(self._expire, pending, pending.deadline_s)
        try:
            if isinstance(pending.request, Generate):
                await self.log.check_unchanged()
                pending.after = self.log.record.out_seq
            with structlog.contextvars.bound_contextvars(session=str(self.key), request=pending.id):
                await self._commit(pending, await self._attempt(pending))
        finally:
            self.active = None
            self.used_s = monotonic()

    async def _expire(self, pending: Pending, deadline_s: float) -> None:
        """Wait for a request's deadline, then end its turn; the tokens sampled until then stay."""
        # The clock of `sleep` stands still while a machine sleeps.
        while (left_s := deadline_s - time()) > 0:  # noqa: ASYNC110
            await sleep(min(left_s, _LOOK_S))
        if pending is self.active:
            pending.expired = True
            self._stop_active()

    async def _attempt(self, pending: Pending) -> tuple[Result, History]:
        """Carry out a request, or give up if it has crashed too many workers."""
        request = pending.request
        if isinstance(request, Open):  # runs nothing on the device, and may wait for its parent
            return await self._result(pending)
        if request is not None and await self.log.find_answered(request.id) is not None:  # nor does a repeat
            return await self._result(pending)
        doubt, device_lock = self._doubt, self._services.device_lock
        note, limit = doubt.note, self._services.attempts.max_attempts
        is_new = doubt.is_new(pending.seq)
        if is_new:
            is_mine = doubt.begun_seq == pending.seq  # others may have counted that attempt
            is_first = is_mine or 0 < doubt.first_seq <= pending.seq
            is_counted = is_mine or await self._services.attempts.is_under_way(note)
            if note.seq != pending.seq or not is_counted:
                note = note.then(pending.seq, await self._num_published(pending), is_first=is_first)
        num_attempts = note.attempts
        if num_attempts > limit:
            num_attempts -= await self._services.attempts.num_busy(self.key)
        if num_attempts > limit:
            if is_new:
                await doubt.store(note)  # ending it may crash a worker too
            keeps = num_attempts == limit + 1
            why = "it has ended every worker that began it"
            return await self._give_up(pending, num_attempts - 1, why, keeps=keeps)
        try:
            async with device_lock.enter(lambda: pending.stopped, alone=num_attempts == limit > 1):
                if is_new:  # not earlier: a waiting request cannot crash a worker
                    await doubt.store(note)
                doubt.begun_seq = pending.seq
                return await self._result(pending)
        except (StoppingError, CutOffError) as error:  # this worker has survived it
            if doubt.is_raised or isinstance(error, StoppingError):  # else it goes on here, without a note
                await doubt.uncount(pending.seq, await self._num_published(pending))
            raise

    async def _num_published(self, pending: Pending) -> int:
        return (await self._published(pending)).num_tokens

    async def _give_up(
        self, pending: Pending, num_attempts: int, reason: str, *, keeps: bool = True
    ) -> tuple[Result, History]:
        """Give up a request: store a dead letter for the operator, and return a failure.

        With `keeps`, the published part of an answer becomes its result.
        """
        log.error("giving up a request", seq=pending.seq, attempts=num_attempts, reason=reason)
        letter = DeadLetter(
            seq=pending.seq,
            id=pending.id,
            request=pending.type,
            position=self.log.record.position,
            attempts=num_attempts,
            reason=reason,
            worker=self._services.worker,
            model=self._services.model,
        )
        await self._services.journal.append(self.key, "dead", encode(letter))
        message = f"{reason} ({num_attempts} attempts); to try again send it under a new id"
        if keeps:
            return await self._failure(pending, "internal", message)
        return failed(pending, self.log.record.position, "internal", message), self.history

    async def _failure(self, pending: Pending, code: ErrorCode, why: str) -> tuple[Result, History]:
        """Return a failure; or, if clients have seen a part of the answer, that part as the result.

        Raises `StoppingError`, `FencedError` and `CutOffError`.
        """
        request, history = pending.request, self.history
        if isinstance(request, Generate) and self.log.record.diverged is None:
            try:
                if await self._is_streamed(pending):
                    pending.given_up = why[:_MAX_WHY]
                    self._services.fold.check(history, request)
                    return await self._services.execution.carry_out(self.key, request, pending, history)
            except (StoppingError, FencedError, CutOffError):
                raise
            except Exception:
                log.exception("what was streamed of an answer cannot be recorded")
        return failed(pending, self.log.record.position, code, why), history

    async def fail(self, error: Exception) -> None:
        """Count a failure for an unknown reason, and drop the session's state, so that its log is read again.

        After `max_attempts` failures the next request is given up. If reading the log itself fails as often,
        requests are answered with `history_diverged`.
        """
        doubt, record = self._doubt, self.log.record
        doubt.num_failures += 1
        if doubt.num_failures >= self._services.attempts.max_attempts and record.folded and record.pending:
            pending = record.pending[0]
            reason = f"it failed for an unknown reason: {type(error).__name__}: {error}"
            await self._commit(pending, await self._give_up(pending, doubt.num_failures, reason))
            doubt.num_failures = 0
        self.forget()

    async def _result(self, pending: Pending) -> tuple[Result, History]:
        """Return a request's result and the history after it.

        Raises only `StoppingError`, `FencedError` and `CutOffError`; other errors become a `failed` result.
        """
        history, position = self.history, self.log.record.position
        try:
            return await self._try(pending, history)
        except RefusedError as error:
            if self._doubted_seq != pending.seq and await self._is_streamed(pending):
                # Only once: the log, read again, may justify the refusal (a closed session was removed).
                self._doubted_seq = pending.seq
                raise FencedError("another worker has begun to answer what is refused here") from error
            refused = failed(pending, position, error.code, str(error), field=error.field, limit=error.limit)
            return refused, history
        except NoMemoryError as error:
            return await self._failure(pending, "memory_exceeded", str(error))
        except DeviceFaultError as error:
            return await self._failure(pending, "internal", f"the forward pass failed: {error}")
        except (StoppingError, FencedError, CutOffError):
            raise
        except Exception as error:
            if self.log.is_stale:  # other entries may have taken the sequences that it has read
                raise FencedError("the server has restarted") from error
            log.exception("a request failed for an unknown reason")
            return await self._failure(pending, "internal", f"{type(error).__name__}: {error}")

    async def _try(self, pending: Pending, history: History) -> tuple[Result, History]:
        request = pending.request
        if self._bad_name is not None:
            raise RefusedError("invalid_request", self._bad_name)
        if request is None:
            why = pending.invalid
            raise RefusedError("invalid_request", str(why), field=why.field if why else None)
        while (known := await self.log.find_answered(request.id)) is not None:
            if (repeated := await self._repeated(request, pending, known)) is not None:
                return repeated, history
        if pending.stopped and not await self._is_streamed(pending):
            return withdrawn(pending, history, self.log.record.position), history
        if self.log.record.diverged is not None:
            return await self._end_diverged(request, pending, self.log.record.diverged)
        self._services.fold.check(history, request)
        if isinstance(request, Open) and request.from_ is not None:
            parent = await self._parent(self.key, request.from_)
            return self._services.execution.fork(request, request.from_, pending, parent)
        if isinstance(request, Close):
            had = await self.log.all_tokens() if request.forget else ()
            return await self._services.execution.close(
                self.key, request, pending, history, had, self._count_shared
            )
        return await self._services.execution.carry_out(self.key, request, pending, history)

    async def _end_diverged(self, request: Request, pending: Pending, why: str) -> tuple[Result, History]:
        """Remove a session that this worker cannot continue, if a close asks to forget it; else refuse.

        Not all of its tokens are known, so some of their KV may stay.
        """
        if not (isinstance(request, Close) and request.forget):
            raise RefusedError("history_diverged", why)
        position, had = self.log.record.position, await self.log.all_tokens()
        if request.expect_position not in (None, position):
            raise RefusedError("position_conflict", f"the session is at position {position}")
        closed, history = await self._services.execution.close(
            self.key, request, pending, self.history, had, self._count_shared
        )
        return msgspec.structs.replace(closed, position=position, settled=False), history

    async def _count_shared(self, tokens: Tokens) -> int:
        """Count the first ones of these tokens that another open session has too.

        If this session may have crashed a worker, its parent is not read: that may have caused the crash.
        """
        parent = None if self._doubt.is_raised else self.history.parent
        return await self._num_shared(self.key, tokens, parent)

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

    async def _commit(
        self, pending: Pending, outcome: tuple[Result, History] | None, *, waits: bool = False
    ) -> bool:
        """Store a result and the history after it, then wake all tasks that wait for the result.

        Without an `outcome`, stores that the request was cancelled while it waited. Raises what
        `SessionLog.commit` raises. Returns False if that has stored nothing.
        """
        closes = outcome is not None and isinstance(outcome[0], Closed) and outcome[0].repeat_of is None
        committed = await self.log.commit(pending, outcome, closes=closes, waits=waits)
        if committed is None:
            return False
        self._count(pending, committed.result)
        pending.done.set()
        if closes and isinstance(pending.request, Close) and pending.request.forget:
            self._services.retention.wake()
        if isinstance(pending.request, Generate):
            await self._end_tokens(pending, pending.request.id, pending.held)
        return True

    def _count(self, pending: Pending, result: Result) -> None:
        """Count a stored result in the metrics, and hand its turn to tracing."""
        services = self._services
        is_given_up = isinstance(result, Generated) and result.finish_reason == "given_up"
        outcome = result.code if isinstance(result, Failed) else "internal" if is_given_up else "ok"
        counted = outcome if outcome in ("ok", *ERROR_CODES) else "other"  # a repeat may have an unknown code
        services.telemetry.requests[pending.type][counted] += 1
        services.telemetry.tenants.count_request(self.key.tenant, counted)
        seconds = pending.waited_s(monotonic())
        if isinstance(result, Appended | Generated) and result.repeat_of is None:
            services.telemetry.request_duration.observe(seconds)
        if services.traces is not None and isinstance(pending.request, Append | Generate):
            services.traces.add(turn_times(self.key, pending, result, services.model))
        log.info(
            "answered",
            type=pending.type,
            outcome=outcome,
            seq=pending.seq,
            position=self.log.record.position,
            seconds=round(seconds, 2),
            **({"tokens": result.usage.completion_tokens} if isinstance(result, Generated) else {}),
        )

    async def _end_tokens(self, pending: Pending, request_id: str, held: Chunk | None) -> None:
        """Close an answer's token stream.

        First publishes `held`: text that was held back when the answer was ended early. This must follow the
        commit: until then, after a crash, another worker could continue the answer with other text.
        """
        says = held is not None and (held.text or held.reasoning or held.tool_calls)
        rest = msgspec.structs.replace(held, seq=pending.seq) if held and says else None
        await self._services.outbox.end(self.key, request_id, pending.seq, rest)


def _no_cancel(request_id: str, *, is_answered: bool) -> Failed:
    why = "it was answered already" if is_answered else "the session has no request with this id that waits"
    return failure(request_id, "invalid_request", f"nothing to cancel under {request_id!r}: {why}")
