"""`turnkeep bench session`: one session, many turns, for as long as it is told; then its report.

Owns the run: which worker, the progress bar, checkpoints, and what is kept when it is ended early.
"""

from __future__ import annotations

import contextlib
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from protocol.client import connect

from . import environment
from .conversation import Conversation, Plan
from .local import LocalWorker
from .page import render
from .report import BenchError, Recorder, now_iso, schema_of
from .session_checks import checks
from .session_page import page_of
from .session_report import SessionReport, series, summarise

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from protocol.client import Client

    from .corpus import Corpus
    from .session_report import Spread
    from .session_turns import Turn

SCHEMA: Final = schema_of("session")
#: Enough turns for two windows of five, and short enough for a minute on two slow cores.
SMOKE_TURNS: Final = 12
SMOKE_TOKENS: Final = 16
OWN_WORKER: Final = "a worker of its own"


class Run:
    """One run of the bench. `out` is a folder for the report and its page; None writes nothing."""

    def __init__(
        self, plan: Plan, corpus: Corpus, *, url: str | None, out: Path | None, checkpoint_s: float
    ) -> None:
        self._plan = plan
        self._corpus = corpus
        self._url = url
        self._console = Console(stderr=True, highlight=False)
        self._recorder = Recorder(out, "session", every_s=checkpoint_s, warn=self._warn)
        self._environment = environment.look()
        self._started_at = now_iso()
        self._conversation: Conversation | None = None
        self._worker: LocalWorker | None = None

    async def run(self) -> SessionReport:
        """Hold the conversation and return its report, which is on disk by then.

        When cancelled, or after a fault, what was measured so far is kept, marked as not complete. Raises
        `ReportError`, and `NoWorkerError` where there is no worker.
        """
        self._recorder.start(self._report("running"))
        ending = "interrupted"
        try:
            async with self._target() as client:
                await self._converse(client)
            ending = "done"
        except Exception as error:
            ending = f"fault: {error}"
            raise
        finally:
            report = self._report(ending)
            self._keep(report)
        return report

    async def _converse(self, client: Client) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        hidden = not self._console.is_terminal
        with Progress(*columns, console=self._console, transient=True, disable=hidden) as bars:
            total = self._plan.duration_s if self._plan.turns is None else self._plan.turns
            bar = bars.add_task("turn 1", total=total)

            def count(turn: Turn) -> None:
                done = turn.started_s + turn.latency_s if self._plan.turns is None else turn.turn
                took = turn.error or f"{turn.latency_s:.2f} s"
                bars.update(bar, completed=done, description=f"turn {turn.turn}: {took}")
                if self._recorder.due:
                    self._recorder.checkpoint(self._report("running"))
                if self._worker is not None and self._worker.exit_code is not None:
                    raise BenchError(f"the bench's worker ended with exit code {self._worker.exit_code}")

            texts = self._corpus.texts()
            self._conversation = Conversation(client, self._plan, texts, on_turn=count)
            await self._conversation.run()

    @asynccontextmanager
    async def _target(self) -> AsyncIterator[Client]:
        if self._url is not None:
            async with _closing(await connect(self._url)) as client:
                yield client
            return
        with tempfile.TemporaryDirectory(prefix="turnkeep-bench-") as folder:
            self._worker = LocalWorker(Path(folder))
            self._worker.start()
            try:
                async with _closing(await self._worker.ready("bench")) as client:
                    yield client
            finally:
                self._worker.stop()

    def _report(self, ending: str) -> SessionReport:
        conversation = self._conversation
        turns = tuple(conversation.turns) if conversation else ()
        summary = summarise(turns)
        return SessionReport(
            schema=SCHEMA,
            started_at=self._started_at,
            elapsed_s=conversation.elapsed_s if conversation else 0.0,
            complete=ending == "done",
            ending=ending,
            target=OWN_WORKER if self._url is None else "a worker that was running",
            environment=self._environment,
            worker=conversation.worker if conversation else None,
            settings={**self._plan.settings(), "corpus": self._corpus.source.name},
            source=self._corpus.source,
            checks=checks(summary),
            series=series(turns),
            summary=summary,
            rewinds=tuple(conversation.rewinds) if conversation else (),
            messages=dict(conversation.messages) if conversation else {},
            turns=turns,
        )

    def _keep(self, report: SessionReport) -> None:
        if report.turns:
            show(report)
        path = self._recorder.path
        if path is None:
            return
        if not report.complete and not report.turns:
            path.unlink(missing_ok=True)
            return
        self._recorder.finish(report, lambda: render(page_of(report), warn=self._warn))
        Console(highlight=False, soft_wrap=True).print(
            f"{'report' if report.complete else 'partial report'}: {path}"
        )

    def _warn(self, message: str) -> None:
        self._console.print(f"turnkeep: {message}", soft_wrap=True, markup=False)


@asynccontextmanager
async def _closing(client: Client) -> AsyncIterator[Client]:
    try:
        yield client
    finally:
        with contextlib.suppress(OSError):  # of a server that is gone
            await client.close()


async def run(
    plan: Plan, corpus: Corpus, *, url: str | None, out: Path | None, checkpoint_s: float
) -> SessionReport:
    """Measure the worker at `url`, or one made for it; see `Run.run`."""
    return await Run(plan, corpus, url=url, out=out, checkpoint_s=checkpoint_s).run()


def show(report: SessionReport) -> None:
    """Print what a run found."""
    summary = report.summary
    console = Console(highlight=False)
    table = Table(box=None, header_style="bold")
    table.add_column("")
    for name in ("p50", "p95", "p99", "max", "drift"):
        table.add_column(name, justify="right")
    for name, measured in (
        ("whole turn", summary.latency),
        ("first chunk", summary.first_chunk),
        ("per token", summary.per_token),
    ):
        if measured is not None:
            table.add_row(name, *_cells(measured))
    console.print(table)
    console.print(f"{summary.turns} turns, {summary.answered} answered, in {report.elapsed_s:.1f} s")
    for check in report.checks:
        colour, mark = {True: ("green", "ok"), False: ("red", "FAILED"), None: ("yellow", "cannot tell")}[
            check.passed
        ]
        console.print(f"[{colour}]{mark}[/]  {check.name}: {check.detail}", soft_wrap=True)
    for rewind in report.rewinds:
        where = f"before turn {rewind.turn}, at {rewind.position} tokens"
        console.print(f"rewound to the beginning {where}: {rewind.reason}")
    for name, message in report.messages.items():
        console.print(f"{name}: {message}", markup=False, soft_wrap=True)


def _cells(measured: Spread) -> tuple[str, ...]:
    times = (measured.p50, measured.p95, measured.p99, measured.max)
    drift = "-" if measured.drift is None else f"{measured.drift * 1000:+.0f} ms"
    if measured.drift_share is not None:
        drift += f" ({measured.drift_share:+.1%})"
    return (*(f"{value * 1000:.0f} ms" for value in times), drift)
