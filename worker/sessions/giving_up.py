"""Attempts a session's requests, and gives up those that have crashed too many workers, or failed too often.

An attempt is counted in the log before it begins (`attempts`), if an earlier one may have crashed a worker.
The last attempt allowed runs alone on the device: if it crashes the worker, no other request suffers. A
request that is given up becomes a dead letter; what clients have seen of its answer becomes its result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog

from cache.names.errors import InterruptionError
from turnkeep_client.messages import DeadLetter, Generate, Open, encode
from worker.engine.port import StoppingError

from .attempts import AttemptNote
from .execution import Execution
from .results import Outcome, failed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from turnkeep_client.errors import ErrorCode

    from .record import Pending
    from .services import Services
    from .session_log import SessionLog

log = structlog.get_logger()

#: Most characters of the reason why an answer was given up.
_MAX_WHY: Final = 500


class Doubt:
    """Attempts the requests of one session, or gives them up. Event loop only.

    Of a session that cannot have crashed a worker, nothing is read or stored.
    """

    def __init__(self, session_log: SessionLog, services: Services) -> None:
        self._log = session_log
        self._services = services
        self._begun_seq = 0  # the request that this worker has begun last, and survived until now
        self._tried_seq = 0  # the request for which this worker has stored a note
        self._uncounted_seq = 0  # the request whose attempt this worker has last survived

    def may_count(self, seq: int) -> bool:
        """Whether the log has, or may have, a note of attempts at the request at `seq`."""
        return self._log.is_doubted or self._uncounted_seq == seq

    async def attempt(self, pending: Pending, answer: Callable[[Pending], Awaitable[Outcome]]) -> Outcome:
        """Return what `answer(pending)` returns, or give up if the request has crashed too many workers."""
        request, attempts = pending.request, self._services.attempts
        is_open = isinstance(request, Open)  # runs nothing on the device, and may wait for its parent
        if is_open or (request is not None and await self._log.find_answered(request.id) is not None):
            return await answer(pending)
        is_new = self._log.is_doubted and self._tried_seq != pending.seq
        note = await attempts.note(self._log.key) if self._log.is_doubted else AttemptNote()
        note = await self._next(note, pending) if is_new else note
        num_attempts, limit = note.attempts, attempts.max_attempts
        if num_attempts > limit:
            num_attempts -= await attempts.num_busy(self._log.key)
        if num_attempts > limit:
            if is_new:
                await self._store(note)  # ending it may crash a worker too
            keeps = num_attempts == limit + 1
            why = "it has ended every worker that began it"
            return await self.give_up(pending, num_attempts - 1, why, keeps=keeps)
        lock = self._services.device_lock
        try:
            async with lock.enter(lambda: pending.stopped, alone=num_attempts == limit > 1):
                if is_new:  # not earlier: a waiting request cannot crash a worker
                    await self._store(note)
                self._begun_seq = pending.seq
                return await answer(pending)
        except StoppingError:  # this worker has survived it
            await self._uncount(pending, note)
            raise

    async def _next(self, note: AttemptNote, pending: Pending) -> AttemptNote:
        """Return the note of the next attempt at a request; `note` is that of the last one."""
        seq = pending.seq
        is_mine = self._begun_seq == seq  # others may have counted that attempt
        is_first = is_mine or 0 < self._log.first_seq <= seq
        is_counted = is_mine or await self._services.attempts.is_under_way(note)
        if note.seq == seq and is_counted:
            return note
        return note.then(seq, (await self._log.published(pending)).num_tokens, is_first=is_first)

    async def _store(self, note: AttemptNote) -> None:
        await self._services.attempts.store(self._log.key, note)
        self._tried_seq = note.seq

    async def _uncount(self, pending: Pending, note: AttemptNote) -> None:
        """Subtract the last attempt from the count, since the attempt ended without a crash."""
        attempts = note.attempts if note.seq == pending.seq else 1
        num_tokens = (await self._log.published(pending)).num_tokens
        await self._store(AttemptNote(pending.seq, attempts - 1, num_tokens))
        self._tried_seq = self._begun_seq = 0
        self._uncounted_seq = pending.seq

    async def give_up(
        self, pending: Pending, num_attempts: int, reason: str, *, keeps: bool = True
    ) -> Outcome:
        """Give up a request: store a dead letter for the operator, and return a failure.

        With `keeps`, the published part of an answer becomes its result.
        """
        log.error("giving up a request", seq=pending.seq, attempts=num_attempts, reason=reason)
        record = self._log.record
        letter = DeadLetter(
            seq=pending.seq,
            id=pending.id,
            request=pending.type,
            position=record.position,
            attempts=num_attempts,
            reason=reason,
            worker=self._services.worker,
            model=self._services.model,
        )
        await self._services.journal.append(self._log.key, "dead", encode(letter))
        message = f"{reason} ({num_attempts} attempts); to try again send it under a new id"
        if keeps:
            return await self.failure(pending, "internal", message)
        record = self._log.record
        return Outcome(failed(pending, record.position, "internal", message), record.history)

    async def failure(self, pending: Pending, code: ErrorCode, why: str) -> Outcome:
        """Return a failure; or, if clients have seen a part of the answer, that part as the result.

        Raises only `InterruptionError`.
        """
        request, record = pending.request, self._log.record
        history = record.history
        if isinstance(request, Generate) and record.diverged is None:
            try:
                if await self._log.is_streamed(pending):
                    self._services.fold.check(history, request)
                    execution = Execution(self._services, self._log.key, pending, history)
                    return await execution.carry_out(given_up=why[:_MAX_WHY])
            except InterruptionError:
                raise
            except Exception:
                log.exception("what was streamed of an answer cannot be recorded")
        return Outcome(failed(pending, self._log.record.position, code, why), history)
