"""What a run of `bench many` does: how many sessions, and which of them is asked next."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A session is rewound to its beginning after so many turns, or when it is full: popular ones must not
#: outgrow the memory.
KEPT_TURNS: Final = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. Memory is for `room` sessions; without `turns` and `duration_s` it never ends."""

    sessions: int
    turns: int | None
    duration_s: float | None
    room: int
    in_flight: int
    concurrency: int
    skew: float
    history: int
    max_tokens: int
    turn_timeout_s: float
    seed: int

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """Return the settings as a report holds them."""
        return asdict(self)


def order(sessions: int, skew: float, seed: int) -> Iterator[int]:
    """Yield which session is asked next, for ever.

    Every second turn is of one that was not asked yet, in random order, until all were; the others follow
    Zipf's law with the exponent `skew`: few sessions are asked often, most seldom.
    """
    draw = np.random.default_rng(seed)
    by_rank = draw.permutation(sessions)
    shares = np.cumsum(1.0 / np.arange(1, sessions + 1) ** skew)
    unasked = list(draw.permutation(sessions))
    while True:
        if unasked:
            yield int(unasked.pop())
        rank = int(np.searchsorted(shares, draw.random() * shares[-1], side="right"))
        yield int(by_rank[min(rank, sessions - 1)])
