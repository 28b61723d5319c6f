"""Derives a formula for the size of a session's KV from the majority of a run's turns. Pure.

A turn's fact `kept` is the number of its session's tokens with KV on the device; only turns of paged sessions
have the fact `again`. Checks compare every turn with the formula.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from .turns import Turn


def kv_formula(turns: Sequence[Turn]) -> Callable[[int, Turn], float] | None:
    """Return a function from a number of tokens, and a turn, to bytes of KV; None if no turn has KV.

    The formula is fitted to most turns. Each of the first `kept` tokens takes the same number of bytes. Each
    further token takes no bytes, or in a paged session the bytes of its sketch.
    """
    sizes = [(turn.kv_live_bytes, tokens, _kept(turn)) for turn in turns for tokens in _lengths(turn)]
    is_paged = any(turn.fact("again") is not None for turn in turns)
    held = _voted(size / min(tokens, kept) for size, tokens, kept in sizes if tokens <= kept or not is_paged)
    if not held:
        return None
    beyond = [one for one in sizes if is_paged and one[1] > one[2]]
    more = _voted((size - kept * held) / (tokens - kept) for size, tokens, kept in beyond)

    def formula(tokens: int, turn: Turn) -> float:
        kept = _kept(turn)
        return min(tokens, kept) * held + max(tokens - kept, 0) * more

    return formula


def _lengths(turn: Turn) -> list[int]:
    """Return the possible numbers of tokens with KV after a turn: all, or all but the last."""
    position = turn.position or 0
    return [tokens for tokens in (position, position - 1) if tokens > 0]


def _voted(sizes: Iterable[float]) -> float:
    votes = Counter(size for size in sizes if size > 0)
    return max(votes, key=votes.__getitem__, default=0)


def _kept(turn: Turn) -> float:
    return turn.fact("kept") or math.inf


def follows_formula(turn: Turn, formula: Callable[[int, Turn], float]) -> bool:
    """Whether the size of a turn's KV equals the formula for all tokens, or for all but the last."""
    return turn.kv_live_bytes in {formula(tokens, turn) for tokens in _lengths(turn)}
