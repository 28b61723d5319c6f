"""Helps `lies`: makes a healthy worker's turns, falsifies them, and plants faults in a real worker."""

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
from worker.sessions import fold, history, results

#: Seconds to prefill a token, in honest runs of long sessions.
PREFILL_S = 0.003


@dataclass(frozen=True)
class Lie:
    """A worker's fault: `name` says what it does, `check` is the beginning of the failing check's name.

    `bend` falsifies one turn or sample of an honest run; `serve` plants the fault in a real worker.
    """

    name: str
    check: str
    bend: Callable[[Any], Any]
    serve: Callable[[], None] | None = None


@dataclass(frozen=True)
class Suite:
    """A bench with its lies; `honest` makes a healthy worker's turns and samples from a seed.

    For a real worker, `model` is the fixture of its model, and `program` the module that is run.
    """

    bench: AnyBench
    plan: Any
    honest: Callable[[int], tuple[Sequence[Turn], Sequence[Sample]]]
    lies: tuple[Lie, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    model: str = "tiny_model"
    program: str = "commands.__main__"


def answer(prompt: int, own: int, tokens: Sequence[int], **fields: Any) -> Turn:
    """Make a healthy worker's turn, for which all prompt tokens but the last `own` ones were cached."""
    account = {"prompt_tokens": prompt, "cached_tokens": prompt - own, "prefilled_tokens": own}
    account |= {"position": prompt + len(tokens), "tokens": tuple(tokens), "joined": True}
    return Turn(**(account | fields))


def turns(*cases: str, when: Callable[[Turn], object] = bool, **changes: Any) -> Callable[[Any], Any]:
    """Return a `bend` that sets fields of turns, to values or functions of the turn; it merges `facts`."""

    def bend(one: Any) -> Any:
        if not isinstance(one, Turn) or (cases and one.case not in cases) or not when(one):
            return one
        made = {name: value(one) if callable(value) else value for name, value in changes.items()}
        return replace(one, **made | {"facts": one.facts | made.get("facts", {})})

    return bend


def samples(
    measure: Measure, value: Callable[[Sample], float], *cases: str, when: Callable[[Sample], object] = bool
) -> Callable[[Any], Any]:
    """Return a `bend` that changes the samples of a measure, of all cases or some."""

    def bend(one: Any) -> Any:
        mine = not isinstance(one, Turn) and one.measure == measure.name and (not cases or one.case in cases)
        return replace(one, value=value(one)) if mine and when(one) else one

    return bend


#: Changes after which a turn reports that it prefilled its whole prompt.
ALL = {"cached_tokens": 0, "prefilled_tokens": lambda turn: turn.prompt_tokens}
#: Makes a turn take as long as if it prefilled the whole session.
WAITS = turns(first_s=lambda turn: turn.first_s + PREFILL_S * turn.facts["held"])


def beginning_with(**fields: Any) -> Callable[[], None]:
    """Return a patch that sets `fields` of each turn before it begins; the worker reports the effect."""

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
    """Make the worker negate the values of all KV that it restores."""
    rebuilt = Acquisition._rebuilt

    def spoil(self: Acquisition, turn: Any) -> Any:
        held = rebuilt(self, turn)
        for cache in held.caches if held is not None else ():
            cache.values = -cache.values
        return held

    Acquisition._rebuilt = spoil


def change_read() -> None:
    """Make restores negate the values of the first layer's KV."""
    rebuild = layers.rebuild

    def spoil(*given: Any) -> Any:
        caches = rebuild(*given)
        caches[0].values = -caches[0].values
        return caches

    layers.rebuild = spoil


def report_no_kv() -> None:
    """Make all results report that the session has no KV on the device."""
    generated = results.Generated
    results.Generated = lambda **fields: generated(**(fields | {"kv_live_bytes": 0}))


def forget_sessions() -> None:
    """Make the worker treat every second turn as the first one of its session."""
    extend, extended = fold.Fold.extend, []

    def forget(self: fold.Fold, before: history.History, *rest: Any) -> Any:
        extended.append(before.position)
        return extend(self, self.begin(before.conversation.started) if len(extended) % 2 else before, *rest)

    fold.Fold.extend = forget


def hold_half_more() -> None:
    """Make the worker keep up to 150% of its limit of KV on the device."""
    reserve = Ledger.reserve

    def more(self: Ledger, claim: Any, size_bytes: int) -> object:
        limit = self.max_bytes
        self.max_bytes = limit * 3 // 2
        try:
            return reserve(self, claim, size_bytes)
        finally:
            self.max_bytes = limit

    Ledger.reserve = more
