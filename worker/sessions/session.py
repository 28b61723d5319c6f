"""One session: carries out its requests in the order of the log, and commits a result for each.

An actor on the event loop. A delivery only wakes the session, which then reads its log forward
(`session_log`), and answers the requests that have no result, one at a time. Each commit names the sequence
of the last result that the session knows, so it fails if another worker has stored a result since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
from anyio import sleep
from msgspec import structs

from cache.names.errors import InterruptionError
from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.log import ROOM_REMEDY
from turnkeep_client.messages import Close, Generate, Open
from turnkeep_client.subjects import SessionKey, session_key
from worker.device.request import NoMemoryError
from worker.engine.port import DeviceFaultError
from worker.process.clock import monotonic, time
from worker.process.concurrency import task_group
from worker.wire.fence import FencedError

from .dead_letters import RequestAttempts
from .execution import Execution
from .history import RefusedError
from .images import SessionImages
from .results import Outcome, count_result, failed, is_close, withdrawn_result
from .rules import check_allowed
from .session_log import FencedLog
from .streaming import unpublished_text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from anyio.abc import TaskGroup

    from cache.names.tokens import Tokens
    from turnkeep_client.messages import Chunk, ForkPoint, Parent, Request
    from worker.wire.intake import Delivery

    from .history import TokenHistory
    from .pending import PendingRequest
    from .record import Record
    from .services import Services

log = structlog.get_logger()

#: How often to look at the wall clock while waiting for a deadline.
_LOOK_S: Final = 1.0


class ServedSession:
    """One session: reads its log, and answers its requests in order. Event loop only.

    `run` may be called by one task at a time, all other methods at any time.
    """

    def __init__(
        self,
        key: SessionKey,
        services: Services,
        wake: Callable[[ServedSession], None],
        parent: Callable[[SessionKey, ForkPoint], Awaitable[TokenHistory]],
        num_shared: Callable[[SessionKey, Tokens, Parent | None], Awaitable[int]],
    ) -> None:
        """`wake(session)` starts `run` in a task unless it runs already.

        `parent` returns the history of a fork's parent; `num_shared` counts the first tokens that another
        session has too.
        """
        self.key = key
        self._parent = parent
        self._num_shared = num_shared
        self.services = services
        self._wake = wake
        self.log = FencedLog(key, services)
        self._attempts = RequestAttempts(self.log, services)
        self.active: PendingRequest | None = None
        self._closing_seq = 0  # the log's last note that a worker is about to close the session
        self.num_users = 0  # users besides its task
        self.used_s = monotonic()  # when it last answered or was looked up, by the monotonic clock
        self.counted_bytes = 0  # its size as `Sessions` last counted it

    @property
    def history(self) -> TokenHistory:
        """The session's state after its last result."""
        return self.log.record.history

    @property
    def pending(self) -> tuple[PendingRequest, ...]:
        """Requests that were read and have no result, in order; the first may be running."""
        return tuple(self.log.record.pending)

    @property
    def needed(self) -> Tokens | None:
        """The tokens whose KV this session still needs; None if it is closed, closing, or not read.

        If closing sessions needed tokens, two sessions that are forgotten at the same time would both keep
        the KV that they share. `read_closing` shows whether another worker is closing it.
        """
        history = self.history
        is_closing = self.active is not None and isinstance(self.active.request, Close)
        is_closing = is_closing or self._closing_seq > self.log.record.out_seq
        return history.tokens if self.is_read and history.is_open and not is_closing else None

    @property
    def is_read(self) -> bool:
        """Whether `history` is what the log says, as far as this worker knows."""
        return self.log.record.folded and not self.log.is_stale and self.log.record.diverged is None

    def ring(self, delivery: Delivery) -> None:
        """Note that the log has a request at the delivery's sequence, and start the session's task.

        A close with `cancel` cancels the requests before it at once.
        """
        self.log.ring(delivery)
        self._end_before(delivery)
        self._wake(self)

    def _end_before(self, delivery: Delivery) -> None:
        """If the delivery is a close with `cancel`, cancel the requests before it, also those being read."""
        request = delivery.request
        if not (isinstance(request, Close) and request.cancel):
            return
        self.log.record.cancel_before(delivery.seq)
        if self.active is not None and self.active.cancelled:
            self.stop_active()
        if self.log.record.pending and self.log.record.pending[0].stopped:
            self.services.shares.admit(self.key)

    async def run(self) -> None:
        """Answer all requests without a result, and acknowledge their delivery.

        If another worker has taken the session over, hand the requests over to it instead. Raises
        `StoppingError` if the worker stops first.
        """
        while True:
            try:
                async with self._share():
                    async with task_group() as asides:
                        record = await self._answer_next(asides)
                        asides.cancel_scope.cancel()
                    if not self.log.has_work:
                        await self.log.survived()
                        self.log.check_fresh()  # no ack if the server lost the result: it would not redeliver
                        if record is not self.log.record:  # another task reads it anew, and may find more
                            continue
                        if not self.log.has_work:  # a delivery that came meanwhile still needs the anchor
                            await self.services.ack(self.key)
                        if not self.log.has_work:  # else a delivery came meanwhile
                            return
            except FencedError as error:
                if await self.services.is_elsewhere(self.key):  # else both would answer it, by turns
                    log.warning("another worker has taken this session over", why=str(error))
                    self.forget()
                    self.log.unring()
                    await self.services.hand_over(self.key)
                    if not self.log.has_work:  # else a delivery came meanwhile
                        return
                else:
                    log.warning("this session was changed elsewhere; reading its log anew", why=str(error))
                    self.forget()

    def _share(self) -> AbstractAsyncContextManager[None]:
        """Return the place among its tenant's sessions at work that the next request needs."""
        pending = self.log.next_request
        request = pending.request if pending else None
        deadline_s = pending.deadline_s if pending else None
        return self.services.shares.enter(
            self.key,
            pending.priority if pending else 0,
            at_once=pending is not None and pending.stopped,
            max_new=request.max_tokens if isinstance(request, Generate) else 0,
            most_s=None if deadline_s is None else max(deadline_s - time(), 0.0),
        )

    async def _answer_next(self, asides: TaskGroup) -> Record:
        """Read the log and answer the first request without a result; return the log's record before that."""
        await self.log.catch_up()
        record = self.log.record
        if (last := self.log.record.take_last()) is not None:
            # Its worker may have died before it ended the stream.
            pending, result = last
            await self._end_tokens(pending, unpublished_text(result, await self.log.published(pending)))
        if self.log.record.pending:
            await self._answer(self.log.record.pending[0], asides)
            await self.log.survived()
            self.log.num_failures = 0
        return record

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
        self._closing_seq = await self.services.journal.last_seq(self.key, "closed")

    def forget(self) -> None:
        """Drop the session's state in memory and its KV on the device; the next `run` reads the log again.

        The KV stays if only the NATS server has restarted.
        """
        if self.log.server == self.services.journal.server:  # after a restart the log is mostly the same
            self.services.engine.forget(self.key)
        self.log.drop_record()

    def stop_active(self) -> None:
        """End the running request, if there is one, as soon as possible."""
        self.services.engine.cancel(self.key)
        self.services.device_lock.recheck()

    async def end_early(self, pending: PendingRequest) -> None:
        """Have the session's task end a cancelled request as soon as possible; return once it has a result.

        Returns also if the log was read again meanwhile.
        """
        if pending is self.active:
            self.stop_active()
        self._wake(self)
        self.services.shares.admit(self.key)
        if pending in self.log.record.pending:  # else the task has read or answered it meanwhile
            await pending.done.wait()

    async def _answer(self, pending: PendingRequest, asides: TaskGroup) -> None:
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
                await self.commit(pending, await self._attempts.attempt(pending, self._result))
        finally:
            self.active = None
            self.used_s = monotonic()

    async def _expire(self, pending: PendingRequest, deadline_s: float) -> None:
        """Wait for a request's deadline, then end its turn; the tokens sampled until then stay."""
        # The clock of `sleep` stands still while a machine sleeps.
        while (left_s := deadline_s - time()) > 0:  # noqa: ASYNC110
            await sleep(min(left_s, _LOOK_S))
        pending.expired = True
        self.stop_active()

    async def fail(self, error: Exception) -> None:
        """Count a failure for an unknown reason, and drop the session's state, so that its log is read again.

        After `max_attempts` failures the next request is given up. If reading the log itself fails as often,
        requests are answered with `history_diverged`.
        """
        session_log, record = self.log, self.log.record
        session_log.num_failures += 1
        is_last = session_log.num_failures >= self.services.max_attempts
        if is_last and record.folded and record.pending:
            pending = record.pending[0]
            reason = f"it failed for an unknown reason: {type(error).__name__}: {error}"
            try:
                outcome = await self._attempts.give_up(pending, session_log.num_failures, reason)
                await self.commit(pending, outcome)
                session_log.num_failures = 0
            except Exception:
                log.exception("a request could not be given up")
        self.forget()

    async def _result(self, pending: PendingRequest) -> Outcome:
        """Return a request's result and the history after it.

        Raises only `InterruptionError`; other errors become a `failed` result.
        """
        history, position = self.log.record.history_before(pending), self.log.record.position
        try:
            return await self._try(pending, history)
        except RefusedError as error:
            await self.log.is_streamed(pending)  # seals its token stream: no worker may begin it any more
            refused = failed(pending, position, error.code, str(error), field=error.field, limit=error.limit)
            return Outcome(refused, history)
        except NoMemoryError as error:
            return await self._attempts.failure(pending, "memory_exceeded", str(error))
        except DeviceFaultError as error:
            return await self._attempts.failure(pending, "internal", f"the forward pass failed: {error}")
        except InterruptionError:
            raise
        except Exception as error:
            if self.log.is_stale:  # other entries may have taken the sequences that it has read
                raise FencedError("the server has restarted") from error
            await self.log.check_unchanged()  # another worker may have removed what it needs
            log.exception("a request failed for an unknown reason")
            return await self._attempts.failure(pending, "internal", f"{type(error).__name__}: {error}")

    async def _try(self, pending: PendingRequest, history: TokenHistory) -> Outcome:
        request = pending.request
        try:
            session_key(self.key.tenant, self.key.session)
        except InvalidMessageError as error:
            raise RefusedError("invalid_request", str(error)) from None
        if request is None:
            why = pending.invalid
            raise RefusedError("invalid_request", str(why), field=why.field if why else None)
        if (repeated := await self.log.repeated(request, pending)) is not None:
            return repeated
        if pending.stopped and not await self.log.is_streamed(pending):
            return Outcome(withdrawn_result(pending, history, self.log.record.position), history)
        if self.log.record.diverged is not None:
            return await self._end_diverged(request, pending, self.log.record.diverged)
        await self._check_room(request, pending)
        check_allowed(history, request)
        if isinstance(request, Open) and request.from_ is not None:
            parent = await self._parent(self.key, request.from_)
            forked = self._execution(pending, parent).fork(request, request.from_)
            of = SessionKey(self.key.tenant, request.from_.session)
            await SessionImages(of, self.services).copy(forked.history, self.key)
            return forked
        if isinstance(request, Close):
            had = await self.log.all_tokens() if request.forget else ()
            return await self._execution(pending, history).close(request, had, self._count_shared)
        return await self._execution(pending, history).carry_out()

    async def _check_room(self, request: Request, pending: PendingRequest) -> None:
        """Raise `RefusedError` if the log is full. A close goes on, and an answer that clients have seen."""
        if isinstance(request, Close) or not await self.services.retention.is_full():
            return
        if not await self.log.is_streamed(pending):
            raise RefusedError("overloaded", f"the log is full{ROOM_REMEDY}")

    def _execution(self, pending: PendingRequest, history: TokenHistory) -> Execution:
        return Execution(self.services, self.key, pending, history)

    async def _end_diverged(self, request: Request, pending: PendingRequest, why: str) -> Outcome:
        """Remove a session that this worker cannot continue, if a close asks to forget it; else refuse.

        Not all of its tokens are known, so some of their KV may stay.
        """
        if not (isinstance(request, Close) and request.forget):
            raise RefusedError("history_diverged", why)
        position, had = self.log.record.position, await self.log.all_tokens()
        if request.expect_position not in (None, position):
            raise RefusedError("position_conflict", f"the session is at position {position}")
        execution = self._execution(pending, self.history)
        closed, history, *_ = await execution.close(request, had, self._count_shared)
        return Outcome(structs.replace(closed, position=position, settled=False), history)

    async def _count_shared(self, tokens: Tokens) -> int:
        """Count the first ones of these tokens that another open session has too.

        If this session may have crashed a worker, its parent is not read: that may have caused the crash.
        """
        parent = None if self.log.is_doubted else self.history.parent
        return await self._num_shared(self.key, tokens, parent)

    async def commit(self, pending: PendingRequest, outcome: Outcome | None, *, waits: bool = False) -> bool:
        """Store a result (see `FencedLog.commit`), and count it.

        Then wakes the retention after a close with `forget`, or ends the token stream of a generate. Returns
        False if nothing was stored, and then does nothing else. Raises `FencedError`.
        """
        result = await self.log.commit(pending, outcome, waits=waits)
        if result is None:
            return False
        count_result(self.services, self.key, pending, result, self.log.record.position)
        if is_close(result) and isinstance(pending.request, Close) and pending.request.forget:
            self.services.retention.wake()
        await self._end_tokens(pending, outcome.held if outcome else None)
        return True

    async def _end_tokens(self, pending: PendingRequest, rest: Chunk | None) -> None:
        """Close the token stream of a generate.

        First publishes `rest`: text that was held back when the answer was ended early. This must follow the
        commit: until then, after a crash, another worker could continue the answer with other text.
        """
        if isinstance(pending.request, Generate):
            says = rest is not None and (rest.text or rest.reasoning or rest.tool_calls)
            rest = structs.replace(rest, seq=pending.seq) if rest and says else None
            await self.services.outbox.end(self.key, pending.request.id, pending.seq, rest)
