"""The command `turnkeep bench store`."""

from __future__ import annotations

from pathlib import Path

import click

from bench.old.options import COUNT, Numbers, conduct, recording

SMOKE_LENGTHS = (300,)
SMOKE_BLOCKS = 2_000


@click.command()
@recording
@click.option(
    "--tokens",
    "lengths",
    type=Numbers(),
    default="300,1500,6000",
    show_default=True,
    metavar="N,...",
    help="Lengths of the sessions that are restored.",
)
@click.option("--layers", type=COUNT, default=30, show_default=True, help="Layers of their KV.")
@click.option("--heads", type=COUNT, default=3, show_default=True, help="KV heads.")
@click.option("--dim", type=COUNT, default=64, show_default=True, help="Size of a head.")
@click.option("--block-tokens", type=COUNT, default=128, show_default=True, help="Tokens of a block.")
@click.option("--blocks", type=COUNT, default=100_000, show_default=True, help="Blocks of the index.")
@click.option("--chain", type=COUNT, default=1_000, show_default=True, help="Blocks of a prefix in it.")
@click.option("--rounds", type=COUNT, default=15, show_default=True, help="How often all is measured.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Where snapshots are written and removed again, to choose the disk. [default: the temporary one]",
)
def store(
    out: Path | None,
    smoke: bool,
    checkpoint: float,
    lengths: tuple[int, ...],
    layers: int,
    heads: int,
    dim: int,
    block_tokens: int,
    blocks: int,
    chain: int,
    rounds: int,
    folder: Path | None,
) -> None:
    """The snapshot cache alone: restores beside MLX loading the same files, and a large index.

    What is restored was written a moment before, and comes from the page cache: what is measured is what a
    restore costs beside the disk. The default KV is that of the packaged model.
    """
    from .measure import Plan, StoreBench

    if smoke:
        lengths, blocks, rounds = SMOKE_LENGTHS, min(blocks, SMOKE_BLOCKS), 3
    if chain > blocks:
        raise click.UsageError("--chain is longer than --blocks")
    plan = Plan(lengths, layers, heads, dim, block_tokens, blocks, chain, rounds)
    conduct(StoreBench(plan, folder), out=out, checkpoint_s=checkpoint)
