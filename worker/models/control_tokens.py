"""Keeps messages from injecting control tokens: text in a message never becomes a control token.

A template writes control tokens and the content of messages into one text, which is tokenised as a whole.
Content that spells a control token, or a part of one at its ends, is therefore marked: each character there
is replaced by a stand-in, a lone surrogate, which no message and no template can contain. So the template
sees contents of the same length and the same other text; it may truncate them. If a control token would cover
a stand-in, the text is tokenised in pieces instead. Stand-ins change no other token.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

#: The stand-in of a character is this many code points further: a high surrogate.
_DISTANCE: Final = 0xD800
_STAND_IN: Final = re.compile("[\ud800-\udbff]")
#: Characters that have a stand-in: no white space, which templates trim, and none that JSON escapes.
_MARKED: Final = re.compile(r'[^\s"\\\u0400-\U0010ffff]')
#: Fields of a message whose values the protocol restricts to a few words.
_NO_CONTENT: Final = frozenset({"role", "type", "digest"})


class ControlTokens:
    """The tokens of a vocabulary that only the chat template may use. Immutable, so thread-safe.

    These are the special tokens, the tokens that end an answer, and other added tokens that the template
    writes (`<tool_call>`). An assistant's messages may contain such other tokens, since models sample them in
    their answers.
    """

    def __init__(self, rust: Any, end_ids: Collection[int], template: str) -> None:
        """Find the tokens of `rust`, a `tokenizers.Tokenizer`; `template` is the chat template's source."""
        self._rust = rust
        added = rust.get_added_tokens_decoder()
        #: The ids of the special tokens and of those that end an answer: no text in an answer.
        self.special_ids = frozenset(i for i, token in added.items() if token.special or i in end_ids)
        written = (
            i for i, token in added.items() if not token.content.isspace() and token.content in template
        )
        #: The ids of all control tokens.
        self.ids = self.special_ids.union(written)
        tokens = [added[i] for i in self.ids]
        names = [token.content for token in tokens]
        self._beginnings = frozenset(name[:i] for name in names for i in range(1, len(name)))
        self._ends = frozenset(name[i:] for name in names for i in range(1, len(name)))
        self._longest = max(map(len, names), default=0)
        # A normalizer may turn other text into a token, perhaps only after a space that the template writes.
        self._normalized = [token.content for token in tokens if token.normalized and rust.normalizer]
        first = "".join(re.escape(name[0]) for name in names)
        self._first = re.compile("" if self._normalized else f"[{first}]" if first else r"(?!)")

    def mark(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a message to render, in which no text can become a control token.

        Characters of a text that spells one, such as `<|im_end|>`, become stand-ins (see the module), which
        `encode` turns back. An assistant's messages may contain the tokens that models sample in answers.
        """
        forbidden = self.special_ids if message.get("role") == "assistant" else self.ids
        return {
            name: value if name in _NO_CONTENT else self._mark_value(value, forbidden, _NO_CONTENT)
            for name, value in message.items()
        }

    def mark_all(self, value: Any) -> Any:
        """Return a JSON value in which all texts are marked, including the names of fields."""
        return self._mark_value(value, self.ids, frozenset())

    def mark_text(self, text: str) -> str:
        """Return a marked text: no part of it can become a control token."""
        return self._mark(text, self.ids)

    def mark_tokens(
        self, tokens: Sequence[int], decode: Callable[[Sequence[int]], str], *, in_answer: bool = False
    ) -> str:
        """Return the text of tokens. Control tokens stay unmarked; other text that spells one is marked.

        With `in_answer`, only text that spells a special token is, as in an assistant's message.
        """
        forbidden = self.special_ids if in_answer else self.ids
        runs = groupby(tokens, self.ids.__contains__)
        return "".join(
            decode(list(run)) if control else self._mark(decode(list(run)), forbidden)
            for control, run in runs
        )

    def encode(self, text: str, encode_later: Callable[[str], list[int]]) -> list[int]:
        """Return the tokens of a marked text, with its stand-ins turned back into characters.

        If a control token would cover a stand-in, the text is tokenised in pieces: all but the first by
        `encode_later`.
        """
        marks = [found.start() for found in _STAND_IN.finditer(text)]
        found = self._rust.encode_batch([unmarked(text)], add_special_tokens=False)[0]  # as in `Tokenizer`
        cuts = [
            start + 1
            for token, (start, end) in zip(found.ids, found.offsets, strict=True)
            if token in self.ids and end - start > 1 and bisect_left(marks, start) < bisect_left(marks, end)
        ]
        if not cuts:
            ids: list[int] = found.ids
            return ids
        ids = []
        for start, end in pairwise([0, *cuts, len(text)]):
            ids += encode_later(text[start:end]) if start else self.encode(text[:end], encode_later)
        return ids

    def _mark_value(self, value: Any, forbidden: frozenset[int], but: frozenset[str]) -> Any:
        """Mark all texts of a JSON value, except the values of the fields `but`."""
        match value:
            case str():
                return self._mark(value, forbidden)
            case dict():
                return {
                    self._mark(name, forbidden): one if name in but else self._mark_value(one, forbidden, but)
                    for name, one in value.items()
                }
            case list() | tuple():
                return [self._mark_value(one, forbidden, but) for one in value]
        return value

    def _mark(self, text: str, forbidden: frozenset[int]) -> str:
        spelled, ends = list(self._spelled(text, forbidden)), list(self._ends_of(text))
        if not spelled and not ends:
            return text
        chars = list(text)
        for start, end in spelled + ends:
            chars[start:end] = _with_marks(text[start:end])
        for start, end in spelled:
            if not is_marked("".join(chars[start:end])):
                chars[start] = "\ufffd"  # a token without a character that has a stand-in
        return "".join(chars)

    def _spelled(self, text: str, forbidden: frozenset[int]) -> Iterator[tuple[int, int]]:
        """Yield where a text spells control tokens."""
        if not self._first.search(text):
            return
        # Offsets take twice the time.
        if not forbidden.isdisjoint(self._rust.encode_batch_fast([text], add_special_tokens=False)[0].ids):
            found = self._rust.encode_batch([text], add_special_tokens=False)[0]
            yield from (at for token, at in zip(found.ids, found.offsets, strict=True) if token in forbidden)
        for name in self._normalized:
            yield from (found.span() for found in re.finditer(re.escape(name), text))

    def _ends_of(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the parts at a text's ends that could form a control token with the text beside them."""
        bare = text.strip()
        sizes = range(min(len(bare), self._longest), 0, -1)
        start, end = text.find(bare), text.find(bare) + len(bare)
        yield from ((start, start + size) for size in sizes if bare[:size] in self._ends)
        yield from ((end - size, end) for size in sizes if bare[-size:] in self._beginnings)


def _with_marks(text: str) -> str:
    return _MARKED.sub(lambda found: chr(ord(found[0]) + _DISTANCE), text)


def is_marked(text: str) -> bool:
    """Return whether a text has a stand-in."""
    return _STAND_IN.search(text) is not None


def unmarked(text: str) -> str:
    """Return a text with each stand-in turned back into its character; the length stays the same."""
    return text if text.isascii() else _STAND_IN.sub(lambda found: chr(ord(found[0]) - _DISTANCE), text)
