"""Workers that answer otherwise when they are asked again, and a player that is late."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from saboteurs import Lie, Suite

from bench.record import COMPARABLE, OTHER
from bench.replay import BENCH, CASES, REPLAYED, Plan
from bench.samples import Sample, Turn
from worker.batch import sampling

if TYPE_CHECKING:
    from collections.abc import Callable

PLAN = Plan(corpus="built-in")


def honest(seed: int) -> tuple[list[Turn], list[Sample]]:
    """Sessions of generates; the replay has other times, the same tokens, and is a little late."""
    noise, turns = random.Random(seed), []
    for case in CASES:
        for block in range(PLAN.record_sessions):
            for x in range(1, PLAN.record_turns + 1):
                facts: dict[str, Any] = {"turnaround_s": 1.0}
                if case == REPLAYED:
                    facts |= {"late_s": noise.expovariate(200), "standing": COMPARABLE, "equal": 1.0}
                first_s, total_s = 0.1 * noise.lognormvariate(0, 0.3), noise.lognormvariate(0, 0.3)
                counts = {"prompt_tokens": 40 * x, "cached_tokens": 40 * x - 21, "prefilled_tokens": 21}
                answer = {"position": 40 * x + 20, "tokens": (1, 2, 3), "facts": facts}
                turns.append(
                    Turn(case=case, x=x, block=block, first_s=first_s, total_s=total_s, **counts, **answer)
                )
    return turns, []


def told(mine: Callable[[Turn], bool], **facts: float | str | None) -> Callable[[Turn], Turn]:
    """Bend what answers of the replay came to."""
    return lambda turn: (
        replace(turn, facts=turn.facts | facts) if turn.case == REPLAYED and mine(turn) else turn
    )


def one(turn: Turn) -> bool:
    return turn.place == (3, 2)


def draw_again() -> None:
    """Draw otherwise every time, whatever the seed."""
    key, drawn = sampling._key, random.SystemRandom()
    sampling._key = lambda seed, index: key(seed + drawn.randrange(2**30), index)


SAME = "the same model gives the same tokens"
LIES = (
    Lie("draws other tokens", SAME, told(one, equal=0.5, first_difference=1), serve=draw_again),
    Lie("forgets a token", SAME, told(one, equal=None, standing=OTHER)),
    Lie("is asked too late", "requests are sent at most", told(lambda _: True, late_s=0.2)),
)
LONG = ("--corpus", "built-in", "--record-sessions", "2", "--record-turns", "3", "--pace", "0.02")
SUITE = Suite(BENCH, PLAN, honest, LIES, LONG, facts={f"{case} by": ("tiny",) for case in CASES})
