"""What the ratios of `bench peers` rest on, held against what was measured. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bench.old.report import Check

from .summary import CONTEXT_BOUND

if TYPE_CHECKING:
    from .summary import Contexts, Summary

#: A side whose processes use more of a CPU while another one is measured is not idle.
IDLE_BOUND: Final = 0.10


def checks(summary: Summary, *, same_weights: bool) -> tuple[Check, ...]:
    """Say what the ratios rest on. `same_weights`: the other sides run the worker's own model folder."""
    failed = {side.side: side.errors for side in summary.sides if side.errors}
    told = "; ".join(
        f"{side}: " + ", ".join(f"{n} {name}" for name, n in errors.items())
        for side, errors in failed.items()
    )
    found = [
        Check(
            name="every turn of every side was answered",
            passed=not failed if any(side.turns for side in summary.sides) else None,
            detail=told or f"{sum(side.turns for side in summary.sides)} turns",
            exact=False,
        ),
        Check(
            name=f"all sides held the same conversation (contexts within {CONTEXT_BOUND:.0%})",
            passed=all(not one.differing for one in summary.contexts) if summary.contexts else None,
            detail="; ".join(_told(one) for one in summary.contexts) or "no side counts its context",
            exact=False,
        ),
    ]
    if summary.others_busy is not None:
        middle, most = summary.others_busy
        found.append(
            Check(
                name=f"a side is idle while another is measured (under {IDLE_BOUND:.0%} of a CPU)",
                passed=middle < IDLE_BOUND,
                detail=f"{middle:.1%} in the median, {most:.1%} at most",
                exact=False,
            )
        )
    if not same_weights:
        found.append(
            Check(
                name="all sides run the same weights",
                passed=None,
                detail="what a server that was running has loaded is not known",
                exact=False,
            )
        )
    return tuple(found)


def _told(one: Contexts) -> str:
    where = f", first at turn {one.first_difference}" if one.first_difference else ""
    return (
        f"{one.other}: {one.differing} of {one.pairs} turns apart{where}, at most {one.largest_share:.1%};"
        f" {one.equal_answers} answers equal"
    )
