"""The page of `bench snapshots`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.old.about import about, endings, subject
from bench.old.figures import BLUE, GREEN, GREY, ORANGE, legend
from bench.old.page import Page, Plot, Rows

from .summary import text_of
from .takes import FAILING, OFF, ON, SLOW

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.old.stats import Middle

    from .summary import Cost, SnapshotsReport

COLOURS: Final = {OFF: GREY, ON: BLUE, SLOW: ORANGE, FAILING: GREEN}


def page_of(report: SnapshotsReport) -> Page:
    """Lay out a report."""
    rounds = len({take.round for take in report.takes})
    return Page(
        title="What snapshots cost",
        subtitle=f"{subject(report)}, {rounds} rounds, {report.started_at}",
        notes=endings(report),
        checks=report.checks,
        tables=(_sides(report),),
        plots=_plots(report.summary.costs),
        details=(about(report),),
    )


def _sides(report: SnapshotsReport) -> Rows:
    rows = [
        (
            f"{side.side}, batch {side.batch}",
            f"{side.decode_rate.median:.1f}",
            text_of(side.decode),
            *beside_of(side),
            f"{side.prefill_rate.median:.0f}",
            text_of(side.prefill),
            f"{side.durable}",
            f"{side.lost}",
            f"{side.most_waiting}",
        )
        for side in report.summary.costs
    ]
    head = (
        "medians and 95% intervals",
        "decoding, tokens/s",
        "of off",
        "a block adds",
        "which leaves",
        "prompts, tokens/s",
        "of off",
        "written",
        "lost",
        "most waiting",
    )
    return Rows("The sides", head, rows)


def beside_of(cost: Cost) -> tuple[str, str]:
    """Write what a block adds to the steps beside it, and the speed that this leaves."""
    if cost.beside is None:
        return ("", "")
    added = cost.beside.added_s
    milliseconds = f"{1000 * added.median:.1f} ms ({1000 * added.low:.1f} - {1000 * added.high:.1f})"
    return milliseconds, text_of(cost.beside.speed)


def _plots(sides: Sequence[Cost]) -> tuple[Plot, ...]:
    if not sides:
        return ()
    return (
        Plot(
            "Decoding",
            "Tokens per second by those without snapshots in the same round: medians, 95% intervals.",
            lambda axes: _ratios(axes, sides, lambda side: side.decode),
        ),
        Plot(
            "Reading prompts",
            "Tokens per second by those without snapshots in the same round: medians, 95% intervals.",
            lambda axes: _ratios(axes, sides, lambda side: side.prefill),
        ),
    )


def _ratios(axes: Any, sides: Sequence[Cost], pick: Callable[[Cost], Middle]) -> None:
    for name in (ON, SLOW, FAILING):
        some = [(side.batch, pick(side)) for side in sides if side.side == name]
        if some:
            axes.errorbar(
                [batch for batch, _ in some],
                [values.median for _, values in some],
                yerr=[
                    [values.median - values.low for _, values in some],
                    [values.high - values.median for _, values in some],
                ],
                color=COLOURS[name],
                marker="o",
                markersize=4,
                linewidth=1.2,
                capsize=3,
                label=name,
            )
    axes.axhline(1.0, color=GREY, linewidth=1, linestyle="--")
    axes.set(xlabel="sessions at a time", ylabel="ratio")
    axes.set_xticks(sorted({side.batch for side in sides}))
    legend(axes)
