"""Holds the conversation of `bench session`, and tells what it cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.table import Table

from bench.old.run import Bench

from .checks import checks
from .conversation import Conversation, Plan
from .page import page_of
from .summary import SessionReport, series, summarise

if TYPE_CHECKING:
    from rich.console import Console

    from bench.corpus import Corpus
    from bench.old.page import Page
    from bench.old.run import Facts, Run, Where
    from bench.old.stats import Spread

    from .turns import Turn

#: Enough turns for two windows of five, and short enough for a minute on two slow cores.
SMOKE_TURNS: Final = 12
SMOKE_TOKENS: Final = 16


class SessionBench(Bench[SessionReport]):
    """One session and its turns."""

    name = "session"

    def __init__(self, plan: Plan, corpus: Corpus, where: Where) -> None:
        self._plan = plan
        self._corpus = corpus
        self._where = where
        self._conversation: Conversation | None = None

    @property
    def measured(self) -> bool:
        """Say whether a turn was sent."""
        return self._conversation is not None and bool(self._conversation.turns)

    async def measure(self, run: Run) -> None:
        """Hold the conversation. Raises `NoWorkerError` where there is no worker."""
        plan = self._plan
        async with run.target(self._where) as client:
            with run.bar(plan.duration_s if plan.turns is None else plan.turns) as step:

                def count(turn: Turn) -> None:
                    done = turn.started_s + turn.latency_s if plan.turns is None else turn.turn
                    step(done, f"turn {turn.turn}: {turn.error or f'{turn.latency_s:.2f} s'}")

                self._conversation = Conversation(client, plan, self._corpus.texts(), on_turn=count)
                await self._conversation.run()

    def report(self, facts: Facts) -> SessionReport:
        """Make the report of the turns so far; `elapsed_s` is the conversation's, without the start."""
        conversation = self._conversation
        turns = tuple(conversation.turns) if conversation else ()
        summary = summarise(turns)
        facts["elapsed_s"] = conversation.elapsed_s if conversation else 0.0
        return SessionReport(
            **facts,
            target=self._where.target,
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

    def page(self, report: SessionReport) -> Page:
        """Lay the report out."""
        return page_of(report)

    def show(self, report: SessionReport, console: Console) -> None:
        """Print the spreads, and what did not go well."""
        summary = report.summary
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
