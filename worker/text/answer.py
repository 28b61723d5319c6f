"""Collects an answer while it is generated: its tokens and its text, and decides when it ends. Pure.

The state after k tokens depends only on these tokens. So after a crash, pushing the published tokens again
restores the answer's state.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

import msgspec

from turnkeep_client.messages import Chunk, LikelyToken, PromptToken, TokenLogprob

from .splitting import Piece

if TYPE_CHECKING:
    from collections.abc import Iterable

    from turnkeep_client.messages import Called, FinishReason

    from .splitting import Splitter


class TextSink(Protocol):
    """Turns tokens into text that is final and so safe to publish; implemented by `TextStream`."""

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text; None without one."""

    def push(self, token: int) -> str:
        """Add a token; return the text that no later token can change."""

    def spell(self, token: int) -> bytes:
        """Return the bytes of any token of the vocabulary, in the answer or not."""

    def finish(self) -> str:
        """End the text; return the part of it that earlier calls held back."""


class Answer:
    """The tokens and the text that answer one generate request."""

    def __init__(
        self,
        stream: TextSink,
        *,
        max_tokens: int,
        max_bytes: int,
        end_tokens: frozenset[int],
        splitter: Splitter | None = None,
    ) -> None:
        """Begin an answer; without a `splitter` all of it is text, with no reasoning or calls.

        `max_bytes` limits the size of tokens and text as JSON, not counting text that is held back.
        """
        self._stream = stream
        self._splitter = splitter
        self.max_tokens = max_tokens
        self._left_bytes = max_bytes
        self.end_tokens = end_tokens
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.num_thought = 0  # tokens of the reasoning
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        """All reasoning so far."""
        return "".join(self.thoughts)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stream.stop if self.finish_reason == "stop" else None

    @property
    def calls(self) -> tuple[Called, ...]:
        """The complete tool calls so far."""
        return tuple(self._splitter.calls) if self._splitter else ()

    def push(self, token: int, logprob: float | None = None, top: Iterable[tuple[int, float]] = ()) -> Chunk:
        """Add the next token; return the chunk to publish.

        `logprob` and the likeliest tokens (`top`) are those of `worker.batch.row_sampler.Drawn`. Sets
        `finish_reason` if this token is the last.
        """
        index = len(self.tokens)
        self.tokens.append(token)
        said = self._said(token, logprob, top)
        self.logprobs += said
        self.num_thought += self._splitter is not None and self._splitter.in_reasoning
        if token in self.end_tokens:
            self.finish_reason = "stop"
            piece = Piece()
        else:
            text = self._stream.push(token)
            if self._stream.stop is not None:
                self.finish_reason = "stop"
            encoded = len(msgspec.json.encode(text)) + len(msgspec.json.encode(said)) - 2
            self._left_bytes -= len(str(token)) + encoded - 1  # add a comma; omit quotes and brackets
            piece = self._split(text)
            if self.finish_reason is None and self._splitter is not None and self._splitter.is_full:
                self.finish_reason = "stop"
            if self.finish_reason is None and (len(self.tokens) >= self.max_tokens or self._left_bytes < 0):
                self.finish_reason = "length"
        if self.finish_reason is not None:
            piece += self._finish()
        self._add(piece)
        return Chunk(
            index, (token,), piece.text, logprobs=said, reasoning=piece.reasoning, tool_calls=piece.calls
        )

    def of_prompt(self, token: int, logprob: float | None, top: Iterable[tuple[int, float]]) -> PromptToken:
        """Return a prompt token with its log probability and the likeliest tokens (`top`) at its position."""
        (said,) = self._said(token, logprob or 0.0, top)
        told = None if logprob is None else said.logprob
        return PromptToken(said.id, said.token, told, said.bytes, said.top)

    def _split(self, text: str) -> Piece:
        return self._splitter.push(text) if self._splitter else Piece(text)

    def _finish(self) -> Piece:
        """End the text and return what was held back; update `finish_reason` if there are tool calls."""
        piece = self._split(self._stream.finish())
        if self._splitter is not None:
            piece += self._splitter.finish(is_cut=self.finish_reason != "stop" or self.stop is not None)
            if self.finish_reason == "stop" and self._splitter.calls:
                self.finish_reason = "tool_calls"
            elif self.finish_reason == "stop" and self._splitter.malformed:
                self.finish_reason = "tool_calls_malformed"
        return piece

    def _add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.thoughts.append(piece.reasoning)

    def _said(
        self, token: int, logprob: float | None, top: Iterable[tuple[int, float]]
    ) -> tuple[TokenLogprob, ...]:
        if logprob is None:
            return ()
        likely = tuple(LikelyToken(one, *self._spelled(one, value)) for one, value in top)
        return (TokenLogprob(token, *self._spelled(token, logprob), likely),)

    def _spelled(self, token: int, logprob: float) -> tuple[str, float, tuple[int, ...] | None]:
        spelled = self._stream.spell(token)
        text = spelled.decode("utf-8", "replace")
        # The least float stands for minus infinity, which JSON does not have.
        logprob = max(logprob, -sys.float_info.max)
        return text, logprob, None if text.encode() == spelled else tuple(spelled)

    def cancel(self, reason: FinishReason = "cancelled") -> Chunk:
        """End the answer; return a chunk without tokens, with the text that was held back."""
        self.finish_reason = reason
        piece = self._finish()
        self._add(piece)
        return Chunk(len(self.tokens), (), piece.text, reasoning=piece.reasoning, tool_calls=piece.calls)
