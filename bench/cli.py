"""The commands of `turnkeep bench`. Every fault that a user can cause or mend is one line and exit code 1.

`session` also ends with 1 where a check that cannot fail by chance failed, so that CI notices.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from .corpus import CORPORA
from .report import CHECKPOINT_S, BenchError

if TYPE_CHECKING:
    from collections.abc import Coroutine

DEFAULT_TURNS = 50


class _Fault(click.ClickException):
    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"turnkeep: {self.message}", file=file, err=file is None)


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BenchError as error:
            raise _Fault(str(error)) from None


@click.group(cls=_Group)
def bench() -> None:
    """Measure a worker from outside."""


@bench.command()
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the JSON report and its page.")
@click.option("--smoke", is_flag=True, help="A few short turns only, to see that everything works.")
@click.option("--nats", "url", metavar="URL", help="Measure the worker there. [default: one made for it]")
@click.option(
    "--duration", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Stop after."
)
@click.option(
    "--every",
    default=0.0,
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="From turn to turn, at least.",
)
@click.option(
    "--turns",
    type=click.IntRange(min=1),
    help=f"Turns of the session. [default: {DEFAULT_TURNS}, or no limit with --duration]",
)
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Most of one answer."
)
@click.option(
    "--turn-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="A turn that takes longer counts as failed.",
)
@click.option(
    "--checkpoint",
    type=click.FloatRange(min=0, min_open=True),
    default=CHECKPOINT_S,
    show_default=True,
    metavar="SECONDS",
    help="How often the report is written while the bench runs.",
)
@click.option(
    "--corpus",
    type=click.Choice(tuple(CORPORA)),
    help="What is asked. [default: mt-bench; built-in with --smoke]",
)
def session(
    out: Path | None,
    smoke: bool,
    url: str | None,
    duration: float | None,
    every: float,
    turns: int | None,
    max_tokens: int,
    turn_timeout: float,
    checkpoint: float,
    corpus: str | None,
) -> None:
    """One session, many turns: what each turn costs as the session grows.

    A turn is sent every --every seconds, or as soon as the one before is answered where that takes longer.
    Four hours of a turn every half minute: --duration 14400 --every 30.
    """
    from .conversation import Plan
    from .corpus import load
    from .session import SMOKE_TOKENS, SMOKE_TURNS, run

    if smoke:
        turns, max_tokens = turns or SMOKE_TURNS, min(max_tokens, SMOKE_TOKENS)
    elif turns is None and duration is None:
        turns = DEFAULT_TURNS
    plan = Plan(
        turns=turns, duration_s=duration, every_s=every, max_tokens=max_tokens, turn_timeout_s=turn_timeout
    )
    found = load(corpus or ("built-in" if smoke else "mt-bench"))
    report = _run(run(plan, found, url=url, out=out, checkpoint_s=checkpoint))
    if any(check.exact and check.passed is False for check in report.checks):
        raise _Fault("a check failed that does not fail by chance")


@bench.command()
@click.argument("base", metavar="A.json", type=click.Path(path_type=Path))
@click.argument("other", metavar="B.json", type=click.Path(path_type=Path))
def compare(base: Path, other: Path) -> None:
    """Ratios of the medians of two reports, with their spread."""
    from rich.console import Console

    from .compare import load, show

    first, second = load(base, other)
    show(first, second, Console(highlight=False))


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end. SIGTERM and a closed terminal end it as Ctrl-C does: the partial report is kept."""

    async def guarded() -> Any:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if task is not None:
            for number in (signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, task.cancel)
        return await work

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
