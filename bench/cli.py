"""`turnkeep bench`: every bench is a command. A fault that a user can cause or mend is one line, exit code 1.

A bench also ends with 1 where a check failed that cannot fail by chance, so that CI notices.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from . import load, peers, quality, replay, restart, session
from .commands import Group, command
from .old import report as old_report
from .old.overhead.command import overhead
from .old.pressure.command import pressure
from .old.snapshots.command import snapshots
from .old.store.command import store

if TYPE_CHECKING:
    from .spec import AnyBench


@click.group(cls=Group)
def bench() -> None:
    """Measure a worker from outside."""


#: Those that are data and a coroutine, by name.
NEW: Final[dict[str, AnyBench]] = {
    one.name: one
    for one in (session.BENCH, load.BENCH, restart.BENCH, peers.BENCH, replay.BENCH, quality.BENCH)
}
_OLD = (overhead, pressure, store, snapshots)
BENCHES = (*map(command, NEW.values()), *_OLD)
for one in BENCHES:
    bench.add_command(one)


def is_old(path: Path) -> bool:
    """Say whether a report is of a bench that is still to be ported."""
    return path.exists() and f"/{old_report.VERSION}" in path.read_text(errors="replace")[:100]


@bench.command()
@click.argument(
    "reports", metavar="A.json B.json [A.json B.json ...]", type=click.Path(path_type=Path), nargs=-1
)
def compare(reports: tuple[Path, ...]) -> None:
    """Set the typical values of two reports side by side.

    Five pairs of runs that took turns, A B A B ..., are judged.
    """
    from .compare import load as read
    from .compare import table, warnings
    from .tables import printing
    from .tables import show as print_table

    if len(reports) == 2 and is_old(reports[0]):
        from .old.compare import load as read_old
        from .old.compare import show

        show(*read_old(*reports), printing())
        return
    found, pairs = read(reports, NEW)
    console = printing()
    print_table(table(found, pairs), console)
    for warning in warnings(pairs):
        console.print(f"[yellow]warning[/] {warning}", soft_wrap=True)
