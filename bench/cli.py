"""`turnkeep bench`: makes each bench a command. Faults that a user can cause or fix print one line.

After such a fault, or a failed exact check, the exit code is 1, so that CI notices.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import click

from .faults import BenchError
from .plan import CommonOptions, options, smoke

if TYPE_CHECKING:
    from .spec import AnyBench

#: Modules of this package, each with a `BENCH`.
NAMES: Final = ("session", "load", "restart", "peers", "recall", "device")


def _bench(name: str) -> AnyBench:
    found: AnyBench = import_module(f".{name}", __package__).BENCH
    return found


class _Benches(click.Group):
    """Imports a bench on demand, so that other commands do not wait for numpy."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's interface
        """List the benches."""
        return list(NAMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  # likewise
        """Return the command of the bench of this name."""
        return command(_bench(cmd_name)) if cmd_name in NAMES else None


def command(bench: AnyBench) -> click.Command:
    """Make a bench's command. It exits with 1 after a fault, or after a failed exact check."""
    shared = options(CommonOptions)

    def run(**given: Any) -> None:
        from .conduct import conduct, until_stopped

        where = CommonOptions(**{one.name: given.pop(one.name) for one in shared if one.name})
        report = until_stopped(conduct(bench, bench.plan(**given), where))
        if any(check.failed for check in report.checks):
            raise BenchError("a check failed that does not fail by chance")

    params: list[click.Parameter] = [*options(bench.plan), *shared, smoke(bench.plan)]
    made = click.Command(bench.name, callback=run, params=params, help=bench.plan.__doc__)
    made.short_help = made.get_short_help_str(limit=sys.maxsize)  # whole: click shortens it again
    return made


@click.group(cls=_Benches)
def bench() -> None:
    """Measure a worker from outside."""
