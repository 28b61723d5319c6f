"""Joins the token chunks of one answer, without gap or repeat, and checks them against the recorded result.

Pure: chunks in, new text and tokens out. Knows nothing of NATS.
"""

from __future__ import annotations

from .errors import StreamBrokenError
from .messages import Chunk, Generated, TokenLogprob


class Assembly:
    """The beginning of one answer, joined from the chunks received so far.

    After a worker or server crash the same tokens may come again in different chunks. A chunk's `i` is the
    position of its first token in the answer. The position of its text is known only if another chunk began
    or ended at `i`. Otherwise the chunk is ignored, and `has_gap` is true until a later chunk adds tokens.
    """

    def __init__(self) -> None:
        self.has_gap = False
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._text_length = 0
        #: Token index at which some chunk began or ended -> number of characters before it.
        self._text_at = {0: 0}

    def add(self, chunk: Chunk) -> Chunk | None:
        """Add a chunk; return the part of it that is new, None if no part is new or the chunk is ignored.

        Raises `StreamBrokenError` if it contradicts earlier chunks.
        """
        text_start = self._text_at.get(chunk.i)
        if text_start is None:
            self.has_gap = True
            return None
        num_known = len(self._tokens) - chunk.i
        if self._tokens[chunk.i : chunk.i + len(chunk.tokens)] != list(chunk.tokens[:num_known]):
            raise StreamBrokenError(f"tokens from {chunk.i} on were published twice and differ")
        self._check_text(text_start, chunk.text)
        self._text_at.setdefault(chunk.i + len(chunk.tokens), text_start + len(chunk.text))
        if len(chunk.tokens) > num_known:
            self.has_gap = False
        text = chunk.text[self._text_length - text_start :]
        return self._extend(chunk.tokens[num_known:], text, chunk.logprobs[num_known:])

    def finish(self, result: Generated) -> Chunk | None:
        """Return the part of `result` after all chunks, None if empty; `StreamBrokenError` if they differ."""
        num_known = len(self._tokens)
        if list(result.tokens[:num_known]) != self._tokens:
            raise StreamBrokenError(f"the recorded tokens of {result.id} differ from those streamed")
        if not result.text.startswith("".join(self._texts)):
            raise StreamBrokenError(f"the recorded text of {result.id} differs from that streamed")
        text = result.text[self._text_length :]
        return self._extend(result.tokens[num_known:], text, result.logprobs[num_known:])

    def _check_text(self, start: int, text: str) -> None:
        overlap = text[: self._text_length - start]
        if overlap and not "".join(self._texts).startswith(overlap, start):
            raise StreamBrokenError(f"text from character {start} on was published twice and differs")

    def _extend(self, tokens: tuple[int, ...], text: str, logprobs: tuple[TokenLogprob, ...]) -> Chunk | None:
        if not tokens and not text:
            return None
        new = Chunk(i=len(self._tokens), tokens=tokens, text=text, logprobs=logprobs)
        self._tokens += tokens
        self._texts.append(text)
        self._text_length += len(text)
        return new
