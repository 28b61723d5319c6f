"""The plots of `bench load`: throughput, distributions by level, fairness, memory and disk over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.old.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Line,
    logarithmic,
    percent,
    shares,
    sizes_over,
    steps,
)
from bench.old.page import Plot

from .shares import rates
from .turns import first_chunk_s, per_token_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .summary import LoadReport
    from .turns import Turn

MS: Final = 1000.0


def plots(report: LoadReport) -> tuple[Plot, ...]:
    """Return the plots of a report, from top to bottom."""
    if not any(level.answered for level in report.levels):
        return ()
    made = [
        Plot(
            "Throughput against concurrency",
            "Tokens generated per second in the closed loops; bars are the 5th to 95th percentile over a"
            " level's tenths.",
            lambda axes: _against(axes, report),
        ),
        Plot(
            "Time to the first chunk",
            "From when a turn was due: what a user waits before anything is seen.",
            lambda axes: _cdfs(axes, report, first_chunk_s, "time to the first chunk (ms)"),
        ),
        Plot(
            "Time per token",
            "After the first chunk, turn by turn.",
            lambda axes: _cdfs(axes, report, per_token_s, "time per token (ms)"),
        ),
        Plot(
            "Gaps between chunks",
            "How long a running answer stood still; a long shoulder is waiting for the prefill of others.",
            lambda axes: _gaps(axes, report),
        ),
        Plot(
            "Fairness",
            "Tokens per second of each session that did equal work. A level that is fair is a small cloud.",
            lambda axes: _fairness(axes, report),
        ),
        *_stall_plot(report),
    ]
    if len(report.readings) > 1:
        made += [
            Plot(
                "Memory",
                "The worker's process, and KV on its device; shaded where a level ran.",
                lambda axes: _memory(axes, report),
                wide=True,
            ),
            Plot(
                "Bytes written to SSD",
                "Snapshots of KV, since the run began.",
                lambda axes: _written(axes, report),
                wide=True,
            ),
        ]
    return tuple(made)


def _shades(count: int) -> list[Any]:
    """Colours from the lightest load to the heaviest."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.9 * i / max(count - 1, 1)) for i in range(count)]


def _against(axes: Any, report: LoadReport) -> None:
    closed = [level for level in report.levels if level.kind == "closed"]
    found = [(level.amount, level.generated) for level in closed if level.generated is not None]
    axes.errorbar(
        [amount for amount, _ in found],
        [one.mean for _, one in found],
        yerr=[
            [max(0.0, one.mean - one.low) for _, one in found],
            [max(0.0, one.high - one.mean) for _, one in found],
        ],
        color=BLUE,
        marker="o",
        markersize=4,
        capsize=3,
        linewidth=1.2,
    )
    axes.set(xlabel="sessions at a time", ylabel="generated tokens a second")
    if found:
        axes.set_xscale("log", base=2)
        axes.set_xticks([amount for amount, _ in found], [f"{amount:g}" for amount, _ in found])
    axes.set_ylim(bottom=0)


def _cdfs(axes: Any, report: LoadReport, measure: Callable[[Turn], float | None], name: str) -> None:
    values = [
        [value * MS for turn in _load(report, number) if (value := measure(turn)) is not None]
        for number in range(len(report.levels))
    ]
    _distributions(axes, report, values, name, "turns")


def _gaps(axes: Any, report: LoadReport) -> None:
    values = [
        [gap * MS for turn in _load(report, number) for gap in turn.gaps_s]
        for number in range(len(report.levels))
    ]
    _distributions(axes, report, values, "gap (ms)", "gaps")


def _distributions(
    axes: Any, report: LoadReport, values: Sequence[Sequence[float]], name: str, of: str
) -> None:
    for level, some, colour in zip(report.levels, values, _shades(len(values)), strict=True):
        if some:
            steps(axes, some, level.name, colour)
    axes.set(xlabel=name, ylabel=f"share of {of}")
    logarithmic(axes)
    percent(axes)
    if any(values):
        axes.legend(loc="lower right", fontsize=8)


def _fairness(axes: Any, report: LoadReport) -> None:
    for number, colour in enumerate(_shades(len(report.levels))):
        found = list(rates(_load(report, number)).values())
        # Side by side in a fixed order, so that equal points do not hide one another.
        places = [number + 0.5 * ((i + 0.5) / len(found) - 0.5) for i in range(len(found))]
        axes.plot(places, found, linestyle="none", marker="o", markersize=3, color=colour)
    axes.set(ylabel="tokens a second of a session")
    axes.set_xticks(range(len(report.levels)), [level.name for level in report.levels], fontsize=8)
    axes.set_ylim(bottom=0)


def _stall_plot(report: LoadReport) -> tuple[Plot, ...]:
    alone = [gap * MS for one in report.stalls for gap in one.alone_s]
    during = [gap * MS for one in report.stalls for gap in one.during_s]
    if not alone or not during:
        return ()

    def draw(axes: Any) -> None:
        steps(axes, alone, "alone", BLUE)
        steps(axes, during, "beside a long prompt", ORANGE)
        shares(axes, "gap (ms)", "gaps")

    return (Plot("Running answers beside a long prompt", "Gaps between chunks, alone and beside it.", draw),)


def _memory(axes: Any, report: LoadReport) -> None:
    readings = report.readings
    span = sizes_over(
        axes,
        [reading.at_s for reading in readings],
        Line([reading.process_bytes for reading in readings], GREY, "process"),
        Line([reading.resident_kv_bytes for reading in readings], BLUE, "KV on the device"),
        name="memory",
    )
    for one in report.spans:
        axes.axvspan(one.started_s / span, one.ended_s / span, color=GREEN, alpha=0.08, linewidth=0)


def _written(axes: Any, report: LoadReport) -> None:
    readings = report.readings
    sizes = [max(0, reading.written_bytes - readings[0].written_bytes) for reading in readings]
    sizes_over(axes, [reading.at_s for reading in readings], Line(sizes, GREEN), name="written")


def _load(report: LoadReport, number: int) -> list[Turn]:
    return [turn for turn in report.turns if turn.level == number and turn.turn]
