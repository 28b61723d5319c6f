"""Keeps what people say apart from what the chat template says: content never becomes a control token.

A template splices content between its own control tokens into one text, which is tokenised as a whole. So
content that could form such a token is marked: behind each of its characters stands half of a surrogate
pair, which no message and no template can contain. Marks stay with their characters, whatever the template
cuts off; where a control token would cover one, the text is tokenised in pieces instead. Marks change no
other token, and content that cannot form one is not marked.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

_MARK: Final = "\ud800"
#: White space at the ends is left alone, since templates trim it.
_MARKED: Final = re.compile(r"\S")
#: What of a message is the worker's own, or one of a few words that the protocol knows.
_NO_CONTENT: Final = frozenset({"role", "type"})


class ControlTokens:
    """The tokens of a vocabulary that only the chat template may use. Thread-safe: it does not change.

    These are the special tokens, those that end an answer, and what else the template writes (`<tool_call>`)
    of the tokens that are cut out of a text before it is tokenised. An assistant's messages may have the
    latter: they are what the model itself puts into its answers.
    """

    def __init__(self, rust: Any, end_ids: Collection[int], template: str) -> None:
        """`rust` is a tokenizer of the library `tokenizers`; `template` is the chat template's source."""
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
        # A normalizer may make one of other characters, or only behind a space that the template writes.
        self._normalized = [token.content for token in tokens if token.normalized and rust.normalizer]
        first = "".join(re.escape(name[0]) for name in names)
        self._first = re.compile("" if self._normalized else f"[{first}]" if first else r"(?!)")

    def mark(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Mark what a message says, so that none of it is taken for a control token."""
        forbidden = self._special if message.get("role") == "assistant" else self._all

        def marked(value: Any) -> Any:
            match value:
                case str():
                    return self._mark(value, forbidden)
                case dict():
                    return {name: own(name, each) for name, each in value.items()}
                case list() | tuple():
                    return [marked(each) for each in value]
            return value

        def own(name: str, value: Any) -> Any:
            return value if name in _NO_CONTENT else marked(value)

        return {name: own(name, value) for name, value in message.items()}

    def mark_text(self, text: str) -> str:
        """Mark a text, so that none of it is taken for a control token."""
        return self._mark(text, self._all)

    def mark_answer(self, tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
        """Give the text of sampled tokens; what they spell out is marked, a control token is not."""
        runs = groupby(tokens, self._all.__contains__)
        return "".join(
            decode(list(run)) if control else self._mark(decode(list(run)), self._special)
            for control, run in runs
        )

    def encode(self, text: str, go_on: Callable[[str], list[int]]) -> list[int]:
        """Tokenise a text with marks. `go_on` does it for a piece that others stand before."""
        parts = text.split(_MARK)
        plain = "".join(parts)
        marks = _places(parts)
        found = self._rust.encode(plain, add_special_tokens=False)
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
            ids += go_on(text[start:end]) if start else self.encode(text[:end], go_on)
        return ids

    def _mark(self, text: str, forbidden: frozenset[int]) -> str:
        if self._first.search(text):
            ids = self._rust.encode(text, add_special_tokens=False).ids
            if not forbidden.isdisjoint(ids) or any(name in text for name in self._normalized):
                return _with_marks(text)
        return self._mark_ends(text)

    def _mark_ends(self, text: str) -> str:
        """Mark the ends of a text that could form a control token together with what stands beside it."""
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
    """Say whether a text has marks."""
    return _MARK in text


def unmarked(text: str) -> str:
    """Take the marks out of a text."""
    return text.replace(_MARK, "")


def place(text: str, num_chars: int) -> int:
    """Find the place in a text with marks that is behind so many of its characters, and their marks."""
    return num_chars + bisect_right(_places(text.split(_MARK)), num_chars)


def _places(parts: Sequence[str]) -> list[int]:
    """List behind how many characters each mark stands."""
    return list(accumulate(map(len, parts[:-1])))
