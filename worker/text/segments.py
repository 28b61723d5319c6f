"""The segments of a session's conversation: ranges of its tokens, with the messages they came from. Pure.

Adding a segment does not copy the earlier ones, and a checkpoint has only those that the one before it lacks.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, overload

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterator

Message: TypeAlias = dict[str, Any]

#: Segments per part: adding one copies references to at most so many segments, and to the parts. Checkpoints
#: have parts of this size.
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


class _Part:
    """Segments that never change, decoded at their first use: opening a session uses the last ones only."""

    __slots__ = ("_packed", "_segments")

    def __init__(self, segments: tuple[Segment, ...] | None = None, packed: bytes = b"") -> None:
        self._segments = segments
        self._packed = packed

    def segments(self) -> tuple[Segment, ...]:
        """Return the segments. Raises `MsgspecError` or `zlib.error` if they cannot be decoded."""
        if self._segments is None:
            found = zlib.decompressobj().decompress(self._packed, _MAX_BYTES)
            self._segments, self._packed = msgspec.msgpack.decode(found, type=tuple[Segment, ...]), b""
        return self._segments

    def pack(self) -> bytes:
        """Encode the segments."""
        return self._packed or zlib.compress(msgspec.msgpack.encode(self._segments), _LEVEL)


class SegmentList(Sequence[Segment]):
    """Segments in order. Immutable: adding some makes a new list that shares the parts of the old one."""

    __slots__ = ("_parts", "_rest")

    def __init__(self, parts: tuple[_Part, ...] = (), rest: tuple[Segment, ...] = ()) -> None:
        """Make a list from whole parts and from `rest`, the segments after the last part."""
        self._parts = parts
        self._rest = rest

    def __len__(self) -> int:
        return len(self._parts) * _PART + len(self._rest)

    def __iter__(self) -> Iterator[Segment]:
        return chain(chain.from_iterable(part.segments() for part in self._parts), self._rest)

    @overload
    def __getitem__(self, at: int) -> Segment: ...
    @overload
    def __getitem__(self, at: slice) -> SegmentList: ...
    def __getitem__(self, at: int | slice) -> Segment | SegmentList:
        if isinstance(at, slice):
            start, end, _ = at.indices(len(self))
            if start:
                return SegmentList().extended(*(self[i] for i in range(start, end)))
            if end == len(self):
                return self
            num = end // _PART
            return SegmentList(self._parts[:num], self._of(num)[: end - num * _PART])
        at = range(len(self))[at]
        return self._of(at // _PART)[at % _PART]

    def extended(self, *more: Segment) -> SegmentList:
        """Return a list with more segments appended."""
        rest = self._rest + more
        num_whole = len(rest) - len(rest) % _PART
        parts = (_Part(rest[at : at + _PART]) for at in range(0, num_whole, _PART))
        return SegmentList((*self._parts, *parts), rest[num_whole:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SegmentList) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def _of(self, num: int) -> tuple[Segment, ...]:
        """Return the segments of part `num`; after the last part, the rest."""
        return self._rest if num == len(self._parts) else self._parts[num].segments()

    def pack(self, before: SegmentList) -> tuple[int, tuple[bytes, ...]]:
        """Return how many parts this list shares with an earlier one, and all others, encoded."""
        num = min(len(self._parts), len(before._parts))
        while num and self._parts[num - 1] is not before._parts[num - 1]:
            num -= 1
        return num, tuple(part.pack() for part in (*self._parts[num:], _Part(self._rest)))

    def unpack(self, num: int, packed: tuple[bytes, ...]) -> SegmentList:
        """Return the list for which `pack` returned these values, given this one.

        Decodes only its end. Raises `MsgspecError`, `zlib.error` or `ValueError` if that is not possible.
        """
        *parts, rest = (_Part(packed=one) for one in packed)
        return SegmentList((*self._parts[:num], *parts), rest.segments())
