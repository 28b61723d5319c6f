"""Decides the order of requests, and how many of them run at the same time. Pure.

Used by `shares` before a session starts to work, by the device before a turn gets memory and a batch row.
"""

from __future__ import annotations

from typing import Final

#: The most tokens of a short answer.
SHORT_TOKENS: Final = 64
#: One step of priority counts as much as arriving this much earlier.
PRIORITY_S: Final = 10.0
#: One token of an answer's limit counts as much as arriving this much later, up to `_MOST_TOKENS` tokens.
TOKEN_S: Final = 0.02
_MOST_TOKENS: Final = 1024


def place(arrived_s: float, priority: int, max_new: int = 0) -> float:
    """Return a request's rank among all requests, in seconds; the request with the lowest rank is first.

    The fewer tokens its answer may have (`max_new`), the lower its rank. A rank never changes, so no
    request starves: later requests can overtake it only for a limited time.
    """
    return arrived_s - priority * PRIORITY_S + min(max_new, _MOST_TOKENS) * TOKEN_S


def has_place(num: int, num_short: int, limit: int, part: int, *, is_short: bool) -> bool:
    """Return whether one more request may run beside `num` others, of which `num_short` have short answers.

    Up to (limit - 1) / part requests with short answers, rounded up, do not count towards `limit`, so that
    they need not wait for long answers. Any further ones count like requests with long answers.
    """
    return num + 1 - min(num_short + is_short, -(-(limit - 1) // part)) <= limit
