"""Workers that lie about a restart, or are slow in it."""

from __future__ import annotations

import random

from msgspec.structs import replace
from saboteurs import (
    Lie,
    Suite,
    let_tokens_cost,
    never_restore,
    only,
    prefill_in_secret,
    restore_badly,
)

from bench.restart import BENCH, CASES, COLD, KILL, RESTART, RESTARTED, RESTORED, SPILLED, WARM, Plan
from bench.samples import Sample, Turn

PLAN = Plan(tokens=(256, 1024), rounds=5, corpus="built-in")
FIRST_S = {WARM: 0.1, SPILLED: 0.12, RESTART: 0.11, KILL: 0.2}
MIB = 2**20


def honest(seed: int) -> tuple[list[Turn], list[Sample]]:
    """Turns whose times scatter by 15%, as on a busy machine."""
    noise, turns = random.Random(seed), []
    for block in range(PLAN.rounds):
        for length in PLAN.tokens:
            for case in CASES:
                context = length + 32 * block
                own = {COLD: context, KILL: 40}.get(case, 17)
                first_s = (FIRST_S.get(case) or 0.004 * length) * noise.lognormvariate(0, 0.15)
                facts = {"restored_bytes": 30 * MIB} if case in RESTORED else {}
                facts |= {WARM: {"resident": "yes"}, SPILLED: {"resident": "no"}}.get(case, {})
                if case in RESTARTED:
                    facts |= {"felt_s": 2.5 + first_s, "ending_s": 0.5, "starting_s": 2.0}
                turns.append(
                    Turn(
                        case=case,
                        x=length,
                        block=block,
                        first_s=first_s,
                        total_s=first_s + 0.2,
                        position=context + 16,
                        prompt_tokens=context,
                        cached_tokens=context - own,
                        prefilled_tokens=own,
                        own_tokens=16,
                        tokens=(1, 2, block),
                        joined=True,
                        facts=facts,
                    )
                )
    return turns, []


def prefill_all(turn: Turn) -> Turn:
    if turn.case not in RESTARTED:
        return turn
    return replace(turn, cached_tokens=0, prefilled_tokens=turn.prompt_tokens)


def find_some(turn: Turn) -> Turn:
    if turn.case != COLD:
        return turn
    return replace(turn, cached_tokens=128, prefilled_tokens=turn.prompt_tokens - 128)


def forget_one(turn: Turn) -> Turn:
    if turn.case != RESTART:
        return turn
    return replace(turn, prompt_tokens=turn.prompt_tokens - 1, cached_tokens=turn.cached_tokens - 1)


def take_as_long(turn: Turn) -> Turn:
    return replace(turn, first_s=0.004 * turn.x) if turn.case in RESTORED else turn


LIES = (
    Lie(
        "keeps a spilled session in memory",
        "sessions were in memory",
        only(SPILLED, facts={"resident": "yes", "restored_bytes": 0}),
    ),
    Lie("loses a token in a restart", "every case had the same length", forget_one),
    Lie("prefills all after a restart", "only a turn's own tokens", prefill_all, serve=never_restore),
    Lie("finds another tenant's KV", "cold sessions found nothing", find_some),
    Lie(
        "answers otherwise after a restore",
        "what was restored in full",
        only(RESTART, tokens=(9, 9, 9)),
        serve=restore_badly,
    ),
    Lie("answers otherwise after a prefill", "at least 90% of other answers", only(COLD, tokens=(9, 9, 9))),
    Lie(
        "prefills all and reports it as cached",
        "what is reported as cached saves",
        take_as_long,
        serve=prefill_in_secret,
        exact=False,
    ),
)
LONG = ("--tokens", "256", "--rounds", "20", "--corpus", "built-in")
SUITE = Suite(BENCH, PLAN, honest, LIES, LONG, control=let_tokens_cost)
