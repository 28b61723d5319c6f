"""The page of `bench snapshots`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.about import about, endings, subject
from bench.figures import BLUE, GREEN, GREY, ORANGE, legend
from bench.page import Page, Plot, Rows

from .takes import FAILING, OFF, ON, SLOW

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .summary import Cost, Range, SnapshotsReport

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


def text_of(values: Range) -> str:
    """Write a ratio with its least and its largest value."""
    return f"{values.median:.3f} ({values.least:.3f} - {values.largest:.3f})"


def _sides(report: SnapshotsReport) -> Rows:
    rows = [
        (
            f"{side.side}, batch {side.batch}",
            f"{side.decode_rate.median:.1f}",
            text_of(side.decode),
            f"{side.fastest:.3f}",
            f"{side.prefill_rate.median:.0f}",
            text_of(side.prefill),
            f"{side.durable}",
            f"{side.lost}",
            f"{side.most_waiting}",
        )
        for side in report.summary.costs
    ]
    head = (
        "median, least and largest",
        "decoding, tokens/s",
        "of off",
        "fastest, of off's",
        "prompts, tokens/s",
        "of off",
        "written",
        "lost",
        "most waiting",
    )
    return Rows("The sides", head, rows)


def _plots(sides: Sequence[Cost]) -> tuple[Plot, ...]:
    if not sides:
        return ()
    return (
        Plot(
            "Decoding",
            "Tokens per second by those without snapshots in the same round: medians, least and largest.",
            lambda axes: _ratios(axes, sides, lambda side: side.decode),
        ),
        Plot(
            "Reading prompts",
            "Tokens per second by those without snapshots in the same round: medians, least and largest.",
            lambda axes: _ratios(axes, sides, lambda side: side.prefill),
        ),
    )


def _ratios(axes: Any, sides: Sequence[Cost], pick: Callable[[Cost], Range]) -> None:
    for name in (ON, SLOW, FAILING):
        some = [(side.batch, pick(side)) for side in sides if side.side == name]
        if some:
            axes.errorbar(
                [batch for batch, _ in some],
                [values.median for _, values in some],
                yerr=[
                    [values.median - values.least for _, values in some],
                    [values.largest - values.median for _, values in some],
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
