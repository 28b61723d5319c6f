"""The page of `bench store`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.old.about import about, endings
from bench.old.figures import BLUE, GREEN, GREY, ORANGE, legend, percent, steps
from bench.old.page import Page, Plot, Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.old.stats import Middle

    from .summary import Opened, Read, StoreReport

GIB: Final = 2.0**30
MS: Final = 1000.0


def page_of(report: StoreReport) -> Page:
    """Lay out a report."""
    return Page(
        title="The snapshot cache alone",
        subtitle=f"restores and a large index, {report.started_at}",
        notes=[*endings(report), "Files were read soon after they were written: from the page cache."],
        checks=report.checks,
        tables=(_restores(report), _index(report)),
        plots=_plots(report),
        details=(about(report),),
    )


def _restores(report: StoreReport) -> Rows:
    rows = [
        (
            f"{length.tokens:,} tokens",
            f"{length.size_bytes / 2**20:,.0f} MiB",
            _middle(length.restore_rate, GIB, 2),
            _middle(length.load_rate, GIB, 2),
            _middle(length.share, 1, 2),
        )
        for length in report.summary.lengths
    ]
    head = ("median and 95% interval", "size", "restore, GiB/s", "MLX alone, GiB/s", "of MLX alone")
    return Rows("Restores", head, rows)


def _index(report: StoreReport) -> Rows:
    summary = report.summary
    rows = []
    if summary.open_s is not None and summary.match_s is not None:
        rows = [
            (f"opening {summary.blocks:,} blocks", f"{_middle(summary.open_s, 1 / MS, 0)} ms"),
            (f"matching a prefix of {summary.chain:,}", f"{_middle(summary.match_s, 1 / MS, 2)} ms"),
        ]
    return Rows("The index", ("median and 95% interval", "time"), rows)


def _plots(report: StoreReport) -> tuple[Plot, ...]:
    plots: list[Plot] = []
    if report.reads:
        plots.append(
            Plot(
                "Each restore beside MLX alone",
                "Bytes per second of both, round by round. Both meet whatever else the machine does.",
                lambda axes: _rates(axes, report.reads),
                wide=True,
            )
        )
    if report.opened:
        plots.append(
            Plot(
                "Opening and matching",
                "Share of rounds that took at most this long.",
                lambda axes: _times(axes, report.opened),
            )
        )
    return tuple(plots)


def _rates(axes: Any, reads: Sequence[Read]) -> None:
    numbers = range(1, len(reads) + 1)
    for name, colour, seconds in (
        ("restore", BLUE, [read.restore_s for read in reads]),
        ("MLX alone", GREY, [read.load_s for read in reads]),
    ):
        rates = [read.size_bytes / GIB / s for read, s in zip(reads, seconds, strict=True)]
        axes.plot(numbers, rates, color=colour, marker="o", markersize=3, linewidth=0.8, label=name)
    axes.set(xlabel="measurement", ylabel="GiB/s")
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", integer=True)
    legend(axes)


def _times(axes: Any, opened: Sequence[Opened]) -> None:
    steps(axes, [one.open_s * MS for one in opened], "opening", ORANGE)
    steps(axes, [one.match_s * MS for one in opened], "matching", GREEN)
    axes.set(xlabel="time (ms)", ylabel="share of rounds", xscale="log")
    percent(axes)
    legend(axes)


def _middle(middle: Middle, scale: float, digits: int) -> str:
    median, low, high = (value / scale for value in (middle.median, middle.low, middle.high))
    return f"{median:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"
