"""Stores values in the log that are too long for a session's results, and reads them.

Such values are checkpoints, the histories that forks start with, and long inputs. A value is stored as one
or more messages, before the result whose header refers to it. A worker stores a checkpoint of a session
every few hundred results. It opens the session from the last checkpoint and the later entries; if the log
contradicts the checkpoint, it reads the whole log instead.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import structlog
from anyio import TaskHandle, sleep
from msgspec import Struct

from cache.names.images import ImageSpan  # noqa: TC001  # msgspec looks it up
from cache.names.tokens import as_tokens, pack, unpack_ids
from turnkeep_client.checkpoints import CheckpointMessage, Link, digest, read_value
from turnkeep_client.log import CHECKPOINT_HEADER, HISTORY_HEADER
from turnkeep_client.messages import Model, Parent, SessionCache  # noqa: TC001  # msgspec looks them up
from worker.process.concurrency import in_thread
from worker.text.conversation import PackedConversation  # noqa: TC001  # msgspec looks it up
from worker.text.templates import Conversation
from worker.wire.written import answered_seq

from .answered_ids import AnsweredIds
from .history import TokenHistory, cache_field, policy_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from turnkeep_client.subjects import SessionKey
    from worker.models.tokenizer import Tokenizer
    from worker.wire.consistent_reads import StoredMessage

    from .services import Services

log = structlog.get_logger()

#: Increase it when the meaning of a field changes. Every version must still read the histories that forks
#: start with: nothing else has their tokens.
_VERSION: Final = 4
#: Largest part of a value that one message has, in bytes; base64 and JSON add a third.
_PART_BYTES: Final = 128 * 2**10
#: Longest pause between two attempts to store a value that a result names.
_MAX_PAUSE_S: Final = 5.0


class _Head(Struct, frozen=True, array_like=True):
    """The beginning of a stored checkpoint."""

    version: int
    #: Links to the checkpoint of which this one has only the changes; empty if this one is whole.
    before: str


class _Body(_Head, frozen=True, array_like=True):
    """The content of a stored checkpoint; it lacks what the checkpoint before it has."""

    in_seq: int
    exists: bool
    closed: bool
    conversation: PackedConversation
    #: How many of the first tokens the checkpoint before it has.
    kept: int
    #: The packed ids of the other tokens.
    tokens: bytes
    #: The answered ids of requests behind the checkpoint before it.
    ids: bytes
    cache: SessionCache | None
    parent: Parent | None
    tags: tuple[str, ...]
    model: Model | None
    #: The images among `tokens`.
    spans: tuple[ImageSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a session after the request at `in_seq`."""

    in_seq: int
    history: TokenHistory
    answered: AnsweredIds
    #: How many parts of the conversation a reader of the log must read for it.
    num_parts: int = 0

    def pack(self, before: StoredCheckpoint | None = None) -> tuple[bytes, int]:
        """Encode the checkpoint, as changes of the stored one `before` if given; also return its `num_parts`.

        Encodes it whole if the session no longer has most of the parts that a reader would read, or is
        closed: then `before` leaves the log. Takes some milliseconds, so call it on a thread.
        """
        history, tokens = self.history, self.history.tokens
        empty = replace(history, conversation=history.conversation.emptied(), tokens=as_tokens())
        base = before.checkpoint.history if before else empty
        conversation = history.conversation.pack(base.conversation)
        if before and (history.closed or before.checkpoint.num_parts > 2 * conversation.num_shared):
            return self.pack()
        kept = base.tokens.num_common(tokens)
        kept = min([kept, *(span.start for span in tokens.spans if span.start < kept < span.end)])
        body = _Body(
            _VERSION,
            str(before.link) if before else "",
            self.in_seq,
            history.exists,
            history.closed,
            conversation,
            kept,
            pack(tokens.ids(kept)),
            self.answered.behind(before.checkpoint.in_seq if before else 0, self.in_seq).pack(),
            cache_field(history.policy) if history.exists else None,
            history.parent,
            history.tags,
            history.model,
            tuple(span for span in tokens.spans if span.start >= kept),
        )
        num_parts = len(conversation.parts) + (before.checkpoint.num_parts if before else 0)
        return msgspec.msgpack.encode(body), num_parts

    @classmethod
    def unpack(cls, packed: Sequence[bytes], tokenizer: Tokenizer) -> Checkpoint | None:
        """Decode the last checkpoint of a chain.

        `packed` has the whole checkpoint first, then each change of the one before it, oldest first. Returns
        None if any of them has another version or is damaged, or if they contradict each other.
        """
        conversation, tokens, answered = Conversation(tokenizer), as_tokens(), AnsweredIds()
        try:
            bodies = [msgspec.msgpack.decode(one, type=_Body) for one in packed]
            for body in bodies:
                conversation = conversation.unpack(body.conversation)
                tokens = tokens[: body.kept].extended(unpack_ids(body.tokens), body.spans)
            answered.load(b"".join(body.ids for body in bodies))
            history = TokenHistory(
                conversation,
                tokens,
                exists=body.exists,
                closed=body.closed,
                policy=policy_of(body.cache),
                parent=body.parent,
                tags=body.tags,
                model=body.model,
            )
        except (msgspec.MsgspecError, zlib.error, ValueError):
            return None
        is_sound = conversation.position == history.position and {one.version for one in bodies} == {_VERSION}
        num_parts = sum(len(one.conversation.parts) for one in bodies)
        return cls(body.in_seq, history, answered, num_parts) if is_sound else None


class StoredCheckpoint(NamedTuple):
    """A checkpoint in the log, and the link to it."""

    link: Link
    checkpoint: Checkpoint


class FoundCheckpoint(NamedTuple):
    """A checkpoint, and the results after it, up to the one that links to it or some more."""

    checkpoint: Checkpoint
    results: list[StoredMessage]


class SessionAttachments:
    """Stores and reads the checkpoints and other long values of one session. Event loop only."""

    def __init__(self, key: SessionKey, services: Services) -> None:
        self.key = key
        self._last: StoredCheckpoint | None = None
        self._services = services
        self._journal = services.journal
        self._storing: TaskHandle[None] | None = None
        self._ended = False

    @property
    def link(self) -> Link | None:
        """The link to the last stored checkpoint, for a header of every later result; None without one."""
        return self._last.link if self._last else None

    def add(self, checkpoint: Checkpoint) -> None:
        """Start a task that stores a checkpoint; a failure is not retried.

        Does nothing while another one is being stored, and after `end` or `finish`.
        """
        if not self._ended and (
            self._storing is None or self._storing.status is not TaskHandle.Status.PENDING
        ):
            self._storing = self._services.asides.start_soon(
                self._store_checkpoint, checkpoint, name=f"checkpoint {self.key}"
            )

    def end(self) -> None:
        """Stop storing checkpoints, and cancel the one that is being stored."""
        self._ended = True
        if self._storing is not None:
            self._storing.cancel()

    async def finish(self) -> None:
        """Stop storing checkpoints after the current one; return once that one is stored."""
        self._ended = True
        await self.stored()

    async def stored(self) -> None:
        """Wait until the added checkpoint is stored, or storing it has failed."""
        if self._storing is not None:
            await self._storing.wait()

    async def _store_checkpoint(self, checkpoint: Checkpoint) -> None:
        packed, num_parts = await in_thread(checkpoint.pack, self._last)
        link = await self._store(packed)
        if link is not None:
            self._last = StoredCheckpoint(link, replace(checkpoint, num_parts=num_parts))

    async def store_base(self, in_seq: int, history: TokenHistory) -> Link:
        """Store the history with which a fork starts; the request at `in_seq` opens the fork.

        Retries until the history is stored.
        """
        packed, _ = await in_thread(Checkpoint(in_seq, history, AnsweredIds()).pack)
        return await self.store(packed)

    async def store(self, value: bytes) -> Link:
        """Store a value that is too long for a result; return its link. Retries until it is stored."""
        pause_s = 0.1
        while (link := await self._store(value)) is None:
            await sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        return link

    async def read(self, link: Link | None) -> bytes | None:
        """Read a stored value; None without a link, or if a part left the log or has another digest."""
        return await read_value(link, self._journal.entry)

    async def base(self, packed: bytes) -> TokenHistory | None:
        """Decode the history that a fork starts with; None if it is damaged or of another version."""
        found = await in_thread(Checkpoint.unpack, [packed], self._services.formats.tokenizer)
        return found.history if found else None

    async def find(self) -> FoundCheckpoint | None:
        """Read the checkpoint that the last result links to; None if that fails or the log contradicts it.

        The next checkpoint is stored as changes of the one found.
        """
        named = await self._journal.last(self.key, "out")
        text = named.headers.get(CHECKPOINT_HEADER) if named else None
        if named is None or text is None:
            return None
        link = Link.parse(text)
        checkpoint = await self._read_checkpoint(link)
        found = await self._confirmed(checkpoint, named) if checkpoint else None
        if found is None or link is None:
            log.warning("reading a session's whole log: its checkpoint is not one of this log")
            return None
        self._last = StoredCheckpoint(link, found.checkpoint)
        return found

    async def _read_checkpoint(self, link: Link | None) -> Checkpoint | None:
        """Read a checkpoint, and those that it changes; None if one of them is gone, changed or unknown."""
        values: list[bytes] = []
        while link is not None:
            values.append(await self.read(link) or b"")
            try:
                link = Link.parse(msgspec.msgpack.decode(values[-1], type=_Head).before)
            except msgspec.MsgspecError:
                return None
        tokenizer = self._services.formats.tokenizer
        return await in_thread(Checkpoint.unpack, values[::-1], tokenizer) if values else None

    async def _store(self, value: bytes) -> Link | None:
        """Store a value as messages, each linked to the previous one; return the last message's link.

        Returns None if a message could not be stored.
        """
        link = None
        size = part_bytes(self._services.limits.max_result_bytes)
        for start in range(0, max(len(value), 1), size):
            part = value[start : start + size]
            message = CheckpointMessage(part, before=str(link) if link else "").pack()
            seq = await self._journal.store_checkpoint(self.key, message)
            if seq is None:
                return None
            link = Link(seq, digest(message))
        return link

    async def _confirmed(self, checkpoint: Checkpoint, named: StoredMessage) -> FoundCheckpoint | None:
        """Return a checkpoint with the results after it; None if the log contradicts the checkpoint.

        `named` is the result whose header links to the checkpoint. The result of the checkpoint's request
        must have the checkpoint's digest; a crash can leave the checkpoint of a removed session in the log.
        Both must be first results: later ones of a request do not count.
        """
        journal, naming = self._journal, answered_seq(named)
        if naming <= checkpoint.in_seq:
            return None
        history: str | None = None
        results: list[StoredMessage] = []
        more, confirmed = 1, False
        while more and not confirmed:
            after = results[-1].seq if results else checkpoint.in_seq
            page, more = await journal.page(self.key, "out", after)
            for entry in page:
                seq = answered_seq(entry)
                if seq == checkpoint.in_seq and history is None:
                    history = entry.headers.get(HISTORY_HEADER, "")
                elif seq == naming and not confirmed:
                    if entry.seq != named.seq:
                        return None
                    confirmed = True
            results += page
        if not confirmed or checkpoint.history.digest() != history:
            return None
        return FoundCheckpoint(checkpoint, results)


def part_bytes(max_message_bytes: int) -> int:
    """Return the bytes of each part of a value, so that a message of `max_message_bytes` can have one."""
    return min(_PART_BYTES, max_message_bytes // 2)
