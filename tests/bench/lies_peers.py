"""Sides that do not do the same work, or disturb each other."""

from __future__ import annotations

import random

from msgspec.structs import replace
from saboteurs import Lie, Suite, told

from bench.openai import OWN
from bench.peers import BENCH, CHAT, CONCURRENT, KILL, TURNKEEP, WARM, Plan
from bench.spec import Sample, Turn

PLAN = Plan(corpus="built-in")


def honest(seed: int) -> tuple[list[Turn], list[Sample]]:
    """Chats whose first token comes sooner from the worker, streams, and restarts."""
    noise, turns = random.Random(seed), []
    parts = [(CHAT, x, block) for block in range(PLAN.chats) for x in range(1, PLAN.turns + 1)]
    parts += [(CONCURRENT, 1, block) for block in range(PLAN.rounds)]
    parts += [(part, 1000, block) for block in range(PLAN.restarts) for part in (WARM, KILL)]
    for part, x, block in parts:
        context = 250 * x if part == CHAT else 1000
        for case, slower in ((TURNKEEP, 1.0), (OWN, 2.5)):
            first_s = slower * (0.5 + 1e-4 * context) * noise.lognormvariate(0, 0.2)
            times = {"first_s": first_s, "total_s": first_s + slower, "position": context + 64}
            counts = {"prompt_tokens": context, "cached_tokens": context - 200, "prefilled_tokens": 200}
            facts = {"part": part, "text": "a", "tokens": 64}
            facts["others_busy"] = noise.expovariate(100)
            joined = True if case == TURNKEEP else None
            turns.append(Turn(case=case, x=x, block=block, joined=joined, facts=facts, **times, **counts))
    return turns, []


def shorter(turn: Turn) -> Turn:
    """Drop what was said first, as a server does whose context is full."""
    gone = turn.prompt_tokens // 20 if turn.case == OWN and (turn.x or 0) >= 5 else 0
    return replace(turn, prompt_tokens=turn.prompt_tokens - gone, cached_tokens=turn.cached_tokens - gone)


LIES = (
    Lie("forgets what was said first", "all sides held the same conversation", shorter),
    Lie("works while it should be idle", "a side is idle", told(OWN, others_busy=0.5)),
)
LONG = ("--part", "chat", "--corpus", "built-in", "--chats", "1000", "--turns", "3", "--turn-tokens", "20")
SUITE = Suite(BENCH, PLAN, honest, LIES, (*LONG, "--max-tokens", "4"))
