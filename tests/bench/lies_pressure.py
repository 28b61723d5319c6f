"""Workers that lie at their memory limit, and loads that never come near it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from saboteurs import Lie, Suite, only, restore_badly

from bench import pressure
from bench.pressure import AGAIN, ALLOCATED, BENCH, DEVICE, KV, NEVER, PEAK, PROCESS, REFUSED, Plan
from bench.spec import Sample, Turn
from worker.device.admission import Claim, Ledger

if TYPE_CHECKING:
    from collections.abc import Callable

PLAN = Plan(room=256)
MIB = 2**20
KV_LIMIT, DEVICE_LIMIT, IDLE = 10 * MIB, 60 * MIB, 40 * MIB


def honest(seed: int) -> tuple[list[Turn], list[Sample]]:
    """What the bench itself draws, answered as it should be; memory goes up and down below its limits."""
    dice, turns, samples, held = random.Random(seed), [], [], 0
    for i in range(100):
        verb, request, cancel_after_s = pressure.draw(dice, PLAN.room, held)
        if "tokens" in request:
            own, asked = len(request["tokens"]), request.get("max_tokens", 0)
            case = pressure.kind_of(held + own + min(asked, 1), PLAN.room)
            facts = {"verb": verb, "held": held, "cancelled": "yes" if cancel_after_s else None}
            answered: dict[str, Any] = {"error": REFUSED}
            if case != NEVER:
                tokens = (1,) * min(asked, PLAN.room - held - own)
                held += own + len(tokens)
                answered = {"position": held, "tokens": tokens, "joined": True}
                answered |= {"prompt_tokens": held, "prefilled_tokens": held}
            answered |= {"total_s": dice.lognormvariate(0, 0.5), "own_tokens": own, "facts": facts}
            turns.append(Turn(case=case, block=i // 20, **answered))
        if held > 0.6 * PLAN.room:
            held = 0
        used = (1 - (i % 10) / 10) * KV_LIMIT
        sizes = ((KV, "", used), (DEVICE, ALLOCATED, IDLE + used), (DEVICE, PEAK, 0.9 * DEVICE_LIMIT))
        for measure, case, size in (*sizes, (PROCESS, "", 100 * MIB + i * MIB / 5)):
            samples.append(Sample(measure.name, case, i, i // 20, size))
        samples.append(Sample(pressure.RESULTS.name, "", None, i, 1))
    turns += [Turn(case=AGAIN, block=i, total_s=1, position=9, tokens=(1,), facts=SAME) for i in range(9)]
    return turns, samples


def late(measure: Any, case: str, change: Callable[[float], float]) -> Callable[[Sample], Sample]:
    """Bend readings from half-time on."""

    def bend(sample: Sample) -> Sample:
        bent = (sample.measure, sample.case) == (measure.name, case) and (sample.x or sample.block) >= 50
        return replace(sample, value=change(sample.value)) if bent else sample

    return bend


def far_from_it(sample: Sample) -> Sample:
    return replace(sample, value=sample.value / 2) if sample.measure == KV.name else sample


def refuse(turn: Turn) -> Turn:
    return (
        replace(turn, error=REFUSED, tokens=()) if turn.case == pressure.SHORT and turn.block == 2 else turn
    )


def lose_tokens(turn: Turn) -> Turn:
    return replace(turn, position=(turn.position or 0) - 1) if turn.case == pressure.SHORT else turn


def refuse_what_fits() -> None:
    Ledger.ever_fits = lambda self, size: size <= 0.9 * self.max_bytes


def hold_half_more() -> None:
    """Keep half as much again on the device."""
    reserve = Ledger.reserve

    def more(self: Ledger, claim: Claim, size_bytes: int) -> object:
        limit = self.max_bytes
        self.max_bytes = limit * 3 // 2
        try:
            return reserve(self, claim, size_bytes)
        finally:
            self.max_bytes = limit

    Ledger.reserve = more


SAME = {"verb": "generate", "held": 0, "cancelled": None, "same": "yes"}
OTHER = only(AGAIN, facts=SAME | {"same": "no"})
ALLOCATES, HOLDS = late(DEVICE, PEAK, lambda _: DEVICE_LIMIT + 1), late(KV, "", lambda _: KV_LIMIT + 1)
TWICE, NONE = late(pressure.RESULTS, "", lambda _: 2), late(pressure.RESULTS, "", lambda _: 0)
LOSES = late(PROCESS, "", lambda size: size + 400 * MIB)
LIES = (
    Lie("allocates beyond its limit", "what MLX allocates", bend_sample=ALLOCATES),
    Lie("holds KV beyond its limit", "KV stays within", bend_sample=HOLDS, serve=hold_half_more),
    Lie("refuses what fits", "no request that fits", refuse, serve=refuse_what_fits),
    Lie("takes what never fits", "no request was carried out", only(NEVER, error=None, facts=SAME)),
    Lie("answers a request twice", "every request has one", bend_sample=TWICE),
    Lie("leaves one without result", "every request has one", bend_sample=NONE),
    Lie("loses a token", "no answer ran over another context", lose_tokens),
    Lie("restores another KV", "answers are those of the same sessions", OTHER, serve=restore_badly),
    Lie("has more room than it says", "the load came near", bend_sample=far_from_it),
    Lie("loses memory", "the process grows by", bend_sample=LOSES),
)
FACTS = {"max_memory": KV_LIMIT, "device_memory": DEVICE_LIMIT, "without sessions": IDLE}
SUITE = Suite(BENCH, PLAN, honest, LIES, ("--duration", "20"), facts=FACTS)
