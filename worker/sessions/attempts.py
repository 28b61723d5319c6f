"""Counts attempts to answer a request that may have crashed a worker.

The count is stored in the log, beside the session's entries. A worker stores nothing before the first attempt
at a request. Before each later attempt it stores a note with the number of tokens published until then. Some
attempts do not count: those that published further tokens, and those of workers that still run. Such a worker
may have seemed to have ended, as while its machine was asleep, or the server has lost its claim. `giving_up`
decides by these notes.
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

    async def store(self, key: SessionKey, note: AttemptNote) -> None:
        """Store the note of an attempt that this worker makes, before the attempt begins."""
        await self._journal.append(key, "attempt", msgspec.json.encode(replace(note, by=self._me)))

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
