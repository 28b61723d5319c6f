"""Splits answers in OpenAI's harmony format: messages with channels. Pure.

An answer is a series of messages: a header (`<|channel|>analysis`, perhaps with `to=functions.NAME`), then
`<|message|>`, then content up to `<|end|>`, `<|call|>` or `<|return|>`. The channel `analysis` is reasoning,
`final` is text, and a message to a function is a call with JSON arguments.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from turnkeep_client.messages import Called, CalledFunction, CallPart

from .splitting import Piece, first_marker

if TYPE_CHECKING:
    from collections.abc import Callable

#: What begins the text of an answer; all before it is reasoning, or a call.
FINAL: Final = "<|channel|>final<|message|>"
_START, _MESSAGE = "<|start|>", "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|channel|>", _START)
_TO: Final = re.compile(r"\bto=(?:functions\.)?([\w.\-]+)")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonySplitter:
    """Splits one answer, which begins with a header or, after an unfinished answer, with text."""

    def __init__(self, *, with_calls: bool, new_id: Callable[[int], str]) -> None:
        """Without `with_calls`, messages to functions stay text."""
        self._with_calls = with_calls
        self._new_id = new_id
        self.calls: list[Called] = []
        self.malformed = False
        self.in_reasoning = False
        self._header: str | None = ""  # None within a message's content
        self._callee: str | None = None
        self._arguments = ""
        self._held = ""

    def push(self, text: str) -> Piece:
        """Add text; return what is final."""
        held, self._held = self._held + text, ""
        piece = Piece()
        while held:
            at, marker = first_marker(held, (_MESSAGE,) if self._header is not None else _ENDS)
            if self._header is not None:
                self._header += held[:at]
                if marker is not None:
                    piece += self._begin(self._header)
            else:
                piece += self._content(held[:at])
                if marker is not None:
                    piece += self._end()
                    self._header = marker if marker in ("<|channel|>", _START) else ""
            self._held = held[at:] if marker is None else ""
            held = "" if marker is None else held[at + len(marker) :]
        return piece

    def finish(self) -> Piece:
        """End the answer; return the rest. A header without a message is text."""
        held, self._held = self._held, ""
        if self._header is None:
            return self._content(held) + self._end()
        said = self._header + held
        if self._with_calls and _TO.search(said):
            self.malformed = True
        elif said.startswith(("<|channel|>", _START)):
            said = ""
        return Piece(said)

    def _begin(self, header: str) -> Piece:
        self._header = None
        channel, callee = _CHANNEL.search(header), _TO.search(header)
        self._callee = callee[1] if callee and self._with_calls else None
        self._arguments = ""
        self.in_reasoning = channel is not None and channel[1] == "analysis" and not self._callee
        if self._callee is None:
            return Piece()
        index = len(self.calls)
        return Piece(calls=(CallPart(index, self._new_id(index), self._callee),))

    def _content(self, text: str) -> Piece:
        if not text:
            return Piece()
        if self._callee is not None:
            self._arguments += text
            return Piece(calls=(CallPart(len(self.calls), arguments=text),))
        return Piece(reasoning=text) if self.in_reasoning else Piece(text)

    def _end(self) -> Piece:
        """End a message. Arguments that are no JSON object become text."""
        self._header, self.in_reasoning = "", False
        callee, self._callee = self._callee, None
        if callee is None:
            return Piece()
        try:
            if not isinstance(json.loads(self._arguments or "{}"), dict):
                raise ValueError("the arguments are no object")  # noqa: TRY301, TRY004
        except ValueError:
            self.malformed, self._with_calls = True, False
            return Piece(f"<|channel|>commentary to=functions.{callee}{_MESSAGE}{self._arguments}")
        index, missing = len(self.calls), "" if self._arguments else "{}"
        function = CalledFunction(callee, self._arguments + missing)
        self.calls.append(Called(self._new_id(index), function))
        return Piece(calls=(CallPart(index, arguments=missing),) if missing else ())
