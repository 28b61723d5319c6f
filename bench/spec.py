"""The parts of a bench: what it measures, the turns and samples of a run, and their lookup. Pure.

A bench is data and one measuring coroutine; tables, ratios, plots and pages follow from the samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from msgspec import Struct

from . import stats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .checks import Check
    from .run import Run
    from .stats import Blocks, Estimate

P = TypeVar("P")

Unit = Literal["s", "bytes", "tokens", "tokens/s", "share", ""]
Kind = Literal["cdf", "over time", "by x", "bars", "points"]


class Turn(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One generate. Times are the client's, in seconds; the counts are the worker's account.

    `case` is what is compared, `x` the place on an axis, `block` the unit of pairing and statistics. `at_s`
    counts from the start of the run, `first_s` and `total_s` from sending the request; `gaps_s` are the times
    between chunks. `counts` are the tokens of each chunk; empty if each has one. Exactly one of `error` and
    `position` is set. `joined`: the chunks add up to the result. `facts` are specific to a bench.
    """

    case: str = ""
    x: float | None = None
    block: int = 0
    session: str = ""
    at_s: float = 0.0
    total_s: float
    first_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    error: str | None = None
    message: str | None = None
    own_tokens: int | None = None
    position: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    tokens: tuple[int, ...] = ()
    finish_reason: str | None = None
    joined: bool | None = None
    kv_live_bytes: int = 0
    queued_s: float = 0.0
    rewritten_from: int | None = None
    facts: dict[str, float | str | None] = {}

    @property
    def place(self) -> tuple[float | None, int]:
        """What identifies the same turn in all cases: level and block."""
        return self.x, self.block

    @property
    def num_tokens(self) -> float:
        """The tokens of the answer; a fact, if only their number is known."""
        return len(self.tokens) or self.fact("tokens") or 0

    @property
    def per_token_s(self) -> float | None:
        """Seconds per token after the first; None for an answer of fewer than two tokens."""
        if self.first_s is None or self.num_tokens < 2:
            return None
        return (self.total_s - self.first_s) / (self.num_tokens - 1)

    def fact(self, name: str) -> float | None:
        """Return a fact that is a number; None if there is none."""
        value = self.facts.get(name)
        return value if isinstance(value, int | float) else None


class Sample(Struct, frozen=True, array_like=True):
    """One value of a measure."""

    measure: str
    case: str
    x: float | None
    block: int
    value: float


@dataclass(frozen=True, slots=True)
class Measure:
    """One quantity. `of` returns its values for a turn: a number, several, or None; else there are samples.

    `log`: values are above 0, and the typical value is a geometric mean; not for shares, or values that may
    be 0. `at` returns a value's place on an axis, if not the turn's `x`. `levels` names `x`, if it is one of
    a few levels that are not the bench's.
    """

    name: str
    unit: Unit
    better: Literal["lower", "higher"] = "lower"
    of: Callable[[Turn], float | Sequence[float] | None] | None = None
    log: bool = True
    at: Callable[[Turn], float | None] | None = None
    levels: str | None = None


@dataclass(frozen=True, slots=True)
class Against:
    """A comparison by block: a measure in every other case against the case `base`."""

    measure: Measure
    base: str
    kind: Literal["ratio", "difference"] = "ratio"


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure; `caption` says how to read it, `x` names an axis without levels.

    `cdf`, `over time` (x in seconds) and `points` show a line or cloud for each of `measures` and each case;
    `by x` shows the typical values of the first, with their intervals; `bars` stacks all for each case.
    """

    kind: Kind
    title: str
    measures: tuple[Measure, ...]
    caption: str = ""
    log: bool = False
    x: str = ""


@dataclass(frozen=True, slots=True)
class Bench(Generic[P]):
    """One bench. `plan` is an annotated dataclass, whose docstring is the command's help (see `plan`).

    `cases` is the order of tables and legends; other cases come last. `levels` names `x` if it is one of a
    few levels with table rows of their own (lengths, batch sizes); otherwise `x` is only an axis. `remote`:
    the bench can measure a running worker. `planned` says whether a failed turn is intended. `follows` makes
    the samples of several turns together (tokens/s).
    """

    name: str
    title: str
    plan: type[P]
    measures: tuple[Measure, ...]
    plots: tuple[Plot, ...]
    checks: Callable[[Findings[P]], Iterable[Check]]
    measure: Callable[[Run[P]], Awaitable[None]]
    cases: tuple[str, ...] = ("",)
    against: tuple[Against, ...] = ()
    levels: str = ""
    remote: bool = False
    planned: Callable[[Turn], bool] = lambda _: False
    notes: Callable[[P], Iterable[str]] = lambda _: ()
    follows: Callable[[Sequence[Turn]], Iterable[Sample]] = lambda _: ()


AnyBench = Bench[Any]


@dataclass
class Findings(Generic[P]):
    """The measurements of a run, looked up by measure, case and level."""

    bench: Bench[P]
    plan: P
    turns: Sequence[Turn]
    given: Sequence[Sample] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    _looked_up: dict[tuple[str, str | None, float | None], list[Sample]] = field(default_factory=dict)

    @cached_property
    def answered(self) -> list[Turn]:
        """The turns without a fault."""
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
                    x = turn.x if measure.at is None else measure.at(turn)
                    found[measure.name] += (
                        Sample(measure.name, turn.case, x, turn.block, one) for one in values
                    )
        for sample in self.bench.follows(self.turns):
            found[sample.measure].append(sample)
        return found

    def of(self, measure: Measure, case: str | None = None, level: float | None = None) -> list[Sample]:
        """Return the samples of a measure, or those of one case and one level."""
        key = (measure.name, case, level)
        if key not in self._looked_up:
            some = self._samples[measure.name] if case is None else self.of(measure)
            self._looked_up[key] = [
                sample
                for sample in some
                if case in {None, sample.case} and (level is None or level == sample.x)
            ]
        return self._looked_up[key]

    def cases(self, measure: Measure) -> list[str]:
        """Return the cases that have samples, in the bench's order."""
        found = dict.fromkeys(sample.case for sample in self._samples[measure.name])
        return sorted(found, key=lambda case: (*self.bench.cases, case).index(case))

    def level_name(self, measure: Measure) -> str:
        """Return the name of a measure's levels; empty if `x` is only an axis."""
        return self.bench.levels if measure.levels is None else measure.levels

    def places(self, measure: Measure) -> list[tuple[float | None, str]]:
        """Return the levels and cases that have table rows; a level of None means all or none."""
        levelled = bool(self.level_name(measure))
        found = {(sample.x if levelled else None, sample.case) for sample in self._samples[measure.name]}
        order = self.cases(measure)
        return sorted(found, key=lambda one: (one[0] is None, one[0] or 0.0, order.index(one[1])))

    def blocks(self, measure: Measure, case: str, level: float | None = None) -> Blocks:
        """Return each block's median."""
        return stats.by_block((sample.block, sample.value) for sample in self.of(measure, case, level))

    def numbers(self, measure: Measure) -> dict[str, list[float]]:
        """Return the blocks' medians of each case, over all levels."""
        return {case: [*self.blocks(measure, case).values()] for case in self.cases(measure)}

    def estimate(self, measure: Measure, case: str, level: float | None = None) -> Estimate | None:
        """Return the typical value with its interval."""
        return stats.mean(self.blocks(measure, case, level).values(), log=measure.log)

    def compared(self, against: Against, case: str, level: float | None = None) -> list[float]:
        """Return the ratios of a case to the case `base`, or the differences from it, block by block."""
        compare = {"ratio": stats.ratios, "difference": stats.differences}[against.kind]
        return compare(*(self.blocks(against.measure, one, level) for one in (against.base, case)))

    def pairs(self, base: str) -> Iterator[tuple[Turn, Turn]]:
        """Yield the turns of all other cases, each with the turn of the case `base` at the same place."""
        bases = {turn.place: turn for turn in self.answered if turn.case == base}
        for turn in self.answered:
            if turn.case != base and turn.place in bases:
                yield turn, bases[turn.place]
