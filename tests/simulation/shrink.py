"""Shrinks a history that goes wrong to the few acts and disturbances that it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .history import simulate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .history import Outcome

#: Histories that a seed may take: each has to be played.
_MOST_RUNS: Final = 400


def shrink(seed: int, favoured: Mapping[str, Any] | None = None) -> Outcome:
    """Leave out what the fault does not need; return the smallest history that goes wrong, with its story.

    Halves first, then ever smaller parts (ddmin). Acts draw from randomness of their own, so those that stay
    do the same; only the times of the world change. So another fault than the first may be what is left.
    """
    without: frozenset[str] = frozenset()
    left = simulate(seed, favoured=favoured).acts
    size, num_runs = max(len(left) // 2, 1), 0
    while num_runs < _MOST_RUNS:
        num_before = len(left)
        for start in range(len(left) - size, -size, -size):  # from the end: later acts are needed less
            tried = without | frozenset(left[max(start, 0) : start + size])
            num_runs += 1
            outcome = simulate(seed, favoured=favoured, without=tried)
            if outcome.wrong:
                without, left = tried, [act for act in left if act not in tried]
        if size == 1 and len(left) == num_before:
            break
        size = max(size // 2, 1)
    return simulate(seed, favoured=favoured, without=without, tell=True)
