"""Workers that lie about a restart, or are slow in it."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

from msgspec.structs import replace
from saboteurs import Lie, Suite, let_tokens_cost, never_restore, only, prefill_in_secret, restore_badly

from bench.restart import BENCH, CASES, COLD, KILL, RESTART, RESTORED, SPILLED, WARM, Plan
from bench.spec import Sample, Turn

if TYPE_CHECKING:
    from collections.abc import Callable

PLAN = Plan(tokens=(256, 1024), rounds=5, corpus="built-in")
FIRST_S = {WARM: 0.1, SPILLED: 0.12, RESTART: 0.11, KILL: 0.2}
FACTS = {WARM: {"resident": "yes"}, SPILLED: {"resident": "no"}}


def honest(seed: int) -> tuple[list[Turn], list[Sample]]:
    """Turns whose times scatter by 15%, as on a busy machine."""
    noise, turns = random.Random(seed), []
    for block, length, case in itertools.product(range(PLAN.rounds), PLAN.tokens, CASES):
        context = length + 32 * block
        own = {COLD: context, KILL: 40}.get(case, 17)
        first_s = FIRST_S.get(case, 0.004 * length) * noise.lognormvariate(0, 0.15)
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
                tokens=(1, 2, block),
                joined=True,
                facts=FACTS.get(case, {}),
            )
        )
    return turns, []


def cached(case: str, tokens: int) -> Callable[[Turn], Turn]:
    """Find so many tokens in a cache."""
    return lambda turn: (
        replace(turn, cached_tokens=tokens, prefilled_tokens=turn.prompt_tokens - tokens)
        if turn.case == case
        else turn
    )


def forget_one(turn: Turn) -> Turn:
    if turn.case != RESTART:
        return turn
    return replace(turn, prompt_tokens=turn.prompt_tokens - 1, cached_tokens=turn.cached_tokens - 1)


def as_long(turn: Turn) -> Turn:
    """Take as long as if all were prefilled."""
    return replace(turn, first_s=0.004 * turn.x) if turn.case in RESTORED else turn


LIES = (
    Lie("spills no session", "sessions were in memory", only(SPILLED, facts={"resident": "yes"})),
    Lie("loses a token in a restart", "every case had the same length", forget_one),
    Lie("prefills all after a restart", "only a turn's own tokens", cached(RESTART, 0), serve=never_restore),
    Lie("finds another tenant's KV", "cold sessions found nothing", cached(COLD, 128)),
    Lie("restores badly", "what was restored in full", only(RESTART, tokens=(9,)), serve=restore_badly),
    Lie("answers otherwise after a prefill", "at least 90% of other answers", only(COLD, tokens=(9,))),
    Lie("prefills in secret", "what is reported as cached", as_long, serve=prefill_in_secret, exact=False),
)
LONG = ("--tokens", "256", "--rounds", "20", "--corpus", "built-in")
SUITE = Suite(BENCH, PLAN, honest, LIES, LONG, control=let_tokens_cost)
