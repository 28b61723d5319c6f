"""Collects an answer while it is generated: its tokens and its text, and decides when it ends. Pure.

The state after k tokens depends only on these tokens. So after a crash, pushing the published tokens again
restores the answer's state.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec

from turnkeep_client.messages import Chunk, LikelyToken, TokenLogprob

from .splitting import Piece

if TYPE_CHECKING:
    from collections.abc import Iterable

    from turnkeep_client.messages import Called, FinishReason

    from .splitting import Splitter
    from .text_stream import TextStream


class Answer:
    """The tokens and the text that answer one generate request."""

    def __init__(
        self,
        stream: TextStream,
        *,
        max_tokens: int,
        max_bytes: int,
        end_tokens: frozenset[int],
        splitter: Splitter | None = None,
    ) -> None:
        """Begin an answer; without a `splitter` all of it is text, with no reasoning or calls.

        `max_bytes` limits the size of tokens, text and calls as JSON, not counting text that `stream` holds
        back. A call that does not fit is left out, and ends the answer.
        """
        self._stream = stream
        self._splitter = splitter
        self.max_tokens = max_tokens
        self._left_bytes = max_bytes
        self._held_bytes = 0  # of text that the splitter has; already taken from `_left_bytes`
        self._num_calls = 0
        self.end_tokens = end_tokens
        self.tokens: list[int] = []
        #: The text and the reasoning that each push has added.
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        #: The number of tokens of the reasoning.
        self.num_thought = 0
        self.logprobs: list[TokenLogprob] = []
        #: None until the answer has ended.
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
        """The stop string that ended the answer; None if it goes on, or ended otherwise."""
        is_stopped = self.finish_reason in ("stop", "tool_calls", "tool_calls_malformed")
        return self._stream.stop if is_stopped else None

    @property
    def calls(self) -> tuple[Called, ...]:
        """The complete tool calls so far."""
        return tuple(self._splitter.calls[: self._num_calls]) if self._splitter else ()

    def push(self, token: int, logprob: float | None = None, top: Iterable[tuple[int, float]] = ()) -> Chunk:
        """Add the next token; return the chunk to publish.

        `logprob` and the likeliest tokens (`top`) are those of `worker.batch.row_sampler.DrawnToken`. Sets
        `finish_reason` if this token is the last.
        """
        index = len(self.tokens)
        self.tokens.append(token)
        said = self._said(token, logprob, top)
        self.logprobs += said
        self._left_bytes -= len(str(token)) + len(msgspec.json.encode(said)) - 1  # add a comma; omit brackets
        self.num_thought += self._splitter is not None and self._splitter.in_reasoning
        if token in self.end_tokens:
            self.finish_reason = "stop"
            piece = Piece()
        else:
            text = self._stream.push(token)
            if self._stream.stop is not None:
                self.finish_reason = "stop"
            self._held_bytes += _num_bytes(text)
            self._left_bytes -= _num_bytes(text)
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

    def _split(self, text: str) -> Piece:
        return self._fitting(self._splitter.push(text) if self._splitter else Piece(text))

    def _fitting(self, piece: Piece) -> Piece:
        """Return what fits of a piece: all text, and calls up to one for which there is no room.

        Such a call ends the answer. Calls become larger than their text: they have ids and full names.
        """
        self._take(_num_bytes(piece.text) + _num_bytes(piece.reasoning))
        for call in self._splitter.calls[self._num_calls :] if self._splitter else ():
            num_bytes = len(msgspec.json.encode(call)) + 1
            if num_bytes > self._left_bytes + self._held_bytes:
                if self.finish_reason in (None, "stop"):
                    self.finish_reason = "length"
                break
            self._take(num_bytes)
            self._num_calls += 1
        return piece._replace(calls=tuple(one for one in piece.calls if one.index < self._num_calls))

    def _take(self, num_bytes: int) -> None:
        """Take room for a part of the result: first that of the text of which the part was made."""
        held = self._held_bytes - num_bytes
        self._held_bytes = max(held, 0)
        self._left_bytes += min(held, 0)

    def _finish(self) -> Piece:
        """End the text and return what was held back; update `finish_reason` if there are tool calls."""
        piece = self._split(self._stream.finish())
        if self._splitter is not None:
            is_cut = self.finish_reason != "stop" or self.stop is not None
            piece += self._fitting(self._splitter.finish(is_cut=is_cut))
            if self.finish_reason == "stop" and self.calls:
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
        """End the answer for `reason`; return a chunk without tokens, with what was held back until now."""
        self.finish_reason = reason
        piece = self._finish()
        self._add(piece)
        return Chunk(len(self.tokens), (), piece.text, reasoning=piece.reasoning, tool_calls=piece.calls)


def _num_bytes(text: str) -> int:
    return len(msgspec.json.encode(text)) - 2
