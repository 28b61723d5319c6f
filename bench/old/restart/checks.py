"""What a restart is promised to cost, held against what was measured. Pure."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from bench.old.report import Check

from .summary import groups, of_kind
from .turns import COLD, RESTARTED, RESTORED, SPILLED, WARM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .turns import Measured

#: A worker that prefills everything takes all of a cold session's time; one that restores, a small part.
BELIEVED: Final = 0.5
#: Below this, what prefill takes drowns in what every turn takes.
MIN_PREFILL_S: Final = 0.05


def checks(turns: Sequence[Measured], block_tokens: int) -> tuple[Check, ...]:
    """Hold all turns so far against what is promised."""
    return (
        _lived(turns),
        _same_context(turns),
        _prefilled(turns, block_tokens),
        _nothing_cached(turns),
        _exact_answers(turns),
        _answers(turns),
        _believed(turns),
    )


def _lived(turns: Sequence[Measured]) -> Check:
    wrong = [
        turn
        for turn in turns
        if (turn.kind == WARM and not turn.resident) or (turn.kind == SPILLED and turn.resident)
    ]
    asked = [turn for turn in turns if turn.kind in {WARM, SPILLED}]
    return _count("warm sessions were in memory, spilled ones were not", len(wrong), asked)


def _same_context(turns: Sequence[Measured]) -> Check:
    pairs = _pairs(turns, exclude=())
    wrong = sum(turn.prompt_tokens != base.prompt_tokens for turn, base in pairs)
    return _count("every kind of session had the same length", wrong, pairs)


def _prefilled(turns: Sequence[Measured], block_tokens: int) -> Check:
    """Check who prefills its own tokens only.

    The answer before the turn left one token to run. A kill may lose what was on its way to the disk: at
    most a block.
    """
    some = [turn for turn in turns if turn.kind != COLD]
    spare = {kind: block_tokens if kind in RESTARTED else 0 for kind in (WARM, *RESTORED)}
    wrong = sum(turn.prefilled_tokens > turn.own_tokens + 1 + spare[turn.kind] for turn in some)
    return _count("only a turn's own tokens are prefilled, after a restart at most a block more", wrong, some)


def _nothing_cached(turns: Sequence[Measured]) -> Check:
    some = [turn for turn in turns if turn.kind == COLD]
    return _count("cold sessions found nothing in any cache", sum(t.cached_tokens > 0 for t in some), some)


def _exact_answers(turns: Sequence[Measured]) -> Check:
    """Compare answers where all KV was restored: those compute on the same numbers, bit by bit."""
    pairs = [(t, base) for t, base in _pairs(turns, (COLD,)) if t.prefilled_tokens == base.prefilled_tokens]
    wrong = sum(turn.answer != base.answer for turn, base in pairs)
    return _count("what was restored in full answers as if nothing had happened", wrong, pairs)


def _answers(turns: Sequence[Measured]) -> Check:
    """Compare all answers. Other chunks of prefill round otherwise, which can turn a near tie."""
    pairs = _pairs(turns, exclude=())
    wrong = sum(turn.answer != base.answer for turn, base in pairs)
    return _count("all answers are those of the warm session", wrong, pairs, exact=False)


def _believed(turns: Sequence[Measured]) -> Check:
    """Hold what was reported as cached against the time that it took.

    Prefilling all takes a cold session's time, restoring it a part of that; taken at the longest length,
    where the two are farthest apart, and from the fastest turn of each kind: whatever else the machine does
    can only make a turn slower.
    """
    name = "the wait for the first token bears out what was reported as cached"
    grouped = groups(turns)
    length = max((turn.length for turn in turns), default=0)
    warm, cold = grouped.get((length, WARM)), grouped.get((length, COLD))
    restored = {kind: some for kind in RESTORED if (some := grouped.get((length, kind)))}
    whole_s = _first(cold) - _first(warm) if warm and cold else 0.0
    if whole_s < MIN_PREFILL_S or not restored or not warm:
        return Check(name=name, passed=None, detail="no prefill was long enough", exact=False)
    shares = {kind: (_first(some) - _first(warm)) / whole_s for kind, some in restored.items()}
    passed = all(
        share <= BELIEVED + statistics.median(turn.prefilled_share for turn in restored[kind])
        for kind, share in shares.items()
    )
    said = ", ".join(f"{kind} {share:.1%}" for kind, share in shares.items())
    detail = f"of the time to prefill {length:,} tokens: {said}"
    return Check(name=name, passed=passed, detail=detail, exact=False)


def _first(turns: Sequence[Measured]) -> float:
    return min(turn.first_s for turn in turns)


def _pairs(turns: Sequence[Measured], exclude: tuple[str, ...]) -> list[tuple[Measured, Measured]]:
    """Join each turn with that of the warm session in the same place."""
    warm = of_kind(turns, WARM)
    return [
        (turn, warm[turn.place]) for turn in turns if turn.kind not in {WARM, *exclude} and turn.place in warm
    ]


def _count(name: str, wrong: int, of: Sequence[object], *, exact: bool = True) -> Check:
    detail = f"{wrong} of {len(of)} turns did not" if wrong else f"{len(of)} turns"
    return Check(name=name, passed=not wrong if of else None, detail=detail, exact=exact)
