"""The segments of a session's conversation: ranges of its tokens, with the messages they came from. Pure.

A checkpoint has only those that the one before it lacks.
"""

from __future__ import annotations

import zlib
from itertools import chain, takewhile
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Struct

Message: TypeAlias = dict[str, Any]

#: Segments per part of a checkpoint.
_PART: Final = 128
#: Limit of a decompressed part: room for the texts of some millions of tokens.
_MAX_BYTES: Final = 256 * 2**20
#: zlib level: halves the size of texts.
_LEVEL: Final = 1


class MessageRecord(Struct, frozen=True, array_like=True, omit_defaults=True, dict=True):
    """One message of a conversation, as in a request or a result."""

    #: An answer's message is used with another tokenizer only, and is empty if unknown (part of an answer).
    message: Message
    #: Whether text that spells a special token becomes that token.
    trusted: bool = False
    #: An answer's packed token ids.
    ids: bytes = b""
    #: Whether an answer's reasoning stays, will be dropped at the next user message, or was dropped.
    thoughts: Literal["kept", "leaving", "gone"] = "kept"
    #: Which call of the answer before it a tool's result answers; None for other messages.
    call_index: int | None = None


class Segment(Struct, frozen=True, array_like=True, dict=True):
    """The tokens `[start, end)` of a session, and where they come from."""

    #: Messages after raw content start a new conversation.
    kind: Literal["prompt", "answer", "raw"]
    start: int
    end: int
    #: A prompt's messages, or an answer as a message.
    said: tuple[MessageRecord, ...] = ()
    #: Whether a prompt ends with an assistant header.
    opens_answer: bool = False
    #: Whether an answer ends with an end-of-turn token.
    closed: bool = False
    #: The text of raw content; None if it was given as tokens.
    text: str | None = None


def pack_segments(
    segments: tuple[Segment, ...], before: tuple[Segment, ...]
) -> tuple[int, tuple[bytes, ...]]:
    """Return how many parts of the segments are those of `before`, and all others, encoded."""
    same = takewhile(lambda pair: pair[0] is pair[1], zip(segments, before, strict=False))
    num = sum(1 for _ in same) // _PART
    starts = range(num * _PART, len(segments) + 1, _PART)  # the last part has what is left, perhaps nothing
    parts = (msgspec.msgpack.encode(segments[at : at + _PART]) for at in starts)
    return num, tuple(zlib.compress(part, _LEVEL) for part in parts)


def unpack_segments(before: tuple[Segment, ...], num: int, packed: tuple[bytes, ...]) -> tuple[Segment, ...]:
    """Return the segments for which `pack_segments` returned these values, given those `before`.

    Raises `MsgspecError` or `zlib.error` if that is not possible.
    """
    parts = (zlib.decompressobj().decompress(one, _MAX_BYTES) for one in packed)
    decoded = (msgspec.msgpack.decode(part, type=tuple[Segment, ...]) for part in parts)
    return (*before[: num * _PART], *chain.from_iterable(decoded))
