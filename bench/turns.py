"""The data of a bench: turns, which the client times; samples, single values; and measures of both. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from .figures import Unit


class TimedTurn(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A timed generate request. The client measures times, in seconds; the worker counts the tokens.

    `case` names the compared variant, `x` is the value on the x axis, `block` the unit of pairing and
    statistics. `at_s` counts from the start of the run, `first_s` and `total_s` from sending the request;
    `gaps_s` are the times between chunks. Exactly one of `error` and `position` is set. `joined`: the chunks
    add up to the result. `facts` are specific to a bench.
    """

    case: str = ""
    x: float | None = None
    block: int = 0
    session: str = ""
    at_s: float = 0.0
    total_s: float
    first_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    error: str | None = None
    message: str | None = None
    position: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    tokens: tuple[int, ...] = ()
    joined: bool | None = None
    kv_live_bytes: int = 0
    rewritten_from: int | None = None
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
    """A measured quantity. `of` returns a turn's values: one, several or None.

    Without `of` the values are the run's samples of this name.
    `levels` names what `x` counts, if that differs from the bench's `levels`.
    """

    name: str
    unit: Unit
    of: Callable[[TimedTurn], float | Sequence[float] | None] | None = None
    levels: str | None = None
