"""`turnkeep bench compare`: shows two reports side by side; gives a verdict on five alternating pairs.

A machine's speed varies more between runs than within a run. So two reports get no verdict: they cannot show
whether the code or the machine's speed has changed. Five pairs of alternating runs (A B A B ...) get a
verdict; each pair is a block.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import stats
from .faults import ReportError
from .figures import interval, number
from .report import Report, read
from .spec import AnyBench
from .stats import Estimate
from .tables import Table, label
from .turns import Measure

Pair = tuple[Report, Report]


def load(paths: Sequence[Path], benches: Mapping[str, AnyBench]) -> tuple[AnyBench, list[Pair]]:
    """Read reports in the order A B A B ... as pairs. Raises `ReportError` if they are not comparable."""
    if len(paths) < 2 or len(paths) % 2:
        raise ReportError("reports are compared in pairs: A.json B.json, then more pairs in the same order")
    reports = [read(path) for path in paths]
    first = reports[0]
    if first.bench not in benches:
        raise ReportError(f"{paths[0]} is of a bench that is not known: {first.bench}")
    for report in reports[1:]:
        if report.bench != first.bench:
            raise ReportError(f"reports of {first.bench} and of {report.bench} cannot be compared")
        here, there = (one.plan | {"model": one.facts.get("model")} for one in (first, report))
        if changed := [name for name in sorted(here | there) if here.get(name) != there.get(name)]:
            values = "; ".join(f"{name} is {here.get(name)} and {there.get(name)}" for name in changed)
            raise ReportError(f"reports of different settings cannot be compared: {values}")
    return benches[first.bench], list(zip(reports[::2], reports[1::2], strict=True))


def interleaved(pairs: Sequence[Pair]) -> bool:
    """Say whether the runs alternated: whether the two runs of each pair directly followed each other."""
    order = sorted(range(2 * len(pairs)), key=lambda i: pairs[i // 2][i % 2].started_at)
    return all(one // 2 == other // 2 for one, other in zip(order[::2], order[1::2], strict=True))


def table(bench: AnyBench, pairs: Sequence[Pair]) -> Table:
    """Compare every measure that all reports have; only ratios of alternating runs have intervals."""
    judged = len(pairs) >= stats.MIN_BLOCKS and interleaved(pairs)
    sides = [[bench.findings(report) for report in side] for side in zip(*pairs, strict=True)]
    first, rows = sides[0][0], []
    for measure in bench.measures:
        for level, case in first.places(measure):
            found = [[one.estimate(measure, case, level) for one in side] for side in sides]
            base, other = ([one.value for one in side if one is not None] for side in found)
            if {len(base), len(other)} != {len(pairs)}:
                continue
            ratios = stats.ratios(dict(enumerate(base)), dict(enumerate(other)))
            ratio = stats.mean(ratios, log=True)
            shown = interval(ratio) if judged else number(None if ratio is None else ratio.value)
            medians = [number(statistics.median(side), measure.unit) for side in (base, other)]
            name = f"{measure.name}, {label(first.level_name(measure), level, case)}"
            rows.append((name, *medians, shown, _reading(ratio, measure) if judged else ""))
    return Table("Typical values", ("", "A", "B", "B / A", ""), rows)


def warnings(pairs: Sequence[Pair]) -> list[str]:
    """Return sentences that say why the runs are hard to compare, and whether ratios get a verdict."""
    cut = [report for pair in pairs for report in pair if not report.complete]
    found = [f"a report is not complete: {report.ending}" for report in cut]
    here, there = (_setting(report) for report in pairs[0])
    if changed := [name for name in here if here[name] != there.get(name)]:
        found.append(f"absolute figures are not comparable: the two differ in {', '.join(changed)}")
    if len(pairs) < stats.MIN_BLOCKS:
        need = f"{stats.MIN_BLOCKS} pairs of runs that took turns, A B A B ..."
        return [*found, f"nothing is judged: that takes {need}"]
    if not interleaved(pairs):
        return [*found, "nothing is judged: the runs did not take turns"]
    return [*found, "each line is judged by itself: one of twenty that are equal seems not to be"]


def _reading(ratio: Estimate | None, measure: Measure) -> str:
    if ratio is None or ratio.low <= 1 <= ratio.high:
        return "cannot tell"
    return "B is better" if (ratio.value < 1) == (measure.better == "lower") else "B is worse"


def _setting(report: Report) -> dict[str, object]:
    """Return a report's settings and facts that must be equal in comparable runs."""
    environment = report.environment | {"load_average": None}  # differs between any two runs
    worker = {
        f"worker's {name}": getattr(report.worker, name, None)
        for name in ("model", "device", "version", "max_memory_bytes")
    }
    return {**environment, **report.facts, **worker, "target": report.target}
