"""Runs the same sessions on every side, one side after the other, round after round in another order."""

from __future__ import annotations

import contextlib
import random
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from typing import TYPE_CHECKING, Final

from rich.table import Table

from bench.faults import BenchError
from bench.old.run import Bench

from .page import beside_of, page_of
from .sides import Side
from .summary import SnapshotsReport, checks, series, summarise, text_of
from .takes import FAILING, OFF, SIDES, SLOW, Take, agreeing, beside_blocks, decoding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from bench.corpus import Corpus
    from bench.old.page import Page
    from bench.old.run import Facts, Run, Where
    from turnkeep_client.messages import Metrics

    from .sides import Measured

#: What a worker serves at a time by default, and more where a larger batch is measured.
MIN_BATCH: Final = 16
#: Of an answer that only warms up.
WARM_TOKENS: Final = 4
#: How often other prompts are asked before it is said that answers are too short.
MAX_TRIES: Final = 20


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: every batch size in every round; the slow disk takes `sync_s` for a file."""

    batches: tuple[int, ...]
    rounds: int
    prompt_chars: int
    max_tokens: int
    block_tokens: int
    sync_s: float
    timeout_s: float
    seed: int

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """Return the settings as a report holds them."""
        return {**asdict(self), "batches": ",".join(map(str, self.batches))}


class SnapshotsBench(Bench[SnapshotsReport]):
    """Workers without snapshots, with them, and with them on bad disks."""

    name = "snapshots"

    def __init__(self, plan: Plan, corpus: Corpus, where: Where) -> None:
        self._plan = plan
        self._corpus = corpus
        self._where = where
        self._takes: list[Take] = []
        self._worker: Metrics | None = None

    @property
    def measured(self) -> bool:
        """Say whether a batch size was measured on all sides."""
        return bool(self._takes)

    async def measure(self, run: Run) -> None:
        """Start all sides and alternate between them. Raises `BenchError` and what the client raises."""
        where = self._where
        async with contextlib.AsyncExitStack() as stack:
            sides = []
            for name in SIDES:
                worker, client = await stack.enter_async_context(
                    run.worker(*self._options(name), where=where, program=self._program(name))
                )
                where = replace(where, model=str(worker.model_folder))
                sides.append(Side(name, client, settles=name != SLOW, timeout_s=self._plan.timeout_s))
            self._worker = await sides[0].begin()
            for side in sides[1:]:
                await side.begin()
            await self._alternate(run, sides)

    def _options(self, side: str) -> tuple[str, ...]:
        plan = self._plan
        return (
            *("--max-batch", f"{max(MIN_BATCH, *plan.batches)}", "--block-tokens", f"{plan.block_tokens}"),
            # Guesses make a lone answer's speed jump with its text.
            *("--max-draft", "0"),
            *(("--snapshots", "off") if side == OFF else ()),
        )

    def _program(self, side: str) -> tuple[str, ...]:
        spoiled = {SLOW: ("--sync-s", f"{self._plan.sync_s}"), FAILING: ("--fails",)}.get(side)
        return ("worker",) if spoiled is None else ("bench.old.snapshots.disk", *spoiled)

    async def _alternate(self, run: Run, sides: Sequence[Side]) -> None:
        """Go through all rounds; the one before the first has short answers, and is not counted."""
        plan, order = self._plan, random.Random(self._plan.seed)  # noqa: S311  # an order, not a secret
        prompts = prompts_of(self._corpus.texts(), plan.prompt_chars)
        done = 0
        with run.bar((plan.rounds + 1) * len(plan.batches) * len(sides)) as step:
            for number in range(plan.rounds + 1):
                for batch in order.sample(plan.batches, len(plan.batches)):
                    first, *others = order.sample(list(sides), len(sides))
                    what = f"round {number}, batch {batch}" if number else "warming up"
                    max_tokens = plan.max_tokens if number else min(WARM_TOKENS, plan.max_tokens)
                    step(done, f"{what}, {first.name}")
                    asked, found = await self._long(first, prompts, batch, max_tokens)
                    measured = {first.name: found}
                    for side in others:
                        step(done := done + 1, f"{what}, {side.name}")
                        measured[side.name] = await side.take(asked, max_tokens)
                    step(done := done + 1, what)
                    if number:
                        self._takes += taken(number, batch, measured, plan.block_tokens)

    async def _long(
        self, side: Side, prompts: Iterator[str], batch: int, max_tokens: int
    ) -> tuple[list[str], Measured]:
        """Find prompts whose answers are long, on average half of what they may be, and measure them.

        Raises `BenchError` where there are none.
        """
        for _ in range(MAX_TRIES):
            asked = list(islice(prompts, batch))
            found = await side.take(asked, max_tokens)
            num_tokens = sum(len(answer.tokens) for answer in found.answers)
            if 2 * num_tokens >= batch * max_tokens and decoding(found.answers)[0]:
                return asked, found
        raise BenchError(f"answers end before half of {max_tokens} tokens: use fewer --max-tokens")

    def report(self, facts: Facts) -> SnapshotsReport:
        """Make the report of the rounds so far."""
        takes = tuple(self._takes)
        summary = summarise(takes, self._plan.block_tokens)
        return SnapshotsReport(
            **facts,
            target=self._where.target,
            worker=self._worker,
            settings={**self._plan.settings(), "corpus": self._corpus.source.name},
            source=self._corpus.source,
            checks=checks(takes, summary),
            series=series(takes),
            summary=summary,
            takes=takes,
        )

    def page(self, report: SnapshotsReport) -> Page:
        """Lay the report out."""
        return page_of(report)

    def show(self, report: SnapshotsReport, console: Console) -> None:
        """Print the ratios."""
        table = Table(box=None, header_style="bold")
        table.add_column("batch", justify="right")
        table.add_column("side", no_wrap=True)
        for name in ("decoding, of off", "a block leaves", "prompts, of off"):
            table.add_column(name, justify="right", no_wrap=True)
        for one in report.summary.costs:
            if one.side != OFF:
                _, left = beside_of(one)
                table.add_row(f"{one.batch}", one.side, text_of(one.decode), left, text_of(one.prefill))
        console.print(table)


def prompts_of(texts: Iterator[str], num_chars: int) -> Iterator[str]:
    """Yield prompts of about so many characters, each with a beginning that no other has."""
    for number in count():
        prompt = f"Note {number}."
        while len(prompt) < num_chars:
            prompt += f" {next(texts)}"
        yield prompt[:num_chars]


def taken(number: int, batch: int, measured: dict[str, Measured], block_tokens: int) -> list[Take]:
    """Hold every side's answers against those without snapshots."""
    reference = measured[OFF].answers
    takes = []
    for side, one in measured.items():
        decoded, decode_s = decoding(one.answers)
        takes.append(
            Take(
                round=number,
                batch=batch,
                side=side,
                prompt_tokens=one.prompt_tokens,
                prefill_s=one.prefill_s,
                tokens=sum(len(answer.tokens) for answer in one.answers),
                agreeing=agreeing(one.answers, reference),
                decoded=decoded,
                decode_s=decode_s,
                beside_s=tuple(
                    added for answer in one.answers for added in beside_blocks(answer, block_tokens)
                ),
                snapshots=one.snapshots,
            )
        )
    return takes
