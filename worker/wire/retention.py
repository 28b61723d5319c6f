"""Removes from the log what it need not keep: answered requests, and sessions.

Nothing is removed because of an entry that a power cut may still lose (`synced`): neither what a result
answers, nor what a close ends. Else the entry might be lost, and the removal stay.

A result has its request, so while the log is filling, requests leave `in` once they have results. They are
overwritten like the entries of forgotten sessions: the session may be forgotten later, and a server
overwrites nothing that it has removed before. Requests leave in their order, so the first one that a session
has on `in` may only be followed by newer ones, and the delivery of a waiting request stays valid.

Closed sessions leave after a time, or if the log is full; forgotten ones soon.

The entries of forgotten sessions are also overwritten in the server's files, one by one (`overwriting`).
This may take minutes. A removal may be interrupted, so whoever reads a session's log ignores what is left of
it before a close, if that forgets it or cannot be continued.

Before the result of a close is stored, a note is stored on the session's subject `closed`. So the note exists
even if the worker crashes in between; it takes effect once the result exists. After a crash the close is
noted again: its first note counts. Entries of an open session always stay.

Between a close and its result, the log may contain requests for the next session of the same name, and
results of requests before the close.

A session's last result must stay while any worker may have read only an older one. Without the last result,
the older one would be the last again, and that worker's late commit would pass the fence (see `journal`).
Therefore the close of a recently closed session, and its result, stay.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakValueDictionary

import nats.errors
import structlog
from anyio import Event, Lock, move_on_after, sleep
from msgspec import UNSET
from nats.js.errors import APIError

from turnkeep_client.checkpoints import Link, backwards
from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.log import CLOSE_HEADER, PARTS_HEADER
from turnkeep_client.messages import (
    Close,
    Closed,
    Failed,
    Generated,
    decode_asked,
    decode_request,
    decode_result,
)
from worker.process.concurrency import task_group

from .intake import session_of
from .log_room import open_bytes
from .synced import SyncedEntries
from .written import answered_seq

if TYPE_CHECKING:
    from collections.abc import Callable

    from turnkeep_client.subjects import SessionKey

    from .consistent_reads import StoredMessage
    from .journal import Journal

log = structlog.get_logger()

_PERIOD_S: Final = 10.0
#: Above this share of the log's limit closed sessions are removed early, until the log is below `_RELIEVED`.
_NEARLY_FULL: Final = 0.9
_RELIEVED: Final = 0.8
#: A note without a result after this time belongs to a close that was never carried out, unless that waits.
_STALE_S: Final = 3600.0
#: How long the result of a close stays if it is the session's last. A worker that knows only an older one was
#: stalled or cut off: the server closes such a connection after about six minutes; its late commits are lost.
_LAST_S: Final = 900.0
#: Above this share of the log's limit answered requests leave it. Not always: each removal overwrites, for
#: which the server rewrites a file of up to 8 MB.
_FILLING: Final = 0.5
_FORGET: Final = b"forget"


class _Closing(NamedTuple):
    """A close in the log: the entry of its result, the result, and whether the close asks to `forget`."""

    entry: StoredMessage
    result: Closed
    forgets: bool


class Retention:
    """Removes closed sessions and answered requests from the log. Event loop only."""

    def __init__(
        self,
        journal: Journal,
        *,
        closed_ttl_s: float | None,
        max_bytes: int,
        sync_s: float,
        is_first: Callable[[], bool] = lambda: True,
    ) -> None:
        """`max_bytes` is the log's limit, until `run` reads it; near it, closed sessions are removed early.

        Without `closed_ttl_s` they stay until then; else until that many seconds after their close. The
        server syncs its files every `sync_s` seconds; with 0, before it acknowledges an entry.
        `is_first` says whether this worker, and no other one of the prefix, removes them.
        """
        self._is_first = is_first
        self._journal = journal
        self._ttl_s = closed_ttl_s
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._synced = SyncedEntries(journal, sync_s)
        self._seen_seq = 0  # notes up to this sequence were handled, or are not due yet
        self._forgotten: set[int] = set()  # later notes that were handled
        self._stripped: set[int] = set()  # notes of sessions of which only the close is left
        self._server = ""  # the server process that has these notes
        self._nearly_full = False
        self._locks: WeakValueDictionary[SessionKey, Lock] = WeakValueDictionary()
        self._woken = Event()

    async def is_full(self) -> bool:
        """Whether the log is full: then no turn may begin, as its result would use the reserve."""
        if self.num_bytes > open_bytes(self.max_bytes):  # there may be room again
            with contextlib.suppress(nats.errors.Error, APIError, OSError):
                self.num_bytes, _ = await self._journal.end()
        return self.num_bytes > open_bytes(self.max_bytes)

    def lock(self, key: SessionKey) -> Lock:
        """Return a session's lock, held while its log is read page by page, closed, or removed."""
        return self._locks.setdefault(key, Lock(fast_acquire=True))

    async def note_close(self, key: SessionKey, seq: int, *, forget: bool) -> int | None:
        """Store a note that a session is about to be closed by the request at `seq`.

        With `forget`, returns how many entries will be removed (0 if the server does not answer); else None.
        """
        num_entries = await self._journal.count(key) if forget else None
        await self._journal.append(key, "closed", _FORGET if forget else b"", {CLOSE_HEADER: str(seq)})
        return num_entries and num_entries - 1  # not the close itself

    def wake(self) -> None:
        """Have `run` look for sessions to remove now: the result of a close that forgets one was stored."""
        self._woken.set()

    async def run(self) -> None:
        """Remove periodically what need not stay in the log, until cancelled; log errors, and try again."""
        async with task_group() as tasks:
            tasks.start_soon(self._run_queue)
            await self._run_closed()

    async def _run_queue(self) -> None:
        while True:
            try:
                await self.remove_answered()
            except (nats.errors.Error, APIError, OSError) as error:
                log.warning("answered requests could not be removed, trying again", error=str(error))
            await sleep(_PERIOD_S + self._synced.after_s)

    async def remove_answered(self) -> None:
        """While the log is filling, remove requests that have results, unless another worker does that."""
        if self.num_bytes <= _FILLING * self.max_bytes or not self._is_first():
            return
        for queue in await self._journal.queues(self._synced.has):
            for seq in queue.answered:
                if not self._synced.has(seq):  # the server has restarted: another entry may be there
                    return
                await self._journal.delete(seq)

    async def _run_closed(self) -> None:
        while True:
            self._woken = Event()
            try:
                is_first = self._is_first()  # the size is lowered before the removals, which make room
                self.max_bytes = await self._journal.room.restore(lowers=is_first)
                if is_first:
                    await self.sweep()
                else:
                    self.num_bytes = await self._synced.look()
            except (nats.errors.Error, APIError, OSError) as error:
                log.warning("closed sessions could not be removed, trying again", error=str(error))
            with move_on_after(_PERIOD_S):
                await self._woken.wait()

    async def sweep(self) -> None:
        """Remove closed sessions that are due; if the log is nearly full, more of them, oldest first."""
        self.num_bytes = await self._synced.look()
        if self._server != self._journal.server:  # other notes may have their sequences now
            self._server, self._seen_seq = self._journal.server, 0
            self._forgotten.clear()
            self._stripped.clear()
        full = self.num_bytes > _NEARLY_FULL * self.max_bytes
        after, more, unfinished = 0, 1, 0
        while more:
            notes, more = await self._journal.close_notes(after)
            for note in notes:
                after = note.seq
                if not await self._try_to_follow(note, at_once=full):
                    unfinished = unfinished or note.seq
                if full:
                    self.num_bytes, _ = await self._journal.end()
                    full = self.num_bytes > _RELIEVED * self.max_bytes
                elif after < self._seen_seq and not self._is_due(note):
                    after, more = self._seen_seq, 1  # the notes in between are younger, so not due either
                    break
        self._seen_seq = unfinished - 1 if unfinished else max(after, self._seen_seq)
        self._forgotten = {seq for seq in self._forgotten if seq > self._seen_seq}
        nearly_full = self.num_bytes > _NEARLY_FULL * self.max_bytes
        if nearly_full and not self._nearly_full:
            log.warning(
                "the log is nearly full, and no closed session is left in it: when it is full it refuses"
                " requests; close sessions, or raise log_max_bytes",
                bytes=self.num_bytes,
                max_bytes=self.max_bytes,
            )
        self._nearly_full = nearly_full

    def _is_due(self, note: StoredMessage) -> bool:
        return self._ttl_s is not None and self._journal.age_s(note) >= self._ttl_s

    async def _try_to_follow(self, note: StoredMessage, *, at_once: bool) -> bool:
        """Carry out a note of a close if it is due; False if it must be read again later."""
        try:
            return await self._follow(note, at_once=at_once)
        except APIError as error:  # the server cannot remove an entry; perhaps it can remove others
            log.warning("a closed session could not be removed, trying again", seq=note.seq, error=str(error))
            return False

    async def _follow(self, note: StoredMessage, *, at_once: bool) -> bool:
        """Carry out a note of a close if it is due.

        Returns False if the close has no result yet, or one that a power cut may lose. Raises `APIError`.
        """
        key = session_of(note.headers["Nats-Subject"])
        due = at_once or self._is_due(note)
        forget = note.body == _FORGET and note.seq > self._seen_seq and note.seq not in self._forgotten
        is_stripped = note.seq in self._stripped and self._journal.age_s(note) < _LAST_S
        if key is None or not (due or forget) or is_stripped:
            return True
        if not self._synced.has(note.seq):  # so its result neither
            return False
        waits = self._journal.age_s(note) < _STALE_S or await self._waits(key, note)
        closed = await self._find_close(key, note.seq)
        if closed is None:
            if not waits:
                await self._journal.delete(note.seq)
            return not waits
        if not self._synced.has(closed.entry.seq):
            return False
        if closed.forgets:  # without the lock: this may take minutes
            await self._remove_before(key, note, closed)
            await self._journal.chunks.remove(key, closed.result.seq or 0)
        if due:  # last: it removes the note, by which an interrupted removal is continued
            async with self.lock(key):
                if not closed.forgets:
                    await self._remove_before(key, note, closed)
                await self._remove(key, note, closed)
        self._forgotten.add(note.seq)
        return True

    async def _remove(self, key: SessionKey, note: StoredMessage, closed: _Closing) -> None:
        """Remove a close and its result, unless a worker may still know an older one as the session's last.

        Requests after the close stay: they belong to a new session.
        """
        close_seq, closed_seq = closed.result.seq or 0, closed.entry.seq
        is_last = await self._journal.last_seq(key, "out") == closed_seq
        requests, more = await self._journal.page(key, "in", close_seq)
        results, _ = await self._journal.page(key, "out", close_seq)
        is_answered = not more and {one.seq for one in requests} <= {answered_seq(one) for one in results}
        is_followed = any(entry.seq > closed_seq and self._synced.has(entry.seq) for entry in results)
        is_young = self._journal.age_s(closed.entry) < _LAST_S
        if not is_followed and (not is_last or is_young or not is_answered):
            self._stripped.add(note.seq)
            return
        self._stripped.discard(note.seq)
        if is_last:
            await self._journal.remove(key, closed_seq + 1)
            return
        # If the close's result follows another one, it would seem lost: it stays until the next close.
        gone = (close_seq, closed_seq) if results and results[0].seq == closed_seq else ()
        notes = await self._notes(key, note)
        for seq in (*gone, *notes):  # in this order: a request must not lack its result
            await self._journal.delete(seq)

    async def _remove_before(self, key: SessionKey, note: StoredMessage, closed: _Closing) -> None:
        """Remove all entries up to a close, and later ones that belong to requests before it.

        Of the images those stored before the first note of the close: later ones are of the next session of
        this name.

        Requests first: a request must not lack its result. Overwrites them if the close forgets the session.
        """
        close_seq, closed_seq, overwrites = closed.result.seq or 0, closed.entry.seq, closed.forgets
        await self._journal.remove(key, close_seq, "in", overwrites=overwrites)
        await self._journal.remove(key, close_seq, overwrites=overwrites)
        await self._journal.remove(key, closed_seq, "dead", overwrites=overwrites)
        first_note, *_ = await self._notes(key, note)
        await self._journal.remove(key, first_note, "image.*", overwrites=overwrites)
        kept = set[int]()
        async for entry in self._journal.every(key, "out", close_seq):
            if entry.seq >= closed_seq:
                break
            if answered_seq(entry) < close_seq:
                await self._journal.delete(entry.seq)
            else:
                kept |= await self._linked(entry)
        await self._journal.remove(key, closed_seq, "checkpoint", overwrites=overwrites, kept=kept)

    async def _notes(self, key: SessionKey, note: StoredMessage) -> list[int]:
        """Return the sequences of all notes of a note's close, in order."""
        close_seq = note.headers.get(CLOSE_HEADER)
        notes, _ = await self._journal.page(key, "closed", 0)
        others = (one.seq for one in notes if close_seq and one.headers.get(CLOSE_HEADER) == close_seq)
        return sorted({note.seq, *others})

    async def _linked(self, entry: StoredMessage) -> set[int]:
        """Return the sequences of the messages that have a result's request or tokens, if these are long.

        A later request that was cancelled while the close ran has its result before that of the close.
        """
        asked, found = decode_asked(entry.body), set[int]()
        for text in (entry.headers.get(PARTS_HEADER, ""), asked.link if asked else ""):
            link = Link.parse(text)
            async for message in backwards(link, self._journal.entry):
                found |= {link.seq} if link else set()
                link = Link.parse(message.before) if message else None
        return found

    async def _waits(self, key: SessionKey, note: StoredMessage) -> bool:
        """Whether the request of a note's close is in the log, and has no result."""
        close_seq = note.headers.get(CLOSE_HEADER, "")
        after = int(close_seq) if close_seq.isdecimal() else 0
        requests, _ = await self._journal.page(key, "in", after - 1)
        if not requests or requests[0].seq != after:
            return False
        async for entry in self._journal.every(key, "out", after):
            if answered_seq(entry) == after:
                return False
        return True

    async def _find_close(self, key: SessionKey, note_seq: int) -> _Closing | None:
        """Find the close of a note; None if the close has no result, or if no worker wrote the note.

        Results of later requests, which were cancelled meanwhile, may precede the result of the close.
        """
        async for entry in self._journal.every(key, "out", note_seq):
            with contextlib.suppress(InvalidMessageError):
                result = decode_result(entry.body)
                if isinstance(result, Closed) and result.repeat_of is None:
                    return _closing(entry, result)
                if not (isinstance(result, Failed) or (isinstance(result, Generated) and not result.tokens)):
                    return None
        return None


def _closing(entry: StoredMessage, result: Closed) -> _Closing | None:
    """Return a close whose result has its request; None if no worker wrote the result."""
    asked = decode_asked(entry.body)
    request = decode_request(bytes(asked.request)) if asked and asked.request is not UNSET else None
    return _Closing(entry, result, bool(request.forget)) if isinstance(request, Close) else None
