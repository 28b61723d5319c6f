"""Reads the values that models write as arguments: JSON, Python's and Gemma's, and mixtures of them. Pure.

A value has one meaning, or is refused: strings may be quoted in several ways and may have raw line breaks,
keys need no quotes, and constants may be Python's; but nothing is guessed that is missing.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

# A model can write any text, and a search holds the interpreter. So in the regular expressions of values and
# calls two repetitions that match the same text never meet: their time would grow with the text's square.
_SPACE: Final = re.compile(r"(?:\s++|(?:#|//)[^\n\r]*+)*+")
_KEY: Final = re.compile(r"[^\s:=,{}()\[\]<>\"'`]++")
_PLAIN: Final = re.compile(r"[^\s:=,{}()\[\]<>\"'`]++")
_WORDS: Final = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
#: The beginnings of strings; Gemma's two quotes are special tokens, and their strings have no escapes.
_QUOTE: Final = re.compile(r"""([rRuU]?)(\"\"\"|'''|["']|<\|"\|>|<escape>)""")
_BODY: Final = {
    quote: re.compile(rf"((?:[^{quote[0]}\\]++|\\.{more})*){quote}", re.DOTALL)
    for quote, more in (('"', ""), ("'", ""), ('"""', '|"(?!"")'), ("'''", "|'(?!'')"))
}
_ESCAPE: Final = re.compile(
    r"\\(?:(?P<octal>[0-7]{1,3})|x(?P<x>[\da-fA-F]{2})|u(?P<u>[\da-fA-F]{4})|U(?P<U>[\da-fA-F]{8})|(?P<char>.))",
    re.DOTALL,
)
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_ESCAPED_ITSELF: Final = "\\'\""


def without_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of these fields; raises `ValueError` for a field that is there twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _refused(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


#: Not strict: models write raw line breaks into strings, which can mean nothing else.
_DECODER: Final = json.JSONDecoder(object_pairs_hook=without_twice, parse_constant=_refused, strict=False)


@contextmanager
def _refusing() -> Iterator[None]:
    """Raise only `ValueError`, also for a value that is nested too deep, or has an impossible character."""
    try:
        yield
    except (OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None


@_refusing()
def read_json(text: str) -> Any:
    """Parse a JSON value; refuses repeated keys and NaN. Raises `ValueError`."""
    return _DECODER.decode(text)


@_refusing()
def read_value(text: str, at: int) -> tuple[Any, int]:
    """Return the value at `at` and the index of its end. Raises `ValueError`."""
    try:
        return _DECODER.raw_decode(text, at)  # much faster than the reader
    except ValueError:
        reader = _Reader(text, at)
        return reader.value(), reader.at


@_refusing()
def read_keywords(text: str, at: int) -> tuple[dict[str, Any], int]:
    """Return the arguments of a call in Python's syntax, and the index behind it; `at` is behind the `(`.

    Raises `ValueError`.
    """
    reader = _Reader(text, at, is_python=True)
    return reader.fields(")", "="), reader.at


class _Reader:
    """Reads values from the index `at` of a text; in Python's syntax, strings in a row are one string."""

    def __init__(self, text: str, at: int, *, is_python: bool = False) -> None:
        self.text = text
        self.at = at
        self._is_python = is_python

    def fields(self, close: str, between: str) -> dict[str, Any]:
        """Read fields up to `close`; each is a name, the character `between`, and a value."""
        pairs: list[tuple[str, Any]] = []
        while not self._takes(close):
            name = self._string()
            if name is None:
                name = self._match(_KEY)
            if not self._takes(between):
                raise ValueError("a name has no value")
            pairs.append((name, self.value()))
            if not self._takes(","):
                self._need(close)
                break
        return without_twice(pairs)

    def value(self) -> Any:
        """Read one value."""
        if self._takes("{"):
            return self.fields("}", ":")
        for begin, close in ("[]", "()"):
            if self._takes(begin):
                found = self._items(close)
                return found[0] if begin == "(" and len(found) == 1 else found
        text = self._string()
        return self._word() if text is None else text

    def _items(self, close: str) -> list[Any]:
        found: list[Any] = []
        while not self._takes(close):
            found.append(self.value())
            if not self._takes(","):
                self._need(close)
                break
        return found

    def _string(self) -> str | None:
        """Read a string; return None if none begins here."""
        found: str | None = None
        self._skip()
        while begin := _QUOTE.match(self.text, self.at):
            found = (found or "") + self._quoted(begin)
            if not self._is_python:
                break
            self._skip()
        return found

    def _quoted(self, begin: re.Match[str]) -> str:
        prefix, quote = begin.groups()
        if quote not in _BODY:
            end = self.text.index(quote, begin.end())
            self.at = end + len(quote)
            return self.text[begin.end() : end]
        body = _BODY[quote].match(self.text, begin.end())
        if body is None:
            raise ValueError("a string does not end")
        self.at = body.end()
        if prefix in ("r", "R"):
            return body[1]
        if quote == '"' and not self._is_python:
            try:
                return str(read_json(f'"{body[1]}"'))
            except ValueError:
                pass  # an escape that JSON does not know
        return _ESCAPE.sub(_unescaped, body[1])

    def _word(self) -> Any:
        word = self._match(_PLAIN)
        if word in _WORDS:
            return _WORDS[word]
        try:
            return read_json(word)
        except ValueError:
            return int(word, 0)  # as 0x1f or 1_000

    def _match(self, pattern: re.Pattern[str]) -> str:
        self._skip()
        found = pattern.match(self.text, self.at)
        if found is None:
            raise ValueError("a value is missing")
        self.at = found.end()
        return found[0]

    def _takes(self, sign: str) -> bool:
        self._skip()
        if not self.text.startswith(sign, self.at):
            return False
        self.at += len(sign)
        return True

    def _need(self, sign: str) -> None:
        if not self._takes(sign):
            raise ValueError(f"{sign} is missing")

    def _skip(self) -> None:
        self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]  # it also matches the empty text


def _unescaped(found: re.Match[str]) -> str:
    """Return what an escape stands for in Python; an unknown one stands for itself."""
    if (char := found["char"]) is not None:
        return char if char in _ESCAPED_ITSELF else _ESCAPED.get(char, found[0])
    code = found["x"] or found["u"] or found["U"]
    return chr(int(code, 16) if code else int(found["octal"], 8))
