"""When turns are due in an open loop, whatever the worker does with them. Pure.

A list for each session, in seconds from the level's start.
"""

from __future__ import annotations

import random
import statistics
from typing import TYPE_CHECKING

from bench.faults import BenchError

if TYPE_CHECKING:
    from bench.corpus import Corpus


def poisson(rate: float, duration_s: float, sessions: int, seed: int) -> list[list[float]]:
    """Draw a Poisson process of `rate` turns a second, each turn one of a session drawn evenly."""
    draw = random.Random(seed)  # noqa: S311  # a load is repeatable, not secret
    dues: list[list[float]] = [[] for _ in range(sessions)]
    at_s = draw.expovariate(rate)
    while at_s < duration_s:
        dues[draw.randrange(sessions)].append(at_s)
        at_s += draw.expovariate(rate)
    return dues


def recorded(corpus: Corpus, pace: float, duration_s: float, sessions: int, seed: int) -> list[list[float]]:
    """Take the times at which people wrote, `pace` times as fast.

    How conversations lay to one another is not recorded: each begins at a time drawn evenly from the median
    length of all. What is due after `duration_s` is left out. Raises `BenchError` without recorded times.
    """
    chosen = [corpus.conversations[i % len(corpus.conversations)] for i in range(sessions)]
    times = [[said.at_s for said in chat.utterances if said.at_s is not None] for chat in chosen]
    if not all(times):
        raise BenchError(
            f"{corpus.source.name} has no recorded times for --arrivals recorded; take --corpus chitchat"
        )
    draw = random.Random(seed)  # noqa: S311  # a load is repeatable, not secret
    middle_s = statistics.median(at[-1] for at in times)
    starts = [draw.uniform(0, middle_s) for _ in times]
    dues = [[(start + at_s) / pace for at_s in at] for start, at in zip(starts, times, strict=True)]
    return [[due for due in one if due < duration_s] for one in dues]
