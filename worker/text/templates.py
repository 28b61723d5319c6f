"""Renders a session with the model's chat template, and finds the tokens that each turn adds.

A turn renders all messages, and adds the text by which that is longer than the session's text. If the
template now renders earlier messages differently (trims an answer, drops its reasoning), the `Addition` says
from which position on the session's tokens are replaced. Both texts come from the current template, so
sessions continue after a template was corrected.

Answers keep their sampled tokens, as the tokenizer might choose others for the same text. Prompts between two
answers are tokenised as one text, since a token may span two of them.

What a turn compares is text that it renders, and the texts of the session's segments, which are decoded once.
Only new text is tokenised. Pure: no device, no broker, no clock.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from cache.names.tokens import unpack
from worker.models.control_tokens import unmarked
from worker.models.image_parts import images_in, with_marks, without_unseen
from worker.models.template_support import TemplateError
from worker.models.tokenizer import Tokenizer

from .conversation import Segments, has_question, in_order, said_in
from .harmony import has_header, in_places, sampled_message, with_places
from .segments import Message, MessageRecord, Segment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Addition", "Conversation", "Message", "MessageRecord", "TemplateError", "Tokenizer"]


@dataclass(frozen=True, slots=True)
class Addition:
    """A change of a session's tokens to `history[:keep] + tokens`."""

    keep: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class _Target:
    """The text that the conversation must have, from its first segment on.

    If `is_own`, it begins with the text of the session's own tokens, not with what the template renders.
    """

    text: str
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class Conversation(Segments):
    """A session's conversation, rendered by a chat template. Immutable: every change returns a new object.

    The argument `history` is always the session's tokens before the change.
    """

    # Changes that return the tokens that a turn adds.

    def add_messages(
        self, history: Sequence[int], messages: Sequence[Message], *, trusted: bool = True
    ) -> tuple[Conversation, Addition]:
        """Add messages, after closing an answer that ended without its end-of-turn token.

        Raises `TemplateError` if the template refuses them.
        """
        return self.add_said(history, [MessageRecord(one, trusted) for one in messages])

    def add_said(
        self, history: Sequence[int], said: Sequence[MessageRecord], *, opens_answer: bool = False
    ) -> tuple[Conversation, Addition]:
        """Add messages, each with its own `trusted`; see `add_messages`.

        With `opens_answer` the header of the assistant's answer follows them. Without messages nothing
        changes, and no header is added. Raises `TemplateError`.
        """
        if not said:
            return self, Addition(len(history), [])
        return self._extend(history, said, opens_answer=opens_answer)

    def set_extras(
        self, history: Sequence[int], tools: Sequence[Message] | None, variables: Mapping[str, Any] | None
    ) -> tuple[Conversation, Addition]:
        """Replace the tools or the template's variables, and render all messages again; None keeps them.

        Tools may be rendered first, so `history`, the session's tokens, may change from there on. Returns the
        new conversation and how its tokens differ. Raises `TemplateError`.
        """
        changed = self.with_extras(tools, variables)
        if changed is self or not self.has_messages:
            return changed, Addition(len(history), [])
        return changed._extend(history, (), opens_answer=False, anew=True)  # noqa: SLF001  # of this class

    def start_answer(self, history: Sequence[int], *, raw: bool = False) -> tuple[Conversation, Addition]:
        """Add the assistant header that a generate needs; nothing if `opens_answer` says that it needs none.

        Raises `TemplateError`.
        """
        if not self.opens_answer(raw=raw):
            return self, Addition(len(history), [])
        return self._extend(history, (), opens_answer=True)

    def add_answer(
        self, history: Sequence[int], tokens: Sequence[int], *, keeps_reasoning: bool = True
    ) -> Conversation:
        """Add an answer of which only the tokens are known; see `answered`."""
        return self.answered(history, tokens, {}, keeps_reasoning=keeps_reasoning)

    def add_raw(
        self, history: Sequence[int], tokens: Sequence[int], text: str | None = None
    ) -> tuple[Conversation, Addition]:
        """Add text or tokens without the template; later messages start a new conversation after them."""
        start = len(history)
        return self.with_raw(start, start + len(tokens), text), Addition(start, list(tokens))

    def in_reasoning(self, history: Sequence[int]) -> bool:
        """Whether the next token of the answer belongs to its reasoning."""
        pair, last = self.tokenizer.markup.reasoning, self._segments[-1] if self._segments else None
        if pair is None or last is None:
            return False
        if last.kind == "answer":  # unfinished; the header before it may have opened the reasoning
            before = self._text(history, self._segments[-2]) if len(self._segments) > 1 else ""
            text = before[-len(pair[0]) - 8 :] + self._text(history, last)
            return not last.closed and text.rfind(pair[0]) > text.rfind(pair[1])
        return last.opens_answer and self._text(history, last).rstrip().endswith(pair[0])

    @property
    def last_message(self) -> Message | None:
        """The current conversation's last message; None without messages.

        Of an answer only the role, and its calls if the template gets them as calls.
        """
        if not self.has_messages:
            return None
        last = self._segments[-1]
        if last.kind == "prompt" and last.said and not last.opens_answer:
            return last.said[-1].message
        answer = self._ready(last.said[0]) if last.kind == "answer" and last.said else {}
        return {"role": "assistant", "tool_calls": answer.get("tool_calls", ())}

    def begun_answer(self, history: Sequence[int]) -> str:
        """The text of an unfinished answer at the session's end, which the next answer continues."""
        last = self._segments[-1] if self._segments else None
        return self._text(history, last) if last and last.kind == "answer" and not last.closed else ""

    def _ready(self, said: MessageRecord) -> Message:
        """Return a message in the template's form, cached, since marking special tokens takes time."""
        found: Message | None = said.__dict__.get("ready")
        if found is None:
            if said.ids:
                found = self._answer_message(said)
            else:
                found = said.message if said.trusted else self.tokenizer.controls.mark(said.message)
                found = without_unseen(with_marks(found))
            said.__dict__["ready"] = found
        return found

    def _answer_message(self, said: MessageRecord) -> Message:
        tokens, markup = unpack(said.ids), self.tokenizer.markup
        closed = tokens[-1] in self.tokenizer.eos_ids
        lead, content = self.tokenizer.answer_content(tokens[:-1] if closed else tokens)
        if markup.is_harmony and has_header(content):
            end = self.tokenizer.decode(tokens[-1:]) if closed else ""
            calls = said.message.get("tool_calls", ()) if self.tokenizer.renders_sampled_calls else ()
            return sampled_message(lead + content, end, calls, has_reasoning=said.thoughts != "gone")
        if said.thoughts == "gone" and (pair := markup.reasoning):
            at = content.rfind(pair[1])
            if at >= 0:
                content = content[at + len(pair[1]) :].lstrip()
            elif content.startswith(pair[0]):
                content = ""
        if (processor := self.tokenizer.image_processor) is not None:  # a sampled token is no image
            for mark in processor.marks:
                content = content.replace(mark, self.tokenizer.as_text(mark))
        return {"role": "assistant", "content": content}

    def _render(self, said: Sequence[MessageRecord], *, header: bool) -> str:
        ready = self._extras.__dict__
        if not ready:
            mark = self.tokenizer.controls.mark_all
            ready |= {"tools": mark([*map(_rendered, self.tools)]), "variables": mark(self.variables)}
        messages, sampled = with_places([self._ready(one) for one in in_order(said)])
        text = self.tokenizer.render(
            messages,
            add_generation_prompt=header,
            started=self.started,
            tools=ready["tools"],
            variables=ready["variables"],
        )
        text = in_places(text, sampled, self.tokenizer.answer_lead)
        if (image_processor := self.tokenizer.image_processor) is None:
            return text
        grids = [tuple(grid or ()) for one in messages for _, grid in images_in(one.get("content"))]
        return image_processor.written(text, grids) if grids else text

    def _text(self, history: Sequence[int], segment: Segment) -> str:
        """Return the text of a segment's tokens, decoded once: they never change."""
        found: str | None = segment.__dict__.get("decoded")
        if found is None:
            found = self.tokenizer.decode(history[segment.start : segment.end])
            segment.__dict__["decoded"] = found
        return found

    def _extend(
        self,
        history: Sequence[int],
        said: Sequence[MessageRecord],
        *,
        opens_answer: bool,
        anew: bool = False,
    ) -> tuple[Conversation, Addition]:
        """Add messages, and return the tokens that the template's render adds to the session.

        Keeps as many tokens as possible. With `anew` any part of the text may have changed.
        """
        target = self._target(history, said, header=opens_answer, anew=anew)
        addition = self._reach(target, history) if isinstance(target, _Target) else target
        end = addition.keep + len(addition.tokens)
        return self.given(said, addition.keep, end, opens_answer=opens_answer), addition

    def _target(
        self, history: Sequence[int], said: Sequence[MessageRecord], *, header: bool, anew: bool
    ) -> _Target | Addition:
        """Render the whole conversation; return a target, or an addition if only the end must change."""
        segments = self._segments[self._first :]
        every = [*said_in(segments, drops=has_question(said)), *said]
        wanted = self._render(every, header=header)
        prompts = _without_last_answer(segments)
        if anew or not prompts or unmarked(wanted).startswith(self._texts(history, prompts)):
            return _Target(wanted)
        more = self._more(said_in(prompts), wanted, opened=prompts[-1].opens_answer)
        if more is None:
            return _Target(wanted)
        # The texts differ: the tokenizer may lose characters, or an earlier template rendered the session.
        again = self._retokenised(history, segments, wanted) if len(prompts) == len(segments) else None
        return again or self._own_target(history, prompts, more)

    def _retokenised(
        self, history: Sequence[int], segments: Sequence[Segment], wanted: str
    ) -> Addition | None:
        """Tokenise all text after the last answer again, and return the addition.

        None if that would change more than the last token of the session.
        """
        at = next((i for i in range(len(segments), 0, -1) if segments[i - 1].kind == "answer"), 0)
        start = segments[at - 1].end if at else segments[0].start
        before = ""
        if at:
            with suppress(TemplateError):
                before = self._render(said_in(segments[:at]), header=False)
            if not before or not wanted.startswith(before):
                return None
        ids = self._encode(wanted[len(before) :], start, history)
        same = _num_same(history[start:], ids)
        return Addition(start + same, ids[same:]) if start + same >= len(history) - 1 else None

    def _own_target(self, history: Sequence[int], segments: Sequence[Segment], more: str) -> _Target:
        """Return the target that keeps the text of the segments' tokens and appends `more`."""
        own = "".join(self.tokenizer.marked(history[one.start : one.end]) for one in segments)
        return _Target(own + more, is_own=True)

    def _texts(self, history: Sequence[int], segments: Sequence[Segment]) -> str:
        return "".join(self._text(history, one) for one in segments)

    def _more(self, said: Sequence[MessageRecord], wanted: str, *, opened: bool) -> str | None:
        """Return the part of `wanted` after the render of earlier messages; None if it does not begin so."""
        try:
            known = self._render(said[:-1] if opened else said, header=opened)
        except TemplateError:
            return None
        return wanted[len(known) :] if wanted.startswith(known) else None

    def _reach(self, target: _Target, history: Sequence[int]) -> Addition:
        """Return the addition that makes the conversation's tokens spell the target's text."""
        segments, base = self._segments[self._first :], self.base
        seam, seam_chars = self._seam(segments, unmarked(target.text), base, history, is_own=target.is_own)
        wanted = self._encode(target.text[seam_chars:], seam, history)
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

        If `target` only extends the segments' text, start at the tokenizer's last added token (such as an
        end-of-turn token), so an append's cost does not grow with the session. Else start at the end of the
        last answer before the first difference, or inside the answer that differs.
        """
        ends = [0]  # in characters, of the segments whose text `target` starts with
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
            return len(history), ends[-1]  # tokenising the text again may give other tokens
        while agreeing and segments[agreeing - 1].kind == "prompt":
            agreeing -= 1
        return segments[agreeing - 1].end if agreeing else base, ends[agreeing]

    def _last_border(self, segments: Sequence[Segment], history: Sequence[int]) -> int | None:
        """Return the position of the last added token of the tokenizer in a final prompt, if any.

        Text after it does not change the tokens before it.
        """
        if not segments or segments[-1].kind != "prompt":
            return None
        backwards = range(segments[-1].end - 1, segments[-1].start, -1)
        return next((i for i in backwards if history[i] in self.tokenizer.added_ids), None)

    def _common(self, tokens: Sequence[int], text: str) -> tuple[int, int]:
        """Return how many first tokens spell the start of `text`, and how many whole characters that is."""
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
        """Return the tokens of `text`, the first of which is at `position` in the session."""
        if position and history[position - 1] in self.tokenizer.eos_ids:
            # Tokenise it with the end-of-turn token, which may absorb the white space after it.
            end = history[position - 1]
            ids = self.tokenizer.encode(self.tokenizer.decode([end]) + text, at_start=False)
            if ids[:1] == [end]:
                return ids[1:]
        return self.tokenizer.encode(text, at_start=position == 0)


def _num_same(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _without_last_answer(segments: Sequence[Segment]) -> Sequence[Segment]:
    """Return the segments without an answer at the end, which the template may still change."""
    return segments[:-1] if segments and segments[-1].kind == "answer" else segments


def _rendered(tool: Message) -> Message:
    """Return a tool for the template: without `strict`, which only the worker uses."""
    function = {name: value for name, value in tool["function"].items() if name != "strict"}
    return {**tool, "function": function}
