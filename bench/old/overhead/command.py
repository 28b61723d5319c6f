"""The command `turnkeep bench overhead`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  # click shows no annotation, but readers want one

import click

from bench.old.options import COUNT, Numbers, conduct, corpus_of, reporting, saying, turn_timeout

SMOKE_BATCHES = (1, 2)


@click.command()
@reporting
@click.option(
    "--batch",
    "batches",
    type=Numbers(most=32),
    default="1,4,8,16",
    show_default=True,
    metavar="N,...",
    help="Sessions at a time, at most 32.",
)
@click.option("--rounds", type=COUNT, default=8, show_default=True, help="How often all sides run.")
@click.option("--turns", type=COUNT, default=3, show_default=True, help="Turns of a session.")
@click.option("--max-tokens", type=COUNT, default=32, show_default=True, help="Most of one answer.")
@click.option(
    "--prompt-tokens", type=COUNT, default=256, show_default=True, help="Longer texts are left out."
)
@click.option(
    "--prefill-step", type=COUNT, default=2048, show_default=True, help="Step of the prefill in process."
)
@turn_timeout("A turn that takes longer ends the run.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order of the sides.")
@saying("What is asked.")
def overhead(
    out: Path | None,
    smoke: bool,
    checkpoint: float,
    model: str | None,
    batches: tuple[int, ...],
    rounds: int,
    turns: int,
    max_tokens: int,
    prompt_tokens: int,
    prefill_step: int,
    turn_timeout: float,
    seed: int,
    corpus: str | None,
) -> None:
    """The same prompts in process, with mlx-lm alone, and through a worker over NATS.

    Both keep their caches from turn to turn, and stop at the same tokens. The sides run one after the other,
    in another order every round; the worker with snapshots and without.
    """
    from bench.old.run import Where

    from .measure import OverheadBench, Plan

    if smoke:
        batches, rounds, turns, max_tokens = SMOKE_BATCHES, 1, 2, 4
    plan = Plan(batches, rounds, turns, max_tokens, prompt_tokens, prefill_step, turn_timeout, seed)
    found = corpus_of(corpus, smoke=smoke)
    conduct(OverheadBench(plan, found, Where(model=model)), out=out, checkpoint_s=checkpoint)
