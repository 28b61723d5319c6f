"""Makes the command of a bench: its plan's options and the shared ones. A fault is one line."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from .faults import BenchError
from .plan import REMOTE, Where, make, options

if TYPE_CHECKING:
    from .spec import AnyBench


class Fault(click.ClickException):
    """A fault as one line for the user; exit code 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it to standard error."""
        click.echo(f"turnkeep: {self.message}", file=file, err=file is None)


class Group(click.Group):
    """Turns every `BenchError` into one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BenchError as error:
            raise Fault(str(error)) from None


def command(bench: AnyBench) -> click.Command:
    """Make a bench's command. It exits with 1 after a fault, or after a failed exact check."""
    shared = [one for one in options(Where) if bench.remote or one.name not in REMOTE]
    smoke = click.Option(["--smoke"], is_flag=True, help="A short form only, to see that everything works.")

    def run(smoke: bool, **given: Any) -> None:
        from .run import conduct, until_stopped

        where = Where(**{one.name: given.pop(one.name) for one in shared if one.name})
        if where.nats is not None and where.model is not None:
            raise click.UsageError("--model is for the bench's own worker; the one at --nats has its own")
        source = click.get_current_context().get_parameter_source
        named = {name for name in given if source(name) is ParameterSource.COMMANDLINE}
        plan = make(bench.plan, given, named=named, smoke=smoke)
        report = until_stopped(conduct(bench, plan, where))
        if any(check.failed for check in report.checks):
            raise Fault("a check failed that does not fail by chance")

    made = click.Command(
        bench.name, callback=run, params=[*options(bench.plan), *shared, smoke], help=bench.plan.__doc__
    )
    made.short_help = made.get_short_help_str(limit=sys.maxsize)  # click cuts it to the terminal's width
    return made
