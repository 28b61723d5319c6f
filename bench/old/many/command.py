"""The command `turnkeep bench many`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  # click shows no annotation, but readers want one
from typing import TYPE_CHECKING, Final

import click

from bench.old.options import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    choosing_worker,
    conduct,
    corpus_of,
    saying,
    turn_timeout,
)

if TYPE_CHECKING:
    from bench.old.run import Where

SMOKE_SESSIONS: Final = 20
SMOKE_TOKENS: Final = 2
SMOKE_ROOM: Final = 2


@click.command()
@choosing_worker
@click.option("--sessions", type=COUNT, default=1000, show_default=True, help="How many are built.")
@click.option(
    "--turns", type=COUNT, help="Turns of all together. [default: two for each, or no limit with --duration]"
)
@click.option("--duration", type=POSITIVE, metavar="SECONDS", help="Stop the turns after.")
@click.option(
    "--room",
    type=COUNT,
    default=8,
    show_default=True,
    help="Sessions that the memory of the bench's own worker is for.",
)
@click.option("--in-flight", type=COUNT, default=64, show_default=True, help="Sessions built at a time.")
@click.option("--concurrency", type=COUNT, default=1, show_default=True, help="Turns at a time after that.")
@click.option(
    "--skew",
    type=NOT_NEGATIVE,
    default=1.1,
    show_default=True,
    help="Exponent of Zipf's law by which sessions are asked again; 0 asks all alike.",
)
@click.option(
    "--history", type=COUNT, default=2, show_default=True, help="Utterances that a session begins with."
)
@click.option("--max-tokens", type=COUNT, default=16, show_default=True, help="Most of one answer.")
@turn_timeout()
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the order.")
@saying("What is said.")
def many(
    where: Where,
    out: Path | None,
    smoke: bool,
    checkpoint: float,
    sessions: int,
    turns: int | None,
    duration: float | None,
    room: int,
    in_flight: int,
    concurrency: int,
    skew: float,
    history: int,
    max_tokens: int,
    turn_timeout: float,
    seed: int,
    corpus: str | None,
) -> None:
    """Far more sessions than fit in memory: whether all are remembered, and what a turn costs.

    Every session is built, then asked in a random order in which few are asked often and every one at least
    once. What it finds in memory, on SSD or nowhere is told apart.
    """
    from .measure import ManyBench
    from .plan import Plan

    if smoke:
        sessions, max_tokens = min(sessions, SMOKE_SESSIONS), min(max_tokens, SMOKE_TOKENS)
        room, history = min(room, SMOKE_ROOM), 1
    if turns is None and duration is None:
        turns = 2 * sessions
    plan = Plan(
        sessions=sessions,
        turns=turns,
        duration_s=duration,
        room=room,
        in_flight=min(in_flight, sessions),
        concurrency=concurrency,
        skew=skew,
        history=history,
        max_tokens=max_tokens,
        turn_timeout_s=turn_timeout,
        seed=seed,
    )
    found = corpus_of(corpus, smoke=smoke)
    conduct(ManyBench(plan, found, where), out=out, checkpoint_s=checkpoint)
