"""Workers that lie about what a long session costs, or let it cost ever more."""

from __future__ import annotations

import random

from msgspec.structs import replace
from saboteurs import PREFILL_S, Lie, Suite, let_tokens_cost, prefill_anew, report_no_kv, wait_for_all

from bench.session import BENCH, Plan
from bench.spec import Sample, Turn

PLAN = Plan(duration=14_400, every=120, corpus="built-in")
TURNS = 120
MIB = 2**20


def honest(seed: int) -> tuple[list[Turn], list[Sample]]:
    """Four hours, and times that scatter by 15%; the session is full and begins anew after 40 turns."""
    noise, turns, held = random.Random(seed), [], 0
    for number in range(TURNS):
        held = 0 if number % 40 == 0 else held
        own = noise.randint(40, 80)
        context, at_s = held + own, number * PLAN.every
        ran = own + (1 if held else 0)
        first_s = (0.05 + PREFILL_S * ran + 1e-4 * held) * noise.lognormvariate(0, 0.15)
        times = {"at_s": at_s, "first_s": first_s, "total_s": first_s + 2.0 * noise.lognormvariate(0, 0.15)}
        counts = {"prompt_tokens": context, "cached_tokens": context - ran, "prefilled_tokens": ran}
        answer = {"position": context + 64, "tokens": tuple(range(64)), "joined": True}
        size = 700 * MIB + round(noise.gauss(0, MIB))
        facts = {"held": held, "beside_bytes": size, "written_bytes": 5 * MIB * number}
        block, kv = PLAN.stretch(number, at_s), 46_080 * (context + 63)
        turns.append(Turn(block=block, kv_live_bytes=kv, facts=facts, **times, **counts, **answer))
        held = context + 64
    return turns, []


def leak(turn: Turn) -> Turn:
    grown = turn.facts["beside_bytes"] + 12 * MIB * turn.at_s / 3600
    return replace(turn, facts=turn.facts | {"beside_bytes": grown})


LIES = (
    Lie("reports no KV", "KV is not empty", lambda turn: replace(turn, kv_live_bytes=0), serve=report_no_kv),
    Lie(
        "keeps more KV in one turn",
        "KV is not empty",
        lambda turn: replace(turn, kv_live_bytes=turn.kv_live_bytes + 1) if turn.at_s == 240 else turn,
    ),
    Lie(
        "prefills all each turn",
        "only a turn's own tokens",
        lambda turn: replace(turn, cached_tokens=0, prefilled_tokens=turn.prompt_tokens),
        serve=prefill_anew,
    ),
    Lie("prefills all and reports it as cached", "a token that a session holds", wait_for_all),
    Lie(
        "becomes slower by the turn",
        "turns at the end take",
        lambda turn: replace(turn, total_s=turn.total_s * (1 + turn.at_s / PLAN.duration)),
    ),
    Lie("leaks", "the process without its KV", leak),
)
LONG = ("--duration", "600", "--every", "0.1", "--max-tokens", "2", "--corpus", "built-in")
SUITE = Suite(BENCH, PLAN, honest, LIES, LONG, control=let_tokens_cost)
