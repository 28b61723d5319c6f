"""`turnkeep bench`: every bench is a command. A fault that a user can cause or fix is one line, exit code 1.

A failed exact check ends a bench with exit code 1 too, so that CI notices.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from .commands import Group, command

if TYPE_CHECKING:
    from .spec import AnyBench


#: Modules of this package, each with a `BENCH`.
NAMES: Final = ("session", "load", "restart", "overhead", "pressure", "peers", "replay", "quality")


def benches() -> dict[str, AnyBench]:
    """Import all benches; return them by name."""
    return {name: _bench(name) for name in NAMES}


def _bench(name: str) -> AnyBench:
    found: AnyBench = import_module(f".{name}", __package__).BENCH
    return found


class _Benches(Group):
    """Imports a bench on demand, so that other commands do not wait for numpy."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the benches, then the other commands."""
        return [*NAMES, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Make a bench's command."""
        return command(_bench(cmd_name)) if cmd_name in NAMES else super().get_command(ctx, cmd_name)


@click.group(cls=_Benches)
def bench() -> None:
    """Measure a worker from outside."""


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
    from .tables import print_table, printing

    found, pairs = read(reports, benches())
    console = printing()
    print_table(table(found, pairs), console)
    for warning in warnings(pairs):
        console.print(f"[yellow]warning[/] {warning}", soft_wrap=True)
