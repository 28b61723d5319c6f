"""Runs the same turns on every side, one side after the other, round after round in another order."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from rich.table import Table

from bench import blas
from bench.baseline.process import running
from bench.old.run import Bench

from .checks import checks
from .cpu import Meter
from .page import page_of
from .prompts import Prompts
from .sides import InProcess, ThroughWorker
from .summary import OverheadReport, series, summarise
from .turns import ALONE, BATCHED, Row, Turn, agreeing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from bench.corpus import Corpus
    from bench.old.page import Page
    from bench.old.run import Facts, Run, Where

    from .sides import Said, Side

#: What a worker serves at a time by default, and more where a larger batch is measured.
MIN_BATCH: Final = 16
#: From one side to the next: acknowledgements and closed connections, which follow an answer, are over then.
PAUSE_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: every batch size in every round, `turns` turns of up to `max_tokens` each."""

    batches: tuple[int, ...]
    rounds: int
    turns: int
    max_tokens: int
    prompt_tokens: int
    prefill_step: int
    timeout_s: float
    seed: int

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """Return the settings as a report holds them."""
        return {**asdict(self), "batches": ",".join(map(str, self.batches))}


class OverheadBench(Bench[OverheadReport]):
    """In process and through a worker, side by side."""

    name = "overhead"

    def __init__(self, plan: Plan, corpus: Corpus, where: Where) -> None:
        self._plan = plan
        self._corpus = corpus
        self._where = where
        self._turns: list[Turn] = []
        self._worker_side: ThroughWorker | None = None
        self._libraries: tuple[tuple[str, ...] | None, tuple[str, ...] | None] = (None, None)

    @property
    def measured(self) -> bool:
        """Say whether a batch size was measured on all sides."""
        return bool(self._turns)

    async def measure(self, run: Run) -> None:
        """Start all sides and alternate between them. Raises `BenchError` and what the client raises."""
        plan = self._plan
        options = ("--max-batch", f"{max(MIN_BATCH, *plan.batches)}")
        async with contextlib.AsyncExitStack() as stack:
            worker, _ = await stack.enter_async_context(run.worker(*options, where=self._where))
            folder = worker.model_folder
            same = replace(self._where, model=str(folder))
            other, _ = await stack.enter_async_context(run.worker(*options, "--snapshots", "off", where=same))
            libraries = blas.mapped(worker.pid)
            baseline = await stack.enter_async_context(
                running(
                    folder,
                    preload=blas.preload_of(libraries),
                    prefill_step=plan.prefill_step,
                    timeout_s=plan.timeout_s,
                )
            )
            self._libraries = (libraries, blas.mapped(baseline.pid))
            self._worker_side = ThroughWorker(worker, snapshots=True, timeout_s=plan.timeout_s)
            sides: list[Side] = [
                InProcess(ALONE, baseline),
                InProcess(BATCHED, baseline),
                self._worker_side,
                ThroughWorker(other, snapshots=False, timeout_s=plan.timeout_s),
            ]
            prompts = Prompts(baseline, self._corpus.texts(), plan.prompt_tokens)
            await self._alternate(run, sides, prompts)

    async def _alternate(self, run: Run, sides: Sequence[Side], prompts: Prompts) -> None:
        """Go through all rounds. The one before the first is run and not counted: it warms up."""
        plan, order = self._plan, random.Random(self._plan.seed)  # noqa: S311  # an order, not a secret
        with run.bar((plan.rounds + 1) * len(plan.batches)) as step:
            for number in range(plan.rounds + 1):
                batches = order.sample(plan.batches, len(plan.batches))
                for i, batch in enumerate(batches):
                    what = f"round {number} of {plan.rounds}, batch {batch}" if number else "warming up"
                    progress = partial(step, number * len(batches) + i, what)
                    progress()
                    wanted = [side for side in sides if batch == 1 or side.name != ALONE]
                    order.shuffle(wanted)
                    said = await prompts.conversations(batch, plan.turns if number else 1)
                    runs = {side.name: await self._run(side, sides, said, progress) for side in wanted}
                    if number:
                        self._turns += _compared(number, batch, said, runs)

    async def _run(
        self,
        side: Side,
        sides: Sequence[Side],
        prompts: Sequence[Sequence[tuple[int, ...]]],
        step: Callable[[], None],
    ) -> list[_Ran]:
        """Run all turns of new sessions on one side; it is idle again afterwards."""
        idle = {other.processes.process.pid: other.processes for other in sides}
        del idle[side.processes.process.pid]
        ran = []
        async with side.sessions(len(prompts[0])):
            for turn in prompts:
                meter = Meter(side.processes, list(idle.values()))
                seconds, said = await side.turn(turn, self._plan.max_tokens)
                ran.append(_Ran(seconds, said, meter))
                step()
                await side.settle()
        await asyncio.sleep(PAUSE_S)
        return ran

    def report(self, facts: Facts) -> OverheadReport:
        """Make the report of the rounds so far."""
        turns = tuple(self._turns)
        worker, baseline = self._libraries
        summary = summarise(turns)
        return OverheadReport(
            **facts,
            target=self._where.target,
            worker=self._worker_side.metrics if self._worker_side else None,
            settings={
                **self._plan.settings(),
                "corpus": self._corpus.source.name,
                "worker's BLAS": blas.names(worker),
                "baseline's BLAS": blas.names(baseline),
            },
            source=self._corpus.source,
            checks=checks(turns, same_library=None if worker is None else worker == baseline),
            series=series(turns),
            summary=summary,
            turns=turns,
        )

    def page(self, report: OverheadReport) -> Page:
        """Lay the report out."""
        return page_of(report)

    def show(self, report: OverheadReport, console: Console) -> None:
        """Print the ratios."""
        table = Table(box=None, header_style="bold")
        table.add_column("batch", justify="right")
        table.add_column("side", no_wrap=True)
        table.add_column("against", no_wrap=True)
        for name in ("tokens/s, ratio", "1st token"):
            table.add_column(name, justify="right", no_wrap=True)
        for one in report.summary.compared:
            table.add_row(
                f"{one.batch}",
                one.side,
                one.base,
                f"{one.rate.median:.2f} ({one.rate.low:.2f} - {one.rate.high:.2f})",
                f"{one.added_first_s.median * 1000:+.1f} ms",
            )
        console.print(table)


class _Ran:
    """One turn of one side as it was run."""

    def __init__(self, seconds: float, said: list[Said], meter: Meter) -> None:
        self.seconds = seconds
        self.said = said
        self.cpu = meter.read()


def _compared(
    number: int,
    batch: int,
    prompts: Sequence[Sequence[tuple[int, ...]]],
    runs: dict[str, list[_Ran]],
) -> list[Turn]:
    """Hold every side's answers against the reference's: mlx-lm alone where it ran, else its batch."""
    reference = runs[ALONE if ALONE in runs else BATCHED]
    turns = []
    for side, ran in runs.items():
        together = [ran is not reference] * batch
        for i, (one, base) in enumerate(zip(ran, reference, strict=True)):
            rows = []
            for j, (said, meant) in enumerate(zip(one.said, base.said, strict=True)):
                common = agreeing(said.tokens, meant.tokens) if together[j] else None
                # What follows an answer that differs has another context.
                together[j] = together[j] and said.tokens == meant.tokens
                rows.append(_row(len(prompts[i][j]), said, common))
            turns.append(
                Turn(
                    round=number,
                    batch=batch,
                    side=side,
                    turn=i + 1,
                    seconds=one.seconds,
                    rows=tuple(rows),
                    cpu=one.cpu,
                )
            )
    return turns


def _row(prompt_tokens: int, said: Said, common: int | None) -> Row:
    return Row(
        prompt_tokens=prompt_tokens,
        tokens=len(said.tokens),
        first_s=said.first_s,
        last_s=said.last_s,
        agreeing=common,
        cached_tokens=said.cached_tokens,
        prefilled_tokens=said.prefilled_tokens,
        context_tokens=said.context_tokens,
    )
