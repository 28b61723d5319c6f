"""The command `turnkeep bench snapshots`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  # click shows no annotation, but readers want one

import click

from bench.old.options import (
    COUNT,
    NOT_NEGATIVE,
    Numbers,
    conduct,
    corpus_of,
    reporting,
    saying,
    turn_timeout,
)

SMOKE_BATCHES = (2,)
SMOKE_PROMPT_CHARS = 100
SMOKE_BLOCK_TOKENS = 16
SMOKE_MAX_TOKENS = 17


@click.command()
@reporting
@click.option(
    "--batch",
    "batches",
    type=Numbers(most=32),
    default="1,4",
    show_default=True,
    metavar="N,...",
    help="Sessions at a time, at most 32.",
)
@click.option("--rounds", type=COUNT, default=8, show_default=True, help="How often all sides run.")
@click.option("--prompt-chars", type=COUNT, default=400, show_default=True, help="Length of a prompt.")
@click.option("--max-tokens", type=COUNT, default=128, show_default=True, help="Most of one answer.")
@click.option("--block-tokens", type=COUNT, default=128, show_default=True, help="Tokens of a block.")
@click.option(
    "--sync",
    "sync_s",
    type=NOT_NEGATIVE,
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="What the slow disk takes for every file.",
)
@turn_timeout("An answer that takes longer ends the run.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order of the sides.")
@saying("What is asked.")
def snapshots(
    out: Path | None,
    smoke: bool,
    checkpoint: float,
    model: str | None,
    batches: tuple[int, ...],
    rounds: int,
    prompt_chars: int,
    max_tokens: int,
    block_tokens: int,
    sync_s: float,
    turn_timeout: float,
    seed: int,
    corpus: str | None,
) -> None:
    """The same answers without snapshots, with them, on a slow disk and on one that fails.

    Four workers run one after the other, in another order every round. Prompts are read first, and answers
    are decoded when that is over; nothing is guessed ahead. Of any 128 tokens of an answer one completes a
    block of 128; the steps beside it are held against their neighbours too, which tells milliseconds that
    are lost in the scatter of whole answers. The two bad disks are those of the writer thread alone: each
    sync of a file takes long, or fails with EIO; what a worker has to say of that goes to the terminal.
    """
    from bench.old.run import Where

    from .measure import Plan, SnapshotsBench

    if smoke:
        batches, rounds, prompt_chars = SMOKE_BATCHES, 1, SMOKE_PROMPT_CHARS
        block_tokens, max_tokens = SMOKE_BLOCK_TOKENS, SMOKE_MAX_TOKENS
    plan = Plan(batches, rounds, prompt_chars, max_tokens, block_tokens, sync_s, turn_timeout, seed)
    found = corpus_of(corpus, smoke=smoke)
    conduct(SnapshotsBench(plan, found, Where(model=model)), out=out, checkpoint_s=checkpoint)
