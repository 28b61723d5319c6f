"""One run of any bench: its workers, its clock, and its report.

A run records raw values; it computes and writes nothing while a turn is in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import tempfile
import time
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Generic, Self, TypeVar

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from turnkeep_client.client import Client
from turnkeep_client.errors import RequestFailedError, TurnkeepError
from turnkeep_client.messages import Chunk, Generated, Metrics
from turnkeep_client.session import Session

from .corpus import CORPORA, Corpus
from .faults import BenchError, ReportError, in_background
from .local import LocalWorker, Process
from .plan import CommonOptions, Setting
from .report import Report, ReportFile, describe
from .turns import Measure, Sample, TimedTurn

P = TypeVar("P")

#: Seconds between two checks of the loop's lag, of the processes, and of the snapshots in flight.
PULSE_S: Final = 0.02
TENANT: Final = "bench"
#: A turn that takes longer has failed.
TURN_TIMEOUT_S: Final = 600.0
SETTLE_TIMEOUT_S: Final = 120.0
#: The pause after a failed turn, so that a broken worker is not flooded.
FAULT_PAUSE_S: Final = 0.2


class BenchRun(Generic[P]):
    """Starts workers, times turns and records measurements for a bench's measuring coroutine."""

    def __init__(self, bench: str, plan: P, where: CommonOptions) -> None:
        self.plan = plan
        self.where = where
        self.turns: list[TimedTurn] = []
        self.facts: dict[str, Setting] = {}
        self.metrics: Metrics | None = None
        self.began_s = time.monotonic()
        self.lags_s = array("d")
        self._corpus: Corpus | None = None
        self._bench = bench
        self._console = Console(stderr=True, highlight=False)
        self.report_file = ReportFile(where.out, bench, where.checkpoint)
        self._environment = describe()
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
        """The corpus that the plan names. Raises `BenchError` if it is not installed."""
        if self._corpus is None:
            self._corpus = CORPORA[self.plan.corpus]()  # type: ignore[attr-defined]  # only for plans with a corpus
        return self._corpus

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.began_s

    async def ask(
        self, session: Session, *, begun: asyncio.Event | None = None, texts: bool = False, **request: Any
    ) -> TimedTurn:
        """Send one generate, wait up to `TURN_TIMEOUT_S`, and return the timed turn.

        The turn is not recorded: call `keep`. A fault is returned in the turn, not raised. `request` are the
        arguments of `Session.generate`. The first chunk sets `begun`. With `texts` the turn's facts have the
        answer's text. An answer without chunks counts as beginning when the result arrives.
        """
        _end_where_cancelled()
        sent_s = time.monotonic()
        arrivals: list[tuple[float, Chunk]] = []
        with self.timing():
            try:
                generation = session.generate(timeout_s=TURN_TIMEOUT_S, **request)
                async for chunk in generation:
                    arrivals.append((time.monotonic() - sent_s, chunk))
                    if begun is not None:
                        begun.set()
                result = generation.result
            except TurnkeepError as error:
                result, fault = None, error
        times: dict[str, Any] = {"at_s": sent_s - self.began_s, "total_s": time.monotonic() - sent_s}
        if result is None:
            first_s = arrivals[0][0] if arrivals else None
            turn = TimedTurn(first_s=first_s, error=class_of(fault), message=str(fault), **times)
        else:
            turn = _answered(arrivals, result, times)
        facts = {"text": result.text} if texts and result is not None else {}
        return replace(turn, session=session.key.session, facts=facts)

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Measure the event loop's lag during the `with` block, and write no report meanwhile."""
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    def keep(self, *turns: TimedTurn) -> None:
        """Record measured turns in the report."""
        self.turns += turns

    def sample(self, measure: Measure, case: str, x: float | None, block: int, value: float) -> None:
        """Record a value that cannot be computed from turns."""
        self._samples.append(Sample(measure.name, case, x, block, value))

    def warn(self, message: str) -> None:
        """Print a warning on standard error."""
        self._console.print(f"turnkeep: {message}", soft_wrap=True, markup=False)

    def progress(self, done: float, total: float | None, what: str) -> None:
        """Move the progress bar; save the report if due, unless a turn is in flight."""
        _end_where_cancelled()
        self._bars.update(self._bar, completed=done, total=total, description=what)
        if not self._in_flight and self.report_file.due:
            try:
                self.report_file.save(self.report("running"))
            except ReportError as error:  # a full disk may have room later
                self.warn(f"checkpoint left out: {error}")

    @asynccontextmanager
    async def worker(self, *options: str) -> AsyncGenerator[tuple[LocalWorker, Client]]:
        """Run the bench's own worker on an empty data directory, with additional `serve` options.

        Yields the worker, once it answers, and a connection. The bench may kill, stop and start the worker.
        At the end the worker is stopped and its directory removed.
        """
        with tempfile.TemporaryDirectory(prefix="turnkeep-bench-") as folder:
            model = () if self.where.model is None else ("--model", self.where.model)
            worker = LocalWorker(Path(folder), *model, *options)
            with self.owning(worker):
                async with await self._ready(worker) as client:
                    yield worker, client

    async def _ready(self, worker: LocalWorker) -> Client:
        """Wait until a starting worker answers; hide the bench's bar, as the worker shows its own bars."""
        was_shown = self._bars.live.is_started
        self._bars.stop()
        try:
            return await worker.ready(TENANT)
        finally:
            if was_shown:
                self._bars.start()

    @contextlib.contextmanager
    def owning(self, process: Process) -> Iterator[None]:
        """Run a process during the `with` block; if it ends by itself, the run fails with a `BenchError`."""
        self._processes.append(process)
        process.start()
        try:
            yield
        finally:
            self._processes.remove(process)
            process.stop()

    async def restart(self, worker: LocalWorker, *options: str, kill: bool = False) -> tuple[float, float]:
        """Stop or kill a worker and start it again; return the seconds to its end, and until it is ready."""
        began_s = time.monotonic()
        await asyncio.to_thread(worker.kill if kill else worker.stop)
        ended_s = time.monotonic()
        worker.start(*options)
        await (await self._ready(worker)).close()
        return ended_s - began_s, time.monotonic() - ended_s

    async def wait_for_snapshots(self, session: Session) -> Metrics:
        """Wait until the worker has written all snapshots; return its metrics. Raises `BenchError`."""
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                while (metrics := (await session.info()).worker).snapshots.in_flight:  # noqa: ASYNC110  # over the wire
                    await asyncio.sleep(PULSE_S)
        except TimeoutError:
            raise BenchError(f"the worker still writes snapshots after {SETTLE_TIMEOUT_S:g} s") from None
        self.metrics = self.metrics or metrics
        return metrics

    async def measure(self, how: Callable[[Self], Awaitable[None]]) -> None:
        """Call a bench's `how` with this run and await it. Raises `BenchError` if a worker ends by itself."""
        try:
            with self._bars:
                async with in_background(self._pulse()):
                    await how(self)
        except TurnkeepError:
            self._check_alive()
            raise

    def report(self, ending: str) -> Report:
        """Return the report of the measurements so far."""
        return Report(
            bench=self._bench,
            started_at=self._started_at,
            elapsed_s=self.elapsed_s,
            complete=ending == "done",
            ending=ending,
            environment=self._environment,
            load_after=os.getloadavg(),
            worker=self.metrics,
            source=None if self._corpus is None else self._corpus.source,
            plan=msgspec.to_builtins(self.plan, enc_hook=str),
            facts=self.facts,
            turns=tuple(self.turns),
            samples=tuple(self._samples),
        )

    async def _pulse(self) -> None:
        """Measure the event loop's lag while turns are in flight. Raises `BenchError` if a process ends."""
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


def _end_where_cancelled() -> None:
    """Raise `CancelledError` if the task was cancelled but a library swallowed the exception.

    `asyncio.wait_for` of Python 3.11 may do so.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _answered(arrivals: Sequence[tuple[float, Chunk]], result: Generated, times: dict[str, Any]) -> TimedTurn:
    """Build a turn from an answer's chunks, each with its arrival time, and the answer's result."""
    usage = result.usage
    tokens = tuple(token for _, chunk in arrivals for token in chunk.tokens)
    text = "".join(chunk.text for _, chunk in arrivals)
    return TimedTurn(
        **times,
        first_s=arrivals[0][0] if arrivals else times["total_s"],
        gaps_s=tuple(later - sooner for (sooner, _), (later, _) in itertools.pairwise(arrivals)),
        position=result.position,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        prefilled_tokens=usage.prefilled_tokens,
        tokens=result.tokens,
        joined=(text, tokens) == (result.text, result.tokens),
        kv_live_bytes=result.kv_live_bytes,
        rewritten_from=result.rewritten_from,
    )


def class_of(fault: TurnkeepError) -> str:
    """Return the class under which a fault is counted: the worker's code, or the exception's name."""
    return fault.code if isinstance(fault, RequestFailedError) else type(fault).__name__
