"""The order of all requests, and how many of them run beside one another. Pure.

`shares` asks before a session works, the device before a turn gets memory and a batch row.
"""

from __future__ import annotations

from typing import Final

#: The most tokens of a short answer.
SHORT_TOKENS: Final = 64
#: Each step of priority counts like having arrived so many seconds earlier.
PRIORITY_S: Final = 10.0
#: Each token that an answer may have counts like having arrived so many seconds later, up to the most.
TOKEN_S: Final = 0.02
_MOST_TOKENS: Final = 1024


def place(arrived_s: float, priority: int, max_new: int = 0) -> float:
    """Return a request's place in the order of all requests, in seconds; the lowest place comes first.

    Short answers, of at most `max_new` tokens, come before long ones. A place never changes, so no request
    starves: later requests overtake it only for a limited time.
    """
    return arrived_s - priority * PRIORITY_S + min(max_new, _MOST_TOKENS) * TOKEN_S


def has_place(num: int, num_short: int, limit: int, part: int, *, is_short: bool) -> bool:
    """Say whether one more fits beside `num`, of which `num_short` have short answers.

    Above 1, the `limit` is one part in `part` higher for short answers alone: so they need not wait for long
    ones, and however many of them come, they take no more from long ones.
    """
    return num + 1 - min(num_short + is_short, -(-(limit - 1) // part)) <= limit
