"""What was measured of each side, turn by turn and round by round."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Ending = Literal["warm", "stop", "kill"]


class Side(Struct, frozen=True, kw_only=True):
    """One of those compared. `blas` names the libraries that its process multiplies with."""

    name: str
    software: str
    model: str
    own_process: bool
    blas: str | None


class Turn(Struct, frozen=True, kw_only=True):
    """One answer, by the client's clock. `first_s` is None where it had no text.

    `tokens` are by the side's own count where `counted` is false, else its deltas were counted.
    `others_busy` is the share of the turn's time for which the other sides' processes used a CPU.
    """

    started_s: float
    latency_s: float
    first_s: float | None = None
    tokens: int = 0
    counted: bool = False
    context_tokens: int | None = None
    cached_tokens: int | None = None
    text: str = ""
    error: str | None = None
    others_busy: float | None = None

    @property
    def per_token_s(self) -> float | None:
        """Seconds per token after the first; None for an answer of fewer than two tokens."""
        if self.error is not None or self.first_s is None or self.tokens < 2:
            return None
        return (self.latency_s - self.first_s) / (self.tokens - 1)


class ChatTurn(Struct, frozen=True, kw_only=True):
    """One turn of the chat part."""

    side: str
    chat: int
    number: int
    turn: Turn


class Round(Struct, frozen=True, kw_only=True):
    """As many streams at once, from the first one's start to the last one's end."""

    side: str
    streams: int
    number: int
    seconds: float
    turns: tuple[Turn, ...]

    @property
    def tokens_per_s(self) -> float | None:
        """All streams' tokens per second; None where one of them failed."""
        if any(turn.error is not None for turn in self.turns) or self.seconds <= 0:
            return None
        return sum(turn.tokens for turn in self.turns) / self.seconds


class Restart(Struct, frozen=True, kw_only=True):
    """The turn after a side's process was ended and started again; `warm` is one before that.

    `ready_s` is from its start until it had answered another, short chat.
    """

    side: str
    length: int
    number: int
    ending: Ending
    ready_s: float | None
    turn: Turn
