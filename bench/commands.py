"""Makes a command of a bench: its plan's options and those that all have. A fault is one line."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from turnkeep_client.subjects import DEFAULT_PREFIX

from .faults import BenchError
from .plan import POSITIVE, make, options
from .report import CHECKPOINT_S

if TYPE_CHECKING:
    from .spec import AnyBench


class Fault(click.ClickException):
    """One line for whoever ran the bench; exit code 1."""

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
    """Make the command. It ends with 1 after a fault, or where a check failed that cannot fail by chance."""

    def run(out: Path | None, smoke: bool, checkpoint: float, model: str | None, **given: Any) -> None:
        from .run import Where, conduct, until_stopped

        remote = {name: given.pop(name) for name in ("url", "prefix", "tenant") if bench.remote}
        if remote.get("url") is not None and model is not None:
            raise click.UsageError("--model is for the bench's own worker; the one at --nats has its own")
        context = click.get_current_context()
        named = {name for name in given if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
        plan = make(bench.plan, given, named=named, smoke=smoke)
        where = Where(model=model, **remote)
        report = until_stopped(conduct(bench, plan, where=where, out=out, checkpoint_s=checkpoint))
        if any(check.failed for check in report.checks):
            raise Fault("a check failed that does not fail by chance")

    return click.Command(
        bench.name, callback=run, params=[*options(bench.plan), *_shared(bench)], help=bench.plan.__doc__
    )


def _shared(bench: AnyBench) -> list[click.Option]:
    path = click.Path(path_type=Path)
    found = [
        click.Option(["--out"], type=path, help="Folder for the JSON report and its page."),
        click.Option(["--smoke"], is_flag=True, help="A short form only, to see that everything works."),
        click.Option(
            ["--checkpoint"],
            type=POSITIVE,
            default=CHECKPOINT_S,
            show_default=True,
            metavar="SECONDS",
            help="How often the report is written while the bench runs.",
        ),
        click.Option(
            ["--model"], metavar="NAME", help="Model of the bench's own worker. [default: packaged]"
        ),
    ]
    if bench.remote:
        prefix, tenant = "First part of that worker's subjects.", "Tenant of the bench's sessions."
        default = "[default: one made for it]"
        found += [
            click.Option(["--nats", "url"], metavar="URL", help=f"Measure the worker there. {default}"),
            click.Option(["--prefix"], default=DEFAULT_PREFIX, show_default=True, help=prefix),
            click.Option(["--tenant"], default="bench", show_default=True, help=tenant),
        ]
    return found
