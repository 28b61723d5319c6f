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
                facts: dict[str, Any] = {"sampled": float(block % 2), "turnaround_s": 1.0}
                if case == REPLAYED:
                    facts |= {"late_s": noise.expovariate(200), "standing": COMPARABLE, "equal": 1.0}
                turns.append(
                    Turn(
                        case=case,
                        x=x,
                        block=block,
                        first_s=0.1 * noise.lognormvariate(0, 0.3),
                        total_s=noise.lognormvariate(0, 0.3),
                        position=40 * x,
                        prompt_tokens=40 * x - 20,
                        cached_tokens=40 * x - 41,
                        prefilled_tokens=21,
                        tokens=(1, 2, 3),
                        facts=facts,
                    )
                )
    return turns, []


def told(**facts: float | str | None) -> Callable[[Turn], Turn]:
    """Bend what one answer of the replay came to."""

    def bend(turn: Turn) -> Turn:
        mine = (turn.case, turn.x, turn.block) == (REPLAYED, 3, 2)
        return replace(turn, facts=turn.facts | facts) if mine else turn

    return bend


def late(turn: Turn) -> Turn:
    return replace(turn, facts=turn.facts | {"late_s": 0.2}) if turn.case == REPLAYED else turn


def draw_again() -> None:
    """Draw otherwise every time, whatever the seed."""
    key, drawn = sampling._key, random.SystemRandom()
    sampling._key = lambda seed, index: key(seed + drawn.randrange(2**30), index)


LIES = (
    Lie(
        "draws other tokens",
        "the same model gives the same tokens",
        told(equal=0.5, first_difference=1),
        serve=draw_again,
    ),
    Lie("forgets a token", "the same model gives", told(equal=None, standing=OTHER)),
    Lie("is asked too late", "requests are sent at most", late),
)
LONG = ("--corpus", "built-in", "--record-sessions", "2", "--record-turns", "3", "--pace", "0.02")
SUITE = Suite(BENCH, PLAN, honest, LIES, LONG, facts={f"{case} by": ("tiny",) for case in CASES})
