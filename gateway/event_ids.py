"""Adds ids to a stream's events; when a client resumes the stream, skips events that the client has. Pure.

An event's id names the answer in the log and a place in it (a number of characters, calls and tokens), which
does not depend on how the answer is divided into chunks. So any gateway can resume the stream there.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, runtime_checkable

from msgspec.structs import replace

from turnkeep_client.messages import Chunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from turnkeep_client.messages import Generated

    from .form import Events
    from .turn import Fault

_ID: Final = re.compile(r"([0-9a-f]{48})\.(\d{1,15})(?:\.(\d{1,15})\.(\d{1,15})\.(\d{1,15})\.(\d{1,15}))?")
_END: Final = b"\n\n"
#: The most events that a dialect sends before the answer's content.
_NUM_STARTING: Final = 2


class Cursor(NamedTuple):
    """A place in an answer's stream: what the stream has before it."""

    #: Events without content since the last content; in a stream with numbered events, all events.
    num_events: int = 0
    #: Characters of reasoning and of text, tool calls, and log probabilities; 0 with numbered events.
    reasoning: int = 0
    text: int = 0
    calls: int = 0
    tokens: int = 0

    @property
    def has_content(self) -> bool:
        """Whether some of the answer is before this place, not only events that open the stream."""
        return self.num_events > _NUM_STARTING or any(self[1:])

    def covers(self, other: Cursor) -> bool:
        """Whether this place has at least as many characters, calls and tokens before it as `other`."""
        return all(mine >= its for mine, its in zip(self[1:], other[1:], strict=True))

    def behind(self, part: Chunk) -> Cursor:
        """Return the place at the end of the chunk `part`, which begins at this place."""
        if not (part.text or part.reasoning or part.tool_calls or part.logprobs):
            return self
        return Cursor(
            0,
            self.reasoning + len(part.reasoning),
            self.text + len(part.text),
            self.calls + len(part.tool_calls),
            self.tokens + len(part.logprobs),
        )


@runtime_checkable
class NumberedEvents(Protocol):
    """Encodes events that have sequence numbers, from 0; `num_events` is the next event's number."""

    num_events: int


class ResumedEvents:
    """Adds ids to the encoded events of one answer, and leaves out events that the client has already."""

    def __init__(self, events: Events, answer_id: str, after: Cursor | None) -> None:
        """The client has the events up to the place `after`; if that is None, it has no events."""
        self._events = events
        self._numbered = events if isinstance(events, NumberedEvents) else None
        self._answer_id = answer_id.encode()
        self._at, self._after = Cursor(), after or Cursor()
        self._is_known = after is not None  # whether the client has the next event

    @property
    def heartbeat(self) -> bytes:
        """The dialect's heartbeat; if events have numbers, with that of the client's last event."""
        if self._numbered is None or not self._is_known:
            return self._events.heartbeat
        num = self._numbered.num_events
        self._numbered.num_events = max(num, self._after.num_events)
        written = self._events.heartbeat
        self._numbered.num_events = num
        return written

    def start(self, index: int) -> bytes:
        """Encode the events that open the answer, without those that the client has."""
        return self._marked(self._events.start(index))

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """Encode the events for a chunk of the answer; return empty bytes if the client has all of it."""
        if self._numbered is not None:
            return self._marked(self._events.chunk(index, chunk))
        return b"".join(self._part(index, part) for part in _parts(chunk))

    def finish(self, index: int, result: Generated) -> bytes:
        """Encode the events that close the answer, without those that the client has."""
        return self._marked(self._events.finish(index, result))

    def end(self, results: Sequence[Generated]) -> bytes:
        """Encode the events that close the stream, without those that the client has."""
        return self._marked(self._events.end(results))

    def error(self, fault: Fault) -> bytes:
        """Encode the error event that ends the stream. It is never left out.

        It has no id: clients resume behind the last event of the answer.
        """
        if self._numbered is not None:
            self._numbered.num_events = max(self._at, self._after).num_events
        return self._events.error(fault)

    def _part(self, index: int, part: Chunk) -> bytes:
        if self._is_known and not self._at.covers(self._after):
            known, part = _divided(part, self._at, self._after)
            self._events.chunk(index, known)
            self._at = self._at.behind(known)
        behind = self._at.behind(part)
        written = b"" if behind is self._at else self._marked(self._events.chunk(index, part), behind)
        self._at = behind
        return written

    def _marked(self, written: bytes, behind: Cursor | None = None) -> bytes:
        """Add ids to events, without those that the client has; `behind` is the place after the last one."""
        shown, events = b"", written.split(_END)[:-1]
        for number, one in enumerate(events, 1):
            is_last = behind is not None and number == len(events)
            self._at = behind if behind and is_last else Cursor(self._at.num_events + 1, *self._at[1:])
            if self._is_known and self._at.covers(self._after):
                is_at = self._at[1:] == self._after[1:]
                self._is_known = is_at and self._at.num_events <= self._after.num_events
            if not self._is_known:
                shown += b"id: %s.%s\n%s\n\n" % (self._answer_id, self._numbers(), one)
        return shown

    def _numbers(self) -> bytes:
        if self._numbered is not None:
            return b"%d" % (self._at.num_events - 1)
        return b"%d.%d.%d.%d.%d" % self._at


def read(event_id: str) -> tuple[str, Cursor] | None:
    """Parse an event's id into an answer's id and a place in the answer; None if no gateway wrote it."""
    if (found := _ID.fullmatch(event_id)) is None:
        return None
    first, *others = (int(number) for number in found.groups()[1:] if number is not None)
    return found[1], Cursor(first, *others) if others else behind_number(first)


def behind_number(number: int) -> Cursor:
    """Return the place after the event that has this number."""
    return Cursor(number + 1)


def _divided(part: Chunk, at: Cursor, target: Cursor) -> tuple[Chunk, Chunk]:
    """Split a chunk that begins at the place `at` into its content up to the place `target`, and the rest."""
    said, text, calls, tokens = (max(0, end - begin) for begin, end in zip(at[1:], target[1:], strict=True))
    known = replace(
        part,
        reasoning=part.reasoning[:said],
        text=part.text[:text],
        tool_calls=part.tool_calls[:calls],
        logprobs=part.logprobs[:tokens],
    )
    rest = replace(
        part,
        reasoning=part.reasoning[said:],
        text=part.text[text:],
        tool_calls=part.tool_calls[calls:],
        logprobs=part.logprobs[tokens:],
    )
    return known, rest


def _parts(chunk: Chunk) -> Iterator[Chunk]:
    """Split a chunk into parts with one kind of content each, since each kind has events of its own."""
    if bool(chunk.reasoning) + bool(chunk.text) + len(chunk.tool_calls) <= 1:
        yield chunk
        return
    empty = Chunk(chunk.i, (), "")
    kinds = [replace(empty, reasoning=chunk.reasoning)] if chunk.reasoning else []
    kinds += [replace(empty, text=chunk.text)] if chunk.text else []
    *before, last = kinds + [replace(empty, tool_calls=(call,)) for call in chunk.tool_calls]
    yield from before
    yield replace(last, tokens=chunk.tokens, logprobs=chunk.logprobs)
