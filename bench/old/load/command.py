"""The command `turnkeep bench load`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  # click shows no annotation, but readers want one
from typing import TYPE_CHECKING, Final

import click

from bench.old.options import (
    COUNT,
    POSITIVE,
    Numbers,
    choosing_worker,
    conduct,
    corpus_of,
    saying,
    turn_timeout,
)

if TYPE_CHECKING:
    from bench.old.run import Where

    from .plan import Level

CONCURRENCY: Final = (1, 2, 4, 8, 16)
#: Of an answer that runs beside the long prompt.
ANSWER_TOKENS: Final = 256
SMOKE_CONCURRENCY: Final = (1, 4)
SMOKE_SESSIONS: Final = 4
SMOKE_TURNS: Final = 3
SMOKE_TOKENS: Final = 6
SMOKE_PROMPT: Final = 256
SMOKE_ANSWER: Final = 16
SMOKE_HISTORY: Final = 3
SMOKE_DURATION_S: Final = 2.0
SMOKE_RATE: Final = 2.0


@click.command()
@choosing_worker
@click.option(
    "--concurrency",
    type=Numbers(),
    metavar="N,N",
    help="Levels of a closed loop: sessions at a time. [default: 1,2,4,8,16; none with an open loop]",
)
@click.option(
    "--rate", type=Numbers(float), metavar="X,X", help="Levels of an open loop: turns due a second."
)
@click.option(
    "--arrivals",
    type=click.Choice(("poisson", "recorded")),
    default="poisson",
    show_default=True,
    help="When turns of an open loop are due; recorded takes the times of --corpus chitchat.",
)
@click.option(
    "--pace", type=POSITIVE, default=10.0, show_default=True, help="How many times as fast as recorded."
)
@click.option(
    "--duration", type=POSITIVE, default=60.0, show_default=True, metavar="SECONDS", help="Of an open loop."
)
@click.option("--sessions", type=COUNT, default=16, show_default=True, help="Sessions of each level.")
@click.option(
    "--turns", type=COUNT, default=4, show_default=True, help="Turns of a session in a closed loop."
)
@click.option(
    "--history",
    type=click.IntRange(min=0),
    default=6,
    show_default=True,
    help="Most utterances that a session begins with; they differ from one to the next.",
)
@click.option("--max-tokens", type=COUNT, default=64, show_default=True, help="Most of one answer.")
@click.option("--long-prompt", type=COUNT, metavar="TOKENS", help="Also prefill this beside running answers.")
@click.option("--rounds", type=COUNT, default=3, show_default=True, help="How often the long prompt is sent.")
@turn_timeout()
@click.option("--seed", type=int, default=0, show_default=True, help="Of the arrivals.")
@saying("What is said.", "mt-bench; chitchat for recorded arrivals; built-in with --smoke")
def load(
    where: Where,
    out: Path | None,
    smoke: bool,
    checkpoint: float,
    concurrency: tuple[int, ...] | None,
    rate: tuple[float, ...] | None,
    arrivals: str,
    pace: float,
    duration: float,
    sessions: int,
    turns: int,
    history: int,
    max_tokens: int,
    long_prompt: int | None,
    rounds: int,
    turn_timeout: float,
    seed: int,
    corpus: str | None,
) -> None:
    """Many sessions at once: throughput, waiting, stalls and fairness at each load.

    In a closed loop so many sessions are served at a time. In an open loop turns are due whatever the worker
    does, and their times count from then.
    """
    from .measure import LoadBench
    from .plan import Plan

    recorded = arrivals == "recorded"
    if recorded and rate is not None:
        raise click.UsageError("--rate is for --arrivals poisson; recorded arrivals have a --pace")
    if smoke:
        concurrency = concurrency or (None if recorded or rate else SMOKE_CONCURRENCY)
        rate = rate or (None if recorded else (SMOKE_RATE,))
        sessions, turns = min(sessions, SMOKE_SESSIONS), min(turns, SMOKE_TURNS)
        history = min(history, SMOKE_HISTORY)
        max_tokens, duration = min(max_tokens, SMOKE_TOKENS), min(duration, SMOKE_DURATION_S)
        long_prompt, rounds = long_prompt or SMOKE_PROMPT, 1
    elif concurrency is None and rate is None and not recorded:
        concurrency = CONCURRENCY
    plan = Plan(
        levels=_levels(concurrency or (), rate or (), pace if recorded else None),
        sessions=max(sessions, *(concurrency or (1,))),
        turns=turns,
        history=history,
        max_tokens=max_tokens,
        duration_s=duration,
        long_prompt=long_prompt,
        rounds=rounds,
        pause_s=0.5 if smoke else 5.0,
        answer_tokens=SMOKE_ANSWER if smoke else ANSWER_TOKENS,
        turn_timeout_s=turn_timeout,
        seed=seed,
    )
    found = corpus_of(corpus or ("chitchat" if recorded else None), smoke=smoke)
    conduct(LoadBench(plan, found, where), out=out, checkpoint_s=checkpoint)


def _levels(concurrency: tuple[int, ...], rate: tuple[float, ...], pace: float | None) -> tuple[Level, ...]:
    from .plan import Level

    return (
        *(Level("closed", amount) for amount in concurrency),
        *(Level("poisson", amount) for amount in rate),
        *(() if pace is None else (Level("recorded", pace),)),
    )
