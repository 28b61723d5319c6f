"""Streams an answer's text in whole characters, and holds back text that may be part of a stop string.

The same tokens always give the same pieces of text, so an answer can be resumed after a crash. Uses Python's
incremental UTF-8 decoder on the tokens' bytes: constant cost per token, and the same text as decoding all
tokens at once. Must not import MLX.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from .splitting import num_held

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker.models.tokenizer import Tokenizer


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
        self._is_marker = is_marker or (lambda _: False)  # an answer without markup
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stop: str | None = None

    def push(self, token: int) -> str:
        """Add the next token; return the text that is now final.

        A special token adds no text, unless it is a marker or a stop string has its text. A token that ends
        an answer never adds any.
        """
        if token in self._tokenizer.eos_ids:
            return ""
        spelled = self._tokenizer.token_bytes(token)
        if token in self._tokenizer.controls.special_ids:
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
        if self.stop is not None:
            return text
        text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self.stop is not None:
            return ""
        text = self._held + text
        ends = [(text.index(one) + len(one), -len(one), one) for one in self._stops if one in text]
        if ends:
            end, _, self.stop = min(ends)
            return text[:end].removesuffix(self.stop)
        size = len(text) - num_held(text, self._stops)
        self._held = text[size:]
        return text[:size]
