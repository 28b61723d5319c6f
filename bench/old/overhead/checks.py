"""Whether the comparison was a fair one, held against what was measured. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from bench.old.report import Check

from .turns import WORKERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .turns import Turn

#: CPUs that all waiting sides together may use without being a burden to the one that is measured.
IDLE_CPUS: Final = 0.05
#: The system counts CPU time in hundredths of a second: less than this tells nothing.
MIN_SECONDS: Final = 5.0
#: Tokens that may differ before it is more than an occasional near tie.
AGREEING: Final = 0.9


def checks(turns: Sequence[Turn], *, same_library: bool | None) -> tuple[Check, ...]:
    """Judge the turns. `same_library` says whether both multiply with the same one, None: not known."""
    through = [turn for turn in turns if turn.side in WORKERS]
    return (
        _taken(through),
        _fresh(through),
        _own(through),
        Check(
            name="both sides multiply with the same library",
            passed=same_library,
            detail={True: "by their memory maps", False: "their memory maps differ", None: "not known"}[
                same_library
            ],
            exact=True,
        ),
        _idle(turns),
        _agreeing(turns),
    )


def _taken(turns: Sequence[Turn]) -> Check:
    """Check that the worker's context is the sum of what was sent and what was answered."""
    held: defaultdict[tuple[int, int, str, int], int] = defaultdict(int)
    wrong, rows = 0, 0
    for turn in turns:
        for i, row in enumerate(turn.rows):
            key = (turn.round, turn.batch, turn.side, i)
            held[key] += row.prompt_tokens
            wrong += row.context_tokens != held[key]
            held[key] += row.tokens
            rows += 1
    return Check(
        name="the worker ran the very tokens that were run in process",
        passed=not wrong if rows else None,
        detail=f"{wrong} of {rows} contexts are of another length" if wrong else f"{rows} contexts",
        exact=True,
    )


def _fresh(turns: Sequence[Turn]) -> Check:
    cached = [row.cached_tokens or 0 for turn in turns if turn.turn == 1 for row in turn.rows]
    return Check(
        name="no session began with what another one had left in a cache",
        passed=not any(cached) if cached else None,
        detail=f"{sum(cached)} tokens of first turns were cached, of {len(cached)} sessions",
        exact=True,
    )


def _own(turns: Sequence[Turn]) -> Check:
    later = [row for turn in turns if turn.turn > 1 for row in turn.rows]
    # One token of the turn before still waits for its forward pass.
    over = [row for row in later if (row.prefilled_tokens or 0) > row.prompt_tokens + 1]
    return Check(
        name="later turns prefilled their own tokens only",
        passed=not over if later else None,
        detail=f"{len(over)} of {len(later)} turns prefilled more" if over else f"{len(later)} turns",
        exact=True,
    )


def _idle(turns: Sequence[Turn]) -> Check:
    seconds = sum(turn.seconds for turn in turns)
    share = sum(turn.cpu.idle for turn in turns) / seconds if seconds else 0.0
    return Check(
        name="the sides that waited were idle",
        passed=share <= IDLE_CPUS if seconds >= MIN_SECONDS else None,
        detail=f"all of them together used {share:.1%} of one CPU, in {seconds:.1f} s",
        exact=False,
    )


def _agreeing(turns: Sequence[Turn]) -> Check:
    rows = [row for turn in turns if turn.side in WORKERS for row in turn.rows if row.agreeing is not None]
    tokens = sum(row.tokens for row in rows)
    same = sum(row.agreeing or 0 for row in rows)
    return Check(
        name="the worker says what is said in process",
        passed=same >= AGREEING * tokens if tokens else None,
        detail=f"{same / tokens:.1%} of {tokens:,} tokens" if tokens else "nothing to compare",
        exact=False,
    )
