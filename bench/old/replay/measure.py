"""Reads a record, or makes one, and plays it again at the worker that is measured."""

from __future__ import annotations

import shlex
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from rich.table import Table

from bench.faults import BenchError
from bench.old.run import Bench, Where, closing
from turnkeep_client.client import connect
from turnkeep_client.errors import TurnkeepError

from .page import interval, page_of
from .player import PREFIX, Player
from .record import fold
from .recording import record
from .summary import ReplayReport, checks, series, summarise

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from rich.console import Console

    from bench.corpus import Corpus
    from bench.old.page import Page
    from bench.old.report import Setting
    from bench.old.run import Facts, Run
    from turnkeep_client.client import Client
    from turnkeep_client.messages import Metrics

    from .player import How
    from .record import Record


#: Tenant of the sessions that the bench records itself.
RECORDER: Final = "recorder"


@dataclass(frozen=True, slots=True)
class Made:
    """A record that the bench makes for itself."""

    corpus: Corpus
    sessions: int
    turns: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Log:
    """A record in a worker's log: all sessions of a tenant, or the named ones."""

    url: str
    prefix: str
    tenant: str
    sessions: tuple[str, ...]


class ReplayBench(Bench[ReplayReport]):
    """One record and its replay. `options` are settings of the bench's own worker."""

    name = "replay"

    def __init__(self, source: Made | Log, how: How, where: Where, options: tuple[str, ...]) -> None:
        self._source = source
        self._how = how
        self._where = where
        self._options = options
        self._record: Record | None = None
        self._player: Player | None = None
        self._worker: Metrics | None = None

    @property
    def measured(self) -> bool:
        """Say whether a request was played."""
        return self._player is not None and bool(self._player.played)

    async def measure(self, run: Run) -> None:
        """Read or make the record, and play it. Raises `BenchError` where there is nothing to play."""
        async with AsyncExitStack() as stack:
            client: Client | None = None
            if isinstance(self._source, Log):
                self._record = await _read(self._source)
                if (self._source.url, self._source.tenant) == (self._where.url, self._where.tenant):
                    run.warn(
                        "the record's own tenant is the target: what it has cached makes the replay faster;"
                        " --target-tenant names another"
                    )
            elif self._options or self._where.url is not None:
                # Recorded by a worker of its own that has no options, so that the replay shows what those do.
                async with run.worker(where=Where(model=self._where.model)) as (worker, _):
                    self._record = await self._make(run, worker.url, self._source)
            else:
                worker, client = await stack.enter_async_context(run.worker(where=self._where))
                self._record = await self._make(run, worker.url, self._source)
            if client is None:
                client = await stack.enter_async_context(run.target(self._where, *self._options))
            self._worker = await _metrics(client)
            await self._play(run, client, self._record)

    async def _make(self, run: Run, url: str, made: Made) -> Record:
        """Record sessions of another tenant: what one tenant has said is in no cache of another."""
        done = 0
        async with closing(await connect(url, tenant=RECORDER)) as client:
            with run.bar(made.sessions * made.turns) as step:

                def count(what: str) -> None:
                    nonlocal done
                    done += 1
                    step(done, what)

                try:
                    await record(
                        client,
                        made.corpus,
                        sessions=made.sessions,
                        turns=made.turns,
                        max_tokens=made.max_tokens,
                        turn_timeout_s=self._how.turn_timeout_s,
                        on_turn=count,
                    )
                except* TurnkeepError as group:
                    raise BenchError(f"the record could not be made: {_first(group)}") from None
                except* BenchError as group:
                    raise BenchError(str(_first(group))) from None
            return fold(await client.log())

    async def _play(self, run: Run, client: Client, record: Record) -> None:
        done = 0
        with run.bar(record.num_steps) as step:

            def count(what: str) -> None:
                nonlocal done
                done += 1
                step(done, what)

            self._player = Player(client, self._how, uuid4().hex[:8], count)
            try:
                await self._player.play(record)
            except* BenchError as group:
                raise BenchError(str(_first(group))) from None

    def report(self, facts: Facts) -> ReplayReport:
        """Make the report of what was played so far."""
        record, player = self._record, self._player
        played = tuple(player.played) if player else ()
        recorded = record.models if record else ()
        replayed = tuple(sorted(player.models)) if player else ()
        summary = summarise(played)
        same = set(recorded) == set(replayed) if recorded and replayed else None
        made = self._source if isinstance(self._source, Made) else None
        return ReplayReport(
            **facts,
            target=self._where.target,
            worker=self._worker,
            settings=self._settings(),
            source=made.corpus.source if made else None,
            checks=checks(summary, same_model=same),
            series=series(played),
            serve=shlex.join(self._options),
            record="made for it" if made else "a worker's log",
            recorded_models=recorded,
            replayed_models=replayed,
            recorded_sessions=len(record.sessions) if record else 0,
            recorded_requests=record.num_steps if record else 0,
            left_out=record.left_out if record else {},
            summary=summary,
            messages=dict(player.messages) if player else {},
            played=played,
        )

    def _settings(self) -> dict[str, Setting]:
        source: dict[str, Setting] = {}
        if isinstance(self._source, Made):
            made = self._source
            source = {"sessions": made.sessions, "turns": made.turns, "max_tokens": made.max_tokens}
        return {**asdict(self._how), **source}

    def page(self, report: ReplayReport) -> Page:
        """Lay the report out."""
        return page_of(report)

    def show(self, report: ReplayReport, console: Console) -> None:
        """Print the times side by side, and what did not go well."""
        table = Table(box=None, header_style="bold")
        table.add_column("median of", no_wrap=True)
        for head in ("recorded", "replayed", "ratio", "95% interval"):
            table.add_column(head, justify="right", no_wrap=True)
        for row in report.summary.beside:
            values = (f"{value * 1000:.1f} ms" for value in (row.recorded_p50, row.replayed_p50))
            table.add_row(row.measure, *values, f"{row.ratio:.3f}", interval(row))
        console.print(table)
        first = report.summary.first_differences
        if first:
            console.print(f"first differences at tokens {', '.join(map(str, first[:20]))}", soft_wrap=True)
        for name, message in report.messages.items():
            console.print(f"{name}: {message}", markup=False, soft_wrap=True)


async def _read(log: Log) -> Record:
    async with _connected(log) as client:
        names = log.sessions or (None,)
        entries = [entry for name in names for entry in await client.log(name)]
    if not log.sessions:
        entries = [entry for entry in entries if not entry.key.session.startswith(PREFIX)]
    found = fold(entries)
    if not found.sessions:
        left_out = ", ".join(f"{count} {reason}" for reason, count in found.left_out.items())
        what = f"the sessions {', '.join(log.sessions)}" if log.sessions else f"the tenant {log.tenant}"
        why = f" ({left_out})" if left_out else ""
        raise BenchError(f"there is nothing to replay: the log holds no answered request of {what}{why}")
    return found


@asynccontextmanager
async def _connected(log: Log) -> AsyncGenerator[Client]:
    try:
        client = await connect(log.url, prefix=log.prefix, tenant=log.tenant)
    except TurnkeepError as error:
        raise BenchError(f"the record cannot be read: {error}") from None
    async with closing(client):
        yield client


async def _metrics(client: Client) -> Metrics:
    session = client.session(f"{PREFIX}{uuid4().hex[:12]}")
    await session.open(timeout_s=60)
    metrics = (await session.info()).worker
    await session.close(timeout_s=60)
    return metrics


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
