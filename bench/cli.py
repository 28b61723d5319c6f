"""`turnkeep bench`: every bench is a command. A fault that a user can cause or mend is one line, exit code 1.

A bench also ends with 1 where a check failed that cannot fail by chance, so that CI notices.
"""

from __future__ import annotations

from pathlib import Path

import click

from .old.load.command import load
from .old.many.command import many
from .old.options import Group
from .old.overhead.command import overhead
from .old.peers.command import peers
from .old.pressure.command import pressure
from .old.quality.command import quality
from .old.replay.command import replay
from .old.restart.command import restart
from .old.session.command import session
from .old.snapshots.command import snapshots
from .old.store.command import store


@click.group(cls=Group)
def bench() -> None:
    """Measure a worker from outside."""


BENCHES = (session, load, restart, overhead, many, pressure, peers, replay, store, snapshots, quality)
for command in BENCHES:
    bench.add_command(command)


@bench.command()
@click.argument("base", metavar="A.json", type=click.Path(path_type=Path))
@click.argument("other", metavar="B.json", type=click.Path(path_type=Path))
def compare(base: Path, other: Path) -> None:
    """Ratios of the medians of two reports, with their spread."""
    from rich.console import Console

    from .old.compare import load as read
    from .old.compare import show

    first, second = read(base, other)
    show(first, second, Console(highlight=False))
