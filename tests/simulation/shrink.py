"""Reduces a failing simulated run (a history) to the few acts and disturbances that cause the failure."""

from collections.abc import Mapping
from typing import Any, Final

from .history import Outcome, simulate

#: The most histories to run for one seed.
_MOST_RUNS: Final = 400


def shrink(seed: int, favoured: Mapping[str, Any] | None = None) -> Outcome:
    """Leave out acts of a failing history while it still fails; return the smallest one, with its story.

    Tries halves first, then smaller and smaller parts (ddmin). Each act has its own random generator, so the
    remaining acts do the same as before; only times change. So the last failure may differ from the first.
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
