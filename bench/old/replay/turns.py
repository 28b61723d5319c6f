"""One request of the record beside its replay, and what follows from the two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from turnkeep_client.messages import Appended, Generated

if TYPE_CHECKING:
    from turnkeep_client.messages import Result

#: Whether the tokens of an answer can be held against the record's, or why not.
Standing = Literal["comparable", "after a difference", "other context", "no answer"]


class Times(Struct, frozen=True, kw_only=True):
    """One side's account. `turnaround_s` is from request to result as the log's server stored them.

    The others are the worker's own, None for a request that is no generate.
    """

    turnaround_s: float | None
    first_token_s: float | None = None
    total_s: float | None = None
    tokens: int = 0
    prompt_tokens: int | None = None
    prefilled_tokens: int = 0

    @property
    def per_token_s(self) -> float | None:
        """Seconds per token after the first; None for fewer than two tokens."""
        if self.total_s is None or self.first_token_s is None or self.tokens < 2:
            return None
        return (self.total_s - self.first_token_s) / (self.tokens - 1)


class Played(Struct, frozen=True, kw_only=True):
    """One request that was played again. `late_s` is how far behind its time it was sent.

    `first_difference` is the index of the first token that differs from the record's: the length of the
    shorter answer where one only ends sooner, None where both are the same or nothing can be compared.
    """

    session: str
    number: int
    kind: str
    sampled: bool
    sent_s: float
    late_s: float
    recorded: Times
    replayed: Times | None
    standing: Standing
    first_difference: int | None
    forced: bool
    error: str | None


def times(result: Result, turnaround_s: float | None) -> Times:
    """Take from a result what is compared."""
    match result:
        case Generated():
            return Times(
                turnaround_s=turnaround_s,
                first_token_s=result.seconds.first_token,
                total_s=result.seconds.total,
                tokens=len(result.tokens),
                prompt_tokens=result.usage.prompt_tokens,
                prefilled_tokens=result.usage.prefilled_tokens,
            )
        case Appended():
            return Times(turnaround_s=turnaround_s, prefilled_tokens=result.prefilled_tokens)
        case _:
            return Times(turnaround_s=turnaround_s)


def first_difference(recorded: tuple[int, ...], replayed: tuple[int, ...]) -> int | None:
    """Return the index of the first token that differs, None where there is none."""
    for i, (one, other) in enumerate(zip(recorded, replayed, strict=False)):
        if one != other:
            return i
    return None if len(recorded) == len(replayed) else min(len(recorded), len(replayed))
