"""What follows from the measurements of `bench peers`: pure, from turns to a report."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec import Struct

from bench.old import stats
from bench.old.report import Report, Series
from bench.old.stats import Spread, spread

from .turns import ChatTurn, Restart, Round, Side  # noqa: TC001  # msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from .turns import Turn

#: Contexts of more than this share apart are not the same conversation.
CONTEXT_BOUND: Final = 0.01

Better = Literal["lower", "higher"]


class Against(Struct, frozen=True, kw_only=True):
    """One measure of the first side against another's: the median of the ratios of single measurements.

    `ratio` is first / other; only measurements that both sides have made in the same place are paired. Fewer
    than five pairs have no interval.
    """

    other: str
    measure: str
    unit: str
    better: Better
    pairs: int
    first_p50: float
    other_p50: float
    ratio: float
    low: float | None
    high: float | None


class Growth(Struct, frozen=True, kw_only=True):
    """How much longer the first token takes for 1,000 more tokens of context, with its 95% interval.

    `ratio` is the first side's growth to this one's, None where either may as well not grow at all.
    """

    side: str
    seconds: float
    low: float
    high: float
    points: int
    ratio: float | None = None


class Contexts(Struct, frozen=True, kw_only=True):
    """Whether another side held the same conversations as the first one: context tokens, and answers.

    `first_difference` is the first turn whose contexts are more than 1% apart.
    """

    other: str
    pairs: int
    differing: int
    largest_share: float
    first_difference: int | None
    equal_answers: int


class Sided(Struct, frozen=True, kw_only=True):
    """One side's spreads over the chats, its rates, and how many of its turns failed, by class."""

    side: str
    turns: int
    errors: dict[str, int]
    first: Spread | None
    per_token: Spread | None
    whole: Spread | None
    tokens_per_s: dict[str, float]


class Summary(Struct, frozen=True, kw_only=True):
    """The aggregates. `others_busy` are the shares of a CPU that idle sides used: median and largest."""

    sides: tuple[Sided, ...]
    against: tuple[Against, ...]
    growth: tuple[Growth, ...]
    contexts: tuple[Contexts, ...]
    others_busy: tuple[float, float] | None


class PeersReport(Report, frozen=True, kw_only=True):
    """The report of `bench peers`. `messages` has, by side, the first message of every class of error."""

    sides: tuple[Side, ...]
    summary: Summary
    messages: dict[str, dict[str, str]]
    turns: tuple[ChatTurn, ...]
    rounds: tuple[Round, ...]
    restarts: tuple[Restart, ...]


#: A measure's values by the place in the plan at which each was taken.
Places = dict[Any, float]


def measures(
    turns: Sequence[ChatTurn], rounds: Sequence[Round], restarts: Sequence[Restart]
) -> Iterator[tuple[str, str, Better, dict[str, Places]]]:
    """Yield every measure: its name, unit, which way is better, and by side its values by their place."""
    for name, read in _CHAT.items():
        yield name, "s", "lower", _by_side((t.side, (t.chat, t.number), read(t.turn)) for t in turns)
    for streams in sorted({one.streams for one in rounds}):
        waves = [one for one in rounds if one.streams == streams]
        name = f"tokens per second, {streams} at once"
        yield name, "1/s", "higher", _by_side((one.side, one.number, one.tokens_per_s) for one in waves)
    for length, ending in dict.fromkeys((one.length, one.ending) for one in restarts):
        some = [one for one in restarts if (one.length, one.ending) == (length, ending)]
        name = f"first token, {length} held, {AFTER[ending]}"
        yield name, "s", "lower", _by_side((one.side, one.number, _first(one.turn)) for one in some)


#: How a side's turn is named after what was done to its process.
AFTER: Final = {"warm": "warm", "stop": "restarted", "kill": "after kill -9"}


def series(
    turns: Sequence[ChatTurn], rounds: Sequence[Round], restarts: Sequence[Restart]
) -> dict[str, Series]:
    """Return every side's measures, for comparing two reports."""
    return {
        f"{side}: {name}": Series(unit=unit, better=better, values=tuple(values.values()))
        for name, unit, better, sides in measures(turns, rounds, restarts)
        for side, values in sides.items()
    }


def summarise(
    names: Sequence[str], turns: Sequence[ChatTurn], rounds: Sequence[Round], restarts: Sequence[Restart]
) -> Summary:
    """Aggregate what there is so far; the first of `names` is held against each of the others."""
    others = names[1:]
    single = [*(t.turn for t in turns), *(one.turn for one in restarts)]
    busy = [turn.others_busy for turn in single if turn.others_busy is not None]
    return Summary(
        sides=tuple(_sided(name, turns, rounds, restarts) for name in names),
        against=tuple(
            found
            for other in others
            for name, unit, better, sides in measures(turns, rounds, restarts)
            if (found := _against(name, unit, better, sides.get(names[0], {}), other, sides.get(other, {})))
        ),
        growth=growths(names, turns),
        contexts=tuple(held for other in others if (held := contexts(turns, names[0], other))),
        others_busy=(statistics.median(busy), max(busy)) if busy else None,
    )


def growths(names: Sequence[str], turns: Sequence[ChatTurn]) -> tuple[Growth, ...]:
    """Fit every side's growth, and hold the first one's against the others'."""
    found = [fit for name in names if (fit := growth(name, turns))]
    first = next((fit for fit in found if fit.side == names[0] and fit.low > 0), None)
    return tuple(
        msgspec.structs.replace(fit, ratio=first.seconds / fit.seconds)
        if first is not None and fit is not first and fit.low > 0
        else fit
        for fit in found
    )


def growth(side: str, turns: Sequence[ChatTurn]) -> Growth | None:
    """Fit the wait for the first token to the context; None where there is too little to fit."""
    points = [
        (t.turn.context_tokens, first)
        for t in turns
        if t.side == side and t.turn.context_tokens is not None and (first := _first(t.turn)) is not None
    ]
    line = stats.robust_line([x for x, _ in points], [y for _, y in points])
    if line is None or not math.isfinite(line.high - line.low):
        return None
    per = 1000
    return Growth(
        side=side,
        seconds=line.slope * per,
        low=line.low * per,
        high=line.high * per,
        points=len(points),
    )


def contexts(turns: Sequence[ChatTurn], first: str, other: str) -> Contexts | None:
    """Compare what two sides held; None where no turn tells of both."""
    ours, theirs = (
        {(t.chat, t.number): t.turn for t in turns if t.side == name and t.turn.error is None}
        for name in (first, other)
    )
    shares: dict[tuple[int, int], float] = {}
    equal = 0
    for place, turn in ours.items():
        peer = theirs.get(place)
        if peer is None or peer.context_tokens is None or not turn.context_tokens:
            continue
        shares[place] = abs(peer.context_tokens - turn.context_tokens) / turn.context_tokens
        equal += peer.text == turn.text
    if not shares:
        return None
    apart = [number for (_, number), share in shares.items() if share > CONTEXT_BOUND]
    return Contexts(
        other=other,
        pairs=len(shares),
        differing=len(apart),
        largest_share=max(shares.values()),
        first_difference=min(apart, default=None),
        equal_answers=equal,
    )


def _first(turn: Turn) -> float | None:
    return turn.first_s if turn.error is None else None


_CHAT: Final[Mapping[str, Callable[[Turn], float | None]]] = {
    "time to first token": _first,
    "time per token": lambda turn: turn.per_token_s,
    "whole turn": lambda turn: turn.latency_s if turn.error is None else None,
}


def _by_side(values: Iterator[tuple[str, Hashable, float | None]]) -> dict[str, Places]:
    found: dict[str, Places] = {}
    for side, place, value in values:
        if value is not None:
            found.setdefault(side, {})[place] = value
    return found


def _against(
    measure: str, unit: str, better: Better, ours: Places, other: str, theirs: Places
) -> Against | None:
    places = [place for place in ours if theirs.get(place, 0) > 0]
    ratio = stats.paired_ratio([theirs[place] for place in places], [ours[place] for place in places])
    if ratio is None:
        return None
    return Against(
        other=other,
        measure=measure,
        unit=unit,
        better=better,
        pairs=len(places),
        first_p50=statistics.median(ours[place] for place in places),
        other_p50=statistics.median(theirs[place] for place in places),
        ratio=ratio.ratio,
        low=ratio.low if math.isfinite(ratio.low) else None,
        high=ratio.high if math.isfinite(ratio.high) else None,
    )


def _sided(
    side: str, turns: Sequence[ChatTurn], rounds: Sequence[Round], restarts: Sequence[Restart]
) -> Sided:
    chat = [t.turn for t in turns if t.side == side]
    every = [
        *chat,
        *(turn for one in rounds if one.side == side for turn in one.turns),
        *(one.turn for one in restarts if one.side == side),
    ]
    rates: dict[str, list[float]] = {}
    for one in rounds:
        if one.side == side and (rate := one.tokens_per_s) is not None:
            rates.setdefault(f"{one.streams}", []).append(rate)
    return Sided(
        side=side,
        turns=len(every),
        errors=dict(Counter(turn.error for turn in every if turn.error is not None)),
        first=spread([value for turn in chat if (value := _first(turn)) is not None]),
        per_token=spread([value for turn in chat if (value := turn.per_token_s) is not None]),
        whole=spread([turn.latency_s for turn in chat if turn.error is None]),
        tokens_per_s={streams: statistics.median(values) for streams, values in rates.items()},
    )
