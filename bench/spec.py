"""What a bench is: data, and one measuring coroutine. Tables, ratios, plots and pages follow from it."""

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
    """One quantity. `of` takes it from a turn: a number, several, or None. Else the bench gives samples.

    `log`: it is above 0, and its typical value a geometric mean. Shares, and what may be 0, are not. `at` is
    the place of its values on an axis, where that is not the turn's `x`; `levels` is its name, where `x` is
    one of a few levels and these are not the bench's. Without a `table` it is only drawn.
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
    """What is set against what, block by block: the measure in every other case against the case `base`."""

    measure: Measure
    base: str
    kind: Literal["ratio", "difference"] = "ratio"


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure; `caption` says how to read it, and `x` names an axis that has no levels.

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

    `cases` are in the order of tables and legends; one that is not named comes behind them. `levels` names
    `x` where it is one of a few levels, which have rows of their own (lengths, batch sizes); else `x` is only
    an axis. `remote`: it can measure a worker that runs already. `planned`: a turn that the bench meant to
    fail. `same` are facts that two runs must share to be compared. `follows` makes the samples that take
    several turns (tokens a second, of all together).
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
