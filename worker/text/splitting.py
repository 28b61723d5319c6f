"""Splits a growing answer into its text, its reasoning and its tool calls. Pure.

The same text, cut at any places, gives the same parts, so an answer can be resumed after a crash. Nothing is
lost: a call that cannot be parsed, or has no end, stays in the text with its markers.
"""

from __future__ import annotations

import json
import re
from hashlib import blake2b
from string import ascii_letters, digits
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from turnkeep_client.messages import Called, CalledFunction, CallPart

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from worker.models.dialect import Dialect, ParsedCall

#: The beginning of a call that is a JSON object, up to its arguments.
_HEAD: Final = re.compile(r'\s*\{\s*"name"\s*:\s*"([\w.\-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
#: Characters in which it is looked for.
_MOST_HEAD: Final = 512
_SPACE: Final = " \t\r\n"
_BRACKET: Final = re.compile(r"[{\[]")
#: Letters of a call's id: templates of Mistral's models want nine of them, and others take any.
_LETTERS: Final = digits + ascii_letters


class Piece(NamedTuple):
    """What some more text of an answer has added to its parts."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()

    def __add__(self, other: object) -> Piece:
        """Join two consecutive pieces."""
        if not isinstance(other, Piece):
            return NotImplemented
        return Piece(self.text + other.text, self.reasoning + other.reasoning, self.calls + other.calls)


class Splitter(Protocol):
    """Splits one answer. `calls` are the complete calls so far."""

    calls: list[Called]
    #: Whether text that looked like a call was no call.
    malformed: bool

    @property
    def in_reasoning(self) -> bool:
        """Whether the answer is in its reasoning."""

    def push(self, text: str) -> Piece:
        """Add text; return what is final."""

    def finish(self) -> Piece:
        """End the answer; return the rest."""


def call_id(request: str, index: int) -> str:
    """Return the id of a request's call number `index`: the same after a crash."""
    number = int.from_bytes(blake2b(f"{request}:{index}".encode(), digest_size=8).digest(), "big")
    letters = []
    for _ in range(9):
        number, letter = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[letter])
    return "".join(letters)


class MarkedSplitter:
    """Splits by a dialect's pairs of markers."""

    def __init__(
        self,
        dialect: Dialect,
        *,
        in_reasoning: bool,
        tools: Sequence[Mapping[str, Any]],
        new_id: Callable[[int], str],
    ) -> None:
        """`in_reasoning` if the prompt has opened the reasoning. Without `tools` there are no calls."""
        self._dialect = dialect
        self._tools = tools
        self._new_id = new_id
        self.calls: list[Called] = []
        self.malformed = False
        self.in_reasoning = in_reasoning
        self._held = ""  # may be the beginning of a marker
        self._space = ""  # of the text, dropped before a call
        self._has_text = self._has_reasoning = False
        self._call: _Call | None = None
        self._may_be_bare = bool(tools) and dialect.is_bare

    def push(self, text: str) -> Piece:
        """Add text; return what is final."""
        held, self._held = self._held + text, ""
        piece = Piece()
        while held:
            if self._may_be_bare and not self.in_reasoning:
                bare = held.lstrip(_SPACE)
                if bare:
                    self._may_be_bare = False
                if bare.startswith("{"):
                    self._call = _Call(held[: len(held) - len(bare)], "", is_json=False)
                    held = bare
            if self._call is not None:
                found, held = self._in_call(self._call, held)
            elif self.in_reasoning:
                found, held = self._in_reasoning(held)
            else:
                found, held = self._in_text(held)
            piece += found
            if self._held:
                break
        return piece

    def finish(self) -> Piece:
        """End the answer; return the rest."""
        held, self._held = self._held, ""
        call, self._call = self._call, None
        if call is not None:
            call.add(held)
            # An object of JSON shows itself that it is complete; the end of other calls is their marker.
            piece, held = self._parsed(call, "", is_whole=not call.end or self._dialect.is_json), ""
        elif self.in_reasoning:
            return self._reasoned(held)
        else:
            piece = Piece()
        space, self._space = self._space, ""
        return piece + Piece(space + held)

    def _in_text(self, held: str) -> tuple[Piece, str]:
        reasoning, calls = self._dialect.reasoning, self._dialect.calls
        opens = [pair[0] for pair in (reasoning,) if pair]
        if calls is not None and self._tools and not self.malformed:
            opens.append(calls[0])
        at, marker = first_marker(held, opens)
        if marker is None:
            self._held = held[at:]
            return self._said(held[:at]), ""
        if reasoning and marker == reasoning[0]:
            piece = self._said(held[:at])
            self.in_reasoning, self._may_be_bare = True, False
        else:
            piece = self._said(held[:at])
            self._call = _Call(self._space + marker, calls[1] if calls else "", is_json=self._dialect.is_json)
            self._space = ""
        return piece, held[at + len(marker) :]

    def _said(self, text: str) -> Piece:
        """Return text but for white space at its end, which a call may follow, and at its beginning."""
        text = self._space + text
        if not self._has_text and (self._has_reasoning or self.calls):
            text = text.lstrip(_SPACE)
        end = len(text.rstrip(_SPACE)) if self._tools else len(text)
        text, self._space = text[:end], text[end:]
        self._has_text = self._has_text or bool(text)
        return Piece(text)

    def _in_reasoning(self, held: str) -> tuple[Piece, str]:
        close = self._dialect.reasoning[1] if self._dialect.reasoning else ""
        at, marker = first_marker(held, [close] if close else [])
        piece = self._reasoned(held[:at])
        if marker is None:
            self._held = held[at:]
            return piece, ""
        self.in_reasoning, self._has_reasoning = False, True
        return piece, held[at + len(marker) :]

    def _reasoned(self, text: str) -> Piece:
        if not self._has_reasoning:
            text = text.lstrip(_SPACE)
            self._has_reasoning = bool(text)
        return Piece(reasoning=text)

    def _in_call(self, call: _Call, held: str) -> tuple[Piece, str]:
        rest, is_over = call.push(held)
        if not is_over:
            self._held = rest
            return self._so_far(call), ""
        piece = self._so_far(call)
        self._call = None
        return piece + self._parsed(call, call.end), rest

    def _so_far(self, call: _Call) -> Piece:
        """Return what is new of a call whose arguments are known while they are written."""
        name, arguments = call.news()
        if name is None and not arguments:
            return Piece()
        index = len(self.calls)
        own = self._new_id(index) if name is not None else None
        return Piece(calls=(CallPart(index, own, name, arguments),))

    def _parsed(self, call: _Call, end: str, *, is_whole: bool = True) -> Piece:
        """Parse a call that is over; what is no call becomes text again."""
        try:
            if self._dialect.parse is None or not is_whole:
                raise ValueError("it has no end")  # noqa: TRY301
            written = call.text if call.end else _values(call.text, call.marker.strip(_SPACE))
            found = self._dialect.parse(written, self._tools)
        except Exception:  # noqa: BLE001  # a parser of foreign text may raise anything
            self.malformed = self.malformed or bool(call.marker.strip(_SPACE))
            return self._said(call.marker + call.text + end)
        if call.name is not None:
            function = CalledFunction(call.name, call.arguments)
            self.calls.append(Called(self._new_id(len(self.calls)), function))
            piece = Piece()
        else:
            piece = Piece(calls=tuple(map(self._made, found)))
        return piece + self._said(call.text[len(written) :])

    def _made(self, call: ParsedCall) -> CallPart:
        index = len(self.calls)
        own = call.id or self._new_id(index)
        self.calls.append(Called(own, CalledFunction(call.name, call.arguments)))
        return CallPart(index, own, call.name, call.arguments)


class _Call:
    """One call that is being written: the text between its markers."""

    def __init__(self, marker: str, end: str, *, is_json: bool) -> None:
        self.marker = marker
        self.end = end
        self.name: str | None = None
        self._is_json = is_json
        self._chars: list[str] = []
        self._arguments: list[str] = []
        self._in_string = self._escaped = False
        self._depth: int | None = None  # of braces in the arguments; 0 after their end
        self._num_told = 0
        self._has_told_name = False

    @property
    def text(self) -> str:
        """The text between the markers."""
        return "".join(self._chars)

    @property
    def arguments(self) -> str:
        """The arguments, as they are written; empty if `name` is None."""
        return "".join(self._arguments)

    def push(self, held: str) -> tuple[str, bool]:
        """Add text up to the end marker; return the rest, and whether the call is over.

        Otherwise the rest may be the beginning of the end marker. Within a string of JSON there is none.
        """
        for at, char in enumerate(held):
            if self.end and not self._in_string and char == self.end[0]:
                if held.startswith(self.end, at):
                    return held[at + len(self.end) :], True
                if self.end.startswith(held[at:]):
                    return held[at:], False
            self.add(char)
        return "", False

    def add(self, text: str) -> None:
        """Add text of the call."""
        for char in text:
            self._chars.append(char)
            if self._is_json:
                self._scan(char)

    def news(self) -> tuple[str | None, str]:
        """Return the name, if it was not told yet, and the arguments since the last time."""
        name = None if self._has_told_name else self.name
        self._has_told_name = self.name is not None
        told, self._num_told = self._num_told, len(self._arguments)
        return name, "".join(self._arguments[told:])

    def _scan(self, char: str) -> None:
        """Follow the JSON: where strings are, and which part are the arguments."""
        if self._depth is None and not self._in_string and char == "{" and len(self._chars) < _MOST_HEAD:
            head = _HEAD.match(self.text)
            if head and head.end() == len(self._chars) - 1:
                self.name, self._depth = head[1], 0
        if self._depth is not None and not (self._depth == 0 and self._arguments):
            self._arguments.append(char)
            if not self._in_string:
                self._depth += (char == "{") - (char == "}")
        if self._escaped:
            self._escaped = False
        elif char == "\\" and self._in_string:
            self._escaped = True
        elif char == '"':
            self._in_string = not self._in_string


def _values(text: str, marker: str) -> str:
    """Return the beginning of `text` that consists of calls with JSON, each but the first with its marker.

    All of the text, if there is no JSON.
    """
    decoder, at, end = json.JSONDecoder(), 0, 0
    while (begin := _BRACKET.search(text, at)) is not None:
        between = text[end : begin.start()].strip(_SPACE + ",;")
        if end and between and not (marker and between.startswith(marker)):
            break
        try:
            _, at = decoder.raw_decode(text, begin.start())
            end = at
        except (ValueError, RecursionError):
            at = begin.end()
    return text[:end] if end else text


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str | None]:
    """Find the first marker; without one, return where the text may begin one (else its end)."""
    found = [(text.index(marker), marker) for marker in markers if marker in text]
    if found:
        return min(found, key=lambda one: (one[0], -len(one[1])))
    sizes = range(min(len(text), max(map(len, markers), default=1) - 1), 0, -1)
    held = next((size for size in sizes if any(one.startswith(text[-size:]) for one in markers)), 0)
    return len(text) - held, None
