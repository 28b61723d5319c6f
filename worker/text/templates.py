"""Renders a session with the model's chat template, and finds the tokens that each turn adds.

A turn adds the tokens that a render of the whole conversation would add. If the template now renders earlier
messages to another text (trims an answer, drops its thoughts), the `Addition` says from which position on the
history is replaced. Pure: no device, no broker, no clock.

The history is a sequence of segments: prompts, answers, raw content. Answers keep their sampled tokens, as
the tokenizer might choose others for the same text. Prompts between two answers are tokenised as one text: a
token may span two turns.

With a local template (`locality`) the cost of a turn depends on its size only: the last messages are rendered
twice, without most earlier messages: first without the new messages, then with them. The first render must
match the end of the session's text. The text that the second render adds is the text that a full render would
add.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Struct, structs

from cache.names.errors import CutOffError
from worker.models.content import index_after, unmarked
from worker.models.tokenizer import TemplateError, Tokenizer

from .locality import num_first

if TYPE_CHECKING:
    from collections.abc import Sequence

Message: TypeAlias = dict[str, Any]

__all__ = ["Addition", "Conversation", "TemplateError", "Tokenizer"]

#: The date for templates that ask for it, if the session's start is unknown.
_SOME_DAY: Final = datetime(2025, 1, 1, tzinfo=UTC)
#: Of a series of prompts without an answer, the last so many are rendered again.
_LAST_PROMPTS: Final = 4
#: Messages rendered before those whose text is needed, besides the conversation's first ones.
_LEAD: Final = 4
#: Minimum of messages in a shortened conversation, besides the first ones.
_KEPT: Final = 24


@dataclass(frozen=True, slots=True)
class Addition:
    """`history[:keep] + tokens` is the new history; `keep < len(history)` replaces a part."""

    keep: int
    tokens: list[int]


class Segment(Struct, frozen=True, array_like=True):
    """The tokens `[start, end)` of a session and their text.

    A prompt holds its messages and may end with the header of an answer. An end-of-turn token closes an
    answer. Messages after raw content start a new conversation; `num_before` counts its messages before this
    segment. The first `num_thought` characters of an answer's content are reasoning that leaves the session
    when the next user message comes.
    """

    kind: Literal["prompt", "answer", "raw"]
    start: int
    end: int
    text: str = ""
    messages: tuple[Message, ...] = ()
    opens_answer: bool = False
    closed: bool = False
    num_before: int = 0
    num_thought: int = 0


@dataclass(frozen=True, slots=True)
class _Target:
    """The text that the conversation must have from the segment at index `start` on."""

    start: int
    text: str


class Changes(NamedTuple):
    """The difference between two conversations: numbers of kept segments and tokens, and new segments."""

    kept_segments: int
    kept_tokens: int
    segments: list[Segment]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A session's state besides its tokens. Immutable: every change returns a new object.

    The argument `history` is always the session's tokens before the change. `started` is the date that the
    template may print: one date per session, so that a replay of its log gives the same tokens. `tools` are
    rendered with the messages, and `variables` are further variables of the template.
    """

    tokenizer: Tokenizer
    started: datetime = _SOME_DAY
    _segments: tuple[Segment, ...] = ()
    _first: int = 0  # the first segment of the conversation that messages continue
    # What `shortened` left out: number of segments, position of their end, the first messages if among them.
    _num_cut: int = 0
    _base: int = 0
    _head: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()
    variables: dict[str, Any] = field(default_factory=dict)

    @property
    def position(self) -> int:
        """Tokens in the session."""
        return self._segments[-1].end if self._segments else self._base

    @property
    def has_messages(self) -> bool:
        """Whether the next messages continue a conversation, so that they are rendered with earlier ones."""
        return self._first < len(self._segments)

    @property
    def last_message(self) -> Message | None:
        """The last message of the conversation that the next ones continue."""
        if not self.has_messages:
            return None
        last = self._segments[-1]
        return last.messages[-1] if last.messages and not last.opens_answer else {"role": "assistant"}

    def add_messages(
        self, history: Sequence[int], messages: Sequence[Message]
    ) -> tuple[Conversation, Addition]:
        """Add messages, after closing an answer that ended without its end-of-turn token.

        Raises `TemplateError` if the template refuses them, and `CutOffError`.
        """
        if not messages:
            return self, Addition(len(history), [])
        return self._extend(history, messages, opens_answer=False)

    def set_rendering(
        self, history: Sequence[int], tools: Sequence[Message], variables: dict[str, Any]
    ) -> tuple[Conversation, Addition]:
        """Change tools and variables; earlier messages are rendered again, as these may stand before them.

        Raises `TemplateError` and `CutOffError`.
        """
        changed = replace(self, tools=tuple(tools), variables=variables)
        if not self.has_messages or (changed.tools, variables) == (self.tools, self.variables):
            return changed, Addition(len(history), [])
        return changed._extend(history, (), opens_answer=False, whole=True)  # noqa: SLF001  # of this class

    @property
    def plain_tools(self) -> list[dict[str, Any]]:
        """The tools as the request gave them, without marks."""
        found: list[dict[str, Any]] = json.loads(unmarked(json.dumps(self.tools, ensure_ascii=False)))
        return found

    def start_answer(self, history: Sequence[int], *, raw: bool = False) -> tuple[Conversation, Addition]:
        """Add the assistant header that a generate needs.

        Adds nothing with `raw`, in a session without messages, after raw content, and after an answer without
        its end-of-turn token: the generate continues that answer. Raises `TemplateError` and `CutOffError`.
        """
        segments = self._segments[self._first :]
        if (
            raw
            or not segments
            or segments[-1].opens_answer
            or (segments[-1].kind == "answer" and not segments[-1].closed)
        ):
            return self, Addition(len(history), [])
        return self._extend(history, (), opens_answer=True)

    def add_answer(
        self, history: Sequence[int], tokens: Sequence[int], *, keeps_reasoning: bool = True
    ) -> Conversation:
        """Add generated tokens; the last one may be an end-of-turn token.

        Without `keeps_reasoning` the answer's reasoning leaves the session with the next user message. After
        an assistant header or an unfinished answer the tokens belong to the assistant; otherwise they are raw
        content.
        """
        last = self._segments[-1] if self._segments else None
        if (
            not tokens
            or last is None
            or not (last.opens_answer or (last.kind == "answer" and not last.closed))
        ):
            return self.add_raw(history, tokens)[0]
        if last.kind == "prompt":
            answer = self._answer(len(history), tokens, _num_up_to(last) - 1, keeps_reasoning=keeps_reasoning)
            return self._with(answer)
        whole = [*history[last.start :], *tokens]
        answer = self._answer(last.start, whole, last.num_before, keeps_reasoning=keeps_reasoning)
        return replace(self, _segments=(*self._segments[:-1], answer))

    def add_raw(self, history: Sequence[int], tokens: Sequence[int]) -> tuple[Conversation, Addition]:
        """Add text or tokens without the template; later messages start a new conversation after them."""
        if not tokens:
            return self, Addition(len(history), [])
        addition = Addition(len(history), list(tokens))
        segments = (*self._segments, Segment("raw", len(history), len(history) + len(tokens)))
        return replace(self, _segments=segments, _first=len(segments), _head=()), addition

    def rewind(self, history: Sequence[int], position: int) -> Conversation:
        """Drop everything from `position` on.

        If the cut is inside an answer, its first part becomes an unfinished answer; inside a prompt, raw
        content. Raises `CutOffError`.
        """
        if not position:
            return Conversation(self.tokenizer, self.started, tools=self.tools, variables=self.variables)
        if position <= self._base:
            raise CutOffError("the part to rewind to was left out")
        segments = [segment for segment in self._segments if segment.end <= position]
        if len(segments) < len(self._segments):
            cut = self._segments[len(segments)]
            if cut.start < position and cut.kind == "answer":
                kept, keeps = history[cut.start : position], not cut.num_thought
                segments.append(self._answer(cut.start, kept, cut.num_before, keeps_reasoning=keeps))
            elif cut.start < position:
                segments.append(Segment("raw", cut.start, position))
        first = _first(segments)
        if self._first and self._num_cut and not first:
            raise CutOffError("the beginning of the conversation was left out")
        return replace(self, _segments=tuple(segments), _first=first)

    def in_reasoning(self) -> bool:
        """Whether the next token of the answer belongs to its reasoning."""
        pair, last = self.tokenizer.dialect.reasoning, self._segments[-1] if self._segments else None
        if pair is None or last is None:
            return False
        if last.kind == "answer":  # unfinished; the header before it may have opened the reasoning
            before = self._segments[-2].text if len(self._segments) > 1 else ""
            text = unmarked(before[-len(pair[0]) - 8 :] + last.text)
            return not last.closed and text.rfind(pair[0]) > text.rfind(pair[1])
        return last.opens_answer and last.text.rstrip().endswith(pair[0])

    @property
    def begins(self) -> int:
        """The position of the first token that changes can read; 0 if no tokens were left out.

        A change that needs earlier tokens raises `CutOffError`.
        """
        return self._base

    @property
    def looks_back(self) -> bool:
        """Whether a later message may change the text of any earlier one."""
        return num_first(self.tokenizer.template) is None

    def shortened(self) -> Conversation:
        """Return the conversation without segments that only a rewind needs, to save memory.

        No effect if the template looks at all messages. Every change then gives the same result as before, or
        raises `CutOffError`.
        """
        num_head, segments = num_first(self.tokenizer.template), self._segments
        if num_head is None or not segments:
            return self
        start = len(segments) - 1
        while start > self._first and (
            segments[start].kind != "prompt"
            or segments[-1].num_before - segments[start].num_before < num_head + _KEPT
        ):
            start -= 1
        if start <= self._first:
            start = max(self._first - 1, 0)  # keep the raw content before the conversation
        if not start:
            return self
        head = self._head or tuple(self._first_messages(num_head)) if start > self._first else ()
        return replace(
            self,
            _segments=segments[start:],
            _first=max(self._first - start, 0),
            _num_cut=self._num_cut + start,
            _base=segments[start].start,
            _head=head,
        )

    def filled(self, whole: Conversation) -> Conversation:
        """Return the conversation with what `shortened` left out, from an earlier state that has it.

        Raises `CutOffError` if that state lacks it too.
        """
        if not self._num_cut:
            return self
        before = whole._segments[: self._num_cut]  # of this class
        if whole.begins or len(before) < self._num_cut or before[-1].end != self._base:
            raise CutOffError("the earlier state lacks the beginning of the conversation too")
        segments = (*before, *self._segments)
        return replace(self, _segments=segments, _first=_first(segments), _num_cut=0, _base=0, _head=())

    def changes(self, since: Conversation) -> Changes:
        """Return the changes since an earlier state. If it was shortened since, all segments count as new."""
        if self._num_cut != since._num_cut:
            return Changes(0, 0, list(self._segments))  # shortened since: all have changed
        kept = 0
        for mine, earlier in zip(self._segments, since._segments, strict=False):
            if mine is not earlier:
                break
            kept += 1
        end = self._segments[kept - 1].end if kept else self._base
        return Changes(self._num_cut + kept, end, list(self._segments[kept:]))

    def pack(self) -> bytes:
        """Encode for `unpack`."""
        started, first = self.started.isoformat(), self._first
        return pack_segments((started, first, self._num_cut, self._base, self._head, self._segments))

    @classmethod
    def unpack(cls, tokenizer: Tokenizer, packed: bytes) -> Conversation:
        """Decode what `pack` returned. Raises `ValueError` and `MsgspecError`."""
        started, first, num_cut, base, head, segments = msgspec.convert(json.loads(packed), _Packed)
        return cls(tokenizer, datetime.fromisoformat(started), segments, first, num_cut, base, head)

    @classmethod
    def of(cls, tokenizer: Tokenizer, started: datetime, segments: Sequence[Segment]) -> Conversation:
        """Build the conversation of these segments, without tools."""
        return cls(tokenizer, started, tuple(segments), _first(segments))

    def pack_rendering(self) -> bytes | None:
        """Encode tools and variables, for `with_rendering`; None if there are none."""
        if self.variables:
            return pack_segments({"tools": self.tools, "variables": self.variables})
        return pack_segments(self.tools) if self.tools else None

    def with_rendering(self, packed: bytes) -> Conversation:
        """Return the conversation with what `pack_rendering` encoded. Raises `ValueError`."""
        found = json.loads(packed)
        variables = {}
        if isinstance(found, dict):
            found, variables = found["tools"], found["variables"]
        return replace(self, tools=tuple(found), variables=variables)

    def _with(self, segment: Segment) -> Conversation:
        return replace(self, _segments=(*self._segments, segment))

    def _answer(
        self, start: int, tokens: Sequence[int], num_before: int, *, keeps_reasoning: bool
    ) -> Segment:
        closed = tokens[-1] in self.tokenizer.eos_ids
        lead, content = self.tokenizer.answer_content(tokens[:-1] if closed else tokens)
        num_thought = 0
        if not keeps_reasoning and (pair := self.tokenizer.dialect.reasoning):
            at = content.rfind(pair[1])
            rest = content[at + len(pair[1]) :].lstrip() if at >= 0 else ""
            num_thought = len(content) - len(rest) if at >= 0 or content.startswith(pair[0]) else 0
        return Segment(
            "answer",
            start,
            start + len(tokens),
            lead + content + (self.tokenizer.decode(tokens[-1:]) if closed else ""),
            ({"role": "assistant", "content": content},),
            closed=closed,
            num_before=num_before,
            num_thought=num_thought,
        )

    def _messages(self, segments: Sequence[Segment], *, drops: bool = False) -> list[Message]:
        """List the messages of the segments; a header without an answer counts as an empty message.

        With `drops`, without the reasoning that is not to be kept.
        """
        messages: list[Message] = []
        for segment in segments:
            if segment.kind == "answer":
                messages.pop()
            if drops and segment.num_thought:
                said = str(segment.messages[0]["content"])[segment.num_thought :]
                messages.append({**segment.messages[0], "content": said})
            else:
                messages += segment.messages
            if segment.opens_answer:
                messages.append({"role": "assistant", "content": ""})
        return messages

    def _render(self, messages: Sequence[Message], *, header: bool) -> str:
        return self.tokenizer.render(
            messages,
            add_generation_prompt=header,
            started=self.started,
            tools=[_rendered(tool) for tool in self.tools],
            variables=self.variables,
        )

    def _extend(
        self,
        history: Sequence[int],
        messages: Sequence[Message],
        *,
        opens_answer: bool,
        whole: bool = False,
    ) -> tuple[Conversation, Addition]:
        """Extend the conversation by messages as the template renders it.

        Keeps as many tokens as possible. With `whole` any part of the text may have changed.
        """
        near = None if whole else self._near_target(messages, header=opens_answer)
        extended = near and self._reach(near, history, messages, opens_answer=opens_answer)
        if extended:
            return extended
        if self._head:
            raise CutOffError("the template needs messages that were left out")
        every = [*self._messages(self._segments[self._first :], drops=_has_question(messages)), *messages]
        target = _Target(self._first, self._render(every, header=opens_answer))
        extended = self._reach(target, history, messages, opens_answer=opens_answer)
        if extended is None:
            raise AssertionError("a render from the first segment cannot fail")
        return extended

    def _near_target(self, messages: Sequence[Message], *, header: bool) -> _Target | None:
        """Find the text after the second last answer, without rendering the text before it.

        None if the conversation is short, the template looks back, or the session's text differs from what
        the template renders.
        """
        segments, num_head = self._segments, num_first(self.tokenizer.template)
        if num_head is None or (found := self._near(num_head)) is None:
            return None
        lead, start, end = found
        odd = (segments[lead].num_before - num_head) % 2  # leave out an even number: indices stay odd or even
        head = self._head or self._first_messages(num_head)
        before = self._messages(segments[lead:end])[odd:]
        opened = segments[end - 1].opens_answer
        after = [*self._messages(segments[lead:], drops=_has_question(messages))[odd:], *messages]
        try:
            known = self._render([*head, *(before[:-1] if opened else before)], header=opened)
            wanted = self._render([*head, *after], header=header)
        except TemplateError:
            return None
        own = "".join(segment.text for segment in segments[start:end])
        shared = len(known) - len(own)
        if shared < 0 or known[shared:] != own or wanted[:shared] != known[:shared]:
            return None
        return _Target(start, wanted[shared:])

    def _near(self, num_head: int) -> tuple[int, int, int] | None:
        """Find the segments to render again: where rendering starts, where the text is needed, and its end.

        The template may use the first `num_head` messages for any text. None if the conversation is short.
        """
        first, segments = self._first, self._segments
        # The last render ended with a prompt; the template may still change an answer after it.
        end = len(segments) - (bool(segments) and segments[-1].kind == "answer")
        if end <= first or segments[end - 1].kind != "prompt":
            return None
        start = end - 1
        while (
            start > first
            and segments[start - 1].kind == "prompt"
            and (end - start < _LAST_PROMPTS or segments[start - 1].opens_answer)
        ):
            start -= 1
        # Render messages before those needed: a text may depend on its neighbours.
        lead, num_lead = start, num_head + _LEAD
        while lead > first and (
            segments[lead].kind == "answer"
            or segments[start].num_before - segments[lead].num_before < num_lead
        ):
            lead -= 1
        if (
            segments[lead].num_before <= num_head
            or segments[start].num_before - segments[lead].num_before < num_lead
        ):
            return None
        return lead, start, end

    def _first_messages(self, num_messages: int) -> list[Message]:
        """List the conversation's first messages."""
        head: list[Message] = []
        first = self._first
        for end in range(first + 1, len(self._segments)):
            head = self._messages(self._segments[first:end])
            if len(head) > num_messages:  # the last message may be an answer's header
                break
        return head[:num_messages]

    def _reach(
        self, target: _Target, history: Sequence[int], messages: Sequence[Message], *, opens_answer: bool
    ) -> tuple[Conversation, Addition] | None:
        """Replace the segments from the target's start on, so that they have the target's text.

        Returns None if earlier segments could change too.
        """
        before, segments = self._segments[: target.start], self._segments[target.start :]
        base = before[-1].end if before else self._base
        agreeing, agreed_chars = _agreement(segments, target.text)
        seam, seam_chars = self._seam(segments, agreeing, agreed_chars, target.text, base, history)
        if seam == base and target.start > self._first and before[-1].kind == "prompt":
            return None  # its last token and the first one here may merge
        wanted = self._encode(target.text[seam_chars:], seam, history)
        same = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(history[seam:], wanted, strict=False))
        )
        addition = Addition(seam + same, wanted[same:])

        kept = [segment for segment in segments[:agreeing] if segment.end <= addition.keep]
        if kept and kept[-1].opens_answer and len(kept) < len(segments):
            # The answer becomes a message of the new segment.
            kept[-1] = structs.replace(kept[-1], opens_answer=False)
        every = [*self._messages(segments, drops=_has_question(messages)), *messages]
        num_kept = len(self._messages(kept))
        added = Segment(
            "prompt",
            kept[-1].end if kept else base,
            addition.keep + len(addition.tokens),
            target.text[sum(len(segment.text) for segment in kept) :],
            tuple(every[num_kept:]),
            opens_answer=opens_answer,
            num_before=num_kept + (segments[0].num_before if segments else 0),
        )
        return replace(self, _segments=(*before, *kept, added)), addition

    def _seam(
        self,
        segments: Sequence[Segment],
        agreeing: int,
        agreed_chars: int,
        target: str,
        base: int,
        history: Sequence[int],
    ) -> tuple[int, int]:
        """Find where tokenising starts: the position and the number of characters of `target` before it.

        If `target` only extends the segments' text, that is the last added token, so the cost of an append
        does not grow with the session. Else it is the end of the last answer before the first difference, or
        a position inside the answer that differs.
        """
        if agreeing < len(segments) and segments[agreeing].kind == "answer":
            answer = segments[agreeing]
            tokens = history[answer.start : answer.end]
            num_tokens, num_chars = self._common(tokens, target[agreed_chars:])
            return answer.start + num_tokens, agreed_chars + num_chars
        if agreeing == len(segments) and (border := self._last_border(segments, history)) is not None:
            tail = self.tokenizer.decode(history[border:])
            # A tokenizer may lose characters that it does not know.
            if target.endswith(tail, 0, agreed_chars):
                return border, agreed_chars - len(tail)
        while agreeing and segments[agreeing - 1].kind == "prompt":
            agreeing -= 1
            agreed_chars -= len(segments[agreeing].text)
        return segments[agreeing - 1].end if agreeing else base, agreed_chars

    def _last_border(self, segments: Sequence[Segment], history: Sequence[int]) -> int | None:
        """Find the last added token of a prompt at the end; later text cannot change the tokens before it."""
        if not segments or segments[-1].kind != "prompt":
            return None
        backwards = range(segments[-1].end - 1, segments[-1].start, -1)
        return next((i for i in backwards if history[i] in self.tokenizer.added_ids), None)

    def _common(self, tokens: Sequence[int], text: str) -> tuple[int, int]:
        """Count the tokens whose text `text` starts with, and their characters, up to a whole character."""
        target = unmarked(text).encode()
        num_bytes = best_tokens = best_bytes = 0
        for count, token in enumerate(tokens, 1):
            piece = self.tokenizer.token_bytes(token)
            if not target.startswith(piece, num_bytes):
                break
            num_bytes += len(piece)
            if target[num_bytes : num_bytes + 1] < b"\x80" or target[num_bytes] >= 0xC0:
                best_tokens, best_bytes = count, num_bytes
        return best_tokens, index_after(text, len(target[:best_bytes].decode()))

    def _encode(self, text: str, position: int, history: Sequence[int]) -> list[int]:
        """Tokenise `text`, which starts at `position`."""
        if position and history[position - 1] in self.tokenizer.eos_ids:
            # Together with the end-of-turn token, which may absorb the white space after it.
            end = history[position - 1]
            ids = self.tokenizer.encode(self.tokenizer.decode([end]) + text, at_start=False)
            if ids[:1] == [end]:
                return ids[1:]
        return self.tokenizer.encode(text, at_start=position == 0)


_Packed: TypeAlias = tuple[str, int, int, int, tuple[Message, ...], tuple[Segment, ...]]


def pack_segments(what: Any) -> bytes:
    """Encode a value with segments as JSON. Not with msgspec, since marked text is not valid UTF-8."""
    return json.dumps(msgspec.to_builtins(what), separators=(",", ":")).encode()


def unpack_segments(packed: bytes) -> list[Segment]:
    """Decode the result of `pack_segments`. Raises `ValueError` and `MsgspecError`."""
    return msgspec.convert(json.loads(packed), list[Segment])


def _first(segments: Sequence[Segment]) -> int:
    """Find the first segment after the last raw content: there the present conversation starts."""
    return next((index for index in range(len(segments), 0, -1) if segments[index - 1].kind == "raw"), 0)


def _rendered(tool: Message) -> Message:
    """Return a tool as templates want it: without what is for the worker alone."""
    function = {name: value for name, value in tool["function"].items() if name != "strict"}
    return {**tool, "function": function}


def _has_question(messages: Sequence[Message]) -> bool:
    return any(message.get("role") == "user" for message in messages)


def _num_up_to(segment: Segment) -> int:
    """Count the messages up to the end of a prompt; a header counts as an empty message."""
    return segment.num_before + len(segment.messages) + segment.opens_answer


def _agreement(segments: Sequence[Segment], target: str) -> tuple[int, int]:
    """Count the segments whose text `target` starts with, and the characters of that text."""
    chars = 0
    for index, segment in enumerate(segments):
        if not target.startswith(segment.text, chars):
            return index, chars
        chars += len(segment.text)
    return len(segments), chars
