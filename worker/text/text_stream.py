"""Streams an answer's text in whole characters, and holds back text that may be part of a stop string.

The same tokens always give the same pieces of text, so an answer can be resumed after a crash. Uses Python's
incremental UTF-8 decoder on the tokens' bytes: constant cost per token, and the same text as decoding all
tokens at once. Must not import MLX.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker.models.tokenizer import Tokenizer


def _never(_: str) -> bool:
    """Return False: in an answer without markup no text is a marker."""
    return False


class TextStream:
    """Turns tokens into text that is safe to publish, up to the first stop string.

    The stop string that ends first counts; if several end at the same place, the longest one. `stop` is set
    to it, and neither the stop string nor the text after it is ever returned.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), is_marker: Callable[[str], bool] | None = None
    ) -> None:
        """`is_marker` says of a special token's text whether it may be a part of the answer's markup."""
        self._tokenizer = tokenizer
        self._stops = stop
        self._is_marker = is_marker or _never
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [_Matcher(string) for string in sorted(stop, key=len, reverse=True)]
        self._held = ""
        self.stop: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether the text has reached a stop string."""
        return self.stop is not None

    def push(self, token: int) -> str:
        """Add the next token; return the text that is now final.

        A special token adds no text, unless it is a marker or a stop string has its text. A token that ends
        an answer never adds any.
        """
        if token in self._tokenizer.eos_ids:
            return ""
        spelled = self._tokenizer.token_bytes(token)
        if token in self._tokenizer.special_ids:
            text = spelled.decode("utf-8", "replace")
            if not self._is_marker(text) and not any(text in stop for stop in self._stops):
                return ""
        return self._release(self._decoder.decode(spelled))

    def spell(self, token: int) -> bytes:
        """Return the bytes of any token of the vocabulary, in the answer or not."""
        return self._tokenizer.token_bytes(token)

    def finish(self) -> str:
        """Return the text that was held back; an incomplete character becomes U+FFFD."""
        text = self._release(self._decoder.decode(b"", final=True))
        if self.stopped:
            return text
        text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        for count, char in enumerate(text, 1) if self._matchers else ():
            # Every matcher must see every character: do not stop at the first hit.
            hits = [matcher.string for matcher in self._matchers if matcher.push(char)]
            if hits:
                self.stop = hits[0]
                return (self._held + text[:count]).removesuffix(hits[0])
        text = self._held + text
        held = max((matcher.matched for matcher in self._matchers), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


class _Matcher:
    """Finds one string in a stream of characters (Knuth-Morris-Pratt), at constant cost per character."""

    def __init__(self, string: str) -> None:
        self.string = string
        self._fallback = [0] * len(string)
        self.matched = 0
        for i in range(1, len(string)):
            self._fallback[i] = self._advance(self._fallback[i - 1], string[i])

    def push(self, char: str) -> bool:
        """Add a character; return whether the stream now ends with the string."""
        self.matched = self._advance(self.matched, char)
        return self.matched == len(self.string)

    def _advance(self, matched: int, char: str) -> int:
        while matched and self.string[matched] != char:
            matched = self._fallback[matched - 1]
        return matched + (self.string[matched] == char)
