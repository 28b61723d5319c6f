"""An answer's text as its tokens arrive: whole characters, held back where a stop string may begin.

A function of the token sequence alone: the same tokens give the same pieces of text, so that an answer can
be taken up again after a crash. Works on the tokens' bytes and Python's incremental UTF-8 decoder, which
costs the same for every token and gives what decoding the whole would give. Must not import MLX.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.models.tokenizer import Tokenizer


class TextStream:
    """Turn tokens into text that is safe to show, up to the first stop string.

    The stop string that ends first counts; of several that end together, the longest. `stopped` tells that
    one was seen: text before it has been returned, it and what follows never will be.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [_Matcher(string) for string in sorted(stop, key=len, reverse=True)]
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take the next token; returns the text that has become certain. End-of-turn tokens have none."""
        if token in self._tokenizer.eos_ids:
            return ""
        return self._take(self._decoder.decode(self._tokenizer.token_bytes(token)))

    def finish(self) -> str:
        """Return what was held back; the beginning of a character that never ended is U+FFFD."""
        text = self._take(self._decoder.decode(b"", final=True))
        if self.stopped:
            return text
        text, self._held = text + self._held, ""
        return text

    def _take(self, text: str) -> str:
        if self.stopped:
            return ""
        for count, char in enumerate(text, 1) if self._matchers else ():
            # Every matcher sees every character: no short cut at the first hit.
            hits = [matcher.length for matcher in self._matchers if matcher.push(char)]
            if hits:
                self.stopped = True
                return (self._held + text[:count])[: -max(hits)]
        text = self._held + text
        held = max((matcher.matched for matcher in self._matchers), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


class _Matcher:
    """Finds one string in a stream of characters (Knuth, Morris and Pratt): constant cost for each."""

    def __init__(self, string: str) -> None:
        self._string = string
        self._fallback = [0] * len(string)
        self.length = len(string)
        self.matched = 0
        for i in range(1, len(string)):
            self._fallback[i] = self._advance(self._fallback[i - 1], string[i])

    def push(self, char: str) -> bool:
        """Take a character; tells whether the string ends with it."""
        self.matched = self._advance(self.matched, char)
        return self.matched == self.length

    def _advance(self, matched: int, char: str) -> int:
        while matched and self._string[matched] != char:
            matched = self._fallback[matched - 1]
        return matched + (self._string[matched] == char)
