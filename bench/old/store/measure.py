"""Runs the cache's own measuring program, and tells what it says.

The program is `cache.measure`: benches may not import the cache, which only a worker and it know from inside.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from rich.table import Table

from bench.faults import BenchError
from bench.old.run import Bench
from bench.program import lines

from .page import page_of
from .summary import Filled, Opened, Read, StoreReport, checks, series, summarise

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from bench.old.page import Page
    from bench.old.run import Facts, Run

GIB: Final = 2.0**30

Line = Read | Filled | Opened

_LINE: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `rounds` restores of each length, and as many openings of the index."""

    lengths: tuple[int, ...]
    layers: int
    heads: int
    dim: int
    block_tokens: int
    blocks: int
    chain: int
    rounds: int

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """Return the settings as a report holds them."""
        return {**asdict(self), "lengths": ",".join(map(str, self.lengths))}


class StoreBench(Bench[StoreReport]):
    """Restores beside MLX alone, and the opening and matching of an index."""

    name = "store"

    def __init__(self, plan: Plan, folder: Path | None) -> None:
        self._plan = plan
        self._folder = folder
        self._reads: list[Read] = []
        self._opened: list[Opened] = []

    @property
    def measured(self) -> bool:
        """Say whether there is anything to report yet."""
        return bool(self._reads or self._opened)

    async def measure(self, run: Run) -> None:
        """Run the program for each length, and for the index. Raises `BenchError`."""
        plan = self._plan
        common = ("--block", plan.block_tokens, "--rounds", plan.rounds)
        shape = ("--layers", plan.layers, "--heads", plan.heads, "--dim", plan.dim)
        total = (len(plan.lengths) + 1) * plan.rounds
        with run.bar(total) as step:
            for tokens in plan.lengths:

                def read(line: Line, what: str = f"restoring {tokens:,} tokens") -> None:
                    if isinstance(line, Read):
                        self._reads.append(line)
                    step(len(self._reads), what)

                step(len(self._reads), f"writing {tokens:,} tokens")
                await self._hear(read, "restore", *common, *shape, "--tokens", tokens)

            def opened(line: Line) -> None:
                if isinstance(line, Opened):
                    self._opened.append(line)
                step(len(self._reads) + len(self._opened), f"opening {plan.blocks:,} blocks")

            step(len(self._reads), f"writing {plan.blocks:,} blocks")
            await self._hear(opened, "index", *common, "--blocks", plan.blocks, "--chain", plan.chain)

    async def _hear(self, hear: Callable[[Line], None], *arguments: object) -> None:
        """Run the program on a directory of its own, and hand on what it says; end it whatever happens."""
        try:
            place = tempfile.TemporaryDirectory(prefix="turnkeep-bench-", dir=self._folder)
        except OSError as error:
            raise BenchError(f"nothing can be written to {self._folder}: {error.strerror}") from None
        with place as folder:
            program = lines("cache.measure", Path(folder) / "store", *arguments)
            async with contextlib.aclosing(program):
                async for line in program:
                    hear(_LINE.decode(line))

    def report(self, facts: Facts) -> StoreReport:
        """Make the report of what was measured so far."""
        summary = summarise(self._reads, self._opened)
        return StoreReport(
            **facts,
            target="the snapshot cache, without a worker",
            worker=None,
            settings=self._plan.settings(),
            source=None,
            checks=checks(summary),
            series=series(self._reads, self._opened),
            summary=summary,
            reads=tuple(self._reads),
            opened=tuple(self._opened),
        )

    def page(self, report: StoreReport) -> Page:
        """Lay the report out."""
        return page_of(report)

    def show(self, report: StoreReport, console: Console) -> None:
        """Print the medians of the restores; the index is among the checks."""
        table = Table(box=None, header_style="bold")
        for name in ("tokens", "restore", "MLX alone", "of it"):
            table.add_column(name, justify="right", no_wrap=True)
        for length in report.summary.lengths:
            table.add_row(
                f"{length.tokens:,}",
                f"{length.restore_rate.median / GIB:.2f} GiB/s",
                f"{length.load_rate.median / GIB:.2f} GiB/s",
                f"{length.share.median:.2f}",
            )
        console.print(table)
