"""What `bench load` measures: turns as they went, levels as they ran, and what follows from each alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from bench.old.session.turns import Answer  # noqa: TC001  # msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Chunks closer than this came in one packet: their reader cannot see a gap between them.
ONE_ARRIVAL_S: Final = 0.0005


class Turn(Struct, frozen=True, kw_only=True):
    """One turn of a session; turn 0 is its opening, which is not part of the load.

    `due_s` and `sent_s` count from the level's start, `first_chunk_s` of the answer and `latency_s` from
    `sent_s`. In a closed loop a turn is due when it is sent. `gaps_s` lie between the chunks. `joined` says
    whether the chunks' tokens are those of the result.
    """

    level: int
    session: int
    turn: int
    due_s: float
    sent_s: float
    latency_s: float
    gaps_s: tuple[float, ...] = ()
    answer: Answer | None = None
    joined: bool | None = None
    error: str | None = None


class Span(Struct, frozen=True, kw_only=True):
    """When a level ran, by the watch's clock, and for how long its load was full."""

    started_s: float
    busy_s: float
    ended_s: float


class Stall(Struct, frozen=True, kw_only=True):
    """One long prompt, prefilled while others decoded: `gaps_s` of them before and after, and during it."""

    tokens: int
    prefilled_tokens: int
    seconds: float
    alone_s: tuple[float, ...]
    during_s: tuple[float, ...]


def gaps(chunks_s: Sequence[float]) -> list[tuple[float, float]]:
    """Return where a running answer stood still: pairs of one arrival and the next."""
    found: list[tuple[float, float]] = []
    before: float | None = None
    for at_s in chunks_s:
        if before is None or at_s - before >= ONE_ARRIVAL_S:
            if before is not None:
                found.append((before, at_s))
            before = at_s
    return found


def lateness_s(turn: Turn) -> float:
    """Return how long after it was due a turn was sent, because the one before was not answered yet."""
    return turn.sent_s - turn.due_s


def whole_s(turn: Turn) -> float:
    """Return the time of a turn from when it was due: a late start is part of what its user waits."""
    return lateness_s(turn) + turn.latency_s


def first_chunk_s(turn: Turn) -> float | None:
    """Return the time to a turn's first chunk from when it was due; None where it was not answered."""
    return None if turn.answer is None else lateness_s(turn) + turn.answer.first_chunk_s


def per_token_s(turn: Turn) -> float | None:
    """Return the seconds per token after the first, None for an answer of fewer than two tokens."""
    answer = turn.answer
    if answer is None or answer.completion_tokens < 2:
        return None
    return (turn.latency_s - answer.first_chunk_s) / (answer.completion_tokens - 1)
