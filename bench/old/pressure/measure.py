"""Gives a worker little memory, loads it from all sides, and tells what it did."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Final

import psutil
from rich.table import Table

from bench.faults import BenchError
from bench.old.figures import MIB
from bench.old.run import Bench, closing
from bench.together import beside
from turnkeep_client.errors import TurnkeepError

from .checks import checks
from .drive import Load
from .page import page_of
from .summary import PressureReport, Sizes, series, summarise
from .turns import Reading

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from bench.local import LocalWorker
    from bench.old.page import Page
    from bench.old.run import Facts, Run, Where
    from turnkeep_client.client import Client
    from turnkeep_client.messages import Metrics

    from .plan import Plan
    from .turns import Answers, Replayed

METRICS_S: Final = 0.1
PULSE_S: Final = 0.1
#: The sessions by which the bytes of a token are found out: two lengths give both parts of the formula.
PROBES: Final = (40, 72)
PROBE_TIMEOUT_S: Final = 120.0
#: Whose sessions are held again alone: another tenant finds nothing that was cached for the first.
ALONE_TENANT: Final = "alone"
CONTEXT: Final = 2


class PressureBench(Bench[PressureReport]):
    """A worker at its memory limit."""

    name = "pressure"

    def __init__(self, plan: Plan, where: Where) -> None:
        self._plan = plan
        self._where = where
        self._started_s = time.monotonic()
        self._load: Load | None = None
        self._metrics: Metrics | None = None
        self._sizes: Sizes | None = None
        self._readings: list[Reading] = []
        self._process: list[int] = []
        self._device_limit = 0
        self._answers: Answers | None = None
        self._replayed: list[Replayed] = []

    @property
    def measured(self) -> bool:
        """Say whether a request was sent."""
        return self._load is not None and bool(self._load.sent)

    async def measure(self, run: Run) -> None:
        """Find out what sessions take, set the limits, and load the worker. Raises `BenchError`."""
        room = self._plan.room
        options = ["--metrics-interval-s", f"{METRICS_S}s", "--max-batch", f"{self._plan.rows}"]
        options += ["--spare-memory", "0"]  # it would hide what the process grows by
        async with run.worker(*options, "--max-context", f"{room}", where=self._where) as (_, client):
            self._sizes = sizes = await _size(client)
        self._device_limit = sizes.beside_bytes + sizes.kv_bytes(room)
        # Of which the worker has to leave for KV what the room takes, to the byte: a check holds it to that.
        # The context must not be what refuses a request.
        options += ["--device-memory", f"{self._device_limit}", "--max-context", f"{CONTEXT * room}"]
        async with run.worker(*options, where=self._where) as (worker, client):
            self._started_s = time.monotonic()
            self._load = load = Load(client, self._plan, self._clock)
            with run.bar(self._plan.duration_s) as step:
                async with beside(self._watch(client), self._pulse(worker, step)):
                    await load.run()
                    self._answers = await load.answers()
                    async with closing(await worker.ready(ALONE_TENANT)) as other:
                        await load.alone(other, self._replayed.append)

    def _clock(self) -> float:
        return time.monotonic() - self._started_s

    async def _watch(self, client: Client) -> None:
        async for metrics in client.metrics():
            self._metrics = self._metrics or metrics
            if metrics.mlx_active_bytes:  # 0 before the first step
                self._readings.append(_reading(self._clock(), metrics))

    async def _pulse(self, worker: LocalWorker, step: Callable[[float, str], None]) -> None:
        """Read the process's size, and move the bar, which also notices the worker's death."""
        while True:
            if worker.pid is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._process.append(psutil.Process(worker.pid).memory_info().rss)
            what = f"request {len(self._load.sent):,}" if self._load else "starting"
            step(self._clock(), f"alone {len(self._replayed)}" if self._answers else what)
            await asyncio.sleep(PULSE_S)

    def report(self, facts: Facts) -> PressureReport:
        """Make the report of what was measured so far."""
        load, plan = self._load, self._plan
        sent = load.sent if load else []
        summary = summarise(
            sent,
            self._readings,
            room=plan.room,
            sizes=self._sizes,
            device_limit_bytes=self._device_limit,
            process_bytes=self._process,
            answers=self._answers,
            replayed=self._replayed,
        )
        return PressureReport(
            **facts,
            target=self._where.target,
            worker=self._metrics,
            settings=plan.settings(),
            source=None,
            checks=checks(summary),
            series=series(sent, self._readings),
            sizes=self._sizes,
            summary=summary,
            messages=dict(load.messages) if load else {},
            sent=tuple(sent),
            readings=tuple(self._readings),
        )

    def page(self, report: PressureReport) -> Page:
        """Lay the report out."""
        return page_of(report)

    def show(self, report: PressureReport, console: Console) -> None:
        """Print what became of the requests of each kind, and the most that was allocated."""
        table = Table(box=None, header_style="bold")
        for i, name in enumerate(("kind", "sent", "outcomes", "p50", "max")):
            table.add_column(name, justify="right" if i else "left")
        for one in report.summary.kinds:
            times = (
                ("", "") if one.seconds is None else (f"{one.seconds.p50:.2f} s", f"{one.seconds.max:.2f} s")
            )
            found = ", ".join(f"{count} {name}" for name, count in one.outcomes.items())
            table.add_row(one.kind, f"{one.sent}", found, *times)
        console.print(table)
        summary = report.summary
        console.print(
            f"allocated at the most {summary.most_peak_bytes / MIB:,.1f} of"
            f" {summary.device_limit_bytes / MIB:,.1f} MiB, {summary.idle_bytes / MIB:,.1f} without sessions;"
            f" {summary.restored_bytes / MIB:,.1f} MiB were restored from SSD",
            soft_wrap=True,
        )
        for name, message in report.messages.items():
            console.print(f"{name}: {message}", markup=False, soft_wrap=True)


async def _size(client: Client) -> Sizes:
    """Find out what a token takes, and what a worker keeps free beside KV. Raises `BenchError`."""
    found: list[tuple[int, int]] = []
    last = client.session("probe-last")
    try:
        for number in PROBES:
            session = client.session(f"probe-{number}")
            done = await session.append(tokens=[number] * number, timeout_s=PROBE_TIMEOUT_S)
            found.append((done.tokens, done.kv_live_bytes))
            await session.close(timeout_s=PROBE_TIMEOUT_S)
        # What is allocated is told after a step: this one's session is next to nothing.
        await last.append(tokens=[1, 1], timeout_s=PROBE_TIMEOUT_S)
        worker = (await last.info()).worker
    except TurnkeepError as error:
        raise BenchError(f"the sessions cannot be sized: {error}") from None
    (first, small), (second, large) = found
    per_token = (large - small) // (second - first)
    return Sizes(
        bytes_per_token=per_token,
        fixed_bytes=small - first * per_token,
        idle_bytes=worker.mlx_active_bytes,
        beside_bytes=worker.device_memory_bytes - worker.max_memory_bytes,
    )


def _reading(at_s: float, metrics: Metrics) -> Reading:
    return Reading(
        at_s=at_s,
        active_bytes=metrics.mlx_active_bytes,
        peak_bytes=metrics.mlx_peak_bytes,
        kv_bytes=metrics.resident_kv_bytes,
        process_bytes=metrics.process_bytes,
        device_limit_bytes=metrics.device_memory_bytes,
        kv_limit_bytes=metrics.max_memory_bytes,
        running=metrics.running,
        waiting=metrics.waiting,
        waiting_for_memory=metrics.waiting_for_memory,
        resident_sessions=metrics.resident_sessions,
        restored_bytes=metrics.snapshots.restored_bytes,
    )
