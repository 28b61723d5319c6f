"""One run of a bench, whichever it is: its progress bar, its workers, and its report until that is on disk.

A bench says what to measure and how to tell it; here is what happens when it is cut short.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Generic, TypedDict, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench import environment
from bench.faults import BenchError
from bench.local import LocalWorker
from turnkeep_client.client import connect
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.subjects import DEFAULT_PREFIX

from .page import render
from .report import CHECKPOINT_S, Recorder, Report, now_iso, schema_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

    from bench.environment import Environment
    from turnkeep_client.client import Client

    from .page import Page

OWN_WORKER: Final = "a worker of its own"
TENANT: Final = "bench"

R = TypeVar("R", bound=Report)


@dataclass(frozen=True, slots=True)
class Where:
    """Which worker is measured: the one at `url`, or one made for it, with `model` (None: packaged)."""

    url: str | None = None
    prefix: str = DEFAULT_PREFIX
    tenant: str = TENANT
    model: str | None = None

    @property
    def target(self) -> str:
        """Name it for the report."""
        return OWN_WORKER if self.url is None else "a worker that was running"


class Facts(TypedDict):
    """The fields of a `Report` that are known to the run, and not to its bench."""

    schema: str
    started_at: str
    elapsed_s: float
    complete: bool
    ending: str
    environment: Environment


class Bench(ABC, Generic[R]):
    """What one bench measures, and how it tells it. It keeps what it has measured so far."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def measured(self) -> bool:
        """Say whether there is anything to report yet."""

    @abstractmethod
    async def measure(self, run: Run) -> None:
        """Measure to the end; what is found on the way is kept in `self`, for `report`."""

    @abstractmethod
    def report(self, facts: Facts) -> R:
        """Make the report of what was measured so far."""

    @abstractmethod
    def page(self, report: R) -> Page:
        """Lay the report out as a page."""

    @abstractmethod
    def show(self, report: R, console: Console) -> None:
        """Print what a terminal wants to know of the report; its checks are printed after it."""


class Run:
    """The frame of one run. `out` is a folder for the report and its page; None writes nothing."""

    def __init__(self, out: Path | None = None, *, checkpoint_s: float = CHECKPOINT_S) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._out = out
        self._checkpoint_s = checkpoint_s
        self._environment = environment.look()
        self._started_at = now_iso()
        self._started_s = time.monotonic()
        self._workers: list[LocalWorker] = []
        self._checkpoint: Callable[[], None] = lambda: None

    async def conduct(self, bench: Bench[R]) -> R:
        """Measure, and return the report, which is on disk by then.

        When cancelled, or after a fault, what was measured so far is kept, marked as not complete. Raises
        `ReportError`, and whatever the bench raises.
        """
        recorder = Recorder(self._out, bench.name, every_s=self._checkpoint_s, warn=self.warn)
        recorder.start(bench.report(self._facts(bench, "running")))

        def checkpoint() -> None:
            if recorder.due:
                recorder.checkpoint(bench.report(self._facts(bench, "running")))

        self._checkpoint = checkpoint
        ending = "interrupted"
        try:
            await bench.measure(self)
            ending = "done"
        except Exception as error:
            ending = f"fault: {error}"
            raise
        finally:
            report = bench.report(self._facts(bench, ending))
            self._keep(bench, report, recorder)
        return report

    @contextmanager
    def bar(self, total: float | None) -> Iterator[Callable[[float, str], None]]:
        """Show a progress bar. What it yields is called after every step, with how far it is and what it was.

        That is also when checkpoints are written, and when a worker's death is noticed (`BenchError`).
        """
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        hidden = not self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=hidden) as bars:
            bar = bars.add_task("starting", total=total)

            def step(done: float, what: str) -> None:
                bars.update(bar, completed=done, description=what)
                self._checkpoint()
                for worker in self._workers:
                    if worker.exit_code is not None:
                        raise BenchError(f"the bench's worker ended with exit code {worker.exit_code}")

            yield step

    @asynccontextmanager
    async def worker(
        self, *options: str, where: Where, program: Sequence[str] = ("worker",)
    ) -> AsyncGenerator[tuple[LocalWorker, Client]]:
        """Run a worker of the bench's own on an empty data directory, with more `serve` options.

        `where` gives model and tenant, `program` is what `LocalWorker` runs. Yields it, once it answers,
        with a connection. The bench may kill and start it; afterwards it is stopped, and its directory is
        gone.
        """
        with tempfile.TemporaryDirectory(prefix="turnkeep-bench-") as folder:
            model = () if where.model is None else ("--model", where.model)
            worker = LocalWorker(Path(folder), *model, *options, program=program)
            self._workers.append(worker)
            worker.start()
            try:
                async with closing(await worker.ready(where.tenant)) as client:
                    yield worker, client
            finally:
                self._workers.remove(worker)
                worker.stop()

    @asynccontextmanager
    async def target(self, where: Where, *options: str) -> AsyncGenerator[Client]:
        """Connect to the worker that is measured, the bench's own where `where` names no other.

        Raises `NoWorkerError` where there is none.
        """
        if where.url is None:
            async with self.worker(*options, where=where) as (_, client):
                yield client
            return
        async with closing(await connect(where.url, prefix=where.prefix, tenant=where.tenant)) as client:
            await expect_worker(client)
            yield client

    def warn(self, message: str) -> None:
        """Say something that does not stop the run."""
        self.console.print(f"turnkeep: {message}", soft_wrap=True, markup=False)

    def _facts(self, bench: Bench[R], ending: str) -> Facts:
        return Facts(
            schema=schema_of(bench.name),
            started_at=self._started_at,
            elapsed_s=time.monotonic() - self._started_s,
            complete=ending == "done",
            ending=ending,
            environment=self._environment,
        )

    def _keep(self, bench: Bench[R], report: R, recorder: Recorder) -> None:
        console = Console(highlight=False)
        if bench.measured:
            bench.show(report, console)
            _show_checks(report, console)
        path = recorder.path
        if path is None:
            return
        if not report.complete and not bench.measured:
            path.unlink(missing_ok=True)
            return
        recorder.finish(report, lambda: render(bench.page(report), warn=self.warn))
        kind = "report" if report.complete else "partial report"
        console.print(f"{kind}: {path}", soft_wrap=True)


@asynccontextmanager
async def closing(client: Client) -> AsyncGenerator[Client]:
    """Close a connection afterwards, also one whose server is gone."""
    try:
        yield client
    finally:
        with contextlib.suppress(OSError):
            await client.close()


async def expect_worker(client: Client) -> None:
    """Raise `NoWorkerError` where no worker answers."""
    with contextlib.suppress(RequestFailedError):  # it knows that there is no such session
        await client.session("any").info()


def _show_checks(report: Report, console: Console) -> None:
    for check in report.checks:
        colour, mark = {True: ("green", "ok"), False: ("red", "FAILED"), None: ("yellow", "cannot tell")}[
            check.passed
        ]
        console.print(f"[{colour}]{mark}[/]  {check.name}: {check.detail}", soft_wrap=True)
