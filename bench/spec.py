"""Defines the parts of a bench; looks up a run's measurements by measure, case and level. Pure.

A bench is data and one measuring coroutine; other modules make tables, ratios, plots and pages from the
samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

import msgspec

from . import stats
from .checks import Check, common
from .report import Report
from .run import BenchRun
from .stats import Blocks, Estimate
from .turns import Measure, Sample, TimedTurn

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class CaseRatio:
    """A ratio to report: every other case to the case `base`, in one measure, block by block."""

    measure: Measure
    base: str


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot of a bench's page."""

    #: `cdf` and `over time` (x in seconds) show a line for each of `measures` and each case; `by x` shows the
    #: first measure's typical values with intervals.
    kind: Literal["cdf", "over time", "by x"]
    title: str
    measures: tuple[Measure, ...]
    #: How to read the plot.
    caption: str = ""
    #: Whether the axis of values is logarithmic.
    log: bool = False
    #: The name of the x axis, if it has no levels.
    x: str = ""


@dataclass(frozen=True, slots=True)
class Bench(Generic[P]):
    """A bench's definition."""

    name: str
    #: An annotated dataclass; its docstring is the help (see `bench.plan`).
    plan: type[P]
    measures: tuple[Measure, ...]
    plots: tuple[Plot, ...]
    checks: Callable[[Findings[P]], Iterable[Check]]
    #: Runs the bench, and records turns and samples in the run.
    measure: Callable[[BenchRun[P]], Awaitable[None]]
    #: The order of cases in tables and legends; other cases come last.
    cases: tuple[str, ...] = ("",)
    against: tuple[CaseRatio, ...] = ()
    #: Names `x` if it is one of a few levels with table rows of their own (lengths, batch sizes); otherwise
    #: `x` is only an axis.
    levels: str = ""
    #: A text for the page, with `{plan.NAME}` for settings.
    notes: str = ""
    #: Computes samples that need several turns, such as tokens/s.
    follows: Callable[[Sequence[TimedTurn]], Iterable[Sample]] = lambda _: ()
    #: Makes a last table's rows; the first cell is its title.
    closing: Callable[[Findings[P]], Sequence[Sequence[str]]] = lambda _: ()

    @property
    def title(self) -> str:
        """The first line of the plan's docstring."""
        return (self.plan.__doc__ or "").partition("\n")[0].rstrip(".")

    def findings(self, report: Report) -> Findings[P]:
        """Return a report's measurements as `Findings`, for looking them up."""
        plan = msgspec.convert(report.plan, self.plan, dec_hook=lambda kind, value: kind(value))
        return Findings(self, plan, report.turns, report.samples, report.facts)

    def checked(self, found: Findings[P], lags_s: Sequence[float]) -> tuple[Check, ...]:
        """Return the outcomes of the checks that all benches share, then of this bench's own checks.

        `lags_s` are the delays of the measuring event loop. The shared checks are left out if the run has
        samples and no turns.
        """
        shared = common(found.turns, lags_s) if found.turns or not found.given else ()
        return (*shared, *self.checks(found))


AnyBench = Bench[Any]


@dataclass
class Findings(Generic[P]):
    """The measurements of a run, looked up by measure, case and level."""

    bench: Bench[P]
    plan: P
    turns: Sequence[TimedTurn]
    given: Sequence[Sample] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def answered(self) -> list[TimedTurn]:
        """The turns without an error."""
        return [turn for turn in self.turns if turn.error is None]

    @cached_property
    def _samples(self) -> dict[str, list[Sample]]:
        found: defaultdict[str, list[Sample]] = defaultdict(list)
        for sample in self.given:
            found[sample.measure].append(sample)
        for measure in self.bench.measures:
            for turn in self.answered:
                if measure.of is not None:
                    value = measure.of(turn)
                    values = value if isinstance(value, Iterable) else () if value is None else (value,)
                    found[measure.name] += (
                        Sample(measure.name, turn.case, turn.x, turn.block, one) for one in values
                    )
        for sample in self.bench.follows(self.turns):
            found[sample.measure].append(sample)
        return found

    def of(self, measure: Measure, case: str | None = None, level: float | None = None) -> list[Sample]:
        """Return the samples of a measure: all, or only those of `case` and of `level`."""
        return [
            sample
            for sample in self._samples[measure.name]
            if case in {None, sample.case} and level in {None, sample.x}
        ]

    def cases(self, measure: Measure) -> list[str]:
        """Return the cases that have samples, in the bench's order."""
        found = dict.fromkeys(sample.case for sample in self._samples[measure.name])
        return sorted(found, key=lambda case: (*self.bench.cases, case).index(case))

    def level_name(self, measure: Measure) -> str:
        """Return the name of a measure's levels; empty if `x` is only an axis."""
        return self.bench.levels if measure.levels is None else measure.levels

    def places(self, measure: Measure) -> list[tuple[float | None, str]]:
        """Return the pairs (level, case) that have table rows; the level is None without levels."""
        levelled = bool(self.level_name(measure))
        found = {(sample.x if levelled else None, sample.case) for sample in self._samples[measure.name]}
        order = self.cases(measure)
        return sorted(found, key=lambda one: (one[0] is None, one[0] or 0.0, order.index(one[1])))

    def blocks(self, measure: Measure, case: str, level: float | None = None) -> Blocks:
        """Return the median of a measure's values in each block."""
        return stats.by_block((sample.block, sample.value) for sample in self.of(measure, case, level))

    def estimate(self, measure: Measure, case: str, level: float | None = None) -> Estimate | None:
        """Return a measure's typical value with its interval; None without values."""
        return stats.estimate(self.blocks(measure, case, level).values())

    def compared(self, measure: Measure, base: str, case: str, level: float | None = None) -> list[float]:
        """Return, block by block, the ratio of a case to the case `base`."""
        return stats.ratios(*(self.blocks(measure, one, level) for one in (base, case)))

    def pairs(self, base: str) -> Iterator[tuple[TimedTurn, TimedTurn]]:
        """Yield each turn of other cases with its counterpart (same level and block) in the case `base`."""
        bases = {turn.place: turn for turn in self.answered if turn.case == base}
        for turn in self.answered:
            if turn.case != base and turn.place in bases:
                yield turn, bases[turn.place]
