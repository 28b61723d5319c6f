"""The parts of lies: honest turns, ways to falsify them, and patches that plant a fault in a real worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from bench.spec import AnyBench
from bench.turns import Measure, Sample, Turn
from cache.kv import layers
from worker.device.acquisition import Acquisition
from worker.device.admission import Ledger
from worker.device.runner import Runner
from worker.models import model
from worker.sessions import fold, history, results

#: What prefilling a token takes in honest runs of long sessions.
PREFILL_S = 0.003


@dataclass(frozen=True)
class Lie:
    """`name` is what the worker does, `check` how the name of the check begins that catches it.

    `bend` changes the turns and samples of an honest run, `serve` patches a worker for a short run.
    """

    name: str
    check: str
    bend: Callable[[Any], Any]
    serve: Callable[[], None] | None = None


@dataclass(frozen=True)
class Suite:
    """`honest` makes the turns and samples of a run by its seed: the control beside the lies.

    `model` is the fixture of what is run, by the module `program`.
    """

    bench: AnyBench
    plan: Any
    honest: Callable[[int], tuple[Sequence[Turn], Sequence[Sample]]]
    lies: tuple[Lie, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    model: str = "tiny_model"
    program: str = "commands.__main__"


def answer(prompt: int, own: int, tokens: Sequence[int], **fields: Any) -> Turn:
    """Make the turn of a worker in good health, that found all of a prompt but its own tokens."""
    account = {"prompt_tokens": prompt, "cached_tokens": prompt - own, "prefilled_tokens": own}
    account |= {"position": prompt + len(tokens), "tokens": tuple(tokens), "joined": True}
    return Turn(**(account | fields))


def turns(*cases: str, when: Callable[[Turn], object] = bool, **changes: Any) -> Callable[[Any], Any]:
    """Bend turns, of all cases or some. A function makes a value of the turn; facts are added to its own."""

    def bend(one: Any) -> Any:
        if not isinstance(one, Turn) or (cases and one.case not in cases) or not when(one):
            return one
        made = {name: value(one) if callable(value) else value for name, value in changes.items()}
        return replace(one, **made | {"facts": one.facts | made.get("facts", {})})

    return bend


def samples(
    measure: Measure, value: Callable[[Sample], float], *cases: str, when: Callable[[Sample], object] = bool
) -> Callable[[Any], Any]:
    """Bend samples of a measure, of all cases or some."""

    def bend(one: Any) -> Any:
        mine = not isinstance(one, Turn) and one.measure == measure.name and (not cases or one.case in cases)
        return replace(one, value=value(one)) if mine and when(one) else one

    return bend


#: Changes of a turn that prefills all of its prompt, and says so.
ALL = {"cached_tokens": 0, "prefilled_tokens": lambda turn: turn.prompt_tokens}
#: Takes the time of prefilling all that the session holds.
WAITS = turns(first_s=lambda turn: turn.first_s + PREFILL_S * turn.facts["held"])


def beginning_with(**fields: Any) -> Callable[[], None]:
    """Make a patch that changes what a turn has of its session, before it begins; the worker says so."""

    def serve() -> None:
        begin = Runner._submit

        def forgetful(self: Runner, turn: Any) -> None:
            for name, value in fields.items():
                setattr(turn, name, value)
            begin(self, turn)

        Runner._submit = forgetful

    return serve


never_restore = beginning_with(restored=None, num_restored=0)
prefill_anew = beginning_with(restored=None, num_restored=0, num_kept=0)


def restore_badly() -> None:
    """Turn the sign of all values that were restored."""
    rebuilt = Acquisition._rebuilt

    def spoil(self: Acquisition, turn: Any) -> Any:
        held = rebuilt(self, turn)
        for cache in held.caches if held is not None else ():
            cache.values = -cache.values
        return held

    Acquisition._rebuilt = spoil


def change_read() -> None:
    """Turn the sign of one layer's restored values."""
    rebuild = layers.rebuild

    def spoil(*given: Any) -> Any:
        caches = rebuild(*given)
        caches[0].values = -caches[0].values
        return caches

    layers.rebuild = spoil


def report_no_kv() -> None:
    """Answer that a session has no KV."""
    generated = results.Generated
    results.Generated = lambda **fields: generated(**(fields | {"kv_live_bytes": 0}))


def forget_sessions() -> None:
    """Answer every second turn as if its session began with it."""
    extend, extended = fold.Fold.extend, []

    def forget(self: fold.Fold, before: history.History, *rest: Any) -> Any:
        extended.append(before.position)
        return extend(self, self.begin(before.conversation.started) if len(extended) % 2 else before, *rest)

    fold.Fold.extend = forget


def refuse_what_fits() -> None:
    """Refuse the last tenth of what fits."""
    Ledger.ever_fits = lambda self, size: size <= 0.9 * self.max_bytes


def hold_half_more() -> None:
    """Keep half as much again on the device."""
    reserve = Ledger.reserve

    def more(self: Ledger, claim: Any, size_bytes: int) -> object:
        limit = self.max_bytes
        self.max_bytes = limit * 3 // 2
        try:
            return reserve(self, claim, size_bytes)
        finally:
            self.max_bytes = limit

    Ledger.reserve = more


def keep_in_full() -> None:
    """Load the model without fewer bits, whatever was asked for."""
    load = model.load
    model.load = lambda folder, *, kv_bits, **more: load(folder, kv_bits=None, **more)
