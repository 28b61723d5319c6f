"""The command `turnkeep bench session`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  # click shows no annotation, but readers want one
from typing import TYPE_CHECKING

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

DEFAULT_TURNS = 50


@click.command()
@choosing_worker
@click.option("--duration", type=POSITIVE, metavar="SECONDS", help="Stop after.")
@click.option(
    "--every", default=0.0, type=NOT_NEGATIVE, metavar="SECONDS", help="From turn to turn, at least."
)
@click.option(
    "--turns",
    type=COUNT,
    help=f"Turns of the session. [default: {DEFAULT_TURNS}, or no limit with --duration]",
)
@click.option("--max-tokens", type=COUNT, default=64, show_default=True, help="Most of one answer.")
@turn_timeout()
@saying("What is asked.")
def session(
    where: Where,
    out: Path | None,
    smoke: bool,
    checkpoint: float,
    duration: float | None,
    every: float,
    turns: int | None,
    max_tokens: int,
    turn_timeout: float,
    corpus: str | None,
) -> None:
    """One session, many turns: what each turn costs as the session grows.

    A turn is sent every --every seconds, or as soon as the one before is answered where that takes longer.
    Four hours of a turn every half minute: --duration 14400 --every 30.
    """
    from .conversation import Plan
    from .measure import SMOKE_TOKENS, SMOKE_TURNS, SessionBench

    if smoke:
        turns, max_tokens = turns or SMOKE_TURNS, min(max_tokens, SMOKE_TOKENS)
    elif turns is None and duration is None:
        turns = DEFAULT_TURNS
    plan = Plan(
        turns=turns, duration_s=duration, every_s=every, max_tokens=max_tokens, turn_timeout_s=turn_timeout
    )
    found = corpus_of(corpus, smoke=smoke)
    conduct(SessionBench(plan, found, where), out=out, checkpoint_s=checkpoint)
