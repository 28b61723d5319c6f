"""What follows from the turns of all sides: pure, from turns to a report."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from msgspec import Struct

from bench.old import stats
from bench.old.report import Report, Series
from bench.old.stats import Middle

from .turns import ALONE, BATCHED, IN_PROCESS, WITHOUT_SNAPSHOTS, WORKER, Turn

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SIDES = (ALONE, BATCHED, WORKER, WITHOUT_SNAPSHOTS)


class Cost(Struct, frozen=True, kw_only=True):
    """One side at one batch size. CPU time is in seconds a token, the event loop's a share of all time."""

    batch: int
    side: str
    turns: int
    tokens: int
    tokens_per_s: Middle
    first_s: Middle
    per_token_s: Middle | None
    loop_share: Middle | None
    process_cpu_s: float
    server_cpu_s: float
    client_cpu_s: float
    agreeing_tokens: int
    compared_tokens: int


class Compared(Struct, frozen=True, kw_only=True):
    """A side held against another at one batch size.

    `rate` is the ratio of the medians of tokens per second; what is added is the median of the differences
    between the same turns.
    """

    batch: int
    side: str
    base: str
    rate: Middle
    added_first_s: Middle
    added_per_token_s: Middle | None


class Summary(Struct, frozen=True, kw_only=True):
    """The aggregates."""

    costs: tuple[Cost, ...]
    compared: tuple[Compared, ...]


class OverheadReport(Report, frozen=True, kw_only=True):
    """The report of `bench overhead`."""

    summary: Summary
    turns: tuple[Turn, ...]


Groups = dict[tuple[int, str], list[Turn]]


def groups(turns: Iterable[Turn]) -> Groups:
    """Sort turns by batch size and side, in the order of `SIDES`."""
    found: defaultdict[tuple[int, str], list[Turn]] = defaultdict(list)
    for turn in turns:
        found[turn.batch, turn.side].append(turn)
    return dict(sorted(found.items(), key=lambda item: (item[0][0], SIDES.index(item[0][1]))))


def summarise(turns: Sequence[Turn]) -> Summary:
    """Aggregate all turns so far."""
    grouped = groups(turns)
    costs = tuple(_cost(batch, side, some) for (batch, side), some in grouped.items())
    compared = tuple(
        found
        for (batch, side), some in grouped.items()
        for base in _bases(side)
        if (base_turns := grouped.get((batch, base)))
        and (found := compare(batch, side, base, some, base_turns))
    )
    return Summary(costs=costs, compared=compared)


def series(turns: Sequence[Turn]) -> dict[str, Series]:
    """Return the measures that two reports are compared by."""
    found = {}
    for (batch, side), some in groups(turns).items():
        where = f"{side}, batch {batch}"
        paces = [pace for turn in some if (pace := turn.per_token_s) is not None]
        found[f"rate: {where}"] = Series(
            unit="tokens/s", better="higher", values=tuple(turn.tokens_per_s for turn in some)
        )
        found[f"first token: {where}"] = Series(
            unit="s", better="lower", values=tuple(turn.first_s for turn in some)
        )
        found[f"per token: {where}"] = Series(unit="s", better="lower", values=tuple(paces))
    return found


def compare(
    batch: int, side: str, base: str, turns: Sequence[Turn], base_turns: Sequence[Turn]
) -> Compared | None:
    """Hold one side's turns against another's; None where they have no turn in common."""
    others = {turn.place: turn for turn in base_turns}
    pairs = [(turn, others[turn.place]) for turn in turns if turn.place in others]
    ratio = stats.median_ratio([b.tokens_per_s for _, b in pairs], [t.tokens_per_s for t, _ in pairs])
    first = stats.middle([turn.first_s - other.first_s for turn, other in pairs])
    if ratio is None or first is None:
        return None
    paces = [
        pace - other_pace
        for turn, other in pairs
        if (pace := turn.per_token_s) is not None and (other_pace := other.per_token_s) is not None
    ]
    return Compared(
        batch=batch,
        side=side,
        base=base,
        rate=Middle(ratio.ratio, ratio.low, ratio.high),
        added_first_s=first,
        added_per_token_s=stats.middle(paces),
    )


def _bases(side: str) -> tuple[str, ...]:
    """Name what a side is held against: both ways in process, and the worker against itself."""
    if side in IN_PROCESS:
        return ()
    return (*IN_PROCESS, WITHOUT_SNAPSHOTS) if side == WORKER else IN_PROCESS


def _cost(batch: int, side: str, turns: Sequence[Turn]) -> Cost:
    tokens = sum(turn.tokens for turn in turns)
    rate, first = stats.middle([t.tokens_per_s for t in turns]), stats.middle([t.first_s for t in turns])
    if rate is None or first is None:
        raise AssertionError("a group has turns")
    judged = [row for turn in turns for row in turn.rows if row.agreeing is not None]
    return Cost(
        batch=batch,
        side=side,
        turns=len(turns),
        tokens=tokens,
        tokens_per_s=rate,
        first_s=first,
        per_token_s=stats.middle([pace for turn in turns if (pace := turn.per_token_s) is not None]),
        loop_share=stats.middle(_loop_shares(turns)),
        process_cpu_s=sum(turn.cpu.process for turn in turns) / tokens,
        server_cpu_s=sum(turn.cpu.server for turn in turns) / tokens,
        client_cpu_s=sum(turn.cpu.client for turn in turns) / tokens,
        agreeing_tokens=sum(row.agreeing or 0 for row in judged),
        compared_tokens=sum(row.tokens for row in judged),
    )


def _loop_shares(turns: Sequence[Turn]) -> list[float]:
    """Return the event loop's share of each round's time: one turn is too short for the system's clock."""
    used: defaultdict[int, float] = defaultdict(float)
    lasted: defaultdict[int, float] = defaultdict(float)
    for turn in turns:
        if turn.cpu.loop is not None:
            used[turn.round] += turn.cpu.loop
            lasted[turn.round] += turn.seconds
    return [used[number] / lasted[number] for number in used]
