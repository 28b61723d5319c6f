"""The data of a bench: turns, which the client times; samples, single values; and measures of both. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from .figures import Unit


class TimedTurn(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A timed generate request. The client measures times, in seconds; the worker counts the tokens."""

    #: The compared variant.
    case: str = ""
    #: The value on the x axis.
    x: float | None = None
    #: The unit of pairing and statistics, such as a round.
    block: int = 0
    session: str = ""
    #: When the request was sent, from the start of the run.
    at_s: float = 0.0
    #: From sending the request to its result, and to the first chunk.
    total_s: float
    first_s: float | None = None
    #: The times between chunks.
    gaps_s: tuple[float, ...] = ()
    #: The class of the fault and its message; None for a turn that was answered.
    error: str | None = None
    message: str | None = None
    #: The session's number of tokens after the turn; None after a fault.
    position: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    tokens: tuple[int, ...] = ()
    #: Whether the chunks add up to the result; None if that is unknown.
    joined: bool | None = None
    kv_live_bytes: int = 0
    rewritten_from: int | None = None
    #: What is specific to a bench.
    facts: dict[str, float | str | None] = {}

    @property
    def place(self) -> tuple[float | None, int]:
        """The turn's level on the x axis, None without one, and its block (repetition) of the run.

        Cases are compared by turns of the same place, since a machine's speed changes between blocks.
        """
        return self.x, self.block

    @property
    def num_tokens(self) -> float:
        """The number of the answer's tokens; from the fact `tokens` if the token ids are unknown."""
        return len(self.tokens) or self.fact("tokens") or 0

    @property
    def per_token_s(self) -> float | None:
        """Seconds per token after the first; None for an answer of fewer than two tokens."""
        if self.first_s is None or self.num_tokens < 2:
            return None
        return (self.total_s - self.first_s) / (self.num_tokens - 1)

    def fact(self, name: str) -> float | None:
        """Return the fact `name` if that is a number; otherwise None."""
        value = self.facts.get(name)
        return value if isinstance(value, int | float) else None


class Sample(Struct, frozen=True, array_like=True):
    """One value of a measure, with its case, level and block."""

    measure: str
    case: str
    x: float | None
    block: int
    value: float


@dataclass(frozen=True, slots=True)
class Measure:
    """A measured quantity."""

    name: str
    unit: Unit
    #: Returns a turn's values: one, several or None. Without it, values are the run's samples of this name.
    of: Callable[[TimedTurn], float | Sequence[float] | None] | None = None
    #: What `x` counts, if that differs from the bench's `levels`.
    levels: str | None = None
