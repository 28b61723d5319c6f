"""Holds a session's conversation as segments: ranges of its tokens, with the messages they came from. Pure.

Segments are prompts, answers or raw content. They are built from requests and results alone, so reading a log
needs no rendering and no tokenising (`templates` does both, for new turns).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Self

from msgspec import Struct, structs

from cache.names.tokens import pack
from worker.models.answer_markup import short_id
from worker.models.image_parts import images_in, with_marks, with_parts

from .segments import Message, MessageRecord, Segment, pack_segments, unpack_segments

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from worker.models.tokenizer import Tokenizer

#: The date for templates that print one, if the session's start is unknown.
_SOME_DAY: Final = datetime(2025, 1, 1, tzinfo=UTC)


#: Stands for the answer that will follow an assistant header.
EMPTY: Final = MessageRecord({"role": "assistant", "content": ""}, trusted=True)


class Extras(Struct, frozen=True, array_like=True, dict=True):
    """The chat template's inputs beside the messages: tools and further variables."""

    tools: tuple[Message, ...] = ()
    variables: Message = {}


class PackedConversation(Struct, frozen=True, array_like=True):
    """A conversation as a checkpoint stores it, in addition to an earlier checkpoint."""

    started: datetime
    #: The first so many parts of the segments are those of the earlier checkpoint; `parts` are all others.
    num_shared: int
    parts: tuple[bytes, ...]
    #: The index of the first segment that messages continue.
    first: int
    extras: Extras


@dataclass(frozen=True, slots=True)
class Segments:
    """A session's state besides its tokens. Immutable: every change returns a new object.

    The argument `history` is always the session's tokens before the change. `started` is the date that the
    template may print: one date per session, so that it does not change tomorrow.
    """

    tokenizer: Tokenizer
    started: datetime = _SOME_DAY
    _segments: tuple[Segment, ...] = ()
    _first: int = 0  # the first segment of the conversation that messages continue
    _extras: Extras = field(default_factory=Extras)

    @property
    def position(self) -> int:
        """Number of tokens in the session."""
        return self._segments[-1].end if self._segments else 0

    @property
    def num_segments(self) -> int:
        """Number of prompts, answers and raw parts; what is kept of each takes memory."""
        return len(self._segments)

    @property
    def base(self) -> int:
        """Number of tokens before the conversation that messages continue."""
        return self._segments[self._first - 1].end if self._first else 0

    @property
    def has_messages(self) -> bool:
        """Whether messages follow the last raw text or tokens; the next messages are rendered with them."""
        return self._first < len(self._segments)

    @property
    def tools(self) -> tuple[Message, ...]:
        """The session's tools, as a request gave them."""
        return self._extras.tools

    def with_call_indices(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages that will be added, with a `call_index` in each that is the result of a call.

        It is the index of the call among the calls of the answer that the results follow. A result of an
        unknown call, or of one that has a result, gets none.
        """
        found, unanswered = list[Message](), self._unanswered()
        for message in messages:
            if message["role"] != "tool":
                unanswered = _calls_of(message)
                found.append(message)
            elif indices := unanswered.get(short_id(message.get("tool_call_id") or "")):
                found.append({**message, "call_index": indices.popleft()})
            else:
                found.append(message)
        return found

    def _unanswered(self) -> dict[str, deque[int]]:
        """Return the indices, by id, of the calls for which the session's end still lacks results."""
        answered = set[int]()
        for at in range(len(self._segments) - 1, self._first - 1, -1):
            for one in reversed(self._segments[at].said):
                if one.call_index is None:
                    return _calls_of(one.message, answered)
                answered.add(one.call_index)
        return {}

    @property
    def images(self) -> list[tuple[str, Sequence[int]]]:
        """(digest, grid) of each image of the current conversation that the model sees, in order."""
        found = _images_in(in_order(said_in(self._segments[self._first :])))
        return [(digest, grid) for digest, grid in found if grid is not None]

    @property
    def digests(self) -> list[str]:
        """The digests of all images in messages, whether the model sees them or not."""
        return [digest for digest, _ in _images_in(said_in(self._segments))]

    @property
    def plain_tools(self) -> list[Message]:
        """A copy of the session's tools."""
        found: list[Message] = json.loads(json.dumps(self.tools))  # copies deeper nesting than `deepcopy`
        return found

    @property
    def variables(self) -> Message:
        """Further variables of the chat template, as a request gave them."""
        return self._extras.variables

    # Changes from requests and results alone, as for reading a log.

    def with_extras(self, tools: Sequence[Message] | None, variables: Mapping[str, Any] | None) -> Self:
        """Replace the tools or the template's further variables; None leaves them unchanged."""
        extras = Extras(
            self.tools if tools is None else tuple(tools),
            self.variables if variables is None else dict(variables),
        )
        return self if extras == self._extras else replace(self, _extras=extras)

    def given(self, said: Sequence[MessageRecord], keep: int, end: int, *, opens_answer: bool) -> Self:
        """Add messages, and an assistant header if `opens_answer`, as a prompt that ends at `end`.

        The prompt replaces the tokens from position `keep` on, and takes over their messages and answers.
        """
        num_kept = len(self._segments)
        while num_kept > self._first and self._segments[num_kept - 1].end > keep:
            num_kept -= 1
        kept = self._segments[:num_kept]
        if num_kept < len(self._segments):
            gone = self._segments[num_kept:]
            last = kept[-1:] if num_kept > self._first and kept[-1].opens_answer else ()
            earlier = said_in([*last, *gone], drops=has_question(said))
            if last:  # the answer becomes a message of the new segment
                kept = (*kept[:-1], structs.replace(kept[-1], opens_answer=False))
                earlier = earlier[len(last[0].said) :]
            said = [*earlier, *said]
        start, told = kept[-1].end if kept else 0, tuple(in_order(said))
        added = Segment("prompt", start, end, told, opens_answer=opens_answer)
        return replace(self, _segments=(*kept, added))

    def opens_answer(self, *, raw: bool = False) -> bool:
        """Return whether a generate must add an assistant header.

        It adds none with `raw`, in a session without messages, after raw content, after a header, or after an
        answer without its end-of-turn token, which the generate continues.
        """
        if raw or not self.has_messages:
            return False
        last = self._segments[-1]
        return not (last.opens_answer or (last.kind == "answer" and not last.closed))

    def answered(
        self,
        history: Sequence[int],
        tokens: Sequence[int],
        message: Message,
        *,
        keeps_reasoning: bool = True,
    ) -> Self:
        """Add an answer's tokens and its message; the last token may be an end-of-turn token.

        Without `keeps_reasoning` the next user message drops the answer's reasoning from the session. After
        an assistant header or an unfinished answer the tokens belong to the assistant; otherwise they are raw
        content.
        """
        last = self._segments[-1] if self._segments else None
        if not tokens:
            return self
        if last is None or not (last.opens_answer or (last.kind == "answer" and not last.closed)):
            end = len(history) + len(tokens)
            return self.with_raw(len(history), end, message.get("content"))
        if last.kind == "prompt":
            answer = self._answer(len(history), tokens, message, keeps=keeps_reasoning)
            return replace(self, _segments=(*self._segments, answer))
        whole = [*history[last.start :], *tokens]
        both = _joined(last.said[0].message, message)
        answer = self._answer(last.start, whole, both, keeps=keeps_reasoning)
        return replace(self, _segments=(*self._segments[:-1], answer))

    def with_raw(self, keep: int, end: int, text: str | None) -> Self:
        """Add raw content, with its text if known; later messages start a new conversation.

        The content replaces the session's tokens from position `keep` on, and ends at `end`.
        """
        if keep == end:
            return self
        kept = self._until(keep)
        texts = [one.text if one.kind == "raw" else None for one in self._segments[len(kept) :]]
        known = [one for one in (*texts, text) if one is not None]
        whole = "".join(known) if len(known) == len(texts) + 1 else None
        start = kept[-1].end if kept else 0
        segments = (*kept, Segment("raw", start, end, text=whole))
        return replace(self, _segments=segments, _first=len(segments))

    def tokenised_anew(self, num_raw: int, grids: Mapping[str, Sequence[int]]) -> Self:
        """Return the conversation for another tokenizer, without the old tokens.

        `num_raw` is how many new tokens its raw content has. Its messages get tokens at the next `given`, and
        their images the `grids`, by digest.
        """
        said = [
            MessageRecord(with_parts(with_marks(one.message, grids)), one.trusted)
            for one in said_in(self._segments[self._first :])
        ]
        raw = [one.text or "" for one in self._segments[: self._first]]
        segments: tuple[Segment, ...] = ()
        if num_raw:
            segments = (Segment("raw", 0, num_raw, text="".join(raw)),)
        first = len(segments)
        if said:  # without tokens yet: `given` moves the messages into the new prompt
            segments = (*segments, Segment("prompt", num_raw, num_raw + 1, tuple(said)))
        return replace(self, _segments=segments, _first=first)

    def parts(self) -> Iterator[str | list[MessageRecord] | None]:
        """Yield the content without tokens, in order: each raw text, and each list of messages between.

        None stands for a raw part of which only the tokens are known; before a list, for unknown messages.
        """
        for is_raw, run in groupby(self._segments, lambda segment: segment.kind == "raw"):
            segments = list(run)
            if is_raw:
                yield from (segment.text for segment in segments)
                continue
            said = [one for one in said_in(segments) if one is not EMPTY]
            if not all(one.message for one in said):
                yield None
            yield [MessageRecord(one.message, one.trusted) for one in said]

    def rewind(self, history: Sequence[int], position: int) -> Self:
        """Drop everything from `position` on.

        If `position` is inside an answer, the part before it becomes an unfinished answer; if inside a
        prompt, raw content.
        """
        if not position:
            return self.emptied()
        segments = self._until(position)
        if len(segments) < len(self._segments):
            cut = self._segments[len(segments)]
            if cut.start < position and cut.kind == "answer":
                kept, keeps = history[cut.start : position], cut.said[0].thoughts == "kept"
                segments = (*segments, self._answer(cut.start, kept, {}, keeps=keeps))
            elif cut.start < position:
                segments = (*segments, Segment("raw", cut.start, position))
        return replace(self, _segments=segments, _first=_first(segments))

    def emptied(self) -> Self:
        """Return an empty conversation with the same tools and variables."""
        return type(self)(self.tokenizer, self.started, _extras=self._extras)

    def pack(self, before: Segments) -> PackedConversation:
        """Encode the conversation for a checkpoint; `before` is the conversation at the checkpoint before."""
        num, parts = pack_segments(self._segments, before._segments)  # of this class
        return PackedConversation(self.started, num, parts, self._first, self._extras)

    def unpack(self, packed: PackedConversation) -> Self:
        """Decode what `pack` returned; this is the conversation at the checkpoint before.

        Raises the errors of `unpack_segments`.
        """
        segments = unpack_segments(self._segments, packed.num_shared, packed.parts)
        return type(self)(self.tokenizer, packed.started, segments, packed.first, packed.extras)

    def _until(self, end: int) -> tuple[Segment, ...]:
        """Return the segments that end at the position `end` or before it."""
        return self._segments[: bisect_right(self._segments, end, key=attrgetter("end"))]

    def _answer(self, start: int, tokens: Sequence[int], message: Message, *, keeps: bool) -> Segment:
        said = MessageRecord(message, ids=pack(tokens), thoughts="kept" if keeps else "leaving")
        end, closed = start + len(tokens), tokens[-1] in self.tokenizer.eos_ids
        return Segment("answer", start, end, (said,), closed=closed)


def said_in(segments: Sequence[Segment], *, drops: bool = False) -> list[MessageRecord]:
    """List the messages of segments; a header without an answer counts as an empty message.

    With `drops`, mark the reasoning of answers that is `leaving` as `gone`.
    """
    said: list[MessageRecord] = []
    for segment in segments:
        if segment.kind == "answer":
            said.pop()
        if drops and segment.kind == "answer" and segment.said[0].thoughts == "leaving":
            said.append(structs.replace(segment.said[0], thoughts="gone"))
        else:
            said += segment.said
        if segment.opens_answer:
            said.append(EMPTY)
    return said


def _images_in(said: Sequence[MessageRecord]) -> list[tuple[str, Sequence[int] | None]]:
    return [image for one in said for image in images_in(one.message.get("content"))]


def _joined(one: Message, other: Message) -> Message:
    """Join the messages of an answer's two parts; empty if one of them is unknown."""
    if not one or not other:
        return {}
    joined = {**one, **other}
    for name in ("content", "reasoning_content"):
        if text := (one.get(name) or "") + (other.get(name) or ""):
            joined[name] = text
    if calls := [*one.get("tool_calls", ()), *other.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined


def _first(segments: Sequence[Segment]) -> int:
    """Return the index of the first segment after the last raw content, where the conversation starts."""
    return next((index for index in range(len(segments), 0, -1) if segments[index - 1].kind == "raw"), 0)


def in_order(said: Sequence[MessageRecord]) -> list[MessageRecord]:
    """Put the results of an answer's calls, which came in any order, in the order of the calls."""
    found = list[MessageRecord]()
    for _, run in groupby(said, lambda one: one.call_index is not None):
        found += sorted(run, key=lambda one: one.call_index or 0)
    return found


def _calls_of(message: Message, answered: Container[int] = ()) -> dict[str, deque[int]]:
    """Return the indices of a message's calls by id, without those of calls that were `answered`."""
    found: dict[str, deque[int]] = {}
    ids = message.get("call_ids") or [call["id"] for call in message.get("tool_calls") or ()]
    for index, one in enumerate(ids):
        if index not in answered:
            found.setdefault(short_id(one), deque()).append(index)
    return found


def has_question(said: Sequence[MessageRecord]) -> bool:
    """Return whether any of the messages has the role user."""
    return any(one.message.get("role") == "user" for one in said)
