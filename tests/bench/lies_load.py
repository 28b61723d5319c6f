"""Workers that lie under load, or share badly, or forget one of a crowd."""

from __future__ import annotations

import random
from typing import Any

from msgspec.structs import replace
from saboteurs import PREFILL_S, Lie, Suite, forget_sessions, let_tokens_cost, outgrow_memory, wait_for_all

from bench.load import ANSWER, BEGINNING, BENCH, KV, MEMORY, OPENING, PROCESS, SSD, Plan
from bench.spec import Sample, Turn

PLAN = Plan(concurrency=(1, 4), sessions=8, long_prompt=4000, crowd=30, corpus="built-in")
MIB, ASKED = 2**20, 60


def honest(seed: int) -> tuple[list[Turn], list[Sample]]:
    """Times scatter by 15%; what is counted is the same in every run."""
    noise, turns = random.Random(seed), []

    def add(
        case: str, block: int, held: int, own: int, tokens: int, x: int | None = None, **facts: Any
    ) -> None:
        first, each, *gaps = (noise.lognormvariate(0, 0.15) for _ in range(tokens + 1))
        first_s = (0.05 + PREFILL_S * own + 1e-4 * held) * first
        answered = {"position": held + own + tokens, "tokens": (1,) * tokens, "joined": True}
        sums = {"prompt_tokens": held + own, "cached_tokens": held, "prefilled_tokens": own}
        times = {"at_s": facts.pop("at_s", 0.0), "first_s": first_s, "total_s": first_s + 0.1 * tokens * each}
        times |= {"gaps_s": tuple(0.1 * gap for gap in gaps)}
        turns.append(
            Turn(case=case, x=x, block=block, facts={"held": held} | facts, **answered, **sums, **times)
        )

    for x in PLAN.closed:
        for number in range(PLAN.sessions):
            add(OPENING, 0, 0, 60 + 20 * number, 4, x, number=number)
        for i in range(PLAN.sessions * PLAN.turns):
            turn, number = divmod(i, PLAN.sessions)
            held, at_s = 64 + 20 * number + 80 * turn, 2.0 * (i // x)
            add("", i // x, held, 50 + i % 7, 8, x, number=number, late_s=0.0, at_s=at_s)
    for i in range(4 * PLAN.rounds):
        begin_s = 100.0 * (i // 4)
        window = {"alone_s": begin_s + 1, "sent_s": begin_s + 2, "over_s": begin_s + 12}
        add(ANSWER, i // 4, 0, 20, 64, at_s=begin_s, **window)
    for number in range(PLAN.crowd):
        add(BEGINNING, 0, 0, 80, 4, number=number)
    for i in range(ASKED):
        held = 84 + 30 * (i % 5)
        case = MEMORY if i % 4 == 0 else SSD
        add(case, 10 * i // ASKED, held, 40, 16, number=i % PLAN.crowd, told=held, at_s=60.0 * i)
    samples = [Sample(KV.name, "", float(i), 0, 0.9) for i in range(100)]
    samples += [Sample(PROCESS.name, "", 60.0 * i, 0, 700 * MIB + noise.gauss(0, MIB)) for i in range(80)]
    return turns, samples


def starve(turn: Turn) -> Turn:
    return replace(turn, total_s=10 * turn.total_s) if turn.facts.get("number") in {0, 5} else turn


def stand_still(turn: Turn) -> Turn:
    gaps = (*turn.gaps_s[:30], 9.0, *turn.gaps_s[30:])
    return replace(turn, gaps_s=gaps) if turn.case == ANSWER else turn


def forget(turn: Turn) -> Turn:
    return replace(turn, position=56) if turn.facts.get("told") == 114 else turn


def over_limit(sample: Sample) -> Sample:
    return replace(sample, value=1.01) if (sample.measure, sample.x) == (KV.name, 50.0) else sample


def leak(sample: Sample) -> Sample:
    more = 12 * MIB * sample.x / 3600 if sample.measure == PROCESS.name else 0
    return replace(sample, value=sample.value + more)


LIES = (
    Lie("prefills all and reports it as cached", "a token that a session holds", wait_for_all),
    Lie("starves two sessions", "the slowest of those served", starve),
    Lie("holds running answers up", "running answers stand still", stand_still),
    Lie("forgets a session", "no session was forgotten", forget, serve=forget_sessions),
    Lie("outgrows its memory", "KV on the device", bend_sample=over_limit, serve=outgrow_memory),
    Lie("leaks", "the process without its KV", bend_sample=leak),
)
LONG = ("--corpus=built-in", "--concurrency=1", "--turns=10000", "--max-tokens=2", "--history=1")
SUITE = Suite(BENCH, PLAN, honest, LIES, LONG, control=let_tokens_cost)
