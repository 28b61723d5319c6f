"""A session's checkpoints in the log: stored behind its answers, found again when it is opened.

What is stored costs what is new since the checkpoint before. A session that is opened reads its checkpoints
and the end of its log; a checkpoint that the log does not confirm is ignored, and the whole log is read.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import structlog

from turnkeep_client.log import CHECKPOINT_HEADER, HISTORY_HEADER
from worker.concurrency import in_thread
from worker.wire.journal import answers

from .checkpoint import Checkpoint, CheckpointMessage, Link, digest, restore

if TYPE_CHECKING:
    from anyio import TaskHandle
    from anyio.abc import TaskGroup

    from turnkeep_client.subjects import SessionKey
    from worker.models.tokenizer import Tokenizer
    from worker.wire.journal import Entry, Journal

    from .checkpoint import Delta

log = structlog.get_logger()

#: So many wait for a log that takes nothing; then there are no more until the session is opened again.
_MAX_WAITING: Final = 64
#: A message holds so much of a checkpoint; base64 and the rest take a third more.
_PART_BYTES: Final = 128 * 2**10


class Trails:
    """What the trails of a worker share; `tasks` are those that store. Event loop only."""

    def __init__(
        self, journal: Journal, tokenizer: Tokenizer, tasks: TaskGroup, *, max_message_bytes: int
    ) -> None:
        self.journal = journal
        self.tokenizer = tokenizer
        self.tasks = tasks
        self.part_bytes = min(_PART_BYTES, max_message_bytes // 2)


class Trail:
    """One session's checkpoints, for as long as its record is in memory. Event loop only."""

    def __init__(self, key: SessionKey, trails: Trails) -> None:
        self.key = key
        #: The last message that is stored: results name it.
        self.link: Link | None = None
        self._trails = trails
        self._waiting: deque[Delta] = deque()
        self._storing: TaskHandle[None] | None = None
        self._is_storing = False
        self._ended = False

    def add(self, delta: Delta) -> None:
        """Store a checkpoint, once those before it are."""
        if self._ended:
            return
        self._waiting.append(delta)
        if not self._is_storing:
            self._is_storing = True
            self._storing = self._trails.tasks.start_soon(self.store, name=f"checkpoint {self.key}")

    def end(self) -> None:
        """Store nothing any more, but what is on its way."""
        self._ended = True
        self._waiting.clear()
        if self._storing is not None:
            self._storing.cancel()

    async def finish(self) -> None:
        """End it, and wait for what is on its way: so it is removed with the rest of the session."""
        self._ended = True
        self._waiting.clear()
        if self._storing is not None:
            await self._storing.wait()

    async def store(self) -> None:
        """Store what waits; what cannot be stored now is tried again with the next one."""
        try:
            while self._waiting:
                link = await self._store(self._waiting[0])
                if link is None or self._ended:
                    if len(self._waiting) > _MAX_WAITING:
                        log.warning("giving up a session's checkpoints until it is opened again")
                        self._ended = True
                        self._waiting.clear()
                    return
                self.link = link
                self._waiting.popleft()
        finally:
            self._is_storing = False

    async def _store(self, delta: Delta) -> Link | None:
        trails = self._trails
        body = await in_thread(lambda: delta.pack(trails.tokenizer.fingerprint))
        link = self.link
        for start in range(0, len(body), trails.part_bytes):
            if self._ended:
                return None
            part = body[start : start + trails.part_bytes]
            message = CheckpointMessage(part, begins=start == 0, before=str(link) if link else "").pack()
            seq = await trails.journal.store_checkpoint(self.key, message)
            if seq is None:
                return None
            link = Link(seq, digest(message))
        return link

    async def find(self, *, whole: bool) -> Checkpoint | None:
        """Find the checkpoint that the last result names; None without one that the log confirms."""
        journal = self._trails.journal
        named = await journal.last_result(self.key)
        text = named.headers.get(CHECKPOINT_HEADER) if named else None
        if named is None or text is None:
            return None
        link = Link.parse(text)
        bodies = await self._read(link)
        tokenizer = self._trails.tokenizer
        found = await in_thread(lambda: restore(bodies, tokenizer, tokenizer.fingerprint, whole=whole))
        if not found or not await self._confirmed(found, named):
            log.warning("reading a session's whole log: its checkpoint is not one of this log and tokenizer")
            return None
        self.link = link
        return found

    async def _read(self, link: Link | None) -> list[bytes]:
        """Read a checkpoint and all before it, in their order; none where one is not what it was."""
        parts: list[bytes] = []
        bodies: list[bytes] = []
        while link is not None:
            body = await self._trails.journal.checkpoint(link.seq)
            message = CheckpointMessage.unpack(body, link) if body is not None else None
            if message is None:
                return []
            parts.append(message.part)
            if message.begins:
                bodies.append(b"".join(reversed(parts)))
                parts.clear()
            link = Link.parse(message.before)
        return bodies[::-1]

    async def _confirmed(self, found: Checkpoint, named: Entry) -> bool:
        """Say whether the log has these tokens after that request, and the result that names the checkpoint.

        Both must be the first results of requests of the session: others are nobody's, and only those are
        what a whole fold would have believed.
        """
        journal = self._trails.journal
        naming = answers(named)
        requests, _ = await journal.page(self.key, "in", naming - 1) if naming else ([], False)
        if naming <= found.in_seq or not requests or requests[0].seq != naming:
            return False
        history: str | None = None
        after, more, confirmed = found.in_seq, True, False
        while more and not confirmed:
            entries, more = await journal.page(self.key, "out", after)
            for entry in entries:
                after, seq = entry.seq, answers(entry)
                if seq == found.in_seq and history is None:
                    history = entry.headers.get(HISTORY_HEADER, "")
                elif seq == naming and not confirmed:
                    if entry.seq != named.seq:
                        return False
                    confirmed = True
        return confirmed and history == await in_thread(found.history.digest)
