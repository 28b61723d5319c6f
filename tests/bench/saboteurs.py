"""The one table of lying and slowed workers, against the checks that must catch them.

A bench's `Suite` has an honest run, made of turns as a worker in good health gives them, and its lies: each
bends those turns, and is caught by the check that it names and by no other. A lie with a `serve` is also a
worker: `python -m saboteurs BENCH NAME serve ...` is `turnkeep serve` that tells it.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from worker.batch.shared_pass import SharedPass
from worker.device.acquisition import Acquisition
from worker.device.admission import Ledger
from worker.device.runner import Runner
from worker.sessions import execution, history

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.spec import AnyBench, Sample, Turn


#: What prefilling a token takes in honest runs of long sessions.
PREFILL_S = 0.003


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
    """`honest` makes the turns and samples of a run by its seed, `control` a worker that tells no lie.

    `long` are options of a run that lasts until it is ended; `model` is the fixture of what is run, by the
    module `program`.
    """

    bench: AnyBench
    plan: Any
    honest: Callable[[int], tuple[Sequence[Turn], Sequence[Sample]]]
    lies: tuple[Lie, ...]
    long: tuple[str, ...]
    control: Callable[[], None] = lambda: None
    facts: dict[str, Any] = field(default_factory=dict)
    model: str = "tiny_model"
    program: str = "worker.__main__"

    @property
    def common(self) -> tuple[Lie, ...]:
        """What any worker may do, under a bench whose turns tell of it."""
        return COMMON if self.honest(0)[0] else ()

    @property
    def serving(self) -> dict[str, Callable[[], None]]:
        """Real workers by their names."""
        told = {lie.name: lie.serve for lie in self.lies if lie.serve is not None}
        return {"is honest": self.control, **told}


def only(case: str, **changes: Any) -> Callable[[Turn], Turn]:
    """Bend the turns of one case."""
    return lambda turn: replace(turn, **changes) if turn.case == case else turn


def told(case: str, **facts: float | str) -> Callable[[Turn], Turn]:
    """Bend what turns of one case came to."""
    return lambda turn: replace(turn, facts=turn.facts | facts) if turn.case == case else turn


def wait_for_all(turn: Turn) -> Turn:
    """Take the time of prefilling all that the session holds."""
    return replace(turn, first_s=turn.first_s + PREFILL_S * turn.facts["held"])


def never_restore() -> None:
    """Drop what was restored before the turn begins, and say so."""
    begin = Runner._submit

    def forgetful(self: Runner, turn: Any) -> None:
        turn.restored, turn.num_restored = None, 0
        begin(self, turn)

    Runner._submit = forgetful


def restore_badly() -> None:
    """Turn the sign of all values that were restored."""
    rebuilt = Acquisition._rebuilt

    def spoil(self: Acquisition, turn: Any) -> Any:
        held = rebuilt(self, turn)
        for cache in held.caches if held is not None else ():
            cache.values = -cache.values
        return held

    Acquisition._rebuilt = spoil


def let_tokens_cost() -> None:
    """Make prefill slow: a tiny model is so fast that a busy machine hides it."""
    step = SharedPass.step

    def slow(self: SharedPass, pieces: Any, **more: Any) -> None:
        time.sleep(3e-4 * sum(len(piece.tokens) for piece in pieces))
        step(self, pieces, **more)

    SharedPass.step = slow


def prefill_anew() -> None:
    """Drop what a session has in memory, and say so."""
    begin = Runner._submit

    def forgetful(self: Runner, turn: Any) -> None:
        turn.num_kept, turn.restored, turn.num_restored = 0, None, 0
        begin(self, turn)

    Runner._submit = forgetful


def report_no_kv() -> None:
    """Answer that a session has no KV."""
    generated = execution.Generated
    execution.Generated = lambda **fields: generated(**(fields | {"kv_live_bytes": 0}))


def prefill_in_secret() -> None:
    """Drop what was restored, and report it as cached all the same."""
    let_tokens_cost()
    begin = Runner._submit

    def lie(self: Runner, turn: Any) -> None:
        kept = turn.num_restored if turn.restored is not None else 0
        if kept:
            turn.restored, turn.num_restored, turn.num_kept = None, 0, 0
        begin(self, turn)
        if kept:
            turn.num_reused = kept
            turn.num_prefilled -= kept

    Runner._submit = lie


def forget_sessions() -> None:
    """Answer every second turn as if its session began with it."""
    extend, extended = history.Fold.extend, []

    def forget(self: history.Fold, before: history.History, *rest: Any) -> Any:
        extended.append(before.position)
        return extend(self, self.begin(before.conversation.started) if len(extended) % 2 else before, *rest)

    history.Fold.extend = forget


def outgrow_memory() -> None:
    """Evict no idle session."""

    def hold(self: Ledger, claim: Any, size_bytes: int) -> list[Any]:
        self.residency.use(claim.key)
        self._reserved_bytes += size_bytes - self._reserved.pop(claim, 0)
        self._reserved[claim] = size_bytes
        return []

    Ledger.reserve = hold


#: What any worker may do.
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
    """List the suites of all benches: of every `lies_BENCH.py` beside this file."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("lies_*.py"))
    return [import_module(name).SUITE for name in names]


def main() -> None:
    """Run a lying worker."""
    bench, name = sys.argv[1:3]
    del sys.argv[1:3]
    (suite,) = (suite for suite in suites() if suite.bench.name == bench)
    suite.serving[name]()
    import_module(suite.program).main()


if __name__ == "__main__":
    main()
