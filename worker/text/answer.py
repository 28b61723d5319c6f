"""One growing answer: its tokens, its text, and when it ends. Pure.

The state after k tokens depends only on these tokens. So after a crash, pushing the published tokens again
restores the answer's state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    from turnkeep_client.messages import FinishReason


class TextSink(Protocol):
    """Turns tokens into text that is final and so safe to publish; implemented by `TextStream`."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was seen."""

    def push(self, token: int) -> str:
        """Add a token; return the text that no later token can change."""

    def finish(self) -> str:
        """Return the text that was held back."""


class Answer:
    """Tokens and text of one generate, up to its end."""

    def __init__(
        self, stream: TextSink, *, max_tokens: int, max_bytes: int, end_tokens: frozenset[int]
    ) -> None:
        """`max_bytes` limits tokens and text as JSON, without the text that is held back."""
        self._stream = stream
        self.max_tokens = max_tokens
        self._left_bytes = max_bytes
        self.end_tokens = end_tokens
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.texts)

    def push(self, token: int) -> str:
        """Add the next token; return the text that is final now. Sets `finish_reason` at the last token."""
        self.tokens.append(token)
        if token in self.end_tokens:
            self.finish_reason = "stop"
            text = ""
        else:
            text = self._stream.push(token)
            if self._stream.stopped:
                self.finish_reason = "stop"
            self._left_bytes -= len(str(token)) + len(msgspec.json.encode(text)) - 1  # a comma, no quotes
            if self.finish_reason is None and (len(self.tokens) >= self.max_tokens or self._left_bytes < 0):
                self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self._stream.finish()
        self.texts.append(text)
        return text

    def cancel(self, reason: Literal["cancelled", "expired"] = "cancelled") -> str:
        """End the answer here; returns the text that was held back."""
        self.finish_reason = reason
        self.texts.append(self._stream.finish())
        return self.texts[-1]
