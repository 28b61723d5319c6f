"""What a run of `bench load` does: its levels one after another, and what they have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Level:
    """One load.

    `closed`: so many sessions at a time, the next turn as soon as one is answered. `poisson`: so many turns a
    second, whatever the answers take. `recorded`: turns at their recorded times, so many times as fast.
    """

    kind: Literal["closed", "poisson", "recorded"]
    amount: float

    @property
    def name(self) -> str:
        """Name the level as reports show it."""
        match self.kind:
            case "closed":
                return f"{self.amount:.0f} at a time"
            case "poisson":
                return f"{self.amount:g} a second"
            case "recorded":
                return f"recorded x{self.amount:g}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What all levels have in common. `history` is the most utterances that a session begins with."""

    levels: tuple[Level, ...]
    sessions: int
    turns: int
    history: int
    max_tokens: int
    duration_s: float
    long_prompt: int | None
    rounds: int
    pause_s: float
    answer_tokens: int
    turn_timeout_s: float
    seed: int

    def history_of(self, session: int) -> int:
        """Say how many utterances a session begins with: they differ from one to the next."""
        return session % (self.history + 1)

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """Return the settings as a report holds them."""
        return {
            "levels": "; ".join(level.name for level in self.levels),
            "sessions": self.sessions,
            "turns": self.turns,
            "history": self.history,
            "max_tokens": self.max_tokens,
            "duration_s": self.duration_s,
            "long_prompt": self.long_prompt,
            "rounds": self.rounds,
            "answer_tokens": self.answer_tokens,
            "pause_s": self.pause_s,
            "turn_timeout_s": self.turn_timeout_s,
            "seed": self.seed,
        }
