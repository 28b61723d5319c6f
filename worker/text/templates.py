"""Renders a session with the model's chat template, and finds the tokens that each turn adds.

A conversation is a sequence of segments: prompts, answers, raw content. They say which tokens came from which
messages, and are built from requests and results alone (`given`, `answered`), so reading a log renders and
tokenises nothing. Only a turn that adds messages renders (`add_messages`, `start_answer`).

What the model was given stays: a turn adds the text by which a render of all messages differs from a render
of the earlier ones. If the template now renders earlier messages to another text (trims an answer, drops its
thoughts), the `Addition` says from which position on the session's tokens are replaced. Both renders are by
today's template, so one that was corrected continues the sessions of the old one.

Answers keep their sampled tokens, as the tokenizer might choose others for the same text. Prompts between two
answers are tokenised as one text: a token may span two turns.

With a local template (`locality`) the cost of a turn depends on its size only: only the last messages are
rendered. Pure: no device, no broker, no clock.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Struct, structs

from cache.names.errors import CutOffError
from cache.names.tokens import pack, unpack
from worker.models.content import index_after, unmarked
from worker.models.tokenizer import TemplateError, Tokenizer

from .locality import num_first

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Message: TypeAlias = dict[str, Any]

__all__ = ["Addition", "Conversation", "Said", "TemplateError", "Tokenizer"]

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


class Said(Struct, frozen=True, array_like=True, omit_defaults=True, dict=True):
    """One message of a conversation, as a request or a result has it.

    Special tokens that are spelled out in its texts are such if it is `trusted`. An answer has its tokens,
    packed, as `ids`; its message is for tokenizers that do not know them, and empty for a part of an answer.
    `thoughts` are an answer's reasoning: kept, or `leaving` with the next user message, or gone.
    """

    message: Message
    trusted: bool = False
    ids: bytes = b""
    thoughts: Literal["kept", "leaving", "gone"] = "kept"


#: Stands for the answer after its header.
_EMPTY: Final = Said({"role": "assistant", "content": ""}, trusted=True)


class Segment(Struct, frozen=True, array_like=True):
    """The tokens `[start, end)` of a session, and where they come from.

    A prompt holds its messages and may end with the header of an answer. An end-of-turn token closes an
    answer. Raw content has its text, unless it was given as tokens. Messages after it start a new
    conversation; `num_before` counts its messages before this segment.
    """

    kind: Literal["prompt", "answer", "raw"]
    start: int
    end: int
    said: tuple[Said, ...] = ()
    opens_answer: bool = False
    closed: bool = False
    num_before: int = 0
    text: str | None = None


class _Extras(Struct, frozen=True, array_like=True, dict=True):
    """What is rendered beside the messages: tools, and further variables of the template."""

    tools: tuple[Message, ...] = ()
    variables: Message = {}


class _Packed(Struct, frozen=True, array_like=True):
    """A conversation in a checkpoint."""

    started: datetime
    segments: tuple[Segment, ...]
    first: int
    num_cut: int
    base: int
    head: tuple[Said, ...]
    extras: _Extras


@dataclass(frozen=True, slots=True)
class _Target:
    """The text that the conversation must have from the segment at index `start` on.

    It begins with the tokens' own text if `is_own`, else with the template's.
    """

    start: int
    text: str
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """A session's state besides its tokens. Immutable: every change returns a new object.

    The argument `history` is always the session's tokens before the change. `started` is the date that the
    template may print: one date per session, so that it does not change tomorrow.
    """

    tokenizer: Tokenizer
    started: datetime = _SOME_DAY
    _segments: tuple[Segment, ...] = ()
    _first: int = 0  # the first segment of the conversation that messages continue
    # What `shortened` left out: number of segments, position of their end, the first messages if among them.
    _num_cut: int = 0
    _base: int = 0
    _head: tuple[Said, ...] = ()
    _extras: _Extras = field(default_factory=_Extras)

    @property
    def position(self) -> int:
        """Tokens in the session."""
        return self._segments[-1].end if self._segments else self._base

    @property
    def has_messages(self) -> bool:
        """Whether the next messages continue a conversation, so that they are rendered with earlier ones."""
        return self._first < len(self._segments)

    @property
    def tools(self) -> tuple[Message, ...]:
        """The tools, as a request gave them."""
        return self._extras.tools

    @property
    def last_message(self) -> Message | None:
        """The last message of the conversation that the next ones continue; of an answer, its role alone."""
        if not self.has_messages:
            return None
        last = self._segments[-1]
        is_prompt = last.kind == "prompt" and last.said and not last.opens_answer
        return last.said[-1].message if is_prompt else {"role": "assistant"}

    @property
    def plain_tools(self) -> list[Message]:
        """A copy of the tools."""
        found: list[Message] = json.loads(json.dumps(self.tools))  # which nests deeper than `deepcopy`
        return found

    @property
    def variables(self) -> Message:
        """Further variables of the template, as a request gave them."""
        return self._extras.variables

    # What requests and results say, by which a log is read.

    def with_extras(
        self, tools: Sequence[Message] | None, variables: Mapping[str, Any] | None
    ) -> Conversation:
        """Change what is rendered beside the messages; None leaves it as it is."""
        extras = _Extras(
            self.tools if tools is None else tuple(tools),
            self.variables if variables is None else dict(variables),
        )
        return self if extras == self._extras else replace(self, _extras=extras)

    def given(self, said: Sequence[Said], keep: int, end: int, *, opens_answer: bool) -> Conversation:
        """Add messages and perhaps the header of an answer, which left `keep` tokens and ended at `end`.

        Messages whose tokens did not stay belong to the new prompt, with the answers among them.
        """
        num_kept = len(self._segments)
        while num_kept > self._first and self._segments[num_kept - 1].end > keep:
            num_kept -= 1
        kept, gone = list(self._segments[:num_kept]), self._segments[num_kept:]
        before = kept[self._first :]
        if gone:
            last = before[-1:] if before and before[-1].opens_answer else []
            earlier = _said_in([*last, *gone], drops=_has_question(said))
            if last:  # the answer becomes a message of the new segment
                kept[-1] = structs.replace(kept[-1], opens_answer=False)
                earlier = earlier[len(last[0].said) :]
            said = [*earlier, *said]
        num_before = _num_up_to(kept[-1]) if before else 0
        start = kept[-1].end if kept else self._base
        added = Segment("prompt", start, end, tuple(said), opens_answer=opens_answer, num_before=num_before)
        return replace(self, _segments=(*kept, added))

    def opens_answer(self, *, raw: bool = False) -> bool:
        """Whether a generate needs the header of an answer.

        Not with `raw`, in a session without messages, after raw content, after a header, and after an answer
        without its end-of-turn token: the generate continues that answer.
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
    ) -> Conversation:
        """Add generated tokens, and the message that they say; the last one may be an end-of-turn token.

        Without `keeps_reasoning` the answer's reasoning leaves the session with the next user message. After
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
            num_before = _num_up_to(last) - 1
            answer = self._answer(len(history), tokens, num_before, message, keeps=keeps_reasoning)
            return replace(self, _segments=(*self._segments, answer))
        whole = [*history[last.start :], *tokens]
        both = _joined(last.said[0].message, message)
        answer = self._answer(last.start, whole, last.num_before, both, keeps=keeps_reasoning)
        return replace(self, _segments=(*self._segments[:-1], answer))

    def with_raw(self, keep: int, end: int, text: str | None) -> Conversation:
        """Add raw content, with its text unless it was given as tokens; later messages start a new one.

        It left `keep` tokens and ended at `end`.
        """
        if keep == end:
            return self
        kept = [segment for segment in self._segments if segment.end <= keep]
        texts = [one.text if one.kind == "raw" else None for one in self._segments[len(kept) :]]
        known = [one for one in (*texts, text) if one is not None]
        whole = "".join(known) if len(known) == len(texts) + 1 else None
        start = kept[-1].end if kept else self._base
        segments = (*kept, Segment("raw", start, end, text=whole))
        return replace(self, _segments=segments, _first=len(segments), _head=())

    def tokenised_anew(self, num_raw: int) -> Conversation:
        """Return the conversation for another tokenizer, before its input is added: see `parts`.

        The first `num_raw` tokens are raw content.
        """
        said = [Said(one.message, one.trusted) for one in _said_in(self._segments[self._first :])]
        raw = [one.text or "" for one in self._segments[: self._first]]
        segments = [Segment("raw", 0, num_raw, text="".join(raw))] if num_raw else []
        first = len(segments)
        if said:  # of no tokens yet: `given` puts them into the new prompt
            segments.append(Segment("prompt", num_raw, num_raw + 1, tuple(said)))
        return replace(self, _segments=tuple(segments), _first=first, _num_cut=0, _base=0, _head=())

    def parts(self) -> Iterator[str | list[Said] | None]:
        """Yield what was said, without tokens: texts, and messages; None for what is known as tokens only.

        Raises `CutOffError`.
        """
        if self._base:
            raise CutOffError("what was said at the beginning was left out")
        for is_raw, run in groupby(self._segments, lambda segment: segment.kind == "raw"):
            segments = list(run)
            if is_raw:
                yield from (segment.text for segment in segments)
                continue
            said = [one for one in _said_in(segments) if one is not _EMPTY]
            if not all(one.message for one in said):
                yield None
            yield [Said(one.message, one.trusted) for one in said]

    # What a turn adds to the tokens.

    def add_messages(
        self, history: Sequence[int], messages: Sequence[Message], *, trusted: bool = True
    ) -> tuple[Conversation, Addition]:
        """Add messages, after closing an answer that ended without its end-of-turn token.

        Raises `TemplateError` if the template refuses them, and `CutOffError`.
        """
        return self.add_said(history, [Said(one, trusted) for one in messages])

    def add_said(self, history: Sequence[int], said: Sequence[Said]) -> tuple[Conversation, Addition]:
        """Do `add_messages`."""
        if not said:
            return self, Addition(len(history), [])
        return self._extend(history, said, opens_answer=False)

    def set_extras(
        self, history: Sequence[int], tools: Sequence[Message] | None, variables: Mapping[str, Any] | None
    ) -> tuple[Conversation, Addition]:
        """Do `with_extras`; earlier messages are rendered again, as these may stand before them.

        Raises `TemplateError` and `CutOffError`.
        """
        changed = self.with_extras(tools, variables)
        if changed is self or not self.has_messages:
            return changed, Addition(len(history), [])
        return changed._extend(history, (), opens_answer=False, anew=True)  # noqa: SLF001  # of this class

    def start_answer(self, history: Sequence[int], *, raw: bool = False) -> tuple[Conversation, Addition]:
        """Add the assistant header that a generate needs, if `opens_answer`.

        Raises `TemplateError` and `CutOffError`.
        """
        if not self.opens_answer(raw=raw):
            return self, Addition(len(history), [])
        return self._extend(history, (), opens_answer=True)

    def add_answer(
        self, history: Sequence[int], tokens: Sequence[int], *, keeps_reasoning: bool = True
    ) -> Conversation:
        """Do `answered` for tokens alone."""
        return self.answered(history, tokens, {}, keeps_reasoning=keeps_reasoning)

    def add_raw(
        self, history: Sequence[int], tokens: Sequence[int], text: str | None = None
    ) -> tuple[Conversation, Addition]:
        """Add text or tokens without the template; later messages start a new conversation after them."""
        start = len(history)
        return self.with_raw(start, start + len(tokens), text), Addition(start, list(tokens))

    def rewind(self, history: Sequence[int], position: int) -> Conversation:
        """Drop everything from `position` on.

        If the cut is inside an answer, its first part becomes an unfinished answer; inside a prompt, raw
        content. Raises `CutOffError`.
        """
        if not position:
            return self.emptied()
        if position <= self._base:
            raise CutOffError("the part to rewind to was left out")
        segments = [segment for segment in self._segments if segment.end <= position]
        if len(segments) < len(self._segments):
            cut = self._segments[len(segments)]
            if cut.start < position and cut.kind == "answer":
                kept, keeps = history[cut.start : position], cut.said[0].thoughts == "kept"
                segments.append(self._answer(cut.start, kept, cut.num_before, {}, keeps=keeps))
            elif cut.start < position:
                segments.append(Segment("raw", cut.start, position))
        first = _first(segments)
        if self._first and self._num_cut and not first:
            raise CutOffError("the beginning of the conversation was left out")
        return replace(self, _segments=tuple(segments), _first=first)

    def in_reasoning(self, history: Sequence[int]) -> bool:
        """Whether the next token of the answer belongs to its reasoning."""
        pair, last = self.tokenizer.dialect.reasoning, self._segments[-1] if self._segments else None
        if pair is None or last is None:
            return False
        if last.kind == "answer":  # unfinished; the header before it may have opened the reasoning
            before = self._text(history, self._segments[-2]) if len(self._segments) > 1 else ""
            text = before[-len(pair[0]) - 8 :] + self._text(history, last)
            return not last.closed and text.rfind(pair[0]) > text.rfind(pair[1])
        return last.opens_answer and self._text(history, last).rstrip().endswith(pair[0])

    def emptied(self) -> Conversation:
        """Return the conversation before anything was said, with the same extras."""
        return Conversation(self.tokenizer, self.started, _extras=self._extras)

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
        head = self._head or tuple(self._first_said(num_head)) if start > self._first else ()
        return replace(
            self,
            _segments=segments[start:],
            _first=max(self._first - start, 0),
            _num_cut=self._num_cut + start,
            _base=segments[start].start,
            _head=head,
        )

    def pack(self) -> bytes:
        """Encode for `unpack`."""
        parts = (self._segments, self._first, self._num_cut, self._base, self._head, self._extras)
        return msgspec.msgpack.encode(_Packed(self.started, *parts))

    @classmethod
    def unpack(cls, tokenizer: Tokenizer, packed: bytes) -> Conversation:
        """Decode what `pack` returned. Raises `MsgspecError`."""
        return cls(tokenizer, *structs.astuple(msgspec.msgpack.decode(packed, type=_Packed)))

    def _answer(
        self, start: int, tokens: Sequence[int], num_before: int, message: Message, *, keeps: bool
    ) -> Segment:
        said = Said(message, ids=pack(tokens), thoughts="kept" if keeps else "leaving")
        end, closed = start + len(tokens), tokens[-1] in self.tokenizer.eos_ids
        return Segment("answer", start, end, (said,), closed=closed, num_before=num_before)

    def _ready(self, said: Said) -> Message:
        """Return a message as the template gets it. Kept with the message, as marking it takes time."""
        found: Message | None = said.__dict__.get("ready")
        if found is None:
            if said.ids:
                found = self._answer_message(said)
            else:
                found = said.message if said.trusted else self.tokenizer.as_content(said.message)
            said.__dict__["ready"] = found
        return found

    def _answer_message(self, said: Said) -> Message:
        tokens = unpack(said.ids)
        closed = tokens[-1] in self.tokenizer.eos_ids
        _, content = self.tokenizer.answer_content(tokens[:-1] if closed else tokens)
        if said.thoughts == "gone" and (pair := self.tokenizer.dialect.reasoning):
            at = content.rfind(pair[1])
            if at >= 0:
                content = content[at + len(pair[1]) :].lstrip()
            elif content.startswith(pair[0]):
                content = ""
        return {"role": "assistant", "content": content}

    def _render(self, said: Sequence[Said], *, header: bool) -> str:
        ready = self._extras.__dict__
        if not ready:
            tools = [_rendered(tool) for tool in self.tools]
            ready["tools"], ready["variables"] = map(self.tokenizer.as_tools, (tools, self.variables))
        return self.tokenizer.render(
            [self._ready(one) for one in said],
            add_generation_prompt=header,
            started=self.started,
            tools=ready["tools"],
            variables=ready["variables"],
        )

    def _text(self, history: Sequence[int], segment: Segment) -> str:
        return self.tokenizer.decode(history[segment.start : segment.end])

    def _extend(
        self,
        history: Sequence[int],
        said: Sequence[Said],
        *,
        opens_answer: bool,
        anew: bool = False,
    ) -> tuple[Conversation, Addition]:
        """Extend the conversation by messages as the template renders it.

        Keeps as many tokens as possible. With `anew` any part of the text may have changed.
        """
        near = None if anew else self._near_target(history, said, header=opens_answer)
        addition = None if near is None else self._reach(near, history)
        if addition is None:
            if self._head:
                raise CutOffError("the template needs messages that were left out")
            target = self._whole_target(history, said, header=opens_answer, anew=anew)
            addition = self._reach(target, history) if isinstance(target, _Target) else target
        if addition is None:
            raise AssertionError("a render from the first segment cannot fail")
        end = addition.keep + len(addition.tokens)
        return self.given(said, addition.keep, end, opens_answer=opens_answer), addition

    def _whole_target(
        self, history: Sequence[int], said: Sequence[Said], *, header: bool, anew: bool
    ) -> _Target | Addition:
        """Return the text of the whole conversation, or what it adds if the session's text is another."""
        segments = self._segments[self._first :]
        every = [*_said_in(segments, drops=_has_question(said)), *said]
        wanted = self._render(every, header=header)
        prompts = _without_last_answer(segments)
        if anew or not prompts or unmarked(wanted).startswith(self._texts(history, prompts)):
            return _Target(self._first, wanted)
        more = self._more(_said_in(prompts), wanted, opened=prompts[-1].opens_answer)
        if more is None:
            return _Target(self._first, wanted)
        # The tokenizer may lose characters, so that its text is another; or the template was another one.
        again = self._retokenised(history, segments, wanted) if len(prompts) == len(segments) else None
        return again or self._target_of(history, self._first, prompts, more)

    def _retokenised(
        self, history: Sequence[int], segments: Sequence[Segment], wanted: str
    ) -> Addition | None:
        """Tokenise what is behind the last answer; None if that changes more than the last token there."""
        at = next((i for i in range(len(segments), 0, -1) if segments[i - 1].kind == "answer"), 0)
        start = segments[at - 1].end if at else segments[0].start
        before = ""
        if at:
            with suppress(TemplateError):
                before = self._render(_said_in(segments[:at]), header=False)
            if not before or not wanted.startswith(before):
                return None
        ids = self._encode(wanted[len(before) :], start, history)
        same = _num_same(history[start:], ids)
        return Addition(start + same, ids[same:]) if start + same >= len(history) - 1 else None

    def _target_of(
        self, history: Sequence[int], start: int, segments: Sequence[Segment], more: str
    ) -> _Target:
        """Return the target that leaves segments as they are, with `more` behind them."""
        own = "".join(self.tokenizer.marked(history[one.start : one.end]) for one in segments)
        return _Target(start, own + more, is_own=True)

    def _texts(self, history: Sequence[int], segments: Sequence[Segment]) -> str:
        return "".join(self._text(history, one) for one in segments)

    def _more(self, said: Sequence[Said], wanted: str, *, opened: bool) -> str | None:
        """Return what `wanted` has behind the render of earlier messages; None if it does not begin so."""
        try:
            known = self._render(said[:-1] if opened else said, header=opened)
        except TemplateError:
            return None
        return wanted[len(known) :] if wanted.startswith(known) else None

    def _near_target(self, history: Sequence[int], said: Sequence[Said], *, header: bool) -> _Target | None:
        """Find the text after the second last answer, without rendering the text before it.

        None if the conversation is short, or the template looks back.
        """
        segments, num_head = self._segments, num_first(self.tokenizer.template)
        if num_head is None or (found := self._near(num_head)) is None:
            return None
        lead, start, end = found
        odd = (segments[lead].num_before - num_head) % 2  # leave out an even number: indices stay odd or even
        head = self._head or self._first_said(num_head)
        before = _said_in(segments[lead:end])[odd:]
        after = [*_said_in(segments[lead:], drops=_has_question(said))[odd:], *said]
        try:
            wanted = self._render([*head, *after], header=header)
        except TemplateError:
            return None
        more = self._more([*head, *before], wanted, opened=segments[end - 1].opens_answer)
        if more is None:
            return None
        known = wanted[: len(wanted) - len(more)]
        plain, own = unmarked(known), self._texts(history, segments[start:end])
        if plain.endswith(own):
            return _Target(start, wanted[index_after(known, len(plain) - len(own)) :])
        return self._target_of(history, start, segments[start:end], more)

    def _near(self, num_head: int) -> tuple[int, int, int] | None:
        """Find the segments to render again: where rendering starts, where the text is needed, and its end.

        The template may use the first `num_head` messages for any text. None if the conversation is short.
        """
        first, segments = self._first, self._segments
        end = len(_without_last_answer(segments))
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

    def _first_said(self, num_messages: int) -> list[Said]:
        """List the conversation's first messages."""
        head: list[Said] = []
        first = self._first
        for end in range(first + 1, len(self._segments)):
            head = _said_in(self._segments[first:end])
            if len(head) > num_messages:  # the last message may be an answer's header
                break
        return head[:num_messages]

    def _reach(self, target: _Target, history: Sequence[int]) -> Addition | None:
        """Replace the tokens from the target's start on, so that they have the target's text.

        Returns None if earlier segments could change too.
        """
        before, segments = self._segments[: target.start], self._segments[target.start :]
        base = before[-1].end if before else self._base
        plain = unmarked(target.text)
        seam, seam_chars = self._seam(segments, plain, base, history, is_own=target.is_own)
        if seam == base and target.start > self._first and before[-1].kind == "prompt":
            return None  # its last token and the first one here may merge
        wanted = self._encode(target.text[index_after(target.text, seam_chars) :], seam, history)
        same = _num_same(history[seam:], wanted)
        return Addition(seam + same, wanted[same:])

    def _seam(
        self,
        segments: Sequence[Segment],
        target: str,
        base: int,
        history: Sequence[int],
        *,
        is_own: bool,
    ) -> tuple[int, int]:
        """Find where tokenising starts: the position and the number of characters of `target` before it.

        If `target` only extends the segments' text, that is the last added token, so the cost of an append
        does not grow with the session. Else it is the end of the last answer before the first difference, or
        a position inside the answer that differs.
        """
        ends = [0]  # of the segments whose text `target` starts with
        for segment in segments:
            text = self._text(history, segment)
            if not target.startswith(text, ends[-1]):
                break
            ends.append(ends[-1] + len(text))
        agreeing = len(ends) - 1
        if agreeing < len(segments) and segments[agreeing].kind == "answer":
            answer = segments[agreeing]
            tokens = history[answer.start : answer.end]
            num_tokens, num_chars = self._common(tokens, target[ends[-1] :])
            return answer.start + num_tokens, ends[-1] + num_chars
        if agreeing == len(segments) and (border := self._last_border(segments, history)) is not None:
            return border, ends[-1] - len(self.tokenizer.decode(history[border:]))
        if is_own and agreeing == len(segments):
            return len(history), ends[-1]  # its text may come to other tokens
        while agreeing and segments[agreeing - 1].kind == "prompt":
            agreeing -= 1
        return segments[agreeing - 1].end if agreeing else base, ends[agreeing]

    def _last_border(self, segments: Sequence[Segment], history: Sequence[int]) -> int | None:
        """Find the last added token of a prompt at the end; later text cannot change the tokens before it."""
        if not segments or segments[-1].kind != "prompt":
            return None
        backwards = range(segments[-1].end - 1, segments[-1].start, -1)
        return next((i for i in backwards if history[i] in self.tokenizer.added_ids), None)

    def _common(self, tokens: Sequence[int], text: str) -> tuple[int, int]:
        """Count the tokens whose text `text` starts with, and their characters, up to a whole character."""
        target = text.encode()
        num_bytes = best_tokens = best_bytes = 0
        for count, token in enumerate(tokens, 1):
            piece = self.tokenizer.token_bytes(token)
            if not target.startswith(piece, num_bytes):
                break
            num_bytes += len(piece)
            if target[num_bytes : num_bytes + 1] < b"\x80" or target[num_bytes] >= 0xC0:
                best_tokens, best_bytes = count, num_bytes
        return best_tokens, len(target[:best_bytes].decode())

    def _encode(self, text: str, position: int, history: Sequence[int]) -> list[int]:
        """Tokenise `text`, which starts at `position`."""
        if position and history[position - 1] in self.tokenizer.eos_ids:
            # Together with the end-of-turn token, which may absorb the white space after it.
            end = history[position - 1]
            ids = self.tokenizer.encode(self.tokenizer.decode([end]) + text, at_start=False)
            if ids[:1] == [end]:
                return ids[1:]
        return self.tokenizer.encode(text, at_start=position == 0)


def _num_same(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _said_in(segments: Sequence[Segment], *, drops: bool = False) -> list[Said]:
    """List the messages of segments; a header without an answer counts as an empty message.

    With `drops`, without the reasoning that is not to be kept.
    """
    said: list[Said] = []
    for segment in segments:
        if segment.kind == "answer":
            said.pop()
        if drops and segment.kind == "answer" and segment.said[0].thoughts == "leaving":
            said.append(structs.replace(segment.said[0], thoughts="gone"))
        else:
            said += segment.said
        if segment.opens_answer:
            said.append(_EMPTY)
    return said


def _without_last_answer(segments: Sequence[Segment]) -> Sequence[Segment]:
    """Return the segments without an answer at the end, which the template may still change."""
    return segments[:-1] if segments and segments[-1].kind == "answer" else segments


def _joined(one: Message, other: Message) -> Message:
    """Return the message of an answer in two parts; empty if the message of one is not known."""
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
    """Find the first segment after the last raw content: there the present conversation starts."""
    return next((index for index in range(len(segments), 0, -1) if segments[index - 1].kind == "raw"), 0)


def _rendered(tool: Message) -> Message:
    """Return a tool as templates want it: without what is for the worker alone."""
    function = {name: value for name, value in tool["function"].items() if name != "strict"}
    return {**tool, "function": function}


def _has_question(said: Sequence[Said]) -> bool:
    return any(one.message.get("role") == "user" for one in said)


def _num_up_to(segment: Segment) -> int:
    """Count the messages up to the end of a segment; a header counts as an empty message."""
    return segment.num_before + len(segment.said) + segment.opens_answer
