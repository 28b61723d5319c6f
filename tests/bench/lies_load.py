"""Workers that lie under load, or share badly, or forget one of a crowd."""

from __future__ import annotations

import random

from msgspec.structs import replace
from saboteurs import Lie, Suite, forget_sessions, let_tokens_cost, outgrow_memory

from bench.load import ANSWER, BEGINNING, BENCH, KV, MEMORY, OPENING, SSD, TURNING, Plan
from bench.samples import Sample, Turn

PLAN = Plan(concurrency=(1, 4), sessions=8, long_prompt=4000, crowd=30, corpus="built-in")
PREFILL_S = 0.003
MIB = 2**20
ASKED = 60


def honest(seed: int) -> tuple[list[Turn], list[Sample]]:
    """Times scatter by 15%; what is counted is the same in every run."""
    noise, turns = random.Random(seed), []

    def scatter() -> float:
        return noise.lognormvariate(0, 0.15)

    def add(case: str, block: int, held: int, own: int, tokens: int, **facts: float) -> None:
        first_s = (0.05 + PREFILL_S * own + 1e-4 * held) * scatter()
        answer = Turn(
            case=case,
            x=None if case not in {"", OPENING} else facts.pop("x"),
            block=block,
            at_s=facts.pop("at_s", 0.0),
            first_s=first_s,
            total_s=first_s + 0.1 * tokens * scatter(),
            gaps_s=tuple(0.1 * scatter() for _ in range(tokens - 1)),
            position=held + own + tokens,
            prompt_tokens=held + own,
            cached_tokens=held,
            prefilled_tokens=own,
            tokens=tuple(range(tokens)),
            joined=True,
            facts={"held": held} | facts,
        )
        turns.append(answer)

    for at_once in PLAN.closed:
        for number in range(PLAN.sessions):
            add(OPENING, 0, 0, 60 + 20 * number, 4, number=number, x=at_once)
        for i in range(PLAN.sessions * PLAN.turns):
            number, turn = i % PLAN.sessions, i // PLAN.sessions
            held = 64 + 20 * number + 80 * turn
            fact = {"number": number, "late_s": 0.0, "x": at_once, "at_s": 2.0 * (i // at_once)}
            add("", i // at_once, held, 50 + i % 7, 8, **fact)
    for block in range(PLAN.rounds):
        for _ in range(4):
            begin_s = 100.0 * block
            window = {"alone_s": begin_s + 1, "sent_s": begin_s + 2, "over_s": begin_s + 12}
            add(ANSWER, block, 0, 20, 64, at_s=begin_s, **window)
    for number in range(PLAN.crowd):
        add(BEGINNING, 0, 0, 80, 4, number=number)
    for i in range(ASKED):
        held = 84 + 30 * (i % 5)
        case = MEMORY if i % 4 == 0 else SSD
        add(case, 10 * i // ASKED, held, 40, 16, number=i % PLAN.crowd, told=held, at_s=60.0 * i)
    samples = [Sample(KV.name, "", float(i), 0, 0.9) for i in range(100)]
    samples += [Sample(TURNING.name, "", 60.0 * i, 0, 700 * MIB + noise.gauss(0, MIB)) for i in range(80)]
    return turns, samples


CROWD = [turn for turn in honest(0)[0] if turn.case in {BEGINNING, MEMORY, SSD}]
ACCOUNT = (
    len(CROWD),
    *(sum(t.cached_tokens for t in CROWD), sum(t.prefilled_tokens for t in CROWD)),
    sum(len(t.tokens) for t in CROWD),
)


def wait_for_all(turn: Turn) -> Turn:
    return replace(turn, first_s=turn.first_s + PREFILL_S * turn.facts["held"])


def starve(turn: Turn) -> Turn:
    return replace(turn, total_s=10 * turn.total_s) if turn.facts.get("number") in {0, 5} else turn


def stand_still(turn: Turn) -> Turn:
    gaps = (*turn.gaps_s[:30], 9.0, *turn.gaps_s[30:])
    return replace(turn, gaps_s=gaps) if turn.case == ANSWER else turn


def forget(turn: Turn) -> Turn:
    return replace(turn, position=56) if turn.facts.get("told") == 114 else turn


def over_limit(sample: Sample) -> Sample:
    return Sample(KV.name, "", sample.x, 0, 1.01) if (sample.measure, sample.x) == (KV.name, 50.0) else sample


def leak(sample: Sample) -> Sample:
    if sample.measure != TURNING.name:
        return sample
    return Sample(*(sample.measure, "", sample.x, 0, sample.value + 12 * MIB * sample.x / 3600))


def work_twice(turn: Turn) -> Turn:
    return replace(turn, cached_tokens=turn.cached_tokens + 1, prefilled_tokens=turn.prefilled_tokens - 1)


LIES = (
    Lie("prefills all and reports it as cached", "a token that a session holds", wait_for_all),
    Lie("starves two sessions", "the slowest of those served", starve),
    Lie("holds running answers up", "running answers stand still", stand_still),
    Lie("forgets a session", "no session was forgotten", forget, serve=forget_sessions),
    Lie("outgrows its memory", "KV on the device", bend_sample=over_limit, serve=outgrow_memory),
    Lie(
        "does other work than it tells",
        "the worker worked on",
        lambda t: work_twice(t) if t.case == SSD else t,
    ),
    Lie("leaks", "the process without its KV", bend_sample=leak),
)
LONG = (
    "--corpus",
    "built-in",
    "--concurrency",
    "1",
    "--turns",
    "10000",
    "--max-tokens",
    "2",
    "--history",
    "0",
)
SUITE = Suite(
    BENCH, PLAN, honest, LIES, LONG, control=let_tokens_cost, facts={"the worker's account": ACCOUNT}
)
