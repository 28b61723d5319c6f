"""What follows from the measured turns: pure, from turns to a report."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import TYPE_CHECKING

from msgspec import Struct

from bench.old import stats
from bench.old.report import Report, Series
from bench.old.stats import Middle

from .turns import COLD, KINDS, RESTORED, WARM, Measured

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Life(Struct, frozen=True, kw_only=True):
    """All turns of one length and kind.

    `of_cold` is the ratio of the first token's median to that of a cold session, `added_s` the time by which
    it came later than that of the warm session in the same round. Rates are bytes per second:
    `restore_rate` of what was restored within `added_s`, None where that is not surely above 0; `limit_rate`
    of MLX alone with the same files; `of_limit` is their ratio.
    """

    length: int
    kind: str
    turns: int
    first_s: Middle
    of_cold: Middle | None
    added_s: Middle | None
    felt_s: Middle | None
    down_s: Middle | None
    start_s: Middle | None
    prefilled_tokens: float
    prefilled_share: float
    restored_bytes: float
    restore_rate: Middle | None
    limit_rate: Middle | None
    of_limit: float | None


class Summary(Struct, frozen=True, kw_only=True):
    """The aggregates, by length and kind."""

    lives: tuple[Life, ...]


class RestartReport(Report, frozen=True, kw_only=True):
    """The report of `bench restart`."""

    summary: Summary
    turns: tuple[Measured, ...]


Groups = dict[tuple[int, str], list[Measured]]


def groups(turns: Iterable[Measured]) -> Groups:
    """Sort turns by length and kind, in the order of `KINDS`."""
    found: defaultdict[tuple[int, str], list[Measured]] = defaultdict(list)
    for turn in turns:
        found[turn.length, turn.kind].append(turn)
    return dict(sorted(found.items(), key=lambda item: (item[0][0], KINDS.index(item[0][1]))))


def of_kind(turns: Iterable[Measured], kind: str) -> dict[tuple[int, int], Measured]:
    """Find one kind's turns by their place."""
    return {turn.place: turn for turn in turns if turn.kind == kind}


def summarise(turns: Sequence[Measured]) -> Summary:
    """Aggregate all turns so far."""
    grouped = groups(turns)
    warm = of_kind(turns, WARM)
    return Summary(
        lives=tuple(
            _life(length, kind, some, warm, grouped.get((length, COLD), []))
            for (length, kind), some in grouped.items()
        )
    )


def series(turns: Sequence[Measured]) -> dict[str, Series]:
    """Return the measures that two reports are compared by."""
    found = {}
    warm = of_kind(turns, WARM)
    for (length, kind), some in groups(turns).items():
        where = f"{kind}, {length} tokens"
        found[f"first token: {where}"] = _lower("s", [turn.first_s for turn in some])
        if felt := [turn.felt_s for turn in some if turn.felt_s is not None]:
            found[f"from the end to the first token: {where}"] = _lower("s", felt)
        if kind in RESTORED:
            found[f"added to the first token: {where}"] = _lower("s", added(some, warm))
    return found


def added(turns: Sequence[Measured], warm: dict[tuple[int, int], Measured]) -> list[float]:
    """Return by how much the first token came later than in the warm session, for each turn."""
    return [turn.first_s - base.first_s for turn in turns if (base := warm.get(turn.place)) is not None]


def restore_rate(size_bytes: float, added_s: Middle | None) -> Middle | None:
    """Return the bytes per second; None where the time is not surely above 0."""
    if added_s is None or added_s.low <= 0 or not size_bytes:
        return None
    return Middle(size_bytes / added_s.median, size_bytes / added_s.high, size_bytes / added_s.low)


def _life(
    length: int,
    kind: str,
    turns: Sequence[Measured],
    warm: dict[tuple[int, int], Measured],
    cold: Sequence[Measured],
) -> Life:
    first = stats.middle([turn.first_s for turn in turns])
    if first is None:
        raise AssertionError("a group has turns")
    later = stats.middle(added(turns, warm)) if kind in RESTORED else None
    restored = statistics.median(turn.restored_bytes for turn in turns)
    rate = restore_rate(restored, later)
    limits = [turn.limit.size_bytes / turn.limit.seconds for turn in turns if turn.limit is not None]
    limit = stats.middle(limits)
    return Life(
        length=length,
        kind=kind,
        turns=len(turns),
        first_s=first,
        of_cold=_ratio(cold, turns),
        added_s=later,
        felt_s=stats.middle([turn.felt_s for turn in turns if turn.felt_s is not None]),
        down_s=stats.middle([turn.down_s for turn in turns if turn.down_s is not None]),
        start_s=stats.middle([turn.start_s for turn in turns if turn.start_s is not None]),
        prefilled_tokens=statistics.median(turn.prefilled_tokens for turn in turns),
        prefilled_share=statistics.median(turn.prefilled_share for turn in turns),
        restored_bytes=restored,
        restore_rate=rate,
        limit_rate=limit,
        of_limit=rate.median / limit.median if rate is not None and limit is not None else None,
    )


def _ratio(base: Sequence[Measured], turns: Sequence[Measured]) -> Middle | None:
    ratio = stats.median_ratio([turn.first_s for turn in base], [turn.first_s for turn in turns])
    return None if ratio is None else Middle(ratio.ratio, ratio.low, ratio.high)


def _lower(unit: str, values: Sequence[float]) -> Series:
    return Series(unit=unit, better="lower", values=tuple(values))
