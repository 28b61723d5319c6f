"""Splits answers in OpenAI's harmony format, messages with channels; and puts them into rendered text. Pure.

An answer is a series of messages: a header (`<|channel|>analysis`, perhaps with `to=functions.NAME`), then
`<|message|>`, then content up to `<|end|>`, `<|call|>` or `<|return|>`. The channel `analysis` is reasoning,
`final` is text, and a message to a function is a call with JSON arguments.
"""

from __future__ import annotations

import re
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from worker.models.call_parsers import parse_calls

from .splitting import Piece, Splitter, first_marker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .splitting import AnswerCalls

#: The header that begins an answer's text; everything before it is reasoning or a call.
FINAL: Final = "<|channel|>final<|message|>"
#: The same header as a model may write it, with the name of a format before `<|message|>`.
FINAL_HEADER: Final = re.compile(rb"<\|channel\|>final[^<]{0,32}(?:<\|constrain\|>[^<]{0,32})?<\|message\|>")
#: Ends a message's header.
_MESSAGE: Final = "<|message|>"
_START: Final = "<|start|>"
_CALL_END: Final = "<|call|>"
#: What separates the messages of an answer, behind the end of each.
_NEXT: Final = f"{_START}assistant"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|channel|>", _START)
_ENDED: Final = re.compile(r"<\|(?:end|call|return)\|>")
_TO: Final = re.compile(r"\bto=(?:functions\.)?([\w.\-]+)")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
#: The field of a message for an answer as it was sampled, and the mark that stands for it in a template: a
#: number between lone surrogates, which no message can contain.
_SAMPLED: Final = "as_sampled"
_PLACE: Final = re.compile(r"\udc02(\d+)\udc03(<\|(?:end|return)\|>)?")
#: The same mark in the arguments of a call, with all that a template writes of the call.
_CALL_PLACE: Final = re.compile(
    r"(<\|start\|>assistant)(?:(?!<\|start\|>)[^\udc02])*\udc02(\d+)\udc03[^<]*<\|call\|>"
)


class HarmonySplitter(Splitter):
    """Splits one answer, or the rest of one that has begun."""

    def __init__(self, calls: AnswerCalls, begun: str = "") -> None:
        """If `calls` offers no tools, messages to functions stay text. `begun` is the answer so far."""
        super().__init__(calls)
        self._header: str | None = ""  # None within a message's content
        self._callee: str | None = None
        self._opened = ""  # header of the message to `_callee`
        self._arguments = ""
        self._held = ""
        self.push(_ENDED.split(begun)[-1])
        if self._header and not self._header.startswith(("<|channel|>", _START)):
            self._header = None  # a text without a header

    def is_marker(self, text: str) -> bool:
        """Whether a special token with this text may be a marker: in a header all may, else only ends."""
        return self._header is not None or text in _ENDS

    def push(self, text: str) -> Piece:
        """Add text; return what is now final."""
        held, self._held = self._held + text, ""
        piece = Piece()
        while held and not self.is_full:
            at, marker = first_marker(held, (_MESSAGE,) if self._header is not None else _ENDS)
            if self._header is not None:
                self._header += held[:at]
                if marker is not None:
                    self._begin(self._header)
            else:
                piece += self._content(held[:at])
                if marker is not None:
                    piece += self._end()
                    self._header = marker if marker in ("<|channel|>", _START) else ""
            self._held = held[at:] if marker is None else ""
            held = "" if marker is None else held[at + len(marker) :]
        return piece

    def finish(self, *, is_cut: bool = False) -> Piece:  # noqa: ARG002  # a call's JSON shows whether it is complete
        """End the answer; an unfinished header is dropped, unless it belongs to a call."""
        held, self._held = self._held, ""
        if self.is_full:
            return Piece()
        if self._header is None:
            return self._content(held) + self._end()
        said = self._header + held
        if self._calls.offered and _TO.search(said):
            self.malformed = True
        elif said.startswith(("<|channel|>", _START)):
            said = ""
        return Piece(said)

    def _begin(self, header: str) -> None:
        channel, callee = _CHANNEL.search(header), _TO.search(header)
        self._callee = callee[1] if callee and self._calls.offered else None
        self._header, self._opened, self._arguments = None, header + _MESSAGE, ""
        self.in_reasoning = channel is not None and channel[1] == "analysis" and not self._callee

    def _content(self, text: str) -> Piece:
        if self._callee is not None:
            self._arguments += text
            return Piece()
        return Piece(reasoning=text) if self.in_reasoning else Piece(text)

    def _end(self) -> Piece:
        """End a message; a message to a function that is not a valid call becomes text."""
        self._header, self.in_reasoning = "", False
        callee, self._callee = self._callee, None
        if callee is None:
            return Piece()
        found = self._calls.believed(parse_calls, callee + self._arguments)
        if found and found[0] and found[1] == len(callee + self._arguments):
            return self._calls.add(found[0])
        self.malformed = True
        return Piece(self._opened + self._arguments)


def has_header(text: str) -> bool:
    """Return whether a text has a message's header, or the beginning of one."""
    return "<|channel|>" in text or _MESSAGE in text


def sampled_message(
    text: str, end: str, calls: Sequence[Mapping[str, Any]], *, has_reasoning: bool
) -> dict[str, Any]:
    """Return the message of an answer of several harmony messages, perhaps without its reasoning.

    Chat templates refuse such a text as content, or write it into the channel `final`. So `with_places` gives
    them a mark for it, and `in_places` replaces that. `end` is the token that ended the answer. The template
    gets the first of `calls` as a call, with the mark in its arguments, so that it renders the call's result.
    """
    if not has_reasoning:
        parts = text.split(_NEXT)
        text = _NEXT.join(part for part in parts if not _is_reasoning(part)).removesuffix("<|end|>")
    message = {"role": "assistant", "content": "", _SAMPLED: text + (end if end == _CALL_END else "")}
    return {**message, "tool_calls": list(calls[:1])} if calls and end == _CALL_END else message


def _is_reasoning(message: str) -> bool:
    header = message.partition(_MESSAGE)[0]
    channel = _CHANNEL.search(header)
    return channel is not None and channel[1] == "analysis" and not _TO.search(header)


def with_places(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return messages for a chat template, with marks for answers as they were sampled; and their texts."""
    texts = [one[_SAMPLED] for one in messages if one.get(_SAMPLED)]
    number = count()
    found = [_placed(one, f"\udc02{next(number)}\udc03") if one.get(_SAMPLED) else one for one in messages]
    return found, texts


def _placed(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return {"role": message["role"], "content": mark}
    (call,) = message["tool_calls"]
    marked = {**call, "function": {**call["function"], "arguments": {mark: ""}}}
    return {"role": message["role"], "content": "", "tool_calls": [marked]}


def in_places(text: str, sampled: Sequence[str], lead: str) -> str:
    """Return a rendered text in which `sampled` texts replace their marks.

    What the template writes before an answer's content (`lead`) or behind it makes way for their own.
    """

    def put(found: re.Match[str]) -> str:
        own = sampled[int(found[1])]
        return own if own.endswith(_CALL_END) else own + (found[2] or "")

    if not sampled:
        return text
    text = _CALL_PLACE.sub(lambda found: found[1] + sampled[int(found[2])], text)
    return _PLACE.sub(put, text.replace(f"{lead}\udc02", "\udc02"))
