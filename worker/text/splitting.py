"""Splits a growing answer into its text, its reasoning and its tool calls. Pure.

The same text, pushed in any pieces, gives the same parts, so an answer can be resumed after a crash. No text
is lost: an invalid call (see `worker.text.arguments`), or one without an end, stays in the text with its
markers. A call is published only when it is complete, so clients never see a call turn into text.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from string import ascii_letters, digits
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from turnkeep_client.messages import Called, CalledFunction, CallPart
from worker.models.call_parsers import CALL_TAG, MOST_NAMED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from worker.models.answer_markup import AnswerMarkup
    from worker.models.call_parsers import CallSyntax, ParsedCall, Parser

    from .arguments import OfferedTools

    #: The code block that text is in, if any: one behind other text shows examples.
    _Code = Literal["", "own", "example"]

_SPACE: Final = " \t\r\n"
#: Characters of a call's id: templates of Mistral's models require nine of them, others accept any id.
_LETTERS: Final = digits + ascii_letters
#: Limit of characters of JSON in failed parses of one answer, as each marker could be tried with each end.
_MOST_TRIED: Final = 4_000_000
#: The characters that decide where a JSON value ends.
_JSON: Final = re.compile(r'\\.|["{}\[\]]', re.DOTALL)
#: How many characters of an answer are checked for the beginning of a call without a marker.
_HEAD: Final = 256
#: How many characters of a line are checked for the beginning of a code block.
_MOST_INDENTED: Final = 40
#: What models write around such calls, and the beginning of it.
_AROUND: Final = re.compile(rf"(?:```[a-z]*+(?=[\s{{\[<])|<{CALL_TAG}>)\s*+")
_AROUND_BEGUN: Final = re.compile(r"`{1,3}[a-z]*|<[a-z_-]{0,30}")


class Piece(NamedTuple):
    """The new text, reasoning and calls of an answer after a push."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()

    def __add__(self, other: object) -> Piece:
        """Join two consecutive pieces."""
        if not isinstance(other, Piece):
            return NotImplemented
        return Piece(self.text + other.text, self.reasoning + other.reasoning, self.calls + other.calls)


class AnswerCalls:
    """Collects the valid tool calls of one answer, and decides when the answer has enough."""

    def __init__(
        self,
        offered: OfferedTools,
        new_id: Callable[[int], str],
        *,
        max_calls: int | None = None,
        ends_at_repeat: bool = False,
    ) -> None:
        """End the answer after `max_calls` calls or, with `ends_at_repeat`, before a repeated call.

        `new_id` returns the id of a call, given its index, if the model wrote none.
        """
        self.offered = offered
        #: The calls that were added.
        self.made: list[Called] = []
        self._ids: set[str] = set()
        #: Whether the answer has all the calls that it may have, and so must end.
        self.is_full = False
        self._new_id = new_id
        self._max_calls = max_calls
        self._ends_at_repeat = ends_at_repeat

    def believed(
        self, parse: Parser, text: str, *, is_ended: bool = True
    ) -> tuple[list[ParsedCall], int] | None:
        """Parse and check the calls that a text begins with; return them and the index where they end.

        None if the text cannot be parsed; an empty list of calls if one of them is invalid. Never raises.
        """
        found: tuple[list[ParsedCall], int] | None = None
        with suppress(Exception):  # checking a model's text against any schema may raise anything
            written, end = parse(text, is_ended)
            found = [], end
            found = [self.offered.believed(one) for one in written], end
        return found

    def add(self, found: Sequence[ParsedCall]) -> Piece:
        """Add calls up to the answer's limit; return the added ones as a piece."""
        return Piece(calls=tuple(self._added(found)))

    def _added(self, found: Sequence[ParsedCall]) -> Iterator[CallPart]:
        for call in found:
            function = CalledFunction(call.name, call.arguments)
            if self._ends_at_repeat and self.made and self.made[-1].function == function:
                self.is_full = True
            if self.is_full:
                return
            index = len(self.made)
            own = self._new_id(index) if call.id is None or call.id in self._ids else call.id
            self._ids.add(own)
            self.made.append(Called(own, function))
            self.is_full = len(self.made) == self._max_calls
            yield CallPart(index, own, call.name, call.arguments)


def call_id(request: str, index: int) -> str:
    """Derive the id of call number `index` from its request's id, so that it is the same after a crash."""
    number = int.from_bytes(blake2b(f"{request}:{index}".encode(), digest_size=8).digest(), "big")
    letters = []
    for _ in range(9):
        number, letter = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[letter])
    return "".join(letters)


class Splitter(ABC):
    """Splits one answer into text, reasoning and tool calls."""

    def __init__(self, calls: AnswerCalls, *, in_reasoning: bool = False) -> None:
        """`calls` collects the tool calls; with `in_reasoning` the answer's text begins in its reasoning."""
        self._calls = calls
        #: Whether the answer's next text belongs to its reasoning.
        self.in_reasoning = in_reasoning
        #: Whether some text looked like a call but was not a valid one.
        self.malformed = False

    @property
    def calls(self) -> list[Called]:
        """The complete calls so far."""
        return self._calls.made

    @property
    def is_full(self) -> bool:
        """Whether the answer has all the tool calls that it may have, and so must end."""
        return self._calls.is_full

    @abstractmethod
    def is_marker(self, text: str) -> bool:
        """Whether a special token with this text may now be a part of the markup."""

    @abstractmethod
    def push(self, text: str) -> Piece:
        """Add text; return the new parts that later text cannot change."""

    @abstractmethod
    def finish(self, *, is_cut: bool = False) -> Piece:
        """End the answer and return what was held back; `is_cut` if a limit or a stop string has ended it."""


class MarkedSplitter(Splitter):
    """Splits an answer at the markers that the model writes (see `AnswerMarkup`)."""

    def __init__(self, markup: AnswerMarkup, calls: AnswerCalls, *, in_reasoning: bool) -> None:
        """With `in_reasoning` the prompt already ends with the marker that begins the reasoning."""
        super().__init__(calls, in_reasoning=in_reasoning)
        self._markup = markup
        self._forms = markup.forms if calls.offered else ()
        #: Parses calls without a marker; None once the answer cannot consist of such calls only.
        self._bare = markup.bare if calls.offered else None
        self._held = ""  # text that may begin a marker, or an incomplete call
        self._space = ""  # white space that ends the text, dropped before a call
        self._last = ""  # last character of the text since the last call
        self._line = ""  # beginning of the text's last line
        self._is_first_line = True
        self._code: _Code = ""  # the code block around that line
        self._has_text = self._has_reasoning = False
        self._form: CallSyntax | None = None  # format of the call that `_held` begins with
        self._seen = 0  # characters of the call, or after it, already searched
        self._scan: _Scan | None = None
        #: A parsed call whose last argument may continue after its apparent end, and the text behind it up to
        #: its end marker; with the index behind that marker.
        self._whole: tuple[list[ParsedCall], str, int] | None = None
        self._left_tries = _MOST_TRIED

    def is_marker(self, text: str) -> bool:
        """Whether a special token with this text may be a marker: any may within a call."""
        if self._form is not None:
            return True
        markers = (*(self._markup.reasoning or ()), *self._markup.strays, *(one.opens for one in self._forms))
        return any(text in marker for marker in markers)

    def push(self, text: str) -> Piece:
        """Add text; return what is now final."""
        self._held += text
        return self._split(is_over=False, is_cut=False)

    def finish(self, *, is_cut: bool = False) -> Piece:
        """End the answer and return what was held back."""
        piece = self._split(is_over=True, is_cut=is_cut)
        space, self._space = self._space, ""
        return piece if self.is_full else piece + Piece(space)

    def _split(self, *, is_over: bool, is_cut: bool) -> Piece:
        piece = Piece()
        while self._held and not self.is_full:
            before = len(self._held), self._form
            if self._form is not None:
                piece += self._in_call(self._form, is_over=is_over, is_cut=is_cut)
            elif self.in_reasoning:
                piece += self._in_reasoning(is_over=is_over)
            else:
                piece += self._in_text(is_over=is_over)
            if before == (len(self._held), self._form):
                break
        return piece

    def _in_text(self, *, is_over: bool) -> Piece:
        reasoning = self._markup.reasoning
        if self._bare is not None and not _begins(self._held, reasoning):
            found = self._if_bare(self._bare, is_over=is_over)
            if found is not None:
                return found
        opens = [one.opens for one in self._forms if self._left_tries > 0]
        closes = [one.closes for one in self._forms if one.closes and self.calls and not self._last]
        markers = [*opens, *closes, *self._markup.strays, *(reasoning or ())[:1]]
        at, marker = first_marker(self._held, markers)
        if marker is None and is_over:
            at = len(self._held)
        piece = self._said(self._held[:at])
        self._held = self._held[at:]
        if marker is None:
            return piece
        if reasoning and marker == reasoning[0]:
            self.in_reasoning, self._held = True, self._held[len(marker) :]
        elif marker in self._markup.strays or (marker in closes and not self._last):
            self._held = self._held[len(marker) :]
        elif marker in closes or self._is_quoted():
            piece += self._mentioned(marker)
        else:
            self._form = next(one for one in self._forms if one.opens == marker)
            self._seen, self._scan, self._whole = 0, None, None
        return piece

    def _if_bare(self, parse: Parser, *, is_over: bool) -> Piece | None:
        """Hold back an answer while it may consist of calls without markers; return None once it cannot."""
        if self._may_be_bare():
            if not is_over:
                return Piece()
            if (found := self._calls.believed(parse, self._held)) and found[0]:
                self._held = self._space = ""
                return self._calls.add(found[0])
        self._bare = None
        return None

    def _may_be_bare(self) -> bool:
        head = self._held[: 2 * _HEAD].lstrip()[:_HEAD]
        if not head and len(self._held) >= 2 * _HEAD:
            return False
        if head.startswith(tuple(one.opens for one in self._forms)):
            return False
        while around := _AROUND.match(head):
            head = head[around.end() :]
        if _AROUND_BEGUN.fullmatch(head):
            return True
        head = "".join(head.split())
        head = head.replace("'", '"').replace("[{", "{")
        begins = ['{"arguments":{', '{"parameters":{', '{"type":"function"', '{"function":{']
        for name in self._calls.offered.names:
            begins += [f'{{"name":"{name}"', f'{{"function":"{name}"', f"[{name}("]
        return any(head.startswith(one) or one.startswith(head) for one in begins)

    def _said(self, text: str) -> Piece:
        """Return text to publish; hold back white space at its end, to drop it if a call follows."""
        if not self._has_text and (self._has_reasoning or self.calls):
            self._space, text = "", text.lstrip(_SPACE)
        end = len(text.rstrip(_SPACE)) if self._calls.offered else len(text)
        if not end:  # each search is of new text only: a model may write nothing but white space
            self._space += text
            return Piece()
        text, self._space = self._space + text[:end], text[end:]
        self._note_lines(text)
        self._has_text, self._last, self._bare = True, text[-1], None
        return Piece(text)

    def _note_lines(self, text: str) -> None:
        *lines, last = (self._line + text).split("\n")
        for line in lines:
            self._code, self._is_first_line = self._code_behind(line), False
        self._line = last[:_MOST_INDENTED]

    def _code_behind(self, line: str) -> _Code:
        if not line.lstrip().startswith("```"):
            return self._code
        return "" if self._code else "own" if self._is_first_line else "example"

    def _is_quoted(self) -> bool:
        """Return whether the text quotes the marker behind it, so that it begins no call."""
        if self._last == "`" and not self._space:
            return True
        return (self._code_behind(self._line) if "\n" in self._space else self._code) == "example"

    def _mentioned(self, marker: str) -> Piece:
        """Return `marker`, with which the held text begins, as text; other markers may follow in the rest."""
        self._form, self._held = None, self._held[len(marker) :]
        return self._said(marker)

    def _in_reasoning(self, *, is_over: bool) -> Piece:
        close = self._markup.reasoning[1] if self._markup.reasoning else ""
        at, marker = first_marker(self._held, [close] if close else [])
        if marker is None and is_over:
            at = len(self._held)
        text, self._held = self._held[:at], self._held[at + len(marker or "") :]
        if not self._has_reasoning:
            text = text.lstrip(_SPACE)
            self._has_reasoning = bool(text)
        if marker is not None:
            self.in_reasoning, self._has_reasoning = False, True
        return Piece(reasoning=text)

    def _in_call(self, form: CallSyntax, *, is_over: bool, is_cut: bool) -> Piece:
        """Look for the end of a call. An invalid call becomes text, in which other calls may begin."""
        text = self._held[len(form.opens) :]
        if not form.may_begin(text):
            return self._mentioned(form.opens)
        if self._whole is None:
            for end, behind in self._ends(form, text):
                is_ended = end < behind
                found = self._tried(form, text[:end], is_ended)
                if found is not None:
                    self._whole, self._seen = (found[0], text[found[1] : end], behind), behind
                    break
                if self._left_tries <= 0 or form.value or not form.is_in_string(text[:end]):
                    return self._no_call(form, form.num_own(text[:end]))
        if self._whole is not None:
            return self._behind_call(form, text, *self._whole, is_over=is_over)
        if form.value is not None and self._scan is None and len(text) > MOST_NAMED:
            return self._no_call(form, form.num_own(text))
        if not is_over:
            return Piece()
        if form.is_framed or not is_cut:
            whole = text[: len(text) - num_held(text, (form.closes or "",))]
            is_ended = not form.closes and not is_cut
            if (found := self._tried(form, whole, is_ended, is_over=True)) and found[0]:
                return self._called(found[0], whole[found[1] :])
        return self._no_call(form, form.num_own(text))

    def _behind_call(
        self,
        form: CallSyntax,
        text: str,
        found: Sequence[ParsedCall],
        more: str,
        behind: int,
        *,
        is_over: bool,
    ) -> Piece:
        """Add a parsed call once it is certain that its end marker was not text in its last argument.

        The marker was such text if an argument's end tag follows before another call or reasoning. Until this
        is decided, the call is held back.
        """
        if found and form.is_tagged:
            markers = (form.opens, form.quotes[1], *(self._markup.reasoning or ())[:1])
            at, marker = first_marker(text[self._seen :], markers)
            self._seen += at
            if marker is None and not is_over:
                return Piece()
            found = [] if marker == form.quotes[1] else found
        return self._called(found, more + text[behind:]) if found else self._no_call(form, behind)

    def _called(self, found: Sequence[ParsedCall], rest: str) -> Piece:
        self._form, self._held, self._space, self._last = None, rest, "", ""
        return self._calls.add(found)

    def _no_call(self, form: CallSyntax, num_chars: int) -> Piece:
        """Return an invalid call as text: its marker and the `num_chars` characters after it."""
        self.malformed = True
        return self._mentioned(self._held[: len(form.opens) + num_chars])

    def _tried(
        self, form: CallSyntax, text: str, is_ended: bool, *, is_over: bool = False
    ) -> tuple[list[ParsedCall], int] | None:
        is_parsed = is_over or form.may_end(text)
        found = self._calls.believed(form.parse, text, is_ended=is_ended) if is_parsed else None
        if not found or not found[0]:
            self._left_tries -= (len(text) + 1) * (form.cost if is_parsed else 1)
        return found

    def _ends(self, form: CallSyntax, text: str) -> Iterator[tuple[int, int]]:
        """Yield each index at which a call may end, with the index at which the text after the call starts.

        A call may end with its JSON value, or before an end marker or another call.
        """
        if form.value is not None:
            if self._scan is None and (value := form.value.match(text, 0, MOST_NAMED)):
                self._scan = _Scan(value.end())
            if self._scan is not None and (end := self._scan.end(text)) is not None:
                yield end, end
        elif form.closes is not None:
            while True:
                at, marker = first_marker(text[self._seen :], (form.closes, form.opens))
                end = self._seen = self._seen + at
                if marker is None:
                    return
                self._seen += len(marker)
                yield end, self._seen if marker == form.closes else end


class _Scan:
    """Finds the end of a JSON value in a growing text."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._depth = 0
        self._in_string = False

    def end(self, text: str) -> int | None:
        """Return where the value ends; None if the text does not have its end yet."""
        for found in _JSON.finditer(text, self._at):
            self._at, char = found.end(), found[0]
            if char == '"':
                self._in_string = not self._in_string
            elif not self._in_string and len(char) == 1:
                self._depth += 1 if char in "{[" else -1
                if self._depth <= 0:
                    return self._at
        self._at = len(text) - text.endswith("\\", self._at)  # a backslash escapes the next character
        return None


def _begins(text: str, reasoning: tuple[str, str] | None) -> bool:
    """Return whether a text begins, or may begin when it grows, with the marker that opens reasoning."""
    text, marker = text.lstrip(), reasoning[0] if reasoning else ""
    return bool(text and marker) and (text.startswith(marker) or marker.startswith(text))


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str | None]:
    """Return the index and the text of the first marker in `text`.

    Without one, return the index from which an incomplete marker may end the text (else its length), and
    None.
    """
    found = [(text.index(marker), marker) for marker in markers if marker in text]
    if found:
        return min(found, key=lambda one: (one[0], -len(one[1])))
    return len(text) - num_held(text, markers), None


def num_held(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of a text may begin one of `markers`."""
    begun, longest = _beginnings(tuple(markers))
    sizes = range(min(len(text), longest), 0, -1)
    return next((size for size in sizes if text[-size:] in begun), 0)


@lru_cache(32)
def _beginnings(markers: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """Return all incomplete beginnings of markers, and the length of the longest."""
    begun = frozenset(one[:size] for one in markers for size in range(1, len(one)))
    return begun, max(map(len, begun), default=0)
