"""What follows from the measured turns: pure, from turns to a report."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import TYPE_CHECKING

from msgspec import Struct

from bench import stats
from bench.report import Report, Series
from bench.stats import Middle

from .turns import COLD, KINDS, RESTORED, WARM, Measured

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Life(Struct, frozen=True, kw_only=True):
    """All turns of one length and kind.

    `of_cold` is the ratio of the first token's median to that of a cold session. Rates are bytes per second:
    `restore_rate` of what was restored, over the time by which the first token came later than that of the
    warm session in the same round; `limit_rate` of MLX alone with the same files; `of_limit` their ratio.
    """

    length: int
    kind: str
    turns: int
    first_s: Middle
    of_cold: Middle | None
    felt_s: Middle | None
    down_s: Middle | None
    start_s: Middle | None
    prefilled_tokens: float
    prefilled_share: float
    restored_bytes: float
    restore_rate: Middle | None
    limit_rate: Middle | None
    of_limit: Middle | None


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
        if rates := restore_rates(some, warm):
            found[f"restored: {where}"] = Series(unit="bytes/s", better="higher", values=tuple(rates))
    return found


def restore_rates(turns: Sequence[Measured], warm: dict[tuple[int, int], Measured]) -> list[float]:
    """Return the bytes per second of each restore; those that took no measurable time are left out."""
    return [
        turn.restored_bytes / (turn.first_s - base.first_s)
        for turn in turns
        if turn.restored_bytes and (base := warm.get(turn.place)) is not None and turn.first_s > base.first_s
    ]


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
    rates = restore_rates(turns, warm) if kind in RESTORED else []
    limits = [turn.limit.size_bytes / turn.limit.seconds for turn in turns if turn.limit is not None]
    return Life(
        length=length,
        kind=kind,
        turns=len(turns),
        first_s=first,
        of_cold=_ratio(cold, turns),
        felt_s=stats.middle([turn.felt_s for turn in turns if turn.felt_s is not None]),
        down_s=stats.middle([turn.down_s for turn in turns if turn.down_s is not None]),
        start_s=stats.middle([turn.start_s for turn in turns if turn.start_s is not None]),
        prefilled_tokens=statistics.median(turn.prefilled_tokens for turn in turns),
        prefilled_share=statistics.median(turn.prefilled_share for turn in turns),
        restored_bytes=statistics.median(turn.restored_bytes for turn in turns),
        restore_rate=stats.middle(rates),
        limit_rate=stats.middle(limits),
        of_limit=_middle(stats.median_ratio(limits, rates)),
    )


def _ratio(base: Sequence[Measured], turns: Sequence[Measured]) -> Middle | None:
    return _middle(stats.median_ratio([turn.first_s for turn in base], [turn.first_s for turn in turns]))


def _middle(ratio: stats.Ratio | None) -> Middle | None:
    return None if ratio is None else Middle(ratio.ratio, ratio.low, ratio.high)


def _lower(unit: str, values: Sequence[float]) -> Series:
    return Series(unit=unit, better="lower", values=tuple(values))
