"""One run of a bench, whichever it is: its workers, its clock, and its report until that is on disk.

A bench measures and keeps raw values; nothing is made of them, and nothing written, while a turn is in
flight. What happens when a run is cut short is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from array import array
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from turnkeep_client.client import connect
from turnkeep_client.errors import RequestFailedError, TurnkeepError

from . import checks, environment, tables
from .ask import ask
from .corpus import load
from .faults import BenchError, ReportError
from .local import LocalWorker
from .page import render
from .plan import Where, settings
from .report import Report, ReportFile, Setting, schema_of
from .samples import Findings, Sample
from .together import in_background

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence

    from turnkeep_client.client import Client
    from turnkeep_client.messages import Metrics
    from turnkeep_client.session import Session

    from .corpus import Corpus
    from .local import Process
    from .samples import Turn
    from .spec import Bench, Measure

P = TypeVar("P")

PULSE_S: Final = 0.02
TURN_TIMEOUT_S: Final = 300.0
SETTLE_TIMEOUT_S: Final = 120.0
SETTLE_PAUSE_S: Final = 0.02


class Run(Generic[P]):
    """What a measuring coroutine is given. It keeps what was measured so far."""

    def __init__(self, bench: Bench[P], plan: P, where: Where) -> None:
        self.plan = plan
        self.where = where
        self.turns: list[Turn] = []
        self.facts: dict[str, Setting] = {}
        self.metrics: Metrics | None = None
        self.began_s = time.monotonic()
        self.lags_s = array("d")
        self._corpus: Corpus | None = None
        self._bench = bench
        self._console = Console(stderr=True, highlight=False)
        self.report_file = ReportFile(where.out, bench.name, where.checkpoint)
        self._environment = environment.describe()
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._samples: list[Sample] = []
        self._processes: list[Process] = []
        self._in_flight = 0
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        hidden = not self._console.is_terminal
        self._bars = Progress(*columns, console=self._console, transient=True, disable=hidden)
        self._bar = self._bars.add_task("starting", total=None)

    @property
    def corpus(self) -> Corpus:
        """What is said: the corpus that the plan names. Raises `BenchError` where it is not installed."""
        if self._corpus is None:
            self._corpus = load(self.plan.corpus)  # type: ignore[attr-defined]  # else nobody may ask
        return self._corpus

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.began_s

    async def ask(self, session: Session, **request: Any) -> Turn:
        """Send one generate, and time it. The turn is not kept: `keep` does that.

        It may take as long as the plan's `turn_timeout` says. A fault is an outcome, not an exception.
        """
        _end_where_cancelled()
        timeout_s: float = getattr(self.plan, "turn_timeout", TURN_TIMEOUT_S)
        with self.timing():
            return await ask(session, timeout_s=timeout_s, began_s=self.began_s, **request)

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Say that something is in flight: the loop's lag counts, and no report is written meanwhile."""
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    def keep(self, *turns: Turn) -> None:
        """Keep turns that were measured."""
        self.turns += turns

    def sample(self, measure: Measure, case: str, x: float | None, block: int, value: float) -> None:
        """Keep a value that follows from no turn."""
        self._samples.append(Sample(measure.name, case, x, block, value))

    def warn(self, message: str) -> None:
        """Say something that does not stop the run."""
        self._console.print(f"turnkeep: {message}", soft_wrap=True, markup=False)

    def progress(self, done: float, total: float | None, what: str) -> None:
        """Move the progress bar; where nothing is in flight, write a checkpoint that is due."""
        _end_where_cancelled()
        self._bars.update(self._bar, completed=done, total=total, description=what)
        if not self._in_flight and self.report_file.due:
            try:
                self.report_file.save(self.report("running", ()))
            except ReportError as error:  # a disk that is full now may have room later
                self.warn(f"checkpoint left out: {error}")

    @asynccontextmanager
    async def worker(
        self, *options: str, program: Sequence[str] = ()
    ) -> AsyncGenerator[tuple[LocalWorker, Client]]:
        """Run a worker of the bench's own on an empty data directory, with more `serve` options.

        Yields it, once it answers, with a connection. The bench may kill, stop and start it; afterwards it is
        stopped, and its directory is gone.
        """
        with tempfile.TemporaryDirectory(prefix="turnkeep-bench-") as folder:
            model = () if self.where.model is None else ("--model", self.where.model)
            program = program or self.where.program
            worker = LocalWorker(Path(folder), *model, *options, program=program)
            with self.owning(worker):
                async with closing(await worker.ready(self.where.tenant)) as client:
                    yield worker, client

    @contextlib.contextmanager
    def owning(self, process: Process) -> Iterator[None]:
        """Start a process and stop it afterwards; where it ends by itself the run is over (`BenchError`)."""
        self._processes.append(process)
        process.start()
        try:
            yield
        finally:
            self._processes.remove(process)
            process.stop()

    @asynccontextmanager
    async def target(self, *options: str) -> AsyncGenerator[Client]:
        """Connect to the worker that is measured: one of the bench's own where the user named no other."""
        if self.where.nats is None:
            async with self.worker(*options) as (_, client):
                yield client
            return
        where = self.where
        client = await connect(self.where.nats, prefix=where.prefix, tenant=where.tenant)
        async with closing(client):
            with contextlib.suppress(RequestFailedError):  # it knows that there is no such session
                await client.session("any").info()
            yield client

    @asynccontextmanager
    async def connect(self, worker: LocalWorker, tenant: str) -> AsyncGenerator[Client]:
        """Connect to a worker of one's own under a tenant: across tenants no KV is shared."""
        async with closing(await connect(worker.url, tenant=tenant)) as client:
            yield client

    @asynccontextmanager
    async def watching(self, client: Client, note: Callable[[float, Metrics], None]) -> AsyncGenerator[None]:
        """Call `note` with each metrics message, and its time of arrival, while the block runs."""

        async def listen() -> None:
            name = None
            async for metrics in client.metrics():
                name, self.metrics = name or metrics.worker, self.metrics or metrics
                if metrics.worker == name:  # there may be others on the same NATS
                    note(self.elapsed_s, metrics)

        async with in_background(listen()):
            yield

    async def restart(self, worker: LocalWorker, *options: str, kill: bool = False) -> tuple[float, float]:
        """Stop or kill a worker and start it again; returns the seconds of both, until it is ready."""
        began_s = time.monotonic()
        await asyncio.to_thread(worker.kill if kill else worker.stop)
        ended_s = time.monotonic()
        worker.start(*options)
        await (await worker.ready(self.where.tenant)).close()
        return ended_s - began_s, time.monotonic() - ended_s

    async def wait_for_snapshots(self, session: Session) -> Metrics:
        """Wait until the worker has all snapshots on disk, and return its account. Raises `BenchError`."""
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                metrics = (await session.info()).worker
                while metrics.snapshots.in_flight:
                    await asyncio.sleep(SETTLE_PAUSE_S)
                    metrics = (await session.info()).worker
        except TimeoutError:
            raise BenchError(f"the worker still writes snapshots after {SETTLE_TIMEOUT_S:g} s") from None
        self.metrics = self.metrics or metrics
        return metrics

    async def measure(self) -> None:
        """Run the bench's coroutine. Raises `BenchError` where a worker ends by itself."""
        try:
            with self._bars:
                async with in_background(self._pulse()):
                    await self._bench.measure(self)
        except (TurnkeepError, BenchError):
            self._check_alive()
            raise

    def report(self, ending: str, found: Sequence[checks.Check]) -> Report:
        """Put together what there is."""
        own = self.where.nats is None
        return Report(
            schema=schema_of(self._bench.name),
            started_at=self._started_at,
            elapsed_s=self.elapsed_s,
            complete=ending == "done",
            ending=ending,
            target="a worker of its own" if own else "a worker that was running",
            environment=self._environment,
            load_after=os.getloadavg(),
            worker=self.metrics,
            source=None if self._corpus is None else self._corpus.source,
            plan=settings(self.plan),
            facts=self.facts,
            checks=tuple(found),
            turns=tuple(self.turns),
            samples=tuple(self._samples),
        )

    def judge(self) -> list[checks.Check]:
        """Hold what was found against the bench's promises, and against those of every bench."""
        findings = Findings(self._bench, self.plan, self.turns, self._samples, self.facts)
        return [*checks.common(findings, self.lags_s), *self._bench.checks(findings)]

    async def _pulse(self) -> None:
        """Take the loop's own lag while turns are in flight, and notice a worker's death."""
        while True:
            due_s = time.monotonic() + PULSE_S
            in_flight = self._in_flight
            await asyncio.sleep(PULSE_S)
            if in_flight and self._in_flight:
                self.lags_s.append(max(0.0, time.monotonic() - due_s))
            self._check_alive()

    def _check_alive(self) -> None:
        for process in self._processes:
            process.check_alive()


async def conduct(bench: Bench[P], plan: P, where: Where) -> Report:
    """Measure, and return the report, which is on disk by then.

    When cancelled, or after a fault, what was measured so far is kept, marked as not complete. Raises
    `ReportError`, and whatever the bench raises.
    """
    run = Run(bench, plan, where)
    run.report_file.save(run.report("running", ()))  # a folder that cannot take it is told before the run
    ending = "interrupted"
    try:
        await run.measure()
        ending = "done"
    except Exception as error:
        ending = f"fault: {error}"
        raise
    finally:
        with contextlib.suppress(ReportError):  # raised below, when the figures have been printed
            run.report_file.save(run.report(ending, ()))  # whatever becomes of what is made of it
        report = run.report(ending, run.judge())
        _publish(bench, report, run)
    return report


def _publish(bench: Bench[Any], report: Report, run: Run[Any]) -> None:
    """Print what there is, and write it; of a run that has measured nothing nothing stays."""
    path = run.report_file.path
    if not report.complete and not report.turns and not report.samples:
        if path is not None:
            path.unlink(missing_ok=True)
        return
    tables.print_report(bench, report)
    if path is not None:
        run.report_file.save(report, render(bench, report, warn=run.warn))
        kind = "report" if report.complete else "partial report"
        tables.printing().print(f"{kind}: {path}", soft_wrap=True)


@asynccontextmanager
async def closing(client: Client) -> AsyncGenerator[Client]:
    """Close a connection afterwards, also one whose server is gone."""
    try:
        yield client
    finally:
        with contextlib.suppress(OSError):
            await client.close()


def _end_where_cancelled() -> None:
    """Raise a `CancelledError` again that a library swallowed.

    In Python 3.11 `wait_for` does where the result comes at the same moment.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


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
