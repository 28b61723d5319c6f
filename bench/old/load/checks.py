"""What a worker under load is promised to do, held against what was measured. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from bench.old.report import Check
from bench.old.session.checks import wait_check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.old.session.summary import Wait

    from .turns import Turn


def checks(turns: Sequence[Turn], waits: Wait | None) -> tuple[Check, ...]:
    """Hold the turns against what is promised."""
    answers = [turn.answer for turn in turns if turn.answer is not None]
    errors = Counter(turn.error for turn in turns if turn.error is not None)
    uneven = [a for a in answers if a.cached_tokens + a.prefilled_tokens != a.prompt_tokens]
    torn = [turn for turn in turns if turn.joined is False]
    return (
        Check(
            name="every turn was answered",
            passed=bool(answers) and not errors,
            detail=", ".join(f"{count} {name}" for name, count in errors.items())
            or f"{len(answers)} of {len(turns)}, openings included",
            exact=True,
        ),
        Check(
            name="what was cached and what was prefilled make the prompt",
            passed=not uneven if answers else None,
            detail=f"{len(uneven)} turns where they do not" if uneven else f"in {len(answers)} answers",
            exact=True,
        ),
        Check(
            name="the chunks of an answer joined are its result",
            passed=not torn if answers else None,
            detail=f"{len(torn)} where they are not" if torn else f"in {len(answers)} answers",
            exact=True,
        ),
        wait_check(waits),
    )
