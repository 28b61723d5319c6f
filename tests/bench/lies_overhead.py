"""Workers that are not what their side is called, or whose snapshots cost too much."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

from msgspec.structs import replace
from saboteurs import Lie, Suite, never_restore, only, told

from bench.overhead import BENCH, CASES, FAILING, IDLE, IN_PROCESS, OFF, ON, SLOW, WORKER, Plan
from bench.spec import Sample, Turn
from worker.device.room import Room

if TYPE_CHECKING:
    from collections.abc import Callable

PLAN = Plan(batch=(2,), rounds=8, turns=2)
NONE = {"written": 0, "lost": 0, "waiting": 0}
SOUND = {WORKER: NONE | {"written": 4}, OFF: NONE, ON: NONE | {"written": 4}}
SOUND |= {SLOW: NONE | {"waiting": 4}, FAILING: NONE | {"lost": 4}}
SAID = tuple(range(30))


def honest(seed: int) -> tuple[list[Turn], list[Sample]]:
    """Sides that are as fast as each other; rounds scatter by 30%, and sides within a round by 1%."""
    noise, turns, samples = random.Random(seed), [], []
    moods = [noise.lognormvariate(0, 0.3) for _ in range(PLAN.rounds)]
    for block, case in itertools.product(range(PLAN.rounds), CASES):
        samples.append(Sample(IDLE.name, case, None, block, noise.uniform(0.005, 0.015)))
        for number in range(PLAN.turns):
            cached, context = max(140 * number - 1, 0), 140 * number + 110
            account = {"prompt_tokens": context, "cached_tokens": cached, "joined": True}
            account["prefilled_tokens"] = context - cached
            facts = {"turn": number, "sent": context, "block_tokens": PLAN.block_tokens}
            pace_s = 0.03 * moods[block] * noise.lognormvariate(0, 0.01)
            turns += [
                Turn(
                    case=case,
                    x=2,
                    block=block,
                    session=f"s{i}",
                    first_s=0.1 * moods[block],
                    gaps_s=tuple(pace_s * noise.lognormvariate(0, 0.03) for _ in SAID[1:]),
                    total_s=2.0,
                    own_tokens=110,
                    position=context + 30,
                    tokens=SAID,
                    facts=facts | SOUND.get(case, {}),
                    **(account if case != IN_PROCESS else {}),
                )
                for i in range(2)
            ]
    return turns, samples


def of(*cases: str, bend: Callable[[Turn], Turn]) -> Callable[[Turn], Turn]:
    """Bend the turns of some sides."""
    return lambda turn: bend(turn) if turn.case in cases else turn


def find(turn: Turn) -> Turn:
    """Find tokens in a cache where there can be none."""
    first = turn.facts["turn"] == 0
    return replace(turn, cached_tokens=16, prefilled_tokens=turn.prompt_tokens - 16) if first else turn


def prefill_all(turn: Turn) -> Turn:
    return replace(turn, cached_tokens=0, prefilled_tokens=turn.prompt_tokens)


def slow(turn: Turn) -> Turn:
    """Take a tenth longer for every step."""
    return replace(turn, gaps_s=tuple(1.1 * gap_s for gap_s in turn.gaps_s))


def hold_up(turn: Turn) -> Turn:
    """Take longer for the step behind a block, for the others as much less in all."""
    drawn = 128 - ((turn.position or 0) - 30) % 128
    gaps_s = (gap_s + (0.25 if i == drawn else -0.25 / 28) for i, gap_s in enumerate(turn.gaps_s))
    return replace(turn, gaps_s=tuple(gaps_s))


def busy(sample: Sample) -> Sample:
    return replace(sample, value=sample.value + 0.1)


def keep_nothing() -> None:
    """Let every session's KV leave the device, and restore none of it."""
    never_restore()
    take = Room.pop

    def lose(self: Room, key: object) -> None:
        take(self, key)

    Room.pop = lose


LIES = (
    Lie("loses a token of a session", "a worker ran the very tokens", only(ON, position=1)),
    Lie("finds another session's KV", "no session began with", of(ON, bend=find)),
    Lie("prefills a session anew", "later turns prefilled", of(WORKER, bend=prefill_all), serve=keep_nothing),
    Lie("writes nothing", "with snapshots on, some", told(ON, written=0)),
    Lie("loses a snapshot", "with snapshots on, none", told(ON, lost=1)),
    Lie("writes with snapshots off", "without snapshots", told(OFF, written=1)),
    Lie("has a disk that is quick", "the slow disk kept", told(SLOW, waiting=0)),
    Lie("has a disk that is sound", "the failing disk lost", told(FAILING, lost=0)),
    Lie("computes while it waits", "the sides that waited", bend_sample=busy),
    Lie("answers otherwise", "at least 90% of the tokens", only(ON, tokens=(9,) * 30)),
    Lie("decodes slower with snapshots", "with snapshots on answers decode", of(ON, bend=slow)),
    Lie("decodes slower on a bad disk", "on a bad disk answers decode", of(SLOW, FAILING, bend=slow)),
    Lie("holds a step up for a block", "with snapshots on the steps beside", of(ON, bend=hold_up)),
    Lie("holds a step up on a bad disk", "on a bad disk the steps beside", of(SLOW, FAILING, bend=hold_up)),
)
LONG = ("--batch", "1", "--rounds", "10000", "--corpus", "built-in")
SUITE = Suite(BENCH, PLAN, honest, LIES, LONG)
