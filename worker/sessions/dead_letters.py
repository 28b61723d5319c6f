"""Attempts a session's requests, and gives up those that have crashed too many workers, or failed too often.

Attempts are counted in the log, beside the session's entries. A worker stores nothing before the first
attempt at a request. Before each later attempt it stores a note with the number of tokens published until
then. Some attempts do not count: those that published further tokens, and those of workers that still run.
Such a worker may have seemed to have ended, as while its machine was asleep. The last attempt allowed runs
alone on the device: if it crashes the worker, no other request suffers. A request that is given up becomes a
dead letter; what clients have seen of its answer becomes its result.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
from msgspec import Struct, structs

from cache.names.errors import InterruptionError
from turnkeep_client.messages import DeadLetter, Generate, Open, encode
from worker.engine.port import StoppingError
from worker.process.concurrency import task_group

from .execution import Execution
from .results import Outcome, failed
from .rules import check_allowed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from datetime import datetime

    from turnkeep_client.errors import ErrorCode
    from turnkeep_client.subjects import SessionKey

    from .pending import PendingRequest
    from .services import Services
    from .session_log import FencedLog

log = structlog.get_logger()

#: Most characters of the reason why an answer was given up.
_MAX_WHY: Final = 500


class AttemptNote(Struct, frozen=True, omit_defaults=True):
    """Stored in the log: how many attempts at a request may have crashed a worker."""

    #: The request's sequence.
    seq: int = 0
    attempts: int = 0
    #: How many tokens of its answer were published before the last attempt.
    tokens: int = 0
    #: The worker process that makes the last attempt (`Member.boot`).
    by: str = ""

    def then(self, seq: int, num_tokens: int, *, is_first: bool = False) -> AttemptNote:
        """Return the note of the next attempt at the request at `seq`; `num_tokens` are published already.

        Adds one to the attempts, unless the last attempt has published further tokens. `is_first` says that
        no other worker got the request before this one.
        """
        # Without a note, an earlier worker may have made the first attempt.
        last = self if self.seq == seq else AttemptNote(seq, 0 if is_first else 1)
        return AttemptNote(seq, last.attempts + (num_tokens <= last.tokens), num_tokens)


class RequestAttempts:
    """Attempts the requests of one session, or gives them up. Event loop only.

    Notes are read only for a session that may have crashed a worker (`FencedLog.is_doubted`). For others, one
    is stored only if the worker stops during an attempt.
    """

    def __init__(self, session_log: FencedLog, services: Services) -> None:
        self._log = session_log
        self._services = services
        # By when the log stored them: one restored from a backup may have other requests at their sequences.
        self._begun: datetime | None = None  # the request that this worker has begun last, and survived
        self._tried: datetime | None = None  # the request for which this worker has stored a note

    async def attempt(
        self, pending: PendingRequest, answer: Callable[[PendingRequest], Awaitable[Outcome]]
    ) -> Outcome:
        """Return the outcome of `answer(pending)`, or of `give_up` if it has crashed too many workers.

        Waits while another request runs alone; the last attempt allowed runs alone. Raises as `answer` does.
        """
        request, services, key = pending.request, self._services, self._log.key
        is_open = isinstance(request, Open)  # runs nothing on the device, and may wait for its parent
        if is_open or (request is not None and await self._log.find_answered(request.id) is not None):
            return await answer(pending)
        is_new = self._log.is_doubted and self._tried != pending.stored
        note = await _last_note(services, key) if self._log.is_doubted else AttemptNote()
        note = await self._next(note, pending) if is_new else note
        num_attempts, limit = note.attempts, services.max_attempts
        if num_attempts > limit:
            num_attempts -= await services.num_busy(key)
        if num_attempts > limit:
            if is_new:
                await self._store(pending, note)  # ending it may crash a worker too
            keeps = num_attempts == limit + 1
            why = "it has ended every worker that began it"
            return await self.give_up(pending, num_attempts - 1, why, keeps=keeps)
        try:
            async with services.device_lock.enter(lambda: pending.stopped, alone=num_attempts == limit > 1):
                if is_new:  # not earlier: a waiting request cannot crash a worker
                    await self._store(pending, note)
                self._begun = pending.stored
                return await answer(pending)
        except StoppingError:  # this worker has survived it
            await self._uncount(pending, note)
            raise

    async def _next(self, note: AttemptNote, pending: PendingRequest) -> AttemptNote:
        """Return the note of the next attempt at a request; `note` is that of the last one."""
        seq = pending.seq
        is_mine = self._begun == pending.stored  # others may have counted that attempt
        is_first = is_mine or 0 < self._log.first_seq <= seq
        services = self._services
        is_counted = is_mine or (note.by != services.boot and await services.runs(note.by))
        if note.seq == seq and is_counted:
            return note
        return note.then(seq, (await self._log.published(pending)).num_tokens, is_first=is_first)

    async def _store(self, pending: PendingRequest, note: AttemptNote) -> None:
        await _store(self._services, self._log.key, note)
        self._tried = pending.stored

    async def _uncount(self, pending: PendingRequest, note: AttemptNote) -> None:
        """Subtract the last attempt from the count, since the attempt ended without a crash."""
        attempts = note.attempts if note.seq == pending.seq else 1
        num_tokens = (await self._log.published(pending)).num_tokens
        await self._store(pending, AttemptNote(pending.seq, attempts - 1, num_tokens))

    async def give_up(
        self, pending: PendingRequest, num_attempts: int, reason: str, *, keeps: bool = True
    ) -> Outcome:
        """Give up a request: store a dead letter for the operator, and return a failure as its outcome.

        With `keeps`, returns what was published of its answer instead, if clients may have seen some.
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

    async def failure(self, pending: PendingRequest, code: ErrorCode, why: str) -> Outcome:
        """Return a failure; or, if clients have seen a part of the answer, that part as the result.

        Raises only `InterruptionError`.
        """
        request, record = pending.request, self._log.record
        history = record.history_before(pending)
        if isinstance(request, Generate) and record.diverged is None:
            try:
                if await self._log.is_streamed(pending):
                    check_allowed(history, request)
                    execution = Execution(self._services, self._log.key, pending, history)
                    return await execution.carry_out(given_up=why[:_MAX_WHY])
            except InterruptionError:
                raise
            except Exception:
                log.exception("what was streamed of an answer cannot be recorded")
        return Outcome(failed(pending, self._log.record.position, code, why), history)


async def excuse(services: Services, firsts: Mapping[SessionKey, int]) -> None:
    """Store, for each session in `firsts`, that no worker has begun the request at the given sequence.

    Call this for requests that a stopping worker returns to the server: without a note, the next worker
    would count their second delivery as an attempt. Does nothing for a session whose request has left the
    log, or whose note is about this request, or counts attempts at one that the log still has.
    """

    async def excuse_one(key: SessionKey, seq: int) -> None:
        last, entry = await _last_note(services, key), services.journal.entry
        counts = last.attempts > 0 and await entry(last.seq) is not None
        if not counts and last.seq != seq and await entry(seq) is not None:
            await _store(services, key, AttemptNote(seq))

    async with task_group() as tasks:
        for key, seq in firsts.items():
            tasks.start_soon(excuse_one, key, seq)


async def _last_note(services: Services, key: SessionKey) -> AttemptNote:
    """Read a session's attempt note; an empty one if no worker has written any."""
    found = await services.journal.last(key, "attempt")
    with suppress(msgspec.DecodeError):  # no worker wrote it
        return msgspec.json.decode(found.body if found else b"{}", type=AttemptNote)
    return AttemptNote()


async def _store(services: Services, key: SessionKey, note: AttemptNote) -> None:
    """Store the note of an attempt that this worker makes, before the attempt begins."""
    note = structs.replace(note, by=services.boot)
    await services.journal.append(key, "attempt", msgspec.json.encode(note))
