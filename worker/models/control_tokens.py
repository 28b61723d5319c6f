"""Keeps messages from injecting control tokens: text in a message never becomes a control token.

A template writes control tokens and the content of messages into one text, which is tokenised as a whole.
Content that could form a control token is therefore marked: a lone surrogate, which no message and no
template can contain, follows each of its characters. The template may truncate content; each mark stays with
its character. If a control token would cover a mark, the text is tokenised in pieces instead. Marks change no
other token, and content that cannot form a control token is not marked.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

_MARK: Final = "\ud800"
#: White space gets no marks, since templates trim it.
_MARKED: Final = re.compile(r"\S")
#: Fields of a message whose values the protocol restricts to a few words.
_NO_CONTENT: Final = frozenset({"role", "type"})


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
        self._special = frozenset(i for i, token in added.items() if token.special or i in end_ids)
        written = (
            i for i, token in added.items() if not token.content.isspace() and token.content in template
        )
        self._all = self._special.union(written)
        tokens = [added[i] for i in self._all]
        names = [token.content for token in tokens]
        self._beginnings = frozenset(name[:i] for name in names for i in range(1, len(name)))
        self._ends = frozenset(name[i:] for name in names for i in range(1, len(name)))
        self._longest = max(map(len, names), default=0)
        # A normalizer may turn other text into a token, perhaps only after a space that the template writes.
        self._normalized = [token.content for token in tokens if token.normalized and rust.normalizer]
        first = "".join(re.escape(name[0]) for name in names)
        self._first = re.compile("" if self._normalized else f"[{first}]" if first else r"(?!)")

    @property
    def ids(self) -> frozenset[int]:
        """The ids of the control tokens."""
        return self._all

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of the special tokens and of those that end an answer: no text in an answer."""
        return self._special

    def mark(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message whose content is marked: no part of it can become a control token."""
        forbidden = self._special if message.get("role") == "assistant" else self._all

        def marked(value: Any) -> Any:
            match value:
                case str():
                    return self._mark(value, forbidden)
                case dict():
                    return {
                        self._mark(name, forbidden): marked_field(name, each) for name, each in value.items()
                    }
                case list() | tuple():
                    return [marked(each) for each in value]
            return value

        def marked_field(name: str, value: Any) -> Any:
            return value if name in _NO_CONTENT else marked(value)

        return {name: marked_field(name, value) for name, value in message.items()}

    def mark_all(self, value: Any) -> Any:
        """Return a JSON value in which all texts are marked, including the names of fields."""
        match value:
            case str():
                return self.mark_text(value)
            case dict():
                return {self.mark_text(name): self.mark_all(each) for name, each in value.items()}
            case list() | tuple():
                return [self.mark_all(each) for each in value]
        return value

    def mark_text(self, text: str) -> str:
        """Return a marked text: no part of it can become a control token."""
        return self._mark(text, self._all)

    def mark_answer(self, tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
        """Return the text of an answer's sampled tokens, marked like an assistant's message.

        Control tokens that the model sampled stay unmarked. Other text that spells a special token is marked.
        """
        return self._marked(tokens, decode, self._special)

    def mark_tokens(self, tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
        """Return the text of a session's tokens; other text that spells a control token is marked."""
        return self._marked(tokens, decode, self._all)

    def _marked(
        self, tokens: Sequence[int], decode: Callable[[Sequence[int]], str], forbidden: frozenset[int]
    ) -> str:
        runs = groupby(tokens, self._all.__contains__)
        return "".join(
            decode(list(run)) if control else self._mark(decode(list(run)), forbidden)
            for control, run in runs
        )

    def encode(self, text: str, encode_later: Callable[[str], list[int]]) -> list[int]:
        """Tokenise a marked text, without its marks. `encode_later` tokenises all pieces but the first."""
        parts = text.split(_MARK)
        plain = "".join(parts)
        marks = _mark_positions(parts)
        found = self._rust.encode_batch([plain], add_special_tokens=False)[0]  # as in `Tokenizer`
        cuts = [
            start + 1
            for token, (start, end) in zip(found.ids, found.offsets, strict=True)
            if token in self._all
            and end - start > 1
            and bisect_right(marks, start) < bisect_right(marks, end)
        ]
        if not cuts:
            ids: list[int] = found.ids
            return ids
        ids = []
        places = [0, *(cut + bisect_right(marks, cut) for cut in cuts), len(text)]
        for start, end in pairwise(places):
            ids += encode_later(text[start:end]) if start else self.encode(text[:end], encode_later)
        return ids

    def _mark(self, text: str, forbidden: frozenset[int]) -> str:
        if self._first.search(text):
            ids = self._rust.encode_batch_fast([text], add_special_tokens=False)[0].ids
            if not forbidden.isdisjoint(ids) or any(name in text for name in self._normalized):
                return _with_marks(text)
        return self._mark_ends(text)

    def _mark_ends(self, text: str) -> str:
        """Mark a text's start and end where they could form a control token with the text beside them."""
        bare = text.strip()
        sizes = range(min(len(bare), self._longest), 0, -1)
        head = next((size for size in sizes if bare[:size] in self._ends), 0)
        tail = next((size for size in sizes if bare[-size:] in self._beginnings), 0)
        if not head and not tail:
            return text
        start = text.index(bare)
        middle, end = start + head, start + len(bare)
        last = max(middle, end - tail)
        return text[:start] + _with_marks(text[start:middle]) + text[middle:last] + _with_marks(text[last:])


def _with_marks(text: str) -> str:
    return _MARKED.sub(rf"\g<0>{_MARK}", text)


def is_marked(text: str) -> bool:
    """Return whether a text has marks."""
    return _MARK in text


def unmarked(text: str) -> str:
    """Remove the marks from a text."""
    return text.replace(_MARK, "")


def index_after(text: str, num_chars: int) -> int:
    """Return the index in a marked text after its first `num_chars` characters and their marks."""
    return num_chars + bisect_right(_mark_positions(text.split(_MARK)), num_chars)


def _mark_positions(parts: Sequence[str]) -> list[int]:
    """Return, for each mark between `parts`, the number of characters before it that are no marks."""
    return list(accumulate(map(len, parts[:-1])))
