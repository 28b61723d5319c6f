"""How often a request was begun by workers that died over it, and what is done with one that ends them all.

Counted in the log, beside the session: what is begun for the first time costs nothing. What a worker may
have died over is noted before it is begun again, with how far it had come; an attempt that got further does
not count. The last attempt is made alone on the device, so that nobody fails for having been near.
"""

from __future__ import annotations

import contextlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
from anyio import Event
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from turnkeep_client.subjects import SessionKey
    from worker.wire.journal import Journal


class AttemptNote(Struct, frozen=True, omit_defaults=True):
    """What is known of a session in doubt: attempts at the request at `seq`, and at reading the log.

    `tokens` of the request's answer had been published before the attempt.
    """

    seq: int = 0
    attempts: int = 0
    tokens: int = 0
    reads: int = 0

    def then(self, seq: int, num_tokens: int) -> AttemptNote:
        """Return the next attempt at the request at `seq`, of which so many tokens are published by now."""
        # Where nothing is known of it, the life before this one may have begun it.
        last = self if self.seq == seq else AttemptNote(seq, 1)
        return AttemptNote(seq, last.attempts + (num_tokens <= last.tokens), num_tokens)


class Attempts:
    """Reads and writes the notes. Event loop only."""

    def __init__(self, journal: Journal, max_attempts: int) -> None:
        self._journal = journal
        self.max_attempts = max_attempts

    async def begin_reading(self, key: SessionKey) -> AttemptNote:
        """Note that the log of a session in doubt is read once more."""
        body = await self._journal.last(key, "attempt")
        note = AttemptNote()
        with contextlib.suppress(msgspec.DecodeError):  # somebody else's
            note = msgspec.json.decode(body or b"{}", type=AttemptNote)
        return await self.store(key, msgspec.structs.replace(note, reads=note.reads + 1))

    async def store(self, key: SessionKey, note: AttemptNote) -> AttemptNote:
        """Store what is about to be tried."""
        await self._journal.append(key, "attempt", msgspec.json.encode(note))
        return note

    async def uncount(self, key: SessionKey, seq: int, num_tokens: int, last: AttemptNote) -> None:
        """Note that the attempt was ended by an orderly stop: it does not count."""
        attempts = last.attempts if last.seq == seq else 1
        await self.store(key, AttemptNote(seq, attempts - 1, num_tokens))

    async def end(self, key: SessionKey) -> None:
        """Remove the notes."""
        await self._journal.purge(key, "attempt")


class DeviceLock:
    """Requests on the device, and the one that must be there alone. Event loop only."""

    def __init__(self) -> None:
        self._num = 0
        self._is_shut = False  # while somebody is alone, or waits for the others to leave
        self._changed = Event()

    @asynccontextmanager
    async def enter(self, given_up: Callable[[], bool], *, alone: bool = False) -> AsyncIterator[None]:
        """Be there, with others or alone, once that is possible.

        Whoever has `given_up` leaves the device alone and gets by at once; `recheck` after it did.
        """
        while self._is_shut and not given_up():
            await self._changed.wait()
        shuts = alone and not self._is_shut
        self._is_shut = self._is_shut or shuts
        try:
            while shuts and self._num and not given_up():
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
        """Have all who wait look whether they still must, in the order in which they came."""
        changed, self._changed = self._changed, Event()
        changed.set()
