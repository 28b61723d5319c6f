"""The command `turnkeep bench restart`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  # click shows no annotation, but readers want one

import click

from bench.faults import BenchError
from bench.old.options import COUNT, Numbers, conduct, corpus_of, reporting, saying, turn_timeout

SMOKE_LENGTHS = (256,)


@click.command()
@reporting
@click.option(
    "--tokens",
    "lengths",
    type=Numbers(),
    default="256,1024,2048,4096,6000",
    show_default=True,
    metavar="N,...",
    help="Lengths of the sessions.",
)
@click.option("--rounds", type=COUNT, default=5, show_default=True, help="How often every life is lived.")
@click.option("--turn-tokens", type=COUNT, default=16, show_default=True, help="Tokens of a turn.")
@click.option("--max-tokens", type=COUNT, default=16, show_default=True, help="Most of one answer.")
@click.option("--from-disk", is_flag=True, help="Empty the page cache of the snapshots before each restore.")
@turn_timeout("A turn that takes longer ends the run.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order of the lives.")
@saying("What the sessions hold.")
def restart(
    out: Path | None,
    smoke: bool,
    checkpoint: float,
    model: str | None,
    lengths: tuple[int, ...],
    rounds: int,
    turn_tokens: int,
    max_tokens: int,
    from_disk: bool,
    turn_timeout: float,
    seed: int,
    corpus: str | None,
) -> None:
    """The first token of a session's next turn after a restart and after kill -9.

    Beside them the same turn in a session that is in memory, in one that was spilled to SSD, and in one that
    is prefilled from its beginning.
    """
    from bench.old.run import Where

    from .files import can_leave_memory
    from .measure import Plan, RestartBench

    if from_disk and not can_leave_memory():
        raise BenchError("this system cannot empty its page cache of a file; leave out --from-disk")
    if smoke:
        lengths, rounds, max_tokens = SMOKE_LENGTHS, 1, 8
    plan = Plan(lengths, rounds, turn_tokens, max_tokens, from_disk, turn_timeout, seed)
    found = corpus_of(corpus, smoke=smoke)
    conduct(RestartBench(plan, found, Where(model=model)), out=out, checkpoint_s=checkpoint)
