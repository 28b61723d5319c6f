"""Runs the levels of `bench load`, and tells what became of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from bench.old.run import Bench
from bench.together import beside
from bench.watch import Watch

from .checks import checks
from .drive import Driver
from .page import glance, page_of
from .stall import Beside
from .summary import LoadReport, series, stall, summarise, wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from bench.corpus import Corpus
    from bench.old.page import Page
    from bench.old.run import Facts, Run, Where
    from turnkeep_client.client import Client

    from .plan import Plan
    from .turns import Span, Stall, Turn

#: How often the bench's own worker tells of itself, and how often its death is looked for.
METRICS_S: Final = 0.5
PULSE_S: Final = 0.25
#: Answers that run beside a long prompt.
ANSWERS: Final = 4


class LoadBench(Bench[LoadReport]):
    """Many sessions at once, level by level."""

    name = "load"

    def __init__(self, plan: Plan, corpus: Corpus, where: Where) -> None:
        self._plan = plan
        self._corpus = corpus
        self._where = where
        self._turns: list[Turn] = []
        self._spans: list[Span] = []
        self._stalls: list[Stall] = []
        self._messages: dict[str, str] = {}
        self._watch: Watch | None = None
        self._doing = "starting"

    @property
    def measured(self) -> bool:
        """Say whether a turn was sent."""
        return bool(self._turns or self._stalls)

    async def measure(self, run: Run) -> None:
        """Run all levels. Raises `NoWorkerError` where there is no worker."""
        options = ("--metrics-interval-s", f"{METRICS_S}s")
        async with run.target(self._where, *options) as client:
            self._watch = watch = Watch(client)
            with run.bar(None if self._has_open_loop else self._num_steps) as step:
                async with beside(watch.run(), self._pulse(step)):
                    await self._levels(client, watch)

    @property
    def _has_open_loop(self) -> bool:
        return any(level.kind != "closed" for level in self._plan.levels)

    @property
    def _num_steps(self) -> int:
        plan = self._plan
        openings = sum(1 for i in range(plan.sessions) if plan.history_of(i))
        rounds = plan.rounds if plan.long_prompt else 0
        return len(plan.levels) * (plan.sessions * plan.turns + openings) + rounds

    async def _levels(self, client: Client, watch: Watch) -> None:
        plan = self._plan
        run = f"load-{uuid4().hex[:8]}"
        driver = Driver(client, plan, self._corpus, watch, run=run, on_turn=self._count)
        for number, level in enumerate(plan.levels):
            self._doing = level.name
            self._spans.append(await driver.level(number, level))
        if plan.long_prompt is not None:
            self._doing = "a long prompt"
            prompt = Beside(
                client,
                self._corpus,
                run=run,
                answers=ANSWERS,
                answer_tokens=plan.answer_tokens,
                timeout_s=plan.turn_timeout_s,
                pause_s=plan.pause_s,
            )
            await prompt.measure(plan.long_prompt, plan.rounds, self._stalls)

    async def _pulse(self, step: Callable[[float, str], None]) -> None:
        """Move the bar, which also notices a worker's death, whatever turns are waited for."""
        while True:
            step(len(self._turns) + len(self._stalls), self._doing)
            await asyncio.sleep(PULSE_S)

    def _count(self, turn: Turn, message: str | None) -> None:
        self._turns.append(turn)
        if turn.error is not None and message is not None:
            self._messages.setdefault(turn.error, message)

    def report(self, facts: Facts) -> LoadReport:
        """Make the report of the levels so far."""
        plan, turns = self._plan, self._turns
        readings = self._watch.of_one if self._watch else []
        begun = max((turn.level + 1 for turn in turns), default=0)
        levels = tuple(
            summarise(
                level,
                self._spans[number] if number < len(self._spans) else None,
                [turn for turn in turns if turn.level == number],
                readings,
            )
            for number, level in enumerate(plan.levels[:begun])
        )
        alone = {i for i, level in enumerate(plan.levels) if level.kind == "closed" and level.amount == 1}
        waits = wait([turn for turn in turns if turn.level in alone])
        return LoadReport(
            **facts,
            target=self._where.target,
            worker=self._watch.worker if self._watch else None,
            settings={**plan.settings(), "corpus": self._corpus.source.name},
            source=self._corpus.source,
            checks=checks(turns, waits),
            series=series(levels, turns, self._stalls),
            levels=levels,
            stall=stall(self._stalls),
            wait=waits,
            messages=dict(self._messages),
            spans=tuple(self._spans),
            stalls=tuple(self._stalls),
            readings=tuple(readings),
            turns=tuple(turns),
        )

    def page(self, report: LoadReport) -> Page:
        """Lay the report out."""
        return page_of(report)

    def show(self, report: LoadReport, console: Console) -> None:
        """Print a line for every level, and what did not go well."""
        from rich.table import Table

        head, rows = glance(report)
        shown = Table(box=None, header_style="bold")
        for i, name in enumerate(head):
            shown.add_column(name, justify="right" if i else "left", no_wrap=True)
        for row in rows:
            shown.add_row(*row)
        console.print(shown)
        stalled = report.stall
        if stalled is not None and stalled.alone is not None and stalled.during is not None:
            console.print(
                f"gaps of running answers: p99 {stalled.during.p99 * 1000:.1f} ms beside prompts of"
                f" {stalled.tokens:,.0f} tokens, {stalled.alone.p99 * 1000:.1f} ms alone",
                soft_wrap=True,
            )
        for name, message in report.messages.items():
            console.print(f"{name}: {message}", markup=False, soft_wrap=True)
