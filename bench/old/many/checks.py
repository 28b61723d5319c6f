"""What a worker is promised to do with more sessions than fit in memory. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.old.report import Check
from bench.old.session.checks import growth_check, wait_check

if TYPE_CHECKING:
    from .summary import ManySummary


def checks(summary: ManySummary, sessions: int, *, own: bool) -> tuple[Check, ...]:
    """Hold the aggregates against what is promised of so many sessions.

    `own` says that nobody else asks the worker.
    """
    errors = ", ".join(f"{count} {name}" for name, count in summary.errors.items())
    return (
        Check(
            name="every request was answered",
            passed=summary.built > 0 and not errors,
            detail=errors or f"{summary.built:,} sessions built, {summary.answered:,} turns",
            exact=True,
        ),
        _still_answers(summary, sessions),
        Check(
            name="no session was forgotten",
            passed=not summary.forgotten if summary.turns else None,
            detail=f"forgotten: sessions {', '.join(map(str, summary.forgotten))}"
            if summary.forgotten
            else f"positions follow one another in {summary.turns:,} turns",
            exact=True,
        ),
        Check(
            name="KV on the device stays within its limit",
            passed=summary.over_limit == 0 if summary.readings else None,
            detail=f"{summary.over_limit:,} of {summary.readings:,} readings are over it",
            exact=True,
        ),
        _accounts(summary, own=own),
        wait_check(summary.wait),
        growth_check(summary.beyond_kv),
    )


def _still_answers(summary: ManySummary, sessions: int) -> Check:
    left = sessions - summary.asked_sessions
    passed: bool | None = None if left else True
    if summary.unanswered_sessions:
        passed = False
    return Check(
        name="every session still answers after all were built",
        passed=passed,
        detail=f"{summary.asked_sessions - summary.unanswered_sessions:,} of {sessions:,}"
        + (f"; {left:,} were not asked" if left else ""),
        exact=True,
    )


def _accounts(summary: ManySummary, *, own: bool) -> Check:
    """Compare the tokens. A request whose end is not known may have been carried out all the same."""
    passed: bool | None = None
    detail = "others may have asked this worker"
    if own:
        detail = "the end of a request is not known" if summary.errors else "the run was not finished"
    if own and not summary.errors and summary.account is not None:
        here, there = summary.counted, summary.account
        passed = here == there
        detail = (
            f"the bench counted {here.cached:,} cached, {here.prefilled:,} prefilled,"
            f" {here.generated:,} generated"
        )
        if not passed:
            detail += f"; the worker {there.cached:,}, {there.prefilled:,}, {there.generated:,}"
    return Check(
        name="the worker worked on as many tokens as it told", passed=passed, detail=detail, exact=True
    )
