"""Erases a forgotten session's KV also at workers that did not run when the session was forgotten.

The worker that forgets a session stores a note in the log: digests (marks) of the session's tokens, and which
processes have none of its KV any more. Each worker reads the notes that it has not carried out, also those
from before it started, and before it uses any KV. If a backup may have brought back some of its KV, it reads
all notes again. A note names neither the session nor its tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import nats.errors
import structlog
from anyio import sleep
from nats.js.errors import APIError

from cache.names.marks import ErasureNote, ErasureProgress, Marks, digest_of_name
from worker.process.clock import monotonic, time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cache.names.tokens import Tokens
    from turnkeep_client.subjects import SessionKey

    from .consistent_reads import StoredMessage
    from .journal import Journal

    LetGo = Callable[[Callable[[SessionKey], bool]], set[SessionKey]]

log = structlog.get_logger()

_PERIOD_S: Final = 10.0
#: How long notes are kept. A worker that was away for longer drops all its KV if there are new notes.
_KEPT_DAYS: Final = 90
_KEPT_S: Final = _KEPT_DAYS * 86400.0
#: How long to wait at a start until notes are tried again that could not be read or carried out.
_AGAIN_S: Final = 1.0
#: How often to remove old notes, and to store the time, by which a worker knows how long it was away.
_OFTEN_S: Final = 3600.0


#: In notes the name of a remote tier, beside those of processes.
TIER: Final = "tier"


class Copies(Protocol):
    """A worker's own snapshots, or those in its remote tier.

    Implemented by `cache.index.eraser.Eraser` and `cache.index.tier_eraser.TierEraser`.
    """

    @property
    def put_back(self) -> frozenset[bytes]:
        """Marks of snapshots that may have come back after notes on them were carried out, as from a backup.

        Such notes are carried out again; the next `note_erased` ends that.
        """

    async def erase_marked(self, tenant: str, marks: Marks) -> bool:
        """Erase the copies of a forgotten token sequence; return false if this has to be tried again."""

    async def clear(self) -> bool:
        """Erase all copies of KV; return false if this has to be tried again."""

    async def erased_up_to(self, log: str) -> ErasureProgress | None:
        """Return the last argument of `note_erased` for the log with this name; None if there is none."""

    async def note_erased(self, erased: ErasureProgress) -> None:
        """Store up to which note of a log all are carried out. Raises `OSError` if it could not be stored."""


class Erasures:
    """Stores notes about forgotten sessions, and carries out other workers' notes. Event loop only."""

    def __init__(self, journal: Journal, boot: str, copies: Copies | None) -> None:
        """`boot` is the worker process's, or `TIER`; `copies` is None if it stores no snapshots."""
        self._journal = journal
        self._boot = boot
        self._copies = copies
        self._carried_out: set[tuple[int, float]] = set()  # only notes behind one that must wait
        self._log = ""
        self._noted: ErasureProgress | None = None  # the only record of it if there are no `copies`
        self._was_put_back = True  # whether the copies may be older than what a note says of them
        self._late: set[SessionKey] | None = None  # were at work as this worker began to drop all its KV
        self._cleaned_s = -_OFTEN_S

    async def note(self, key: SessionKey, tokens: Tokens, shared: int, done: Iterable[str]) -> None:
        """Store a note that a session is forgotten, before its tokens leave the log.

        It concerns all processes but those in `done`, and all tokens but the first `shared`. Stores none if
        these are all.
        """
        if len(tokens) > shared:
            note = ErasureNote(
                digest_of_name(str(key)), Marks.of(key.tenant, tokens.packed(), shared), tuple(done)
            )
            await self._journal.note_erasure(key.tenant, msgspec.json.encode(note))

    async def catch_up(self, let_go: LetGo) -> None:
        """Carry out all notes, however long that takes to read them; for `let_go` see `run`."""
        while True:
            try:
                return await self._look(let_go)
            except (nats.errors.Error, APIError, OSError) as error:
                log.warning("waiting until notes of what was forgotten are carried out", error=str(error))
            await sleep(_AGAIN_S)

    async def run(self, let_go: LetGo, is_first: Callable[[], bool]) -> None:
        """Carry out notes until cancelled. A worker removes old notes only while its `is_first()` is true.

        `let_go(match)` drops matching sessions from memory and device; returns those at work, which stay.
        """
        while True:
            try:
                await self._look(let_go)
                if is_first() and monotonic() > self._cleaned_s + _OFTEN_S:
                    await self._clean()
                    self._cleaned_s = monotonic()
            except (nats.errors.Error, APIError, OSError) as error:
                log.warning("notes of what was forgotten are not carried out yet", error=str(error))
            await sleep(_PERIOD_S)

    async def _look(self, let_go: LetGo) -> None:
        self._log = self._log or await self._journal.log_name()
        server = self._journal.server
        noted = await self._copies.erased_up_to(self._log) if self._copies is not None else self._noted
        known = noted or ErasureProgress(self._log, 0, time())
        if not await self._is_there(known):
            known = known._replace(seq=0, stored_s=0.0)
        if time() - known.time_s > _KEPT_S and not await self._drop_all(let_go, known.seq):
            return
        self._was_put_back = self._noted is None or known.seq < self._noted.seq
        doubtful = self._copies.put_back if self._copies is not None else frozenset()
        is_empty = noted is None and self._boot != TIER
        done, stored_s = await self._carry_out(let_go, known, doubtful, is_empty=is_empty)
        is_due = self._noted is None or doubtful or not 0 < time() - known.time_s < _OFTEN_S
        if server != self._journal.server:  # it may have lost what was read first
            await self._look(let_go)
        elif done > known.seq or (done == known.seq and is_due):
            progress = ErasureProgress(self._log, done, time(), stored_s)
            if self._copies is not None:
                await self._copies.note_erased(progress)
            self._noted = progress

    async def _is_there(self, known: ErasureProgress) -> bool:
        """Whether the log has the note `known`, and not another one at its sequence.

        A server that loses its last entries (a power cut, a backup) uses their sequences again.
        """
        if not known.seq:
            return True
        notes, _ = await self._journal.erasure_notes(known.seq - 1)
        return any((one.seq, one.stored.timestamp()) == (known.seq, known.stored_s) for one in notes[:1])

    async def _drop_all(self, let_go: LetGo, after: int) -> bool:
        """Drop all KV if there are notes after `after`; return false if this has to be continued later.

        Sessions that are at work keep their KV until their turns have ended. Only after that are the copies
        erased, as these turns may add some.
        """
        notes, _ = await self._journal.erasure_notes(after)
        if not notes:
            return True
        late = self._late
        if late is None:
            log.warning(
                "this worker was away so long that notes of what to erase have expired: it drops all its KV",
                days=_KEPT_DAYS,
            )
        self._late = let_go(lambda key: late is None or key in late)
        if self._late or not (self._copies is None or await self._copies.clear()):
            return False
        self._late = None
        return True

    async def _carry_out(
        self, let_go: LetGo, known: ErasureProgress, doubtful: frozenset[bytes], *, is_empty: bool
    ) -> tuple[int, float]:
        """Carry out the notes after `known`, and those before that concern a `doubtful` mark.

        With `is_empty`, no KV was stored before these notes, so none concerns any.
        Returns the sequence up to which all are carried out, and when the server stored that note.
        """
        more, is_left = 1, False
        done = after = (0, 0.0) if doubtful else (known.seq, known.stored_s)
        while more:
            notes, more = await self._journal.erasure_notes(after[0])
            for entry in notes:
                after = entry.seq, entry.stored.timestamp()
                marks = None if entry.seq > known.seq and not is_empty else doubtful
                if after in self._carried_out or await self._erase(let_go, entry, marks):
                    self._carried_out.add(after)
                else:
                    is_left = True
                done = done if is_left else after
        self._carried_out = {note for note in self._carried_out if note > done}
        return done

    async def _erase(self, let_go: LetGo, entry: StoredMessage, marks: frozenset[bytes] | None) -> bool:
        """Carry out a note; return false if this has to be tried again, for instance after a turn.

        With `marks`, a note that concerns none of them is carried out already.
        """
        tenant = entry.headers["Nats-Subject"].rpartition(".")[2]
        try:
            note = msgspec.json.decode(entry.body, type=ErasureNote)
        except msgspec.MsgspecError:
            return True  # not written by a worker
        is_done = self._boot in note.done and not self._was_put_back
        if is_done or (marks is not None and not note.marks.concerns(marks)):
            return True
        if let_go(lambda key: key.tenant == tenant and digest_of_name(str(key)) == note.session):
            return False
        return self._copies is None or await self._copies.erase_marked(tenant, note.marks)

    async def _clean(self) -> None:
        """Remove notes that are too old. The last note stays, since it shows that there were some."""
        await self._journal.end()
        notes, _ = await self._journal.erasure_notes(0)
        while len(notes) > 1:
            for entry in notes[:-1]:
                if self._journal.age_s(entry) < _KEPT_S:
                    return
                await self._journal.delete(entry.seq)
            notes, _ = await self._journal.erasure_notes(0)
