"""Runs the worker's own measuring program, and tells what it says.

The program is `worker.quality`: benches may not import the worker, whose attention and caches are measured.
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
from .summary import Answer, Kept, QualityReport, Window, checks, series, summarise

if TYPE_CHECKING:
    from rich.console import Console

    from bench.corpus import Corpus
    from bench.old.page import Page
    from bench.old.run import Facts, Run

#: The precisions that are held against the full one.
BITS: Final = (8, 4)

Line = Kept | Window | Answer

_LINE: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured, of which model, on which text."""

    model: str | None
    text: str
    window: int
    windows: int
    answer: int
    answers: int

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """Return the settings as a report holds them."""
        return asdict(self)


class QualityBench(Bench[QualityReport]):
    """Windows of a text, and answers to it, in each precision."""

    name = "quality"

    def __init__(self, plan: Plan, text: str, corpus: Corpus | None) -> None:
        self._plan = plan
        self._text = text
        self._corpus = corpus
        self._kept: list[Kept] = []
        self._windows: list[Window] = []
        self._answers: list[Answer] = []

    @property
    def measured(self) -> bool:
        """Say whether there is anything to report yet."""
        return bool(self._windows)

    async def measure(self, run: Run) -> None:
        """Run the program. Raises `BenchError`."""
        plan = self._plan
        sizes = ("window", "windows", "answer", "answers")
        options = [word for name in sizes for word in (f"--{name}", getattr(plan, name))]
        model = () if plan.model is None else ("--model", plan.model)
        with tempfile.TemporaryDirectory(prefix="turnkeep-bench-") as folder, run.bar(None) as step:
            text = Path(folder) / "text"
            text.write_text(self._text, "utf-8")
            step(0, "loading the model")
            program = lines("worker.quality", text, "--data-dir", folder, "--bits", *BITS, *model, *options)
            async with contextlib.aclosing(program):
                async for line in program:
                    self._hear(_LINE.decode(line))
                    done = len(self._windows) + len(self._answers)
                    step(done, f"{len(self._windows)} windows, {len(self._answers)} answers")

    def _hear(self, line: Line) -> None:
        match line:
            case Kept():
                self._kept.append(line)
            case Window():
                self._windows.append(line)
            case Answer():
                self._answers.append(line)

    def report(self, facts: Facts) -> QualityReport:
        """Make the report of what was measured so far."""
        summary = summarise(self._kept, self._windows, self._answers)
        return QualityReport(
            **facts,
            target="the model as a worker runs it, without a worker",
            worker=None,
            settings=self._plan.settings(),
            source=self._corpus.source if self._corpus else None,
            checks=checks(summary),
            series=series(self._windows, self._answers),
            summary=summary,
            kept=tuple(self._kept),
            windows=tuple(self._windows),
            answers=tuple(self._answers),
        )

    def page(self, report: QualityReport) -> Page:
        """Lay the report out."""
        return page_of(report)

    def show(self, report: QualityReport, console: Console) -> None:
        """Print the precisions side by side."""
        table = Table(box=None, header_style="bold")
        for name in ("kv_bits", "perplexity", "of full", "likeliest", "answers", "memory", "disk"):
            table.add_column(name, justify="right", no_wrap=True)
        for side in report.summary.sides:
            ratio = side.perplexity_ratio
            table.add_row(
                str(side.kv_bits or "full"),
                f"{side.perplexity:.3f}",
                "-" if ratio is None else f"{ratio.median:.4f}",
                f"{side.likeliest_equal:.1%}",
                "-" if side.answers_equal is None else f"{side.answers_equal:.1%}",
                f"{side.kv_bytes_per_token:,} B",
                f"{side.disk_bytes_per_token:,.0f} B",
            )
        console.print(table)


def text_of(corpus: Corpus | None, path: Path | None) -> str:
    """Return the text of a file, or all that the users of a corpus say. Raises `BenchError`."""
    if path is not None:
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BenchError(f"the text {path} cannot be read: {error}") from None
    said = corpus.conversations if corpus is not None else ()
    return "\n\n".join(utterance.text for conversation in said for utterance in conversation.utterances)
