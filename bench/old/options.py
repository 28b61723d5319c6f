"""What the commands of all benches share: their options, and how a run ends."""

from __future__ import annotations

import asyncio
import functools
import math
import signal
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

import click

from bench.corpus import CORPORA, load
from bench.faults import BenchError, ReportError
from turnkeep_client.subjects import DEFAULT_PREFIX

from .report import CHECKPOINT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from bench.corpus import Corpus

    from .report import Report
    from .run import Bench, Where

Command = TypeVar("Command", bound="Callable[..., Any]")

POSITIVE: Final = click.FloatRange(min=0, min_open=True)
NOT_NEGATIVE: Final = click.FloatRange(min=0)
COUNT: Final = click.IntRange(min=1)

_OUT: Final = (
    click.option("--out", type=click.Path(path_type=Path), help="Folder for the JSON report and its page."),
    click.option("--smoke", is_flag=True, help="A short form only, to see that everything works."),
    click.option(
        "--checkpoint",
        type=POSITIVE,
        default=CHECKPOINT_S,
        show_default=True,
        metavar="SECONDS",
        help="How often the report is written while the bench runs.",
    ),
)
_MODEL: Final = click.option(
    "--model", metavar="NAME", help="Model of the bench's own worker. [default: packaged]"
)
_NATS: Final = (
    click.option("--nats", "url", metavar="URL", help="Measure the worker there. [default: one made for it]"),
    click.option(
        "--prefix", default=DEFAULT_PREFIX, show_default=True, help="First part of that worker's subjects."
    ),
    click.option("--tenant", default="bench", show_default=True, help="Tenant of the bench's sessions."),
)


class Fault(click.ClickException):
    """One line for whoever ran the bench; exit code 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it to standard error."""
        click.echo(f"turnkeep: {self.message}", file=file, err=file is None)


class Numbers(click.ParamType[Any]):
    """Several numbers above 0, joined by commas; each once, from the least to the largest."""

    name = "numbers"

    def __init__(self, kind: type[int | float] = int, most: float = math.inf) -> None:
        """`most` is the largest that is allowed."""
        self._kind = kind
        self._most = most

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """Read them."""
        if isinstance(value, tuple):
            return value
        try:
            found = {self._kind(part) for part in str(value).split(",")}
        except ValueError:
            found = set()
        if not found or not all(0 < number <= self._most and number < math.inf for number in found):
            what = "whole numbers" if self._kind is int else "numbers"
            most = "" if self._most == math.inf else f" and at most {self._most:g}"
            self.fail(
                f"{value!r} is not valid: it must be {what} above 0{most}, joined by commas", param, ctx
            )
        return tuple(sorted(found))


def turn_timeout(
    what: str = "A turn that takes longer counts as failed.", default_s: float = 300.0
) -> Callable[[Command], Command]:
    """Give a command `turn_timeout`, in seconds."""
    return click.option(
        "--turn-timeout",
        type=POSITIVE,
        default=default_s,
        show_default=True,
        metavar="SECONDS",
        help=what,
    )


def saying(what: str, default: str = "mt-bench; built-in with --smoke") -> Callable[[Command], Command]:
    """Give a command `corpus`, which `corpus_of` takes."""
    return click.option("--corpus", type=click.Choice(tuple(CORPORA)), help=f"{what} [default: {default}]")


def corpus_of(name: str | None, *, smoke: bool) -> Corpus:
    """Load the corpus that a command was given, or its default."""
    return load(name or ("built-in" if smoke else "mt-bench"))


def recording(command: Command) -> Command:
    """Give a command `out`, `smoke` and `checkpoint`, for a bench that has no worker."""
    return _apply(command, _OUT)


def reporting(command: Command) -> Command:
    """Give a command `out`, `smoke` and `checkpoint`, and `model` for the bench's own worker."""
    return _apply(command, (*_OUT, _MODEL))


def choosing_worker(command: Command) -> Command:
    """Give a command `where`: the bench's own worker with `--model`, or a running one with `--nats`."""

    @functools.wraps(command)
    def chosen(
        *args: Any, url: str | None, prefix: str, tenant: str, model: str | None, **options: Any
    ) -> Any:
        from .run import Where

        if url is not None and model is not None:
            raise click.UsageError("--model is for the bench's own worker; the one at --nats has its own")
        where: Where = Where(url, prefix, tenant, model)
        return command(*args, where=where, **options)

    return _apply(chosen, (*_OUT, *_NATS, _MODEL))  # type: ignore[return-value]  # one function for another


def conduct(bench: Bench[Any], *, out: Path | None, checkpoint_s: float) -> None:
    """Run a bench to its end.

    Raises `Fault` where a check failed that cannot fail by chance, so that CI notices. SIGTERM and a closed
    terminal end it as Ctrl-C does: the partial report is kept.
    """
    from .run import Run

    report: Report = until_stopped(Run(out, checkpoint_s=checkpoint_s).conduct(bench))
    if any(check.exact and check.passed is False for check in report.checks):
        raise Fault("a check failed that does not fail by chance")


def until_stopped(work: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end; KeyboardInterrupt after Ctrl-C, SIGTERM or SIGHUP, once it is cleaned up.

    What then goes wrong in cleaning up is no news, except that the report could not be written.
    """
    told: list[int] = []

    async def guarded() -> Any:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def stop(number: int) -> None:
            told.append(number)
            if task is not None:
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop, number)
        return await work

    try:
        return asyncio.run(guarded())
    except ReportError:
        raise
    except (asyncio.CancelledError, Exception):
        if told:
            raise KeyboardInterrupt from None
        raise


def _apply(command: Command, options: tuple[Callable[[Any], Any], ...]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


class Group(click.Group):
    """Turns every `BenchError` into one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BenchError as error:
            raise Fault(str(error)) from None
