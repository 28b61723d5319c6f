"""`turnkeep bench`: every bench is a command. A fault that a user can cause or mend is one line, exit code 1.

A bench also ends with 1 where a check failed that cannot fail by chance, so that CI notices.
"""

from __future__ import annotations

from pathlib import Path

import click

from .load.command import load
from .many.command import many
from .options import Group
from .overhead.command import overhead
from .peers.command import peers
from .pressure.command import pressure
from .quality.command import quality
from .replay.command import replay
from .restart.command import restart
from .session.command import session
from .snapshots.command import snapshots
from .store.command import store


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

    from .compare import load as read
    from .compare import show

    first, second = read(base, other)
    show(first, second, Console(highlight=False))
