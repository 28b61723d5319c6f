"""`turnkeep bench`: every bench is a command. A fault that a user can cause or mend is one line, exit code 1.

A bench also ends with 1 where a check failed that cannot fail by chance, so that CI notices.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from . import load, overhead, peers, pressure, quality, replay, restart, session
from .commands import Group, command

if TYPE_CHECKING:
    from .spec import AnyBench


@click.group(cls=Group)
def bench() -> None:
    """Measure a worker from outside."""


BENCHES: Final[dict[str, AnyBench]] = {
    module.BENCH.name: module.BENCH
    for module in (session, load, restart, overhead, pressure, peers, replay, quality)
}
for one in BENCHES.values():
    bench.add_command(command(one))


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

    found, pairs = read(reports, BENCHES)
    console = printing()
    print_table(table(found, pairs), console)
    for warning in warnings(pairs):
        console.print(f"[yellow]warning[/] {warning}", soft_wrap=True)
