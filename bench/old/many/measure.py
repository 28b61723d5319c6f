"""Builds the sessions of `bench many`, asks them, and tells what became of them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from rich.table import Table

from bench.faults import BenchError
from bench.old.run import Bench
from bench.together import beside
from bench.watch import Watch
from turnkeep_client.errors import RequestFailedError

from .checks import checks
from .crowd import Crowd, Probe, probe
from .page import page_of
from .summary import ManyReport, series, summarise

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from bench.corpus import Corpus
    from bench.old.page import Page
    from bench.old.run import Facts, Run, Where
    from turnkeep_client.client import Client

    from .plan import Plan

#: How often the bench's own worker tells of itself, and how often its death is looked for.
METRICS_S: Final = 0.25
PULSE_S: Final = 0.25
#: Snapshots of the sessions that were built must be on SSD before the turns are measured, but not for ever.
WRITTEN_TIMEOUT_S: Final = 60.0
#: The least that a worker takes for its memory.
LEAST_MEMORY: Final = 2**20


class ManyBench(Bench[ManyReport]):
    """Far more sessions than fit in memory."""

    name = "many"

    def __init__(self, plan: Plan, corpus: Corpus, where: Where) -> None:
        self._plan = plan
        self._corpus = corpus
        self._where = where
        self._run = f"many-{uuid4().hex[:8]}"
        self._crowd: Crowd | None = None
        self._watch: Watch | None = None
        self._written_at_s: float | None = None
        self._probe: Probe | None = None

    @property
    def measured(self) -> bool:
        """Say whether a session was built."""
        return self._crowd is not None and bool(self._crowd.built)

    async def measure(self, run: Run) -> None:
        """Build the sessions and ask them. Raises `NoWorkerError` where there is no worker."""
        # Memory that is ready before it is needed would hide what sessions take.
        options = ["--metrics-interval-s", f"{METRICS_S}s", "--spare-memory", "0"]
        if self._where.url is None:
            # Another worker tells what sessions take: a limit is set at the start.
            async with run.worker(where=self._where) as (_, client):
                self._probe = await self._size(run, client)
            options += ["--max-memory", f"{max(LEAST_MEMORY, self._plan.room * self._probe.most_bytes)}"]
        async with run.target(self._where, *options) as client:
            self._probe = self._probe or await self._size(run, client)
            self._watch = watch = Watch(client)
            self._crowd = crowd = Crowd(client, self._plan, self._corpus, watch, self._run)
            total = None if self._plan.turns is None else self._plan.sessions + self._plan.turns
            with run.bar(total) as step:
                try:
                    async with beside(watch.run(), self._pulse(step)):
                        await crowd.build()
                        await self._until_written(watch)
                        await crowd.converse()
                        await crowd.close()
                except BaseException:
                    await crowd.close(in_time=True)
                    raise

    async def _size(self, run: Run, client: Client) -> Probe:
        try:
            with run.bar(None) as step:
                async with beside(self._pulse(step)):
                    return await probe(client, self._plan, self._corpus, self._run)
        except RequestFailedError as error:
            raise BenchError(f"a session cannot be held to its full length: {error}") from None

    async def _until_written(self, watch: Watch) -> None:
        built_s, deadline_s = watch.elapsed_s, time.monotonic() + WRITTEN_TIMEOUT_S
        while time.monotonic() < deadline_s:
            await asyncio.sleep(PULSE_S)
            if any(reading.at_s > built_s and not reading.unwritten for reading in watch.readings[-3:]):
                break
        self._written_at_s = watch.readings[-1].at_s if watch.readings else watch.elapsed_s

    async def _pulse(self, step: Callable[[float, str], None]) -> None:
        """Move the bar, which also notices a worker's death, whatever is waited for."""
        while True:
            done, what = 0, "sizing the sessions"
            if self._crowd is not None:
                built, turns = len(self._crowd.built), len(self._crowd.turns)
                done, what = built + turns, f"turn {turns:,}" if turns else f"session {built:,}"
            step(done, what)
            await asyncio.sleep(PULSE_S)

    def report(self, facts: Facts) -> ManyReport:
        """Make the report of what was measured so far."""
        crowd, watch = self._crowd, self._watch
        built, turns = (crowd.built, crowd.turns) if crowd else ([], [])
        readings = watch.of_one if watch else []
        summary = summarise(
            built,
            turns,
            readings,
            rewinds=crowd.rewinds if crowd else 0,
            looks=crowd.looks if crowd else 0,
            over_limit=crowd.over_limit if crowd else 0,
            written_at_s=self._written_at_s,
            account=crowd.account if crowd else None,
            cold_s=self._probe.cold_s if self._probe else (),
        )
        return ManyReport(
            **facts,
            target=self._where.target,
            worker=watch.worker if watch else None,
            settings={**self._plan.settings(), "corpus": self._corpus.source.name},
            source=self._corpus.source,
            checks=checks(summary, self._plan.sessions, own=self._where.url is None),
            series=series(built, turns, readings),
            summary=summary,
            messages=dict(crowd.messages) if crowd else {},
            written_at_s=self._written_at_s,
            built=tuple(built),
            turns=tuple(turns),
            readings=tuple(readings),
        )

    def page(self, report: ManyReport) -> Page:
        """Lay the report out."""
        return page_of(report)

    def show(self, report: ManyReport, console: Console) -> None:
        """Print the time of a turn by where its session was found, and what sessions take."""
        summary = report.summary
        table = Table(box=None, header_style="bold")
        for i, name in enumerate(("session found in", "turns", "p50", "p99", "first chunk", "p99")):
            table.add_column(name, justify="right" if i else "left")
        for one in summary.places:
            times = (one.whole.p50, one.whole.p99, one.first_chunk.p50, one.first_chunk.p99)
            shown = "no cache" if one.place == "prefilled" else one.place
            table.add_row(shown, f"{one.whole.count}", *(f"{value * 1000:.1f} ms" for value in times))
        console.print(table)
        line = f"{summary.built:,} sessions built in {summary.build_s:.1f} s"
        if summary.per_session is not None:
            size = summary.per_session
            line += (
                f"; each takes {size.size_bytes / 1024:.1f} KiB of the process"
                f" (95%: {size.low / 1024:.1f} to {size.high / 1024:.1f})"
            )
        if summary.ssd_bytes_per_session is not None:
            line += f" and {summary.ssd_bytes_per_session / 1024:.1f} KiB on SSD"
        console.print(line, soft_wrap=True)
        for name, message in report.messages.items():
            console.print(f"{name}: {message}", markup=False, soft_wrap=True)
