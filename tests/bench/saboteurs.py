"""The one table of lying and slowed workers, against the checks that must catch them.

A bench's `Suite` has an honest run, made of turns as a worker in good health gives them, and its lies: each
bends those turns, and is caught by the check that it names and by no other. A lie with a `serve` is also a
worker: `python -m saboteurs BENCH NAME serve ...` is `turnkeep serve` that tells it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.samples import Sample, Turn
    from bench.spec import AnyBench


@dataclass(frozen=True)
class Lie:
    """`name` is what the worker does, `check` how the name of the check begins that catches it.

    `exact`: the short form catches it too.
    """

    name: str
    check: str
    bend: Callable[[Turn], Turn] = lambda turn: turn
    bend_sample: Callable[[Sample], Sample] = lambda sample: sample
    serve: Callable[[], None] | None = None
    exact: bool = True


@dataclass(frozen=True)
class Suite:
    """`honest` makes the turns and samples of a run by its seed, `control` a worker that tells no lie."""

    bench: AnyBench
    plan: Any
    honest: Callable[[int], tuple[Sequence[Turn], Sequence[Sample]]]
    lies: tuple[Lie, ...]
    control: Callable[[], None] = lambda: None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def serving(self) -> dict[str, Callable[[], None]]:
        """Real workers by their names."""
        told = {lie.name: lie.serve for lie in self.lies if lie.serve is not None}
        return {"is honest": self.control, **told}


#: What any worker may do, under every bench whose turns tell of it.
COMMON = (
    Lie(
        "leaves a turn unanswered",
        "every turn was answered",
        lambda turn: replace(turn, error="internal") if turn.block == 1 else turn,
    ),
    Lie("loses a chunk", "the chunks of an answer", lambda turn: replace(turn, joined=False)),
    Lie(
        "tells other sums",
        "what was cached and what was prefilled",
        lambda turn: replace(turn, prompt_tokens=turn.prompt_tokens + 1),
    ),
)


def suites() -> list[Suite]:
    """List the suites of all benches that have one."""
    import lies_restart

    return [lies_restart.SUITE]


def main() -> None:
    """Run a lying worker."""
    bench, name = sys.argv[1:3]
    del sys.argv[1:3]
    (suite,) = (suite for suite in suites() if suite.bench.name == bench)
    suite.serving[name]()
    from worker.__main__ import main as serve

    serve()


if __name__ == "__main__":
    main()
