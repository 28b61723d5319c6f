"""The command `turnkeep bench peers`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  # click shows no annotation, but readers want one

import click

from bench.old.options import COUNT, Numbers, conduct, corpus_of, reporting, saying, turn_timeout

OWN_PEER = "mlx_lm.server"
PART_NAMES = ("chat", "concurrent", "restart")
TURNS = 10
CHATS = 3
ROUNDS = 5
RESTARTS = 5
TURN_TOKENS = 195
MAX_TOKENS = 64
CONCURRENCY = (1, 4, 8)
LENGTHS = (1000, 2000)


@click.command()
@reporting
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="PEER",
    default=(OWN_PEER,),
    show_default=True,
    help=f"Compare with: {OWN_PEER}, which is started for it, or a running server as NAME=URL"
    " (NAME=URL#MODEL where it has several models).",
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(PART_NAMES),
    help="Only this part. [default: all of them]",
)
@click.option("--chats", type=COUNT, help=f"Chats held turn by turn. [default: {CHATS}]")
@click.option("--turns", type=COUNT, help=f"Turns of each chat. [default: {TURNS}]")
@click.option("--turn-tokens", type=COUNT, help=f"Tokens a user says at a time. [default: {TURN_TOKENS}]")
@click.option("--max-tokens", type=COUNT, help=f"Most of one answer. [default: {MAX_TOKENS}]")
@click.option("--concurrency", type=Numbers(), metavar="N,...", help="Streams at once. [default: 1,4,8]")
@click.option("--rounds", type=COUNT, help=f"Turns of every stream. [default: {ROUNDS}]")
@click.option(
    "--lengths", type=Numbers(), metavar="N,...", help="Tokens held at a restart. [default: 1000,2000]"
)
@click.option("--restarts", type=COUNT, help=f"Times for each length. [default: {RESTARTS}]")
@turn_timeout()
@saying("What is said.")
def peers(
    out: Path | None,
    smoke: bool,
    checkpoint: float,
    model: str | None,
    peers: tuple[str, ...],
    parts: tuple[str, ...],
    chats: int | None,
    turns: int | None,
    turn_tokens: int | None,
    max_tokens: int | None,
    concurrency: tuple[int, ...] | None,
    rounds: int | None,
    lengths: tuple[int, ...] | None,
    restarts: int | None,
    turn_timeout: float,
    corpus: str | None,
) -> None:
    """The same conversations with a worker and with OpenAI-compatible servers.

    The sides take turns with every measurement, and only one of them works at a time. Three parts: chats turn
    by turn, several streams at once, and the turn after a restart of the side's process.
    """
    from .measure import PeersBench
    from .parts import Plan

    plan = Plan(
        parts=tuple(part for part in PART_NAMES if part in parts) or PART_NAMES,
        chats=chats or (1 if smoke else CHATS),
        turns=turns or (2 if smoke else TURNS),
        turn_tokens=turn_tokens or (30 if smoke else TURN_TOKENS),
        max_tokens=max_tokens or (6 if smoke else MAX_TOKENS),
        turn_timeout_s=turn_timeout,
        concurrency=concurrency or ((2,) if smoke else CONCURRENCY),
        rounds=rounds or (1 if smoke else ROUNDS),
        lengths=lengths or ((60,) if smoke else LENGTHS),
        restarts=restarts or (1 if smoke else RESTARTS),
        endings=("kill",) if smoke else ("stop", "kill"),
    )
    found = corpus_of(corpus, smoke=smoke)
    conduct(PeersBench(plan, found, peers, model), out=out, checkpoint_s=checkpoint)
