"""Makes the tables of a bench's findings, for a page or a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table as Grid

from . import stats
from .figures import interval, number
from .report import Report
from .spec import AnyBench, Findings
from .turns import Measure

PRINTED_WIDTH: Final = 132


@dataclass(frozen=True, slots=True)
class Table:
    """A table. The first column is text, the others are numbers."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(findings: Findings[Any]) -> list[Table]:
    """Return the tables of a report: one of all measures with a single row, one of each other measure.

    The bench's closing table, if it has one, is the last.
    """
    shown = [measure for measure in findings.bench.measures if findings.cases(measure)]
    single = [measure for measure in shown if findings.places(measure) == [(None, "")]]
    last = findings.bench.closing(findings)
    return [
        *([table(findings, "all in all", single)] if single else []),
        *(table(findings, measure.name, [measure]) for measure in shown if measure not in single),
        *([Table(last[0][0], ("", *last[0][1:]), last[1:])] if last else []),
    ]


def table(findings: Findings[Any], title: str, measures: Sequence[Measure]) -> Table:
    """Return a table of measures, a row for each level and case: estimate, quantiles, ratios."""
    bases = [against.base for against in findings.bench.against if [against.measure] == [*measures]]
    rows = [["", "values", "median (of blocks)", "p95", "p99", *(f"of {base}" for base in bases)]]
    for measure in measures:
        for level, case in findings.places(measure):
            values = [sample.value for sample in findings.of(measure, case, level)]
            cells = [label(findings.level_name(measure), level, case) or measure.name, f"{len(values):,}"]
            cells.append(interval(findings.estimate(measure, case, level), measure.unit))
            cells += [number(stats.quantile(values, share), measure.unit) for share in (0.95, 0.99)]
            for base in bases:
                ratio = stats.estimate(findings.compared(measure, base, case, level))
                cells.append("" if case == base else interval(ratio))
            rows.append(cells)
    empty = {i for i in (3, 4) if all(row[i] == "-" for row in rows[1:])}
    kept = [[cell for i, cell in enumerate(row) if i not in empty] for row in rows]
    return Table(title, kept[0], kept[1:])


def printing() -> Console:
    """Return a console for a bench's output; if it is not a terminal, it is wide enough for the tables."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, PRINTED_WIDTH)
    return console


def print_report(bench: AnyBench, report: Report) -> None:
    """Print a report's tables and checks."""
    console = printing()
    for rows in tables(bench.findings(report)):
        print_table(rows, console)
    colours = {"holds": "green", "fails": "red", "cannot tell": "yellow"}
    for exact, title in (
        (True, "checks that decide the exit code"),
        (False, "checks that may fail by chance"),
    ):
        if shown := [check for check in report.checks if check.exact is exact]:
            console.print(f"[bold]{title}[/]")
        for one in shown:
            text = f"[{colours[one.outcome]}]{one.outcome}[/]  {one.name}: {one.detail}"
            console.print(text, soft_wrap=True)


def print_table(table: Table, console: Console) -> None:
    """Print a table on a console, with numbers aligned to the right."""
    printed = Grid(box=None, header_style="bold", title=table.title, title_justify="left", title_style="bold")
    for i, name in enumerate(table.head):
        printed.add_column(name, justify="right" if i else "left", no_wrap=not i)
    for row in table.rows:
        printed.add_row(*row)
    console.print(printed)


def label(name: str, level: float | None, case: str) -> str:
    """Return the label of a table row: how many of `name`, and the case, as in "8 sessions, cold"."""
    if level is None:
        return case
    at = f"{level:,g} {name}"
    return f"{at}, {case}" if case else at
