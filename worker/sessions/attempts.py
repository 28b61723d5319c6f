"""Counts attempts to answer a request that may have crashed a worker.

The count is stored in the log, beside the session's entries. A worker stores nothing before the first attempt
at a request. Before each later attempt it stores a note with the number of tokens published until then. Some
attempts do not count: those that published further tokens, and those of workers that still run. Such a worker
may have seemed to have ended, as while its machine was asleep, or the server has lost its claim. The last
attempt allowed runs alone on the device: if it crashes the worker, no other request suffers.
"""

from __future__ import annotations

import contextlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
from anyio import Event
from msgspec import Struct
from msgspec.structs import replace

from worker.process.concurrency import task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from turnkeep_client.subjects import SessionKey
    from worker.wire.intake import Delivery
    from worker.wire.journal import Journal


class AttemptNote(Struct, frozen=True, omit_defaults=True):
    """The number of attempts at the request at sequence `seq` that may have crashed a worker.

    `tokens` is the number of answer tokens that were published before the last attempt. `by` identifies the
    worker process that makes the last attempt (`Member.boot`).
    """

    seq: int = 0
    attempts: int = 0
    tokens: int = 0
    by: str = ""

    def then(self, seq: int, num_tokens: int, *, is_first: bool = False) -> AttemptNote:
        """Return the note of the next attempt at the request at `seq`; `num_tokens` are published already.

        `is_first` says that no other worker got the request before this one.
        """
        # Without a note, an earlier worker may have made the first attempt.
        last = self if self.seq == seq else AttemptNote(seq, 0 if is_first else 1)
        return AttemptNote(seq, last.attempts + (num_tokens <= last.tokens), num_tokens)


class Attempts:
    """Reads and writes the attempt notes of all sessions. Event loop only."""

    def __init__(
        self,
        journal: Journal,
        max_attempts: int,
        *,
        me: str = "",
        runs: Callable[[str], Awaitable[bool]] | None = None,
        num_busy: Callable[[SessionKey], Awaitable[int]] | None = None,
    ) -> None:
        """`me` identifies this worker process (`Member.boot`); `runs(boot)` says whether another runs.

        `num_busy` counts the other running workers that have requests of a session.
        """
        self._journal = journal
        self.max_attempts = max_attempts
        self._me = me
        self._runs = runs
        self._num_busy = num_busy

    async def note(self, key: SessionKey) -> AttemptNote:
        """Read a session's attempt note; an empty one if no worker has written any."""
        found = await self._journal.last(key, "attempt")
        with contextlib.suppress(msgspec.DecodeError):  # no worker wrote it
            return msgspec.json.decode(found.body if found else b"{}", type=AttemptNote)
        return AttemptNote()

    async def is_under_way(self, note: AttemptNote) -> bool:
        """Whether another worker that still runs is making the attempt of this note.

        Then the attempt has not crashed a worker.
        """
        return self._runs is not None and note.by != self._me and await self._runs(note.by)

    async def num_busy(self, key: SessionKey) -> int:
        """Count the other workers that still run, and have requests of the session.

        Their attempts have crashed none, although they seemed to have ended, as while a machine is asleep.
        """
        return await self._num_busy(key) if self._num_busy is not None else 0

    async def store(self, key: SessionKey, note: AttemptNote) -> AttemptNote:
        """Store an attempt's note before the attempt begins; return the note, which now names this worker."""
        note = replace(note, by=self._me)
        await self._journal.append(key, "attempt", msgspec.json.encode(note))
        return note

    async def uncount(self, key: SessionKey, seq: int, num_tokens: int, last: AttemptNote) -> None:
        """Subtract the last attempt from the count, since the attempt ended without a crash.

        `num_tokens` tokens of the answer are published.
        """
        attempts = last.attempts if last.seq == seq else 1
        await self.store(key, AttemptNote(seq, attempts - 1, num_tokens))

    async def excuse(self, firsts: Mapping[SessionKey, int]) -> None:
        """Store, for each session in `firsts`, that no worker has begun the request at the given sequence.

        Call this for requests that a stopping worker returns to the server: without a note, the next worker
        would count their second delivery as an attempt. Does nothing for a request that has left the log, or
        if the session's note counts attempts at a request that has not.
        """
        async with task_group() as tasks:
            for key, seq in firsts.items():
                tasks.start_soon(self._excuse, key, seq)

    async def _excuse(self, key: SessionKey, seq: int) -> None:
        last = await self.note(key)
        counts = last.attempts > 0 and await self._journal.entry(last.seq) is not None
        if not counts and await self._journal.entry(seq) is not None:
            await self.store(key, AttemptNote(seq))

    async def end(self, key: SessionKey) -> None:
        """Remove a session's attempt notes from the log."""
        await self._journal.purge(key, "attempt")


class Doubt:
    """Tracks whether one session may have crashed a worker; if it may, holds the session's attempt note.

    Event loop only.
    """

    def __init__(self, key: SessionKey, attempts: Attempts) -> None:
        self.is_raised = False
        self.note = AttemptNote()  # empty unless raised
        self.first_seq = 0  # all requests below this sequence were delivered before
        self.begun_seq = 0  # the request that this worker has begun last, and survived until now
        self.num_failures = 0  # consecutive failures of this worker for unknown reasons
        self._key = key
        self._attempts = attempts
        self._tried_seq = 0  # the request for which this worker has stored a note
        self._uncounted_seq = 0  # the request whose attempt this worker has last survived

    def ring(self, delivery: Delivery) -> None:
        """Set `is_raised` if an earlier delivery of this request may have crashed a worker."""
        self.first_seq = delivery.first_seq
        self.is_raised = self.is_raised or delivery.again

    async def begin(self) -> None:
        """Set `is_raised`, and read the session's attempt note from the log."""
        self.is_raised, self.note = True, await self._attempts.note(self._key)

    def is_new(self, seq: int) -> bool:
        """Whether this worker must still store a note before it attempts the request at `seq`."""
        return self.is_raised and self._tried_seq != seq

    async def store(self, note: AttemptNote) -> None:
        """Store the note of an attempt before the attempt begins."""
        self.note, self._tried_seq = await self._attempts.store(self._key, note), note.seq

    async def uncount(self, seq: int, num_tokens: int) -> None:
        """Subtract the last attempt from the count, since this worker has survived it."""
        await self._attempts.uncount(self._key, seq, num_tokens, self.note)
        self._tried_seq = self.begun_seq = 0
        self._uncounted_seq = seq

    def may_count(self, seq: int) -> bool:
        """Whether the log has, or may have, a note of attempts at the request at `seq`."""
        return self.is_raised or self._uncounted_seq == seq

    async def clear(self) -> None:
        """Remove the session's attempt note, since this worker has survived the request."""
        if self.is_raised:
            await self._attempts.end(self._key)
            self.is_raised, self.note = False, AttemptNote()


class SharedLock:
    """A shared/exclusive lock, for work that must run alone. Event loop only."""

    def __init__(self) -> None:
        self._num = 0
        self._is_shut = False  # while a request runs alone, or waits for the others to end
        self._changed = Event()

    @asynccontextmanager
    async def enter(self, stopped: Callable[[], bool], *, alone: bool = False) -> AsyncIterator[None]:
        """Hold the lock inside the block: shared with others, or exclusively if `alone`.

        A caller whose `stopped()` is true enters without waiting, since it will not do the work. Call
        `recheck` when the result of `stopped()` may have changed.
        """
        while self._is_shut and not stopped():
            await self._changed.wait()
        shuts = alone and not self._is_shut
        self._is_shut = self._is_shut or shuts
        try:
            while shuts and self._num and not stopped():
                await self._changed.wait()
            self._num += 1
            try:
                yield
            finally:
                self._num -= 1
        finally:
            if shuts:
                self._is_shut = False
            if shuts or not self._num:
                self.recheck()

    def recheck(self) -> None:
        """Wake all waiting callers, in the order of their arrival, to check whether they can go on."""
        changed, self._changed = self._changed, Event()
        changed.set()
