"""What follows from the takes of all sides, and what is promised. Pure."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from bench import stats
from bench.report import Check, Report, Series
from bench.stats import Middle  # noqa: TC001  # msgspec reads the annotations

from .takes import FAILING, OFF, ON, SIDES, SLOW, Take

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Of the decoding speed without snapshots.
LEAST_ON: Final = 0.98
LEAST_ON_A_BAD_DISK: Final = 0.95
#: Tokens that may differ before it is more than an occasional near tie.
AGREEING: Final = 0.9


class Range(Struct, frozen=True):
    """The median, the least and the largest of a few ratios."""

    median: float
    least: float
    largest: float


class Cost(Struct, frozen=True, kw_only=True):
    """One side at one batch size. The ratios are to the same round without snapshots, round by round.

    `fastest` holds its fastest decoding against the fastest without snapshots. What else the machine does can
    only slow it down, so this scatters less.
    """

    batch: int
    side: str
    decode_rate: Middle
    prefill_rate: Middle
    decode: Range
    fastest: float
    prefill: Range
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


def summarise(takes: Sequence[Take]) -> Summary:
    """Aggregate all takes so far."""
    base = {take.place: take for take in takes if take.side == OFF}
    found = []
    for batch in sorted({take.batch for take in takes}):
        for side in SIDES:
            some = [take for take in takes if (take.batch, take.side) == (batch, side)]
            if one := _cost(batch, side, [(take, base[take.place]) for take in some if take.place in base]):
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
    least = LEAST_ON if name == ON else LEAST_ON_A_BAD_DISK
    costs = [cost for cost in summary.costs if cost.side == name]
    slowest = min(costs, key=lambda cost: cost.decode.median, default=None)
    where = "with snapshots on" if name == ON else f"on the {name}"
    return Check(
        name=f"{where} answers decode at {least} of the speed without, or more",
        passed=None if slowest is None else slowest.decode.median >= least,
        detail="not measured"
        if slowest is None
        else f"{slowest.decode.median:.3f} at {slowest.batch} sessions, the lowest",
        exact=False,
    )


def _cost(batch: int, name: str, pairs: Sequence[tuple[Take, Take]]) -> Cost | None:
    takes = [take for take, _ in pairs]
    decode_rate = stats.middle([take.decode_rate for take in takes])
    prefill_rate = stats.middle([take.prefill_rate for take in takes])
    if decode_rate is None or prefill_rate is None:
        return None
    return Cost(
        batch=batch,
        side=name,
        decode_rate=decode_rate,
        prefill_rate=prefill_rate,
        decode=_range([take.decode_rate / base.decode_rate for take, base in pairs]),
        fastest=max(take.decode_rate for take in takes) / max(base.decode_rate for _, base in pairs),
        prefill=_range([take.prefill_rate / base.prefill_rate for take, base in pairs]),
        durable=sum(take.snapshots.durable for take in takes),
        lost=sum(take.snapshots.lost for take in takes),
        most_waiting=max(take.snapshots.waiting for take in takes),
    )


def _range(values: Sequence[float]) -> Range:
    return Range(statistics.median(values), min(values), max(values))
