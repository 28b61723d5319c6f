"""Workers that lie at their memory limit, and loads that never come near it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from saboteurs import Lie, Suite, only, restore_badly

from bench.pressure import (
    AGAIN,
    ALLOCATED,
    BENCH,
    DEVICE,
    HELD,
    KV,
    LIMIT,
    NEVER,
    PEAK,
    PROCESS,
    REFUSED,
    RESULTS,
    SHORT,
    Plan,
    draw,
    kind_of,
)
from bench.samples import Sample, Turn
from worker.device.admission import Claim, Ledger

if TYPE_CHECKING:
    from collections.abc import Callable

PLAN = Plan(room=256)
MIB = 2**20
KV_LIMIT, DEVICE_LIMIT, IDLE = 10 * MIB, 60 * MIB, 40 * MIB
FACTS = {"max_memory": KV_LIMIT, "device_memory": DEVICE_LIMIT, "without sessions": IDLE}


def honest(seed: int) -> tuple[list[Turn], list[Sample]]:
    """What the bench itself draws, answered as it should be; memory goes up and down below its limits."""
    dice, turns, samples, held = random.Random(seed), [], [], 0
    for i in range(100):
        verb, request, cancel_after_s = draw(dice, PLAN.room, held)
        own, asked = len(request.get("tokens", ())), request.get("max_tokens", 0)
        case = kind_of(held + own + min(asked, 1), PLAN.room)
        answer = (1,) * min(asked, PLAN.room - held - own)
        if verb in {"append", "generate"}:
            facts = {"verb": verb, "held": held, "cancelled": "yes" if cancel_after_s else None}
            answered = {"error": REFUSED} if case == NEVER else {"position": held + own + len(answer)}
            if case != NEVER:
                held += own + len(answer)
                answered |= {
                    "tokens": answer,
                    "joined": True,
                    "prompt_tokens": held,
                    "prefilled_tokens": held,
                }
            total_s = dice.lognormvariate(0, 0.5)
            turns.append(
                Turn(case=case, block=i // 20, total_s=total_s, own_tokens=own, facts=facts, **answered)
            )
        if held > 0.6 * PLAN.room:
            held = 0
        samples.append(Sample(RESULTS.name, "", None, i, 1))
        used = 1 - (i % 10) / 10
        for measure, line, size in (
            (KV, HELD, used * KV_LIMIT),
            (KV, LIMIT, KV_LIMIT),
            (DEVICE, ALLOCATED, IDLE + used * KV_LIMIT),
            (DEVICE, PEAK, 0.9 * DEVICE_LIMIT),
            (DEVICE, LIMIT, DEVICE_LIMIT),
            (PROCESS, "process", 100 * MIB + i * MIB / 5),
        ):
            samples.append(Sample(measure.name, line, i, i // 20, size))
    again = {"verb": "generate", "held": 0, "same": "yes"}
    turns += [Turn(case=AGAIN, block=i, total_s=1, position=9, tokens=(1,), facts=again) for i in range(9)]
    return turns, samples


def line(measure: Any, case: str, change: Callable[[float], float]) -> Callable[[Sample], Sample]:
    """Bend a line of readings from half-time on."""

    def bend(sample: Sample) -> Sample:
        late = (sample.measure, sample.case) == (measure.name, case) and (sample.x or sample.block) >= 50
        return replace(sample, value=change(sample.value)) if late else sample

    return bend


def far_from_it(sample: Sample) -> Sample:
    return replace(sample, value=sample.value / 2) if sample.case == HELD else sample


def refuse(turn: Turn) -> Turn:
    return replace(turn, error=REFUSED, tokens=()) if turn.case == SHORT and turn.block == 2 else turn


def lose_tokens(turn: Turn) -> Turn:
    return replace(turn, position=(turn.position or 0) - 1) if turn.case == SHORT else turn


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


FACT = {"verb": "generate", "held": 0, "cancelled": None}
LIES = (
    Lie(
        "allocates beyond its limit",
        "what MLX allocates",
        bend_sample=line(DEVICE, PEAK, lambda _: DEVICE_LIMIT + 1),
    ),
    Lie(
        "holds KV beyond its limit",
        "KV stays within",
        bend_sample=line(KV, HELD, lambda _: KV_LIMIT + 1),
        serve=hold_half_more,
    ),
    Lie("takes another limit", "the limits are those", bend_sample=line(KV, LIMIT, lambda _: 11 * MIB)),
    Lie("refuses what fits", "no request that fits", refuse, serve=refuse_what_fits),
    Lie("takes what never fits", "no request was carried out", only(NEVER, error=None, facts=FACT)),
    Lie("answers a request twice", "every request has one", bend_sample=line(RESULTS, "", lambda _: 2)),
    Lie("leaves one without result", "every request has one", bend_sample=line(RESULTS, "", lambda _: 0)),
    Lie("loses a token", "no answer ran over another context", lose_tokens),
    Lie(
        "restores another KV",
        "answers are those of the same sessions alone",
        only(AGAIN, facts={"verb": "generate", "held": 0, "same": "no"}),
        serve=restore_badly,
    ),
    Lie("has more room than it says", "the load came near", bend_sample=far_from_it),
    Lie(
        "loses memory",
        "the process grows by",
        bend_sample=line(PROCESS, "process", lambda size: size + 400 * MIB),
    ),
)
SUITE = Suite(BENCH, PLAN, honest, LIES, ("--duration", "20"), facts=FACTS)
