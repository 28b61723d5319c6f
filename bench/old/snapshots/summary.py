"""What follows from the takes of all sides, and what is promised. Pure."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from bench.old import stats
from bench.old.report import Check, Report, Series
from bench.old.stats import Middle

from .takes import FAILING, OFF, ON, SIDES, SLOW, Take

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: What is promised of the decoding speed without snapshots.
_LEAST: Final = {ON: 0.98, SLOW: 0.95, FAILING: 0.95}
#: Tokens that may differ before it is more than an occasional near tie.
AGREEING: Final = 0.9


class Beside(Struct, frozen=True, kw_only=True):
    """What a block adds to the steps beside it, with its 95% interval, and what that leaves of the speed.

    `added_s` is the mean over `blocks` of `Take.beside_s`, less that of the side without snapshots, where
    nothing is cut. `block_tokens` tokens complete one block, so that
    `speed = 1 / (1 + added_s * rate / block_tokens)`, `rate` being the tokens per second without.
    """

    blocks: int
    added_s: Middle
    speed: Middle


class Cost(Struct, frozen=True, kw_only=True):
    """One side at one batch size. The ratios are to the same round without snapshots, round by round."""

    batch: int
    side: str
    decode_rate: Middle
    prefill_rate: Middle
    decode: Middle
    prefill: Middle
    beside: Beside | None
    durable: int
    lost: int
    most_waiting: int


class Summary(Struct, frozen=True, kw_only=True):
    """The aggregates, by batch size and side."""

    costs: tuple[Cost, ...]


class SnapshotsReport(Report, frozen=True, kw_only=True):
    """The report of `bench snapshots`."""

    summary: Summary
    takes: tuple[Take, ...]


def summarise(takes: Sequence[Take], block_tokens: int) -> Summary:
    """Aggregate all takes so far."""
    base = {take.place: take for take in takes if take.side == OFF}
    found = []
    for batch in sorted({take.batch for take in takes}):
        for side in SIDES:
            some = [take for take in takes if (take.batch, take.side) == (batch, side)]
            pairs = [(take, base[take.place]) for take in some if take.place in base]
            if one := _cost(batch, side, pairs, block_tokens):
                found.append(one)
    return Summary(costs=tuple(found))


def series(takes: Iterable[Take]) -> dict[str, Series]:
    """Return the measures that two reports are compared by."""
    found: dict[str, list[float]] = {}
    for take in takes:
        where = f"{take.side}, batch {take.batch}"
        found.setdefault(f"decode: {where}", []).append(take.decode_rate)
        found.setdefault(f"prefill: {where}", []).append(take.prefill_rate)
    return {
        name: Series(unit="tokens/s", better="higher", values=tuple(values)) for name, values in found.items()
    }


def checks(takes: Sequence[Take], summary: Summary) -> tuple[Check, ...]:
    """Judge the takes: first that the sides were what they are called, then what is promised."""
    return (
        _written(takes),
        _hit(
            "the slow disk kept snapshots waiting",
            [take.snapshots.waiting for take in takes if take.side == SLOW],
        ),
        _hit(
            "the failing disk lost snapshots",
            [take.snapshots.lost for take in takes if take.side == FAILING],
        ),
        _nothing_kept(takes),
        _agreeing(takes),
        *(_fast(summary, side) for side in (ON, SLOW, FAILING)),
        *(_light(summary, side) for side in (ON, SLOW, FAILING)),
    )


def _written(takes: Sequence[Take]) -> Check:
    on = [take.snapshots for take in takes if take.side == ON]
    lost, durable = sum(one.lost for one in on), sum(one.durable for one in on)
    return Check(
        name="with snapshots on, all of them were written",
        passed=not lost and durable > 0 if on else None,
        detail=f"{durable} written, {lost} lost",
        exact=True,
    )


def _hit(name: str, counts: list[int]) -> Check:
    passed = sum(counts) > 0 if counts else None
    return Check(name=name, passed=passed, detail=f"{sum(counts)} of them", exact=True)


def _nothing_kept(takes: Sequence[Take]) -> Check:
    kept = [take.snapshots.durable for take in takes if take.side in {OFF, FAILING}]
    return Check(
        name="without snapshots, and on the failing disk, none were written",
        passed=not sum(kept) if kept else None,
        detail=f"{sum(kept)} were",
        exact=True,
    )


def _agreeing(takes: Sequence[Take]) -> Check:
    others = [take for take in takes if take.side != OFF]
    tokens, same = sum(take.tokens for take in others), sum(take.agreeing for take in others)
    return Check(
        name="all sides said the same",
        passed=same >= AGREEING * tokens if tokens else None,
        detail=f"{same / tokens:.1%} of {tokens:,} tokens" if tokens else "nothing to compare",
        exact=False,
    )


def _fast(summary: Summary, name: str) -> Check:
    """Judge whole answers. Where the interval holds the promised speed, its two sides are not told apart."""
    least = _LEAST[name]
    costs = [cost for cost in summary.costs if cost.side == name]
    slowest = min(costs, key=lambda cost: cost.decode.median, default=None)
    passed, detail = None, "not measured"
    if slowest is not None:
        middle = slowest.decode
        passed = True if middle.median >= least else False if middle.high < least else None
        detail = f"{text_of(middle)} at {slowest.batch} sessions, the lowest"
        detail += ", which does not tell" if passed is None else ""
    return Check(
        name=f"{_where(name)} answers decode at {least} of the speed without, or more",
        passed=passed,
        detail=detail,
        exact=False,
    )


def _light(summary: Summary, name: str) -> Check:
    """Judge by the steps beside the blocks alone: passed where all intervals are above what is promised."""
    least = _LEAST[name]
    found = [(cost.beside, cost.batch) for cost in summary.costs if cost.side == name and cost.beside]
    below = [one for one in found if one[0].speed.high < least]
    slowest = min(below or found, key=lambda one: one[0].speed.low, default=None)
    passed, detail = None, "too few blocks"
    if slowest is not None:
        beside, batch = slowest
        passed = False if below else True if beside.speed.low >= least else None
        detail = (
            f"{1000 * beside.added_s.median:.1f} ms a block leave {text_of(beside.speed)} at {batch} sessions"
        )
        detail += ", which does not tell" if passed is None else ""
    return Check(
        name=f"{_where(name)} the steps beside a block leave {least} of the speed, or more",
        passed=passed,
        detail=detail,
        exact=False,
    )


def _where(name: str) -> str:
    return "with snapshots on" if name == ON else f"on the {name}"


def _cost(batch: int, name: str, pairs: Sequence[tuple[Take, Take]], block_tokens: int) -> Cost | None:
    takes = [take for take, _ in pairs]
    decode_rate = stats.middle([take.decode_rate for take in takes])
    prefill_rate = stats.middle([take.prefill_rate for take in takes])
    decode = stats.middle([take.decode_rate / base.decode_rate for take, base in pairs])
    prefill = stats.middle([take.prefill_rate / base.prefill_rate for take, base in pairs])
    if decode_rate is None or prefill_rate is None or decode is None or prefill is None:
        return None
    return Cost(
        batch=batch,
        side=name,
        decode_rate=decode_rate,
        prefill_rate=prefill_rate,
        decode=decode,
        prefill=prefill,
        beside=None if name == OFF else _beside(pairs, block_tokens),
        durable=sum(take.snapshots.durable for take in takes),
        lost=sum(take.snapshots.lost for take in takes),
        most_waiting=max(take.snapshots.waiting for take in takes),
    )


def _beside(pairs: Sequence[tuple[Take, Take]], block_tokens: int) -> Beside | None:
    with_blocks = [beside_s for take, _ in pairs for beside_s in take.beside_s]
    without = [beside_s for _, base in pairs for beside_s in base.beside_s]
    added = stats.mean_difference(without, with_blocks)
    if added is None:
        return None
    blocks_per_s = statistics.median(base.decode_rate for _, base in pairs) / block_tokens
    slow, median, fast = (1 / (1 + cost_s * blocks_per_s) for cost_s in (added.high, added.median, added.low))
    return Beside(blocks=len(with_blocks), added_s=added, speed=Middle(median, slow, fast))


def text_of(middle: Middle) -> str:
    """Write a ratio with its interval."""
    return f"{middle.median:.3f} ({middle.low:.3f}-{middle.high:.3f})"
