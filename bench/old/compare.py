"""`turnkeep bench compare`: two reports side by side, as ratios of medians with their spread."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from bench.faults import ReportError

from . import stats
from .report import Report, Series, read

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from .stats import Ratio

#: Parts of the environment that differ between any two runs.
_PASSING = frozenset({"load_average"})


@dataclass(frozen=True, slots=True)
class Row:
    """One measure of both reports; `ratio` is None where a side has no values or the base is 0."""

    name: str
    unit: str
    base: float | None
    other: float | None
    ratio: Ratio | None
    reading: str


def load(base: Path, other: Path) -> tuple[Report, Report]:
    """Read two reports that can be compared. Raises `ReportError` saying why they cannot."""
    first, second = read(base, Report), read(other, Report)
    if first.schema != second.schema:
        raise ReportError(
            f"reports of different benches cannot be compared: {base} is {first.schema},"
            f" {other} is {second.schema}"
        )
    names = sorted(first.settings.keys() | second.settings.keys())
    changed = [name for name in names if first.settings.get(name) != second.settings.get(name)]
    if changed:
        values = "; ".join(
            f"{name} is {first.settings.get(name)} and {second.settings.get(name)}" for name in changed
        )
        raise ReportError(f"reports of different settings cannot be compared: {values}")
    return first, second


def warnings(first: Report, second: Report) -> list[str]:
    """Say what makes the two less comparable than they look."""
    found = [
        f"{name} is not complete ({report.ending})"
        for name, report in (("A", first), ("B", second))
        if not report.complete
    ]
    here, there = (msgspec.to_builtins(report.environment) for report in (first, second))
    changed = [name for name in here if name not in _PASSING and here[name] != there[name]]
    if first.target != second.target:
        changed.append("target")
    if first.worker is not None and second.worker is not None:
        changed += [
            f"worker's {name}"
            for name in ("model", "device", "version", "max_memory_bytes")
            if getattr(first.worker, name) != getattr(second.worker, name)
        ]
    if changed:
        found.append(f"absolute figures of the two are not comparable: they differ in {', '.join(changed)}")
    return found


def rows(first: Report, second: Report) -> list[Row]:
    """Compare every measure that both reports have, in the order of the first."""
    return [
        _row(name, first.series[name], second.series[name]) for name in first.series if name in second.series
    ]


def show(first: Report, second: Report, console: Console) -> None:
    """Print the comparison."""
    table = Table(box=None, header_style="bold")
    table.add_column("median of", no_wrap=True)
    for name in ("A", "B", "B / A", "95% interval"):
        table.add_column(name, justify="right", no_wrap=name != "95% interval")
    table.add_column("", no_wrap=True)
    for row in rows(first, second):
        ratio, spread = "-", "-"
        if row.ratio is not None:
            ratio, spread = f"{row.ratio.ratio:.3f}", f"{row.ratio.low:.3f} to {row.ratio.high:.3f}"
        table.add_row(
            row.name, _size(row.base, row.unit), _size(row.other, row.unit), ratio, spread, row.reading
        )
    console.print(table)
    for warning in warnings(first, second):
        console.print(f"[yellow]warning[/] {warning}", soft_wrap=True)


def _row(name: str, first: Series, second: Series) -> Row:
    ratio = stats.median_ratio(first.values, second.values)
    medians = [statistics.median(series.values) if series.values else None for series in (first, second)]
    return Row(name, first.unit, medians[0], medians[1], ratio, _reading(ratio, first.better))


def _reading(ratio: Ratio | None, better: str) -> str:
    if ratio is None:
        return "cannot tell"
    if ratio.low <= 1 <= ratio.high:
        return "no difference"
    return "B is better" if (ratio.ratio < 1) == (better == "lower") else "B is worse"


def _size(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    match unit:
        case "s":
            return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
        case "bytes":
            return f"{value / 2**20:.1f} MiB"
        case _:
            return f"{value:g} {unit}"
