"""Workers that are not what their side is called, or whose snapshots cost too much."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from msgspec.structs import replace
from saboteurs import Lie, Suite, only

from bench.overhead import (
    BENCH,
    CASES,
    FAILING,
    IDLE,
    IN_PROCESS,
    LOST,
    OFF,
    ON,
    SLOW,
    WAITING,
    WORKER,
    WRITTEN,
    Plan,
)
from bench.samples import Sample, Turn
from worker.device.resident import Resident

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.spec import Measure

PLAN = Plan(batch=(2,), rounds=8, turns=2)
#: Written, lost and waiting, of each side.
SOUND = {WORKER: (4, 0, 0), OFF: (0, 0, 0), ON: (4, 0, 0), SLOW: (0, 0, 4), FAILING: (0, 4, 0)}
SAID = tuple(range(30))


def honest(seed: int) -> tuple[list[Turn], list[Sample]]:
    """Sides that are as fast as each other; rounds scatter by 30%, and sides within a round by 1%."""
    noise, turns, samples = random.Random(seed), [], []
    for block in range(PLAN.rounds):
        for batch in PLAN.batch:
            mood = noise.lognormvariate(0, 0.3)
            for case in CASES:
                for number in range(PLAN.turns):
                    held = 140 * number
                    cached, context = max(held - 1, 0), held + 110
                    through = {"prompt_tokens": context, "cached_tokens": cached, "joined": True}
                    through["prefilled_tokens"] = context - cached
                    pace_s = 0.03 * mood * noise.lognormvariate(0, 0.01)
                    turns += [
                        Turn(
                            case=case,
                            x=batch,
                            block=block,
                            session=f"s{i}",
                            first_s=0.1 * mood,
                            gaps_s=tuple(pace_s * noise.lognormvariate(0, 0.03) for _ in SAID[1:]),
                            total_s=2.0,
                            own_tokens=110,
                            position=context + 30,
                            tokens=SAID,
                            facts={"turn": number, "held": held, "block_tokens": PLAN.block_tokens},
                            **(through if case != IN_PROCESS else {}),
                        )
                        for i in range(batch)
                    ]
                told = zip((WRITTEN, LOST, WAITING), SOUND.get(case, ()), strict=False)
                samples += [Sample(measure.name, case, batch, block, value) for measure, value in told]
        samples.append(Sample(IDLE.name, "", None, block, noise.uniform(0.005, 0.015)))
    return turns, samples


def told(
    measure: Measure, cases: tuple[str, ...], change: Callable[[float], float]
) -> Callable[[Sample], Sample]:
    """Bend the samples of some sides."""

    def bend(sample: Sample) -> Sample:
        hit = sample.measure == measure.name and sample.case in cases
        return replace(sample, value=change(sample.value)) if hit else sample

    return bend


def of_later(turn: Turn) -> Turn:
    """Prefill the session anew at each of its turns."""
    if turn.case != WORKER or not turn.facts["held"]:
        return turn
    return replace(turn, cached_tokens=0, prefilled_tokens=turn.prompt_tokens)


def of_first(turn: Turn) -> Turn:
    if turn.case != ON or turn.facts["held"]:
        return turn
    return replace(turn, cached_tokens=16, prefilled_tokens=turn.prompt_tokens - 16)


def slowly(*cases: str) -> Callable[[Turn], Turn]:
    """Take a tenth longer for every step."""
    return lambda turn: (
        replace(turn, gaps_s=tuple(1.1 * s for s in turn.gaps_s)) if turn.case in cases else turn
    )


def held_up(*cases: str) -> Callable[[Turn], Turn]:
    """Take longer for the step behind a block, for the others as much less in all."""

    def bend(turn: Turn) -> Turn:
        if turn.case not in cases:
            return turn
        drawn = 128 - ((turn.position or 0) - 30) % 128
        gaps_s = (gap_s + (0.25 if i == drawn else -0.25 / 28) for i, gap_s in enumerate(turn.gaps_s))
        return replace(turn, gaps_s=tuple(gaps_s))

    return bend


def keep_nothing() -> None:
    """Let every session's KV leave the device, and restore none of it."""
    from saboteurs import never_restore

    never_restore()
    take = Resident.take

    def lose(self: Resident, key: object) -> None:
        take(self, key)

    Resident.take = lose


LIES = (
    Lie("loses a token of a session", "a worker ran the very tokens", only(ON, position=1)),
    Lie("finds another session's KV", "no session began with", of_first),
    Lie("prefills a session anew", "later turns prefilled", of_later, serve=keep_nothing),
    Lie("writes nothing", "with snapshots on, some", bend_sample=told(WRITTEN, (ON,), lambda _: 0)),
    Lie("loses a snapshot", "with snapshots on, none", bend_sample=told(LOST, (ON,), lambda _: 1)),
    Lie("writes with snapshots off", "without snapshots", bend_sample=told(WRITTEN, (OFF,), lambda _: 1)),
    Lie("has a disk that is quick", "the slow disk kept", bend_sample=told(WAITING, (SLOW,), lambda _: 0)),
    Lie("has a disk that is sound", "the failing disk lost", bend_sample=told(LOST, (FAILING,), lambda _: 0)),
    Lie(
        "computes while it waits",
        "the sides that waited",
        bend_sample=told(IDLE, ("",), lambda cpu: cpu + 0.1),
    ),
    Lie("answers otherwise", "at least 90% of the tokens", only(ON, tokens=(9,) * 30)),
    Lie("decodes slower with snapshots", "with snapshots on answers decode", slowly(ON)),
    Lie("decodes slower on a bad disk", "on a bad disk answers decode", slowly(SLOW, FAILING)),
    Lie("holds a step up for a block", "with snapshots on the steps beside", held_up(ON)),
    Lie("holds a step up on a bad disk", "on a bad disk the steps beside", held_up(SLOW, FAILING)),
)
LONG = ("--batch", "1", "--rounds", "10000", "--corpus", "built-in")
SUITE = Suite(BENCH, PLAN, honest, LIES, LONG)
