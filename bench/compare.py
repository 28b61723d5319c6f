"""`turnkeep bench compare`: what two runs measured, side by side; and a judgement where many took turns.

Two runs scatter more between them than within each, since the machine has its hours: their inner scatter
cannot tell a change from the hour. So two reports are shown. Five pairs of runs that took turns are judged: a
run is then a block.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from . import stats
from .faults import ReportError
from .figures import interval, number
from .report import Report, Setting, read
from .tables import Rows, show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from .spec import AnyBench, Measure
    from .stats import Estimate

#: Parts of the environment that differ between any two runs.
_PASSING = frozenset({"load_average"})

Pair = tuple[Report, Report]


@dataclass(frozen=True, slots=True)
class Row:
    """One measure, level and case in both: `ratio` is B by A, with an interval where runs took turns."""

    label: str
    measure: Measure
    base: float
    other: float
    ratio: Estimate | None

    @property
    def reading(self) -> str:
        """Judge it; nothing is said of two runs alone."""
        if self.ratio is None or self.ratio.low is None or self.ratio.high is None:
            return ""
        if self.ratio.low <= 1 <= self.ratio.high:
            return "cannot tell"
        return "B is better" if (self.ratio.value < 1) == (self.measure.better == "lower") else "B is worse"


def load(paths: Sequence[Path], benches: Mapping[str, AnyBench]) -> tuple[AnyBench, list[Pair]]:
    """Read reports that can be compared, as pairs A B A B ... Raises `ReportError` saying why they cannot."""
    if len(paths) < 2 or len(paths) % 2:
        raise ReportError("reports are compared in pairs: A.json B.json, then more pairs in the same order")
    reports = [read(path) for path in paths]
    first = reports[0]
    if first.bench not in benches:
        raise ReportError(f"{paths[0]} is of a bench that is not known: {first.bench}")
    for path, report in zip(paths[1:], reports[1:], strict=True):
        if report.schema != first.schema:
            raise ReportError(
                f"reports of different benches cannot be compared: {paths[0]} is {first.schema}, {path} is"
                f" {report.schema}"
            )
        here, there = (_identity(one, benches) for one in (first, report))
        if changed := [name for name in sorted(here | there) if here.get(name) != there.get(name)]:
            values = "; ".join(f"{name} is {here.get(name)} and {there.get(name)}" for name in changed)
            raise ReportError(f"reports of different settings cannot be compared: {values}")
    return benches[first.bench], list(zip(reports[::2], reports[1::2], strict=True))


def _identity(report: Report, benches: Mapping[str, AnyBench]) -> dict[str, Setting]:
    """Return what two runs must share: the plan, and the facts that the bench names."""
    return {**report.plan, **{name: report.facts.get(name) for name in benches[report.bench].same}}


def interleaved(pairs: Sequence[Pair]) -> bool:
    """Say whether the runs took turns: no other run lies between the two of a pair."""
    order = sorted(range(2 * len(pairs)), key=lambda i: pairs[i // 2][i % 2].started_at)
    return all(one // 2 == other // 2 for one, other in zip(order[::2], order[1::2], strict=True))


def rows(bench: AnyBench, pairs: Sequence[Pair]) -> list[Row]:
    """Compare every measure that all reports have. Five pairs that took turns give an interval."""
    judged = len(pairs) >= stats.MIN_BLOCKS and interleaved(pairs)
    sides = [[report.findings(bench) for report in side] for side in zip(*pairs, strict=True)]
    found = []
    for measure in bench.measures:
        for level in sides[0][0].levels(measure):
            for case in sides[0][0].cases(measure):
                values = [
                    [e.value for one in side if (e := one.estimate(measure, case, level)) is not None]
                    for side in sides
                ]
                if {len(some) for some in values} != {len(pairs)}:
                    continue
                base, other = map(statistics.median, values)
                by_run = [dict(enumerate(some)) for some in values]
                ratio = stats.mean(stats.ratios(*by_run), log=True)
                if ratio is not None and not judged:
                    ratio = stats.Estimate(ratio.value, None, None, ratio.blocks)
                name = sides[0][0].level_name(measure)
                parts = [measure.name, "" if level is None else f"{level:,g} {name}", case]
                found.append(Row(", ".join(filter(None, parts)), measure, base, other, ratio))
    return found


def warnings(pairs: Sequence[Pair]) -> list[str]:
    """Say what makes the runs less comparable than they look."""
    found = [
        f"{name} is not complete ({report.ending})"
        for pair in pairs
        for name, report in zip("AB", pair, strict=True)
        if not report.complete
    ]
    first, other = pairs[0]
    here, there = (msgspec.to_builtins(report.environment) for report in (first, other))
    changed = [name for name in here if name not in _PASSING and here[name] != there[name]]
    changed += [name for name in first.facts if first.facts[name] != other.facts.get(name)]
    if first.target != other.target:
        changed.append("target")
    if first.worker is not None and other.worker is not None:
        changed += [
            f"worker's {name}"
            for name in ("model", "device", "version", "max_memory_bytes")
            if getattr(first.worker, name) != getattr(other.worker, name)
        ]
    if changed:
        found.append(f"absolute figures are not comparable: the two differ in {', '.join(changed)}")
    if len(pairs) < stats.MIN_BLOCKS:
        need = stats.MIN_BLOCKS
        found.append(f"nothing is judged: that takes {need} pairs of runs that took turns, A B A B ...")
    elif not interleaved(pairs):
        found.append("nothing is judged: the runs did not take turns")
    return found


def print_comparison(bench: AnyBench, pairs: Sequence[Pair], console: Console) -> None:
    """Print the comparison."""
    table = [
        (
            row.label,
            number(row.base, row.measure.unit),
            number(row.other, row.measure.unit),
            interval(row.ratio),
            row.reading,
        )
        for row in rows(bench, pairs)
    ]
    show(Rows("Typical values", ("", "A", "B", "B / A", ""), table), console)
    for warning in warnings(pairs):
        console.print(f"[yellow]warning[/] {warning}", soft_wrap=True)
