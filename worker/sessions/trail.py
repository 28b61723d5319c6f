"""A session's checkpoints in the log: stores them after answers, and finds them when the session is opened.

A checkpoint has only the changes since the previous one. To open a session, its checkpoints and the end of
its log are read; if the log does not confirm a checkpoint, the whole log is read instead. The whole log of a
fork begins with a base, which has all of its parent's history up to the fork.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog
from anyio import sleep

from turnkeep_client.checkpoints import CheckpointMessage, Link, backwards, digest
from turnkeep_client.log import CHECKPOINT_HEADER, HISTORY_HEADER
from worker.process.concurrency import in_thread
from worker.wire.journal import answers

from .checkpoint import Checkpoint, Delta, has_start, restore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio import TaskHandle
    from anyio.abc import TaskGroup

    from turnkeep_client.subjects import SessionKey
    from worker.models.tokenizer import Tokenizer
    from worker.wire.journal import Entry, Journal

    from .history import History

log = structlog.get_logger()

#: Limit of waiting checkpoints; above it, the session stores none until it is opened again.
_MAX_WAITING: Final = 64
#: Bytes of a checkpoint in one message; base64 and JSON add a third.
_PART_BYTES: Final = 128 * 2**10
#: Longest pause between two attempts to store a base.
_MAX_PAUSE_S: Final = 5.0


class Trails:
    """The services that all trails of a worker share; `tasks` runs the storing tasks. Event loop only."""

    def __init__(
        self, journal: Journal, tokenizer: Tokenizer, tasks: TaskGroup, *, max_message_bytes: int
    ) -> None:
        self.journal = journal
        self.tokenizer = tokenizer
        self.tasks = tasks
        self.part_bytes = min(_PART_BYTES, max_message_bytes // 2)


class Found(NamedTuple):
    """A checkpoint, and the session's later results that were read to find and confirm it."""

    checkpoint: Checkpoint
    results: list[Entry]


class Trail:
    """The checkpoints of one session. Event loop only."""

    def __init__(self, key: SessionKey, trails: Trails) -> None:
        self.key = key
        #: The last stored message; results name it.
        self.link: Link | None = None
        self._trails = trails
        self._waiting: deque[Delta] = deque()
        self._storing: TaskHandle[None] | None = None
        self._is_storing = False
        self._ended = False

    def add(self, delta: Delta) -> None:
        """Queue a checkpoint to be stored, after the checkpoints that were added earlier."""
        if self._ended:
            return
        self._waiting.append(delta)
        if not self._is_storing:
            self._is_storing = True
            self._storing = self._trails.tasks.start_soon(self.store, name=f"checkpoint {self.key}")

    def end(self) -> None:
        """Stop storing checkpoints; cancels the one that is being stored."""
        self._ended = True
        self._waiting.clear()
        if self._storing is not None:
            self._storing.cancel()

    async def finish(self) -> None:
        """Stop storing checkpoints after the current one; return once that one is stored."""
        self._ended = True
        self._waiting.clear()
        await self.stored()

    async def stored(self) -> None:
        """Wait until the added checkpoints are stored, or storing one has failed."""
        if self._storing is not None:
            await self._storing.wait()

    async def store(self) -> None:
        """Store the waiting checkpoints. If storing one fails, the next `add` tries it again."""
        try:
            while self._waiting:
                link = await self._store(self._waiting[0], self.link)
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

    async def store_base(self, in_seq: int, history: History) -> Link:
        """Store the base of a fork that the request at `in_seq` opens. Retries until it is stored."""
        delta, pause_s = Delta.base(in_seq, history), 0.1
        while (link := await self._store(delta, None)) is None:
            await sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        return link

    async def base(self, link: Link | None) -> History | None:
        """Read the base of a fork; None if it is gone, or not what `link` names."""
        tokenizer = self._trails.tokenizer
        # Nothing else has these tokens: a log that does not answer now is asked until it does.
        bodies = await self._read(link, self._trails.journal.get, whole=True)
        found = await in_thread(lambda: restore(bodies, tokenizer, None, whole=True))
        return found.history if found else None

    async def _store(self, delta: Delta, link: Link | None) -> Link | None:
        """Store a checkpoint whose first part names `link`; None on failure."""
        trails = self._trails
        body = await in_thread(lambda: delta.pack(trails.tokenizer.fingerprint))
        for start in range(0, len(body), trails.part_bytes):
            part = body[start : start + trails.part_bytes]
            message = CheckpointMessage(part, begins=start == 0, before=str(link) if link else "").pack()
            seq = await trails.journal.store_checkpoint(self.key, message)
            if seq is None:
                return None
            link = Link(seq, digest(message))
        return link

    async def whole(self) -> History | None:
        """Read all of the history at the last stored checkpoint, without checking it by the log."""
        await self.stored()
        bodies = await self._read(self.link, self._trails.journal.checkpoint, whole=True)
        tokenizer = self._trails.tokenizer
        found = await in_thread(lambda: restore(bodies, tokenizer, tokenizer.fingerprint, whole=True))
        return found.history if found else None

    async def find(self, *, whole: bool) -> Found | None:
        """Read the checkpoint that the last result names; None if it is missing or the log contradicts it."""
        journal = self._trails.journal
        named = await journal.last_result(self.key)
        text = named.headers.get(CHECKPOINT_HEADER) if named else None
        if named is None or text is None:
            return None
        link = Link.parse(text)
        bodies = await self._read(link, journal.checkpoint, whole=whole)
        tokenizer = self._trails.tokenizer
        checkpoint = await in_thread(lambda: restore(bodies, tokenizer, tokenizer.fingerprint, whole=whole))
        found = await self._confirmed(checkpoint, named) if checkpoint else None
        if found is None:
            log.warning("reading a session's whole log: its checkpoint is not one of this log and tokenizer")
            return None
        self.link = link
        return found

    async def _read(
        self, link: Link | None, read: Callable[[int], Awaitable[bytes | None]], *, whole: bool
    ) -> list[bytes]:
        """Read a checkpoint and all before it, oldest first; empty if a message differs from its link.

        Unless `whole`, read back only to the last checkpoint with a start.
        """
        parts: list[bytes] = []
        bodies: list[bytes] = []
        async for message in backwards(link, read):
            if message is None:
                return []
            parts.append(message.part)
            if message.begins:
                bodies.append(b"".join(reversed(parts)))
                parts.clear()
                if not whole and has_start(bodies[-1]):
                    break
        return bodies[::-1]

    async def _confirmed(self, checkpoint: Checkpoint, named: Entry) -> Found | None:
        """Check that the log confirms the checkpoint's tokens and the result that names the checkpoint.

        Each result involved must be the first one of its request, since reading the whole log would use only
        first results. The checkpoint's own request must be in the log: a replica that lags may still show the
        checkpoint of a removed session.
        """
        journal = self._trails.journal
        if await journal.get(checkpoint.in_seq) is None:
            return None
        naming = answers(named)
        requests, _ = await journal.page(self.key, "in", naming - 1) if naming else ([], False)
        if naming <= checkpoint.in_seq or not requests or requests[0].seq != naming:
            return None
        history: str | None = None
        results: list[Entry] = []
        more, confirmed = True, False
        while more and not confirmed:
            after = results[-1].seq if results else checkpoint.in_seq
            page, more = await journal.page(self.key, "out", after)
            for entry in page:
                seq = answers(entry)
                if seq == checkpoint.in_seq and history is None:
                    history = entry.headers.get(HISTORY_HEADER, "")
                elif seq == naming and not confirmed:
                    if entry.seq != named.seq:
                        return None
                    confirmed = True
            results += page
        if not confirmed or history is None or not await in_thread(checkpoint.history.has_digest, history):
            return None
        return Found(checkpoint, results)
