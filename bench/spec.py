"""The parts of a bench: data, and one measuring coroutine. Tables, ratios, plots and pages follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from .checks import Check
    from .run import Run
    from .samples import Findings, Sample, Turn

P = TypeVar("P")

Unit = Literal["s", "bytes", "tokens", "tokens/s", "share", ""]
Kind = Literal["cdf", "over time", "by x", "bars", "points"]


@dataclass(frozen=True, slots=True)
class Measure:
    """One quantity. `of` returns its values for a turn: a number, several, or None; else there are samples.

    `log`: values are above 0, and the typical value is a geometric mean; not for shares, or values that may
    be 0. `at` returns a value's place on an axis, if not the turn's `x`. `levels` names `x`, if it is one of
    a few levels that are not the bench's. Without `table` the measure is only drawn.
    """

    name: str
    unit: Unit
    better: Literal["lower", "higher"] = "lower"
    of: Callable[[Turn], float | Sequence[float] | None] | None = None
    log: bool = True
    at: Callable[[Turn], float | None] | None = None
    levels: str | None = None
    table: bool = True


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
    the bench can measure a running worker. `planned` says whether a failed turn is intended. `same` are facts
    that two runs must share to be compared. `follows` makes the samples of several turns together (tokens/s).
    """

    name: str
    title: str
    plan: type[P]
    cases: tuple[str, ...]
    measures: tuple[Measure, ...]
    against: tuple[Against, ...]
    plots: tuple[Plot, ...]
    checks: Callable[[Findings[P]], Iterable[Check]]
    measure: Callable[[Run[P]], Awaitable[None]]
    levels: str = ""
    remote: bool = False
    planned: Callable[[Turn], bool] = lambda _: False
    same: tuple[str, ...] = ()
    notes: Callable[[P], Iterable[str]] = lambda _: ()
    follows: Callable[[Sequence[Turn]], Iterable[Sample]] = lambda _: ()


AnyBench = Bench[Any]
