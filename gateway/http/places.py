"""Adds ids to a stream's events, and leaves out events that a client has when it resumes the stream. Pure.

An id names an answer in the log, and a place in it that does not depend on how the answer is divided into
chunks, so any gateway can resume after it, from the chunks or from the recorded result.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, runtime_checkable

from msgspec.structs import replace

from turnkeep_client.messages import Chunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gateway.dialect import Events
    from gateway.turn import Fault
    from turnkeep_client.messages import Generated

_ID: Final = re.compile(r"([0-9a-f]{48})\.(\d{1,15})(?:\.(\d{1,15})\.(\d{1,15})\.(\d{1,15})\.(\d{1,15}))?")
_END: Final = b"\n\n"
#: The most events that a dialect sends before the answer's content.
_NUM_STARTING: Final = 2


class Place(NamedTuple):
    """How many characters, calls and tokens of an answer a client has, and `num_events` after the last one.

    In a stream with numbered events, `num_events` counts all events, and the other fields are 0.
    """

    num_events: int = 0
    reasoning: int = 0
    text: int = 0
    calls: int = 0
    tokens: int = 0

    @property
    def has_content(self) -> bool:
        """Whether a client at this place has some of the answer, not only the stream's opening events."""
        return self.num_events > _NUM_STARTING or any(self[1:])

    def covers(self, other: Place) -> bool:
        """Whether a client at this place has all of the answer's content up to the place `other`."""
        return all(mine >= its for mine, its in zip(self[1:], other[1:], strict=True))

    def behind(self, part: Chunk) -> Place:
        """Return the place after a part that begins here; this place if the part is empty."""
        if not (part.text or part.reasoning or part.tool_calls or part.logprobs):
            return self
        return Place(
            0,
            self.reasoning + len(part.reasoning),
            self.text + len(part.text),
            self.calls + len(part.tool_calls),
            self.tokens + len(part.logprobs),
        )


@runtime_checkable
class Numbered(Protocol):
    """A writer of events that have numbers of their own, from 0."""

    num_events: int


class Marked:
    """Writes the events of one answer's stream with ids, except events that the client has already."""

    def __init__(self, events: Events, answer_id: str, after: Place | None) -> None:
        """The client has the events up to the place `after`; none if it is None."""
        self._events = events
        self._numbered = events if isinstance(events, Numbered) else None
        self._answer_id = answer_id.encode()
        self._at, self._after = Place(), after or Place()
        self._is_known = after is not None  # whether the client has the next event

    @property
    def heartbeat(self) -> bytes:
        """The dialect's heartbeat; if events have numbers, with the last number that the client has."""
        if self._numbered is None or not self._is_known:
            return self._events.heartbeat
        num = self._numbered.num_events
        self._numbered.num_events = max(num, self._after.num_events)
        written = self._events.heartbeat
        self._numbered.num_events = num
        return written

    def start(self, index: int) -> bytes:
        """Write the events that open the answer."""
        return self._marked(self._events.start(index))

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """Write the events for a chunk of the answer; empty bytes if it adds nothing new."""
        if self._numbered is not None:
            return self._marked(self._events.chunk(index, chunk))
        return b"".join(self._part(index, part) for part in _parts(chunk))

    def finish(self, index: int, result: Generated) -> bytes:
        """Write the events that close the answer."""
        return self._marked(self._events.finish(index, result))

    def end(self, results: Sequence[Generated]) -> bytes:
        """Write the events that close the stream."""
        return self._marked(self._events.end(results))

    def error(self, fault: Fault) -> bytes:
        """Write the error event that ends the stream; it always counts as new to the client."""
        if self._numbered is not None:
            self._at = max(self._at, self._after)
            self._numbered.num_events = self._at.num_events
        self._is_known = False
        return self._marked(self._events.error(fault))

    def _part(self, index: int, part: Chunk) -> bytes:
        if self._is_known and not self._at.covers(self._after):
            known, part = _divided(part, self._at, self._after)
            self._events.chunk(index, known)
            self._at = self._at.behind(known)
        behind = self._at.behind(part)
        written = b"" if behind is self._at else self._marked(self._events.chunk(index, part), behind)
        self._at = behind
        return written

    def _marked(self, written: bytes, behind: Place | None = None) -> bytes:
        """Add ids to the events that are new to the client; `behind` is the place after the last event."""
        shown, events = b"", written.split(_END)[:-1]
        for number, one in enumerate(events, 1):
            is_last = behind is not None and number == len(events)
            self._at = behind if behind and is_last else Place(self._at.num_events + 1, *self._at[1:])
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


def read(event_id: str) -> tuple[str, Place] | None:
    """Parse an event's id into an answer's id and a place in the answer; None if no gateway wrote it."""
    if (found := _ID.fullmatch(event_id)) is None:
        return None
    first, *others = (int(number) for number in found.groups()[1:] if number is not None)
    return found[1], Place(first, *others) if others else behind_number(first)


def behind_number(number: int) -> Place:
    """Return the place after the event that has this number."""
    return Place(number + 1)


def _divided(part: Chunk, at: Place, target: Place) -> tuple[Chunk, Chunk]:
    """Split a part that begins at the place `at` into its content before the place `target`, and the rest."""
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
