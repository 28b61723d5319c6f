"""Encodes a session's whole state, and decodes it.

A worker opens a long session from a checkpoint and the log entries after it. The history that a fork
starts with is stored in the same form. Pure: no I/O.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from cache.names.tokens import unpack
from turnkeep_client.messages import Model, Parent, SessionCache  # noqa: TC001  # msgspec looks them up
from worker.text.templates import Conversation

from .answered_ids import AnsweredIds
from .history import History
from .policies import in_words, recorded

if TYPE_CHECKING:
    from worker.models.tokenizer import Tokenizer

#: Increase it when the meaning of a field changes. Every version must still read the histories that forks
#: start with: nothing else has their tokens.
_VERSION: Final = 2
#: Limit of a decompressed checkpoint: room for the ids or the texts of some millions of tokens.
_MAX_BYTES: Final = 256 * 2**20
#: zlib level: halves the size of token ids; some megabytes take a tenth of a second.
_LEVEL: Final = 1


class _Body(Struct, frozen=True, array_like=True):
    """The content of a checkpoint; `tokens` are packed.

    `turnkeep sessions --verify` reads the fields by their position.
    """

    version: int
    in_seq: int
    exists: bool
    closed: bool
    conversation: bytes
    tokens: bytes
    ids: bytes
    cache: SessionCache | None
    parent: Parent | None
    tags: tuple[str, ...]
    model: Model | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a session after the request at `in_seq`."""

    in_seq: int
    history: History
    answered: AnsweredIds

    def pack(self) -> bytes:
        """Encode the checkpoint; takes some milliseconds, so call it on a thread."""
        history = self.history
        body = _Body(
            _VERSION,
            self.in_seq,
            history.exists,
            history.closed,
            history.conversation.pack(),
            history.tokens.packed(),
            self.answered.pack(),
            in_words(history.policy) if history.exists else None,
            history.parent,
            history.tags,
            history.model,
        )
        return zlib.compress(msgspec.msgpack.encode(body), _LEVEL)

    @classmethod
    def unpack(cls, packed: bytes, tokenizer: Tokenizer) -> Checkpoint | None:
        """Decode a checkpoint; None if the bytes do not have the format of this version."""
        try:
            stream = zlib.decompressobj()
            body = msgspec.msgpack.decode(stream.decompress(packed, _MAX_BYTES), type=_Body)
            answered = AnsweredIds()
            answered.load(body.ids)
            history = History(
                Conversation.unpack(tokenizer, body.conversation),
                unpack(body.tokens),
                exists=body.exists,
                closed=body.closed,
                policy=recorded(body.cache),
                parent=body.parent,
                tags=body.tags,
                model=body.model,
            )
        except (msgspec.MsgspecError, zlib.error, ValueError):
            return None
        is_sound = body.version == _VERSION and history.conversation.position == history.position
        return cls(body.in_seq, history, answered) if is_sound else None
