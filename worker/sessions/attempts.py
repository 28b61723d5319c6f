"""Counts attempts to answer a request that may have crashed a worker.

The count is stored in the log, beside the session's entries. The first attempt at a request stores nothing.
Before each later attempt a note is stored, with the number of tokens published so far. An attempt that
published more tokens than the previous one does not count, nor does one while another worker still makes the
previous one: two workers may take a session at once if the server has lost the claims. The last attempt runs
alone on the device, so that a crash harms no other request.
"""

from __future__ import annotations

import contextlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
from anyio import Event
from msgspec import Struct
from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from turnkeep_client.subjects import SessionKey
    from worker.wire.intake import Delivery
    from worker.wire.journal import Journal


class AttemptNote(Struct, frozen=True, omit_defaults=True):
    """Counts attempts at the request at `seq` that may have crashed a worker.

    `tokens` is the number of the answer's tokens that were published before the last attempt, `by` names the
    run of the worker that makes this attempt.
    """

    seq: int = 0
    attempts: int = 0
    tokens: int = 0
    by: str = ""

    def then(self, seq: int, num_tokens: int, *, is_first: bool = False) -> AttemptNote:
        """Return the note of the next attempt at the request at `seq`, with `num_tokens` published by now.

        `is_first` says that no worker before this one had the request.
        """
        # Without a note, the worker before this one may have started the request.
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
    ) -> None:
        """`me` names this run of the worker; `runs(name)` says whether another worker's run still answers."""
        self._journal = journal
        self.max_attempts = max_attempts
        self._me = me
        self._runs = runs

    async def note(self, key: SessionKey) -> AttemptNote:
        """Read a session's attempt note; an empty one if no worker has written any."""
        found = await self._journal.last(key, "attempt")
        with contextlib.suppress(msgspec.DecodeError):  # not written by a worker
            return msgspec.json.decode(found.body if found else b"{}", type=AttemptNote)
        return AttemptNote()

    async def is_under_way(self, note: AttemptNote) -> bool:
        """Whether another worker is still making the attempt that a note counts, and so has not crashed."""
        return self._runs is not None and note.by != self._me and await self._runs(note.by)

    async def store(self, key: SessionKey, note: AttemptNote) -> AttemptNote:
        """Store a note before the attempt that it counts; return it with this run's name."""
        note = replace(note, by=self._me)
        await self._journal.append(key, "attempt", msgspec.json.encode(note))
        return note

    async def uncount(self, key: SessionKey, seq: int, num_tokens: int, last: AttemptNote) -> None:
        """Subtract the last attempt from the count: the worker did not crash, it was stopped normally."""
        attempts = last.attempts if last.seq == seq else 1
        await self.store(key, AttemptNote(seq, attempts - 1, num_tokens))

    async def excuse(self, firsts: Mapping[SessionKey, int]) -> None:
        """Note that no worker has begun the requests at these sequences, each the first one of its session.

        For requests that a stopping worker only returned to the server: without a note, the next worker would
        count their second delivery as an attempt.
        """
        for key, seq in firsts.items():
            await self.store(key, AttemptNote(seq))

    async def end(self, key: SessionKey) -> None:
        """Remove a session's attempt notes from the log."""
        await self._journal.purge(key, "attempt")


class Doubt:
    """Tracks whether one session may have crashed a worker, and its attempt note if so. Event loop only."""

    def __init__(self, key: SessionKey, attempts: Attempts) -> None:
        self.is_raised = False
        self.note = AttemptNote()  # if raised
        self.first_seq = 0  # earlier requests were delivered to another worker before
        self.num_failures = 0  # consecutive failures of this worker for unknown reasons
        self._key = key
        self._attempts = attempts
        self._tried_seq = 0  # the request whose attempt this worker has stored

    def ring(self, delivery: Delivery) -> None:
        """Raise the doubt if an earlier delivery of the request may have crashed a worker."""
        self.first_seq = delivery.first_seq
        self.is_raised = self.is_raised or delivery.again

    async def begin(self) -> None:
        """Raise the doubt, and read the session's attempt note."""
        self.is_raised, self.note = True, await self._attempts.note(self._key)

    def is_new(self, seq: int) -> bool:
        """Whether a note of an attempt at the request at `seq` must be stored, and is not stored yet."""
        return self.is_raised and self._tried_seq != seq

    async def store(self, note: AttemptNote) -> None:
        """Store the note of an attempt before the attempt begins."""
        self.note, self._tried_seq = await self._attempts.store(self._key, note), note.seq

    async def uncount(self, seq: int, num_tokens: int) -> None:
        """Subtract the last attempt from the count, since this worker has survived it."""
        await self._attempts.uncount(self._key, seq, num_tokens, self.note)
        self._tried_seq = 0

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
        """Hold the lock, shared with others or `alone`.

        A caller for which `stopped()` is true does not wait, since it will not do the work. Call `recheck`
        when the result of `stopped()` may have changed.
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
