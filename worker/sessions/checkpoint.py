"""Checkpoints: what a session's history became since the one before, as bytes, and a history from them again.

A checkpoint is made of one or more messages beside the session's log, each of which names the one before it
by its stream sequence and digest. The last one is named by a result in the log, so whoever can trust the log
can trust all of them, and what nobody names is never read. Pure: no I/O.
"""

from __future__ import annotations

import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime  # noqa: TC003  # msgspec looks it up
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec import Struct

from cache.names.blocks import as_tokens, pack, unpack
from worker.text.templates import Conversation, Segment, pack_segments, unpack_segments

from .answered import AnsweredIds
from .history import History

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.names.blocks import Tokens
    from worker.models.tokenizer import Tokenizer
    from worker.text.templates import Changes

#: Another number where what a checkpoint holds means something else, or the same requests give other tokens.
_VERSION: Final = 1
#: What a part of a checkpoint may take in memory: the tokens or texts of some millions of tokens.
_MAX_BYTES: Final = 256 * 2**20
#: Of compression: half the size of token ids, some megabytes in a tenth of a second.
_LEVEL: Final = 1


class Link(NamedTuple):
    """Names a message: its sequence in the log's stream, and what it says."""

    seq: int
    digest: bytes

    def __str__(self) -> str:
        return f"{self.seq} {self.digest.hex()}"

    @classmethod
    def parse(cls, text: str) -> Link | None:
        """Read what `str` wrote; None for anything else."""
        seq, _, digest = text.partition(" ")
        try:
            return cls(int(seq), bytes.fromhex(digest))
        except ValueError:
            return None


class CheckpointMessage(Struct, frozen=True, tag_field="type", tag="checkpoint", omit_defaults=True):
    """A message: a part of a checkpoint, the first one or another, and the name of the message before it.

    It is JSON, as all that is heard on a session's subjects.
    """

    part: bytes
    begins: bool
    before: str = ""

    def pack(self) -> bytes:
        """Write it as a message's body."""
        return msgspec.json.encode(self)

    @classmethod
    def unpack(cls, body: bytes, link: Link) -> CheckpointMessage | None:
        """Read a message's body; None where it is not the one that the link names."""
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(body, type=cls) if digest(body) == link.digest else None
        return None


def digest(body: bytes) -> bytes:
    """Name a message's body."""
    return blake2b(body, digest_size=16).digest()


class _Body(Struct, frozen=True, array_like=True):
    """A checkpoint; `near` is its conversation shortened, unless the template looks back."""

    version: int
    maker: bytes
    in_seq: int
    exists: bool
    closed: bool
    started: datetime
    near: bytes
    kept_steps: int
    steps: bytes
    kept_tokens: int
    tokens: bytes
    ids: bytes


@dataclass(frozen=True, slots=True)
class Delta:
    """What a session has become since the checkpoint before, after the request at `in_seq`.

    `history` is without its tokens: `tokens` are those behind the ones that stayed.
    """

    in_seq: int
    history: History
    changes: Changes
    tokens: Tokens
    ids: bytes

    @classmethod
    def of(cls, in_seq: int, history: History, since: Conversation, ids: bytes) -> Delta:
        """Take what is new since a conversation; the history may then change in place."""
        changes = history.conversation.changes(since)
        short = replace(history, conversation=history.conversation.shortened(), tokens=as_tokens())
        return cls(in_seq, short, changes, history.tokens[changes.kept_tokens :], ids)

    def pack(self, maker: bytes) -> bytes:
        """Write it, for another thread: that takes some milliseconds. `maker` names the tokenizer."""
        conversation = self.history.conversation
        body = _Body(
            version=_VERSION,
            maker=maker,
            in_seq=self.in_seq,
            exists=self.history.exists,
            closed=self.history.closed,
            started=conversation.started,
            near=b"" if conversation.looks_back else zlib.compress(conversation.pack(), _LEVEL),
            kept_steps=self.changes.kept_segments,
            steps=zlib.compress(pack_segments(self.changes.segments), _LEVEL),
            kept_tokens=self.changes.kept_tokens,
            tokens=zlib.compress(pack(self.tokens), _LEVEL),
            ids=self.ids,
        )
        return msgspec.msgpack.encode(body)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A session after the request at `in_seq`, as the last of its checkpoints has it."""

    in_seq: int
    history: History
    answered: AnsweredIds


def _inflate(packed: bytes) -> bytes:
    """Decompress; raises `ValueError` for what would take all memory, which no worker has written."""
    stream = zlib.decompressobj()
    found = stream.decompress(packed, _MAX_BYTES)
    if stream.unconsumed_tail:
        raise ValueError("a part of a checkpoint is too large")
    return found


def restore(bodies: Sequence[bytes], tokenizer: Tokenizer, maker: bytes, *, whole: bool) -> Checkpoint | None:
    """Put a session together from all its checkpoints, in their order; for another thread.

    The conversation is shortened unless it is asked for `whole`. None where they are another version's, or
    made with another tokenizer.
    """
    tokens, steps, answered = as_tokens(), list[Segment](), AnsweredIds()
    try:
        read = [msgspec.msgpack.decode(body, type=_Body) for body in bodies]
        if not read or any(body.version != _VERSION or body.maker != maker for body in read):
            return None
        last = read[-1]
        whole = whole or not last.near
        for body in read:
            del tokens[body.kept_tokens :]
            tokens += unpack(_inflate(body.tokens))
            if whole:
                del steps[body.kept_steps :]
                steps += unpack_segments(_inflate(body.steps))
        answered.load(b"".join(body.ids for body in read))
        if whole:
            conversation = Conversation.of(tokenizer, last.started, steps)
        else:
            conversation = Conversation.unpack(tokenizer, _inflate(last.near))
    except (msgspec.MsgspecError, zlib.error, ValueError):
        return None
    history = History(conversation, tokens, exists=last.exists, closed=last.closed)
    return Checkpoint(last.in_seq, history, answered) if conversation.position == len(tokens) else None
