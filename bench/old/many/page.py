"""The page of `bench many`: which tables and plots say what sessions cost that do not fit in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.old.about import about, endings, subject
from bench.old.figures import (
    BLUE,
    GREEN,
    GREY,
    MAX_SHAPES,
    ORANGE,
    Line,
    byte_unit,
    duration,
    shares,
    sizes_over,
    steps,
)
from bench.old.page import Page, Plot, Rows

from .summary import growing
from .turns import found

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.old.stats import Spread

    from .summary import ManyReport, ManySummary
    from .turns import Turn

MS: Final = 1000.0
MIB: Final = 2.0**20
COLOURS: Final = {"memory": BLUE, "SSD": ORANGE, "prefilled": GREEN}
SHOWN: Final = {"memory": "in memory", "SSD": "on SSD", "prefilled": "nowhere: prefilled"}


def page_of(report: ManyReport) -> Page:
    """Lay out a report."""
    summary = report.summary
    span, unit = duration(report.elapsed_s)
    return Page(
        title="More sessions than fit in memory",
        subtitle=f"{subject(report)}, {summary.built:,} sessions and {summary.turns:,} turns in"
        f" {report.elapsed_s / span:.1f} {unit}, {report.started_at}",
        notes=endings(report),
        checks=report.checks,
        tables=(_places(summary), _sizes(summary)),
        plots=_plots(report),
        details=(about(report), *_errors(report)),
    )


def _places(summary: ManySummary) -> Rows:
    rows = [
        (
            SHOWN[one.place],
            f"{one.whole.count:,}",
            *_times(one.whole),
            *_times(one.first_chunk),
            f"{one.prefilled:,.0f}",
        )
        for one in summary.places
    ]
    if summary.build is not None:
        rows.append(
            (
                "a beginning, many at a time",
                f"{summary.build.count:,}",
                *_times(summary.build),
                "",
                "",
                "",
                "",
            )
        )
    head = ("KV found", "turns", "whole p50", "p95", "p99", "first chunk p50", "p95", "p99", "prefilled p50")
    return Rows("Time of a turn by where its session was found", head, rows)


def _sizes(summary: ManySummary) -> Rows:
    rows = [("building all sessions", f"{summary.build_s:,.1f} s", "")]
    if summary.per_session is not None:
        size = summary.per_session
        spread = f"95% {size.low / 1024:,.1f} to {size.high / 1024:,.1f}, {size.readings} readings"
        rows.append(
            ("process memory of a session, KV left out", f"{size.size_bytes / 1024:,.1f} KiB", spread)
        )
    if summary.ssd_bytes_per_session is not None:
        rows.append(("bytes on SSD of a session", f"{summary.ssd_bytes_per_session / 1024:,.1f} KiB", ""))
    if summary.restored_bytes is not None:
        rows.append(("restored from SSD in all turns", f"{summary.restored_bytes / MIB:,.1f} MiB", ""))
    if summary.most_kv_bytes is not None and summary.max_memory_bytes is not None:
        limit = f"limit {summary.max_memory_bytes / MIB:,.2f} MiB, {summary.readings:,} readings"
        rows.append(("most KV on the device", f"{summary.most_kv_bytes / MIB:,.2f} MiB", limit))
    rows.append(("sessions rewound to their beginning", f"{summary.rewinds:,}", ""))
    return Rows("What sessions take", ("", "", ""), rows)


def _times(measured: Spread) -> tuple[str, str, str]:
    p50, p95, p99 = (f"{value * MS:,.1f} ms" for value in (measured.p50, measured.p95, measured.p99))
    return p50, p95, p99


def _errors(report: ManyReport) -> tuple[Rows, ...]:
    rows = [(name, f"{n}", report.messages.get(name, "")) for name, n in report.summary.errors.items()]
    return (Rows("Errors", ("class", "requests", "the first one"), rows, numbers=False),) if rows else ()


def _plots(report: ManyReport) -> tuple[Plot, ...]:
    plots = []
    if report.summary.places:
        plots += [
            Plot(
                "Time of a turn by where its session was found",
                "Right before each turn the worker was asked whether the session's KV was on its device; of"
                " the others, those whose tokens were mostly cached were found on SSD.",
                lambda axes: _cdfs(axes, report, [(t, t.latency_s) for t in report.turns], "whole turn (ms)"),
            ),
            Plot(
                "Time to the first chunk",
                "The same, until something is seen of the answer.",
                lambda axes: _cdfs(
                    axes, report, [(t, t.first_chunk_s) for t in report.turns], "first chunk (ms)"
                ),
            ),
        ]
    if len(report.readings) > 1:
        plots += [
            Plot(
                "Memory over the number of sessions",
                "The worker's process without KV, while sessions were built.",
                lambda axes: _growing(axes, report),
            ),
            Plot(
                "Bytes to SSD",
                "Snapshots of KV: written since the run began, stored now, and restored.",
                lambda axes: _ssd(axes, report),
            ),
            Plot(
                "KV on the device",
                "As the worker published it, under the limit that it was given.",
                lambda axes: _limit(axes, report),
                wide=True,
            ),
            Plot(
                "Process memory over time",
                "All of the worker's process; the line is where the turns began.",
                lambda axes: _process(axes, report),
                wide=True,
            ),
        ]
    return tuple(plots)


def _cdfs(axes: Any, report: ManyReport, timed: Sequence[tuple[Turn, float]], name: str) -> None:
    for one in report.summary.places:
        values = [time_s * MS for turn, time_s in timed if found(turn) == one.place]
        steps(axes, values, f"{SHOWN[one.place]} ({len(values):,})", COLOURS[one.place])
    shares(axes, name)


def _growing(axes: Any, report: ManyReport) -> None:
    points = growing(report.built, report.readings)
    scale, name = byte_unit(max((size for _, size in points), default=0))
    axes.plot(
        [number for number, _ in points],
        [size / scale for _, size in points],
        color=BLUE,
        linewidth=1.2,
        marker="o",
        markersize=2,
        rasterized=len(points) > MAX_SHAPES,
    )
    axes.set(xlabel="sessions built", ylabel=f"process without KV ({name})")
    axes.locator_params(axis="x", integer=True)


def _ssd(axes: Any, report: ManyReport) -> None:
    readings = report.readings
    first = readings[0]
    sizes_over(
        axes,
        [r.at_s for r in readings],
        Line([r.written_bytes - first.written_bytes for r in readings], GREEN, "written"),
        Line([r.stored_bytes for r in readings], GREY, "stored"),
        Line([r.restored_bytes - first.restored_bytes for r in readings], ORANGE, "restored"),
    )


def _limit(axes: Any, report: ManyReport) -> None:
    readings = report.readings
    sizes_over(
        axes,
        [r.at_s for r in readings],
        Line([r.resident_kv_bytes for r in readings], BLUE, "KV"),
        limit_bytes=max(r.max_memory_bytes for r in readings),
    )


def _process(axes: Any, report: ManyReport) -> None:
    readings = report.readings
    line = Line([r.process_bytes for r in readings], GREY)
    span = sizes_over(axes, [r.at_s for r in readings], line, name="process")
    if report.written_at_s is not None:
        axes.axvline(report.written_at_s / span, color=BLUE, linewidth=1, linestyle=":")
