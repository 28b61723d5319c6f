"""Encodes a session's changes since its last checkpoint, and decodes checkpoints to a history.

A fork's base, the part of its parent's history that it begins with, is encoded as a checkpoint too: as the
changes since nothing. Pure: no I/O.
"""

from __future__ import annotations

import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime  # noqa: TC003  # msgspec looks it up
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from cache.names.errors import CutOffError
from cache.names.tokens import TOKEN_BYTES, Boundary, Tokens, as_tokens, pack, unpack
from turnkeep_client.messages import Parent, SessionCache
from worker.text.templates import Conversation, Segment, pack_segments, unpack_segments

from .answered import AnsweredIds
from .history import History
from .policies import in_words, recorded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.models.tokenizer import Tokenizer
    from worker.text.templates import Changes

#: Increase it when the fields change their meaning, or when the same requests give other tokens. The bases of
#: forks must stay readable in every version: nothing else has their tokens.
_VERSION: Final = 1
#: Limit of one decompressed field: the tokens or texts of some millions of tokens.
_MAX_BYTES: Final = 256 * 2**20
#: zlib level: halves the size of token ids, at some megabytes in a tenth of a second.
_LEVEL: Final = 1


class Start(Struct, frozen=True, array_like=True):
    """All of a session's answered ids, and its tokens, of which a middle part may be left out.

    A checkpoint with a start can be decoded without earlier checkpoints.
    """

    begun: bytes
    digests: bytes
    tokens: bytes
    boundaries: tuple[Boundary, ...]
    ids: bytes

    @classmethod
    def of(cls, tokens: Tokens, answered: AnsweredIds) -> Start:
        """Pack shortened tokens and answered ids."""
        return cls(*tokens.pack_shortened(), tuple(tokens.boundaries), answered.pack())

    @property
    def size_bytes(self) -> int:
        """The size in bytes, before compression."""
        return sum(map(len, (self.begun, self.digests, self.tokens, self.ids)))

    def unpacked(self) -> Tokens:
        """Unpack the tokens. Raises `ValueError`."""
        return Tokens.unpack_shortened(self.begun, self.digests, self.tokens, self.boundaries)


class _Body(Struct, frozen=True, array_like=True):
    """The content of a checkpoint.

    `near` is the shortened conversation; it is empty if the template looks back at earlier messages. `cache`
    is the session's policy; it is left out under `full`, as in earlier versions. If a checkpoint has a
    `start`, a session can be opened without earlier checkpoints, unless it needs all of its tokens.
    """

    version: int
    maker: bytes
    in_seq: int
    exists: bool
    closed: bool
    started: datetime
    near: bytes
    kept_segments: int
    segments: bytes
    kept_tokens: int
    tokens: bytes
    ids: bytes
    cache: SessionCache | None = None
    start: bytes | None = None
    parent: tuple[str, int] | None = None
    tags: tuple[str, ...] | None = None
    tools: bytes | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """The changes of a session from its last checkpoint to the request at `in_seq`.

    `tokens` are the session's tokens after the first `changes.kept_tokens`; `history` has no tokens. `ids`
    are the new answered ids. With a `start`, a session can be opened from this checkpoint alone.
    """

    in_seq: int
    history: History
    changes: Changes
    tokens: Tokens
    ids: bytes
    start: Start | None = None

    @property
    def size_bytes(self) -> int:
        """The bytes of tokens and ids."""
        return len(self.tokens) * TOKEN_BYTES + len(self.ids)

    @classmethod
    def base(cls, in_seq: int, history: History) -> Delta:
        """Collect all of a history, for a fork that the request at `in_seq` opens."""
        return cls.of(in_seq, history, Conversation(history.conversation.tokenizer), b"")

    @classmethod
    def of(cls, in_seq: int, history: History, since: Conversation, ids: bytes) -> Delta:
        """Collect the changes since an earlier conversation."""
        changes = history.conversation.changes(since)
        short = replace(history, conversation=history.conversation.shortened(), tokens=as_tokens())
        return cls(in_seq, short, changes, history.tokens[changes.kept_tokens :], ids)

    def pack(self, maker: bytes) -> bytes:
        """Encode; takes some milliseconds, so call it on a thread. `maker` identifies the tokenizer."""
        conversation = self.history.conversation
        rendering = conversation.pack_rendering()
        body = _Body(
            version=_VERSION,
            maker=maker,
            in_seq=self.in_seq,
            exists=self.history.exists,
            closed=self.history.closed,
            started=conversation.started,
            near=b"" if conversation.looks_back else zlib.compress(conversation.pack(), _LEVEL),
            kept_segments=self.changes.kept_segments,
            segments=zlib.compress(pack_segments(self.changes.segments), _LEVEL),
            kept_tokens=self.changes.kept_tokens,
            tokens=zlib.compress(pack(self.tokens), _LEVEL),
            ids=self.ids,
            cache=in_words(self.history.policy) if self.history.exists else None,
            start=zlib.compress(msgspec.msgpack.encode(self.start), _LEVEL) if self.start else None,
            parent=msgspec.structs.astuple(self.history.parent) if self.history.parent else None,
            tags=self.history.tags or None,
            tools=zlib.compress(rendering, _LEVEL) if rendering else None,
        )
        fields = [*msgspec.structs.astuple(body)]
        while fields[-1] is None:
            fields.pop()
        return msgspec.msgpack.encode(fields)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a session after the request at sequence `in_seq`, decoded from its checkpoints."""

    in_seq: int
    history: History
    answered: AnsweredIds
    bytes_since_start: int


def _inflate(packed: bytes) -> bytes:
    """Decompress; raises `ValueError` above `_MAX_BYTES`, which no worker has written."""
    stream = zlib.decompressobj()
    found = stream.decompress(packed, _MAX_BYTES)
    if stream.unconsumed_tail:
        raise ValueError("a part of a checkpoint is too large")
    return found


def has_start(body: bytes) -> bool:
    """Whether a session can be opened from this checkpoint's body, without earlier checkpoints."""
    with suppress(msgspec.MsgspecError):
        return msgspec.msgpack.decode(body, type=_Body).start is not None
    return False


def restore(
    bodies: Sequence[bytes], tokenizer: Tokenizer, maker: bytes | None, *, whole: bool
) -> Checkpoint | None:
    """Decode a session from the bodies of its checkpoints, oldest first. Call it on a thread.

    With `whole`, `bodies` are all checkpoints. Otherwise they begin with the last checkpoint that has a
    start, if any, and the result lacks the early parts of the conversation, and with a start also of tokens.
    Returns None if the bodies cannot be decoded, do not fit together, or are of another version or tokenizer.
    `maker` None accepts any tokenizer, for the base of a fork: later results of its log prove its tokens.
    """
    tokens, segments, answered = as_tokens(), list[Segment](), AnsweredIds()
    num_bytes = 0
    try:
        read = [msgspec.msgpack.decode(body, type=_Body) for body in bodies]
        makers = {maker or body.maker for body in read}
        if not read or any(body.version != _VERSION or body.maker not in makers for body in read):
            return None
        last = read[-1]
        whole = whole or not last.near
        packed, ids = None if whole else read[0].start, [body.ids for body in read]
        if packed is not None:
            start = msgspec.msgpack.decode(_inflate(packed), type=Start)
            tokens, ids[0] = start.unpacked(), start.ids
        for body in read if packed is None else read[1:]:
            more = _inflate(body.tokens)
            tokens = tokens[: body.kept_tokens] + unpack(more)
            num_bytes += len(more) + len(body.ids)
            if whole:
                del segments[body.kept_segments :]
                segments += unpack_segments(_inflate(body.segments))
        answered.load(b"".join(ids))
        if whole:
            conversation = Conversation.of(tokenizer, last.started, segments)
        else:
            conversation = Conversation.unpack(tokenizer, _inflate(last.near))
        if last.tools is not None:
            conversation = conversation.with_rendering(_inflate(last.tools))
        policy = recorded(last.cache)
        parent = Parent(session=last.parent[0], position=last.parent[1]) if last.parent else None
    except (msgspec.MsgspecError, zlib.error, ValueError, LookupError, CutOffError):
        return None
    history = History(
        conversation,
        tokens,
        exists=last.exists,
        closed=last.closed,
        policy=policy,
        parent=parent,
        tags=last.tags or (),
    )
    if conversation.position != len(tokens):
        return None
    return Checkpoint(last.in_seq, history, answered, num_bytes)
