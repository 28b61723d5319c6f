"""The command `turnkeep bench pressure`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  # click shows no annotation, but readers want one
from typing import Final

import click

from bench.old.options import COUNT, POSITIVE, conduct, reporting, turn_timeout

SMOKE_S: Final = 10.0
SMOKE_ROOM: Final = 640
SMOKE_SAMPLE: Final = 4


@click.command()
@reporting
@click.option(
    "--duration",
    type=POSITIVE,
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long requests are sent.",
)
@click.option(
    "--room",
    type=click.IntRange(min=256),
    default=1024,
    show_default=True,
    metavar="TOKENS",
    help="Tokens whose KV the worker's memory is for; the model's context must hold twice as many.",
)
@click.option("--clients", type=COUNT, default=12, show_default=True, help="Requests at a time.")
@click.option(
    "--rows", type=COUNT, default=4, show_default=True, help="Answers at a time: the worker's max_batch."
)
@click.option(
    "--sample", type=COUNT, default=12, show_default=True, help="Sessions that are held again alone."
)
@turn_timeout("A request that takes longer counts as failed.", default_s=600.0)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the requests.")
def pressure(
    out: Path | None,
    smoke: bool,
    checkpoint: float,
    model: str | None,
    duration: float,
    room: int,
    clients: int,
    rows: int,
    sample: int,
    turn_timeout: float,
    seed: int,
) -> None:
    """A worker at its memory limit: never above it, refusing nothing that fits, answering everything else.

    Sessions of random length come and go, some of them so long that they fit alone, or never; some requests
    are cancelled. Afterwards some of the sessions are held again alone: they must get the same answers.
    """
    from bench.old.run import Where

    from .measure import PressureBench
    from .plan import Plan

    if smoke:
        duration, room, sample = min(duration, SMOKE_S), min(room, SMOKE_ROOM), min(sample, SMOKE_SAMPLE)
    plan = Plan(
        duration_s=duration,
        room=room,
        clients=clients,
        rows=rows,
        sample=sample,
        turn_timeout_s=turn_timeout,
        seed=seed,
    )
    conduct(PressureBench(plan, Where(model=model)), out=out, checkpoint_s=checkpoint)
