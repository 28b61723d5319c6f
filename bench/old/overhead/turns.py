"""What one turn of a comparison was: the same prompts for several sessions at once, on one side."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The sides. The first two are mlx-lm in process: one sequence alone, and several in a batch.
ALONE: Final = "generate_step"
BATCHED: Final = "BatchGenerator"
WORKER: Final = "worker"
WITHOUT_SNAPSHOTS: Final = "without snapshots"
WORKERS: Final = (WORKER, WITHOUT_SNAPSHOTS)
IN_PROCESS: Final = (ALONE, BATCHED)


class Row(Struct, frozen=True, kw_only=True):
    """One session's part of a turn; times count from the turn's start.

    `agreeing` are the tokens up to the first that differs from the reference's, None for the reference.
    `cached_tokens` and `prefilled_tokens` are the worker's account.
    """

    prompt_tokens: int
    tokens: int
    first_s: float
    last_s: float
    agreeing: int | None = None
    cached_tokens: int | None = None
    prefilled_tokens: int | None = None
    context_tokens: int | None = None


class Cpu(Struct, frozen=True, kw_only=True):
    """Seconds of CPU time that a turn took.

    `process` is the side that ran it, `loop` the worker's event loop within it (None where the system does
    not tell), `server` the worker's NATS server, `client` the bench itself, `idle` the sides that waited.
    """

    process: float
    loop: float | None
    server: float
    client: float
    idle: float


class Turn(Struct, frozen=True, kw_only=True):
    """One turn of `batch` sessions: `seconds` from its first prompt to its last recorded answer."""

    round: int
    batch: int
    side: str
    turn: int
    seconds: float
    rows: tuple[Row, ...]
    cpu: Cpu

    @property
    def tokens(self) -> int:
        """Count the tokens of all answers."""
        return sum(row.tokens for row in self.rows)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers by the time of the whole turn, prefill included."""
        return self.tokens / self.seconds

    @property
    def first_s(self) -> float:
        """Seconds to the first token, the median of the sessions."""
        return statistics.median(row.first_s for row in self.rows)

    @property
    def per_token_s(self) -> float | None:
        """Seconds from token to token, the median of the sessions with two tokens or more."""
        paces = [(row.last_s - row.first_s) / (row.tokens - 1) for row in self.rows if row.tokens > 1]
        return statistics.median(paces) if paces else None

    @property
    def place(self) -> tuple[int, int, int]:
        """What the same turn of another side has too."""
        return self.round, self.batch, self.turn


def agreeing(tokens: Sequence[int], reference: Sequence[int]) -> int:
    """Count the tokens before the first one that differs; all of them where none does."""
    for i, (one, other) in enumerate(zip(tokens, reference, strict=False)):
        if one != other:
            return i
    return min(len(tokens), len(reference))
