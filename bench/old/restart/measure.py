"""Runs all kinds of lives for all lengths, round after round in another order."""

from __future__ import annotations

import contextlib
import math
import random
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from rich.table import Table

from bench import blas
from bench.baseline.messages import Encode, Tokens
from bench.baseline.process import running
from bench.faults import BenchError
from bench.old.run import Bench

from .checks import checks
from .lives import Lives
from .page import page_of
from .summary import RestartReport, series, summarise
from .turns import COLD, KINDS, WARM, Measured

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from bench.baseline.process import Baseline
    from bench.corpus import Corpus
    from bench.local import LocalWorker
    from bench.old.page import Page
    from bench.old.run import Facts, Run, Where
    from turnkeep_client.client import Client

#: The worker's block: what a kill may cost is counted in it.
BLOCK_TOKENS: Final = 128
#: Of a session that only tells how large its KV is.
PROBE_TOKENS: Final = 64
#: What `--max-memory` takes at least.
MIN_MEMORY_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: a turn of `turn_tokens` after every kind of life, per length and round."""

    lengths: tuple[int, ...]
    rounds: int
    turn_tokens: int
    max_tokens: int
    from_disk: bool
    timeout_s: float
    seed: int

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest session at the end: two turns a round, and one more."""
        return max(self.lengths) + (2 * self.rounds + 1) * (self.turn_tokens + self.max_tokens)

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """Return the settings as a report holds them."""
        lengths = ",".join(map(str, self.lengths))
        return {**asdict(self), "lengths": lengths, "block_tokens": BLOCK_TOKENS}


class RestartBench(Bench[RestartReport]):
    """The first token after a restart, beside that of a warm session and that of a cold one."""

    name = "restart"

    def __init__(self, plan: Plan, corpus: Corpus, where: Where) -> None:
        self._plan = plan
        self._corpus = corpus
        self._where = where
        self._measured: list[Measured] = []
        self._lives: Lives | None = None
        self._memory_bytes: int | None = None
        self._libraries: tuple[tuple[str, ...] | None, tuple[str, ...] | None] = (None, None)

    @property
    def measured(self) -> bool:
        """Say whether a turn was measured."""
        return bool(self._measured)

    async def measure(self, run: Run) -> None:
        """Start worker and baseline, and measure. Raises `BenchError` and what the client raises."""
        plan = self._plan
        async with contextlib.AsyncExitStack() as stack:
            options = ("--block-tokens", f"{BLOCK_TOKENS}")
            worker, client = await stack.enter_async_context(run.worker(*options, where=self._where))
            libraries = blas.mapped(worker.pid)
            preload = blas.preload_of(libraries)
            baseline = await stack.enter_async_context(
                running(worker.model_folder, preload=preload, timeout_s=plan.timeout_s)
            )
            self._libraries = (libraries, blas.mapped(baseline.pid))
            limits, max_context = await self._limits(client)
            await self._restart_with(worker, limits)
            self._lives = Lives(
                worker,
                baseline,
                options=limits,
                max_context=max_context,
                max_tokens=plan.max_tokens,
                timeout_s=plan.timeout_s,
                from_disk=plan.from_disk,
            )
            await self._live(run, self._lives, _Texts(baseline, self._corpus.texts()))

    async def _limits(self, client: Client) -> tuple[tuple[str, ...], int]:
        """Choose the worker's memory so that one session can fill it: its options, and its context."""
        session = client.session("probe")
        probe = await session.append(tokens=(0,) * PROBE_TOKENS, timeout_s=self._plan.timeout_s)
        await session.close(timeout_s=self._plan.timeout_s)
        if not probe.kv_live_bytes:
            raise BenchError("the worker reports no KV: what leaves its memory cannot be told")
        per_token = math.ceil(probe.kv_live_bytes / probe.tokens)
        context = max(self._plan.context_tokens, MIN_MEMORY_BYTES // per_token)
        self._memory_bytes = max(context * per_token, MIN_MEMORY_BYTES)
        options = ("--max-memory", f"{self._memory_bytes}", "--max-context", f"{context}")
        return options, context

    async def _restart_with(self, worker: LocalWorker, options: tuple[str, ...]) -> None:
        worker.stop()
        worker.start(*options)
        client = await worker.ready(self._where.tenant)
        await client.close()

    async def _live(self, run: Run, lives: Lives, texts: _Texts) -> None:
        plan, order = self._plan, random.Random(self._plan.seed)  # noqa: S311  # an order, not a secret
        lengths = sorted(plan.lengths, reverse=True)  # what does not fit is told first
        total = len(lengths) * (1 + plan.rounds * len(KINDS))
        with run.bar(total) as step:
            for done, length in enumerate(lengths):
                step(done, f"beginning with {length:,} tokens")
                await lives.begin(length, await texts.tokens(length))
            done = len(lengths)
            for number in range(1, plan.rounds + 1):
                order.shuffle(lengths)
                for length in lengths:
                    lead, tokens = [await texts.tokens(plan.turn_tokens) for _ in range(2)]
                    for kind in shuffled(order):
                        step(done, f"round {number} of {plan.rounds}, {length:,} tokens, {kind}")
                        first = order.random() < 0.5
                        found = await lives.turn(number, length, kind, lead, tokens, limit_first=first)
                        self._measured.append(found)
                        done += 1

    def report(self, facts: Facts) -> RestartReport:
        """Make the report of the turns so far."""
        turns = tuple(self._measured)
        worker, baseline = self._libraries
        return RestartReport(
            **facts,
            target=self._where.target,
            worker=self._lives.metrics if self._lives else None,
            settings={
                **self._plan.settings(),
                "max_memory": self._memory_bytes,
                "corpus": self._corpus.source.name,
                "worker's BLAS": blas.names(worker),
                "baseline's BLAS": blas.names(baseline),
            },
            source=self._corpus.source,
            checks=checks(turns, BLOCK_TOKENS),
            series=series(turns),
            summary=summarise(turns),
            turns=turns,
        )

    def page(self, report: RestartReport) -> Page:
        """Lay the report out."""
        return page_of(report)

    def show(self, report: RestartReport, console: Console) -> None:
        """Print the medians."""
        table = Table(box=None, header_style="bold")
        for name in ("tokens", "after", "1st token", "of cold", "prefilled", "restored"):
            left = name == "after"
            table.add_column(name, justify="left" if left else "right", no_wrap=True)
        for life in report.summary.lives:
            table.add_row(
                f"{life.length:,}",
                life.kind,
                f"{life.first_s.median * 1000:.0f} ms",
                "-" if life.of_cold is None else f"{life.of_cold.median:.1%}",
                f"{life.prefilled_share:.1%}",
                "-" if life.restore_rate is None else f"{life.restore_rate.median / 2**20:.0f} MiB/s",
            )
        console.print(table)


def shuffled(order: random.Random) -> list[str]:
    """Return all kinds in some order, the cold one after the warm one, whose answer it has to know."""
    kinds = list(KINDS)
    order.shuffle(kinds)
    if kinds.index(COLD) < kinds.index(WARM):
        i, j = kinds.index(COLD), kinds.index(WARM)
        kinds[i], kinds[j] = kinds[j], kinds[i]
    return kinds


class _Texts:
    """Real texts as token ids, joined where more is wanted than one has."""

    def __init__(self, baseline: Baseline, texts: Iterator[str]) -> None:
        self._baseline = baseline
        self._texts = texts

    async def tokens(self, number: int) -> tuple[int, ...]:
        """Return exactly so many tokens: texts one after the other, the last one cut."""
        found: list[int] = []
        while len(found) < number:
            found += (await self._baseline.ask(Encode(f"{next(self._texts)}\n\n"), Tokens)).tokens
        return tuple(found[:number])
