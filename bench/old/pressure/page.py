"""The page of `bench pressure`: memory over time against the limit, and what became of the requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.old.about import about, endings, subject
from bench.old.figures import BLUE, GREEN, GREY, MIB, ORANGE, Line, duration, shares, sizes_over, steps
from bench.old.page import Page, Plot, Rows

if TYPE_CHECKING:
    from .summary import PressureReport, PressureSummary

SHOWN: Final = {
    "short": "short",
    "long": "long: two may fit",
    "alone": "fits alone",
    "never": "can never fit",
}
COLOURS: Final = {"short": BLUE, "long": GREEN, "alone": ORANGE}


def page_of(report: PressureReport) -> Page:
    """Lay out a report."""
    summary = report.summary
    span, unit = duration(report.elapsed_s)
    return Page(
        title="At the memory limit",
        subtitle=f"{subject(report)}, {summary.sent:,} requests in {report.elapsed_s / span:.1f} {unit},"
        f" {report.started_at}",
        notes=endings(report),
        checks=report.checks,
        tables=(_kinds(summary), _sizes(report)),
        plots=_plots(report),
        details=(about(report), *_messages(report)),
    )


def _kinds(summary: PressureSummary) -> Rows:
    rows = []
    for one in summary.kinds:
        times = ("", "", "")
        if one.seconds is not None:
            times = (f"{one.seconds.p50:.2f} s", f"{one.seconds.p95:.2f} s", f"{one.seconds.max:.2f} s")
        found = ", ".join(f"{count:,} {name}" for name, count in one.outcomes.items())
        rows.append((SHOWN[one.kind], f"{one.sent:,}", found, *times))
    return Rows("Requests by what they come to hold", ("", "sent", "outcomes", "p50", "p95", "longest"), rows)


def _sizes(report: PressureReport) -> Rows:
    summary, sizes = report.summary, report.sizes
    rows = [
        ("allocated at the most", _mib(summary.most_peak_bytes), f"limit {_mib(summary.device_limit_bytes)}"),
        ("KV at the most", _mib(summary.most_kv_bytes), f"limit {_mib(summary.kv_limit_bytes)}"),
        ("process before the load", _mib(summary.first_process_bytes), ""),
        ("process at the most", _mib(summary.most_process_bytes), ""),
        ("restored from SSD", _mib(summary.restored_bytes), ""),
        ("requests that waited for memory at a time", f"{summary.most_waiting_for_memory:,}", ""),
    ]
    if sizes is not None:
        rows += [
            ("without sessions", _mib(sizes.idle_bytes), ""),
            ("kept free of KV: weights and the largest step", _mib(sizes.beside_bytes), ""),
            ("KV of a token", f"{sizes.bytes_per_token:,} B", f"and {sizes.fixed_bytes:,} B of a session"),
        ]
    return Rows("Memory", ("", "", ""), rows)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.1f} MiB"


def _messages(report: PressureReport) -> tuple[Rows, ...]:
    rows = list(report.messages.items())
    return (Rows("The first message of each failure", ("", ""), rows, numbers=False),) if rows else ()


def _plots(report: PressureReport) -> tuple[Plot, ...]:
    if len(report.readings) < 2:
        return ()
    return (
        Plot(
            "Memory against the limit",
            "What MLX has allocated, as the worker published it, and the most that it ever had.",
            lambda axes: _device(axes, report),
            wide=True,
        ),
        Plot(
            "KV against its limit",
            "Reserved by requests that run, and held by idle sessions.",
            lambda axes: _lines(
                axes,
                report,
                Line([r.kv_bytes for r in report.readings], BLUE, "KV"),
                limit_bytes=report.summary.kv_limit_bytes,
            ),
            wide=True,
        ),
        Plot(
            "The process",
            "Resident memory of the worker's process.",
            lambda axes: _lines(
                axes, report, Line([r.process_bytes for r in report.readings], GREY, "process")
            ),
        ),
        Plot(
            "Time of a request",
            "Those that were carried out and not cancelled, by what they come to hold.",
            lambda axes: _times(axes, report),
        ),
    )


def _device(axes: Any, report: PressureReport) -> None:
    readings = report.readings
    _lines(
        axes,
        report,
        Line([r.active_bytes for r in readings], BLUE, "allocated"),
        Line([r.peak_bytes for r in readings], GREEN, "peak so far"),
        limit_bytes=report.summary.device_limit_bytes,
    )


def _lines(axes: Any, report: PressureReport, *lines: Line, limit_bytes: int | None = None) -> None:
    sizes_over(axes, [reading.at_s for reading in report.readings], *lines, limit_bytes=limit_bytes)


def _times(axes: Any, report: PressureReport) -> None:
    for kind, colour in COLOURS.items():
        values = report.series[f"request, {kind}"].values
        if values:
            steps(axes, values, f"{SHOWN[kind]} ({len(values):,})", colour)
    shares(axes, "whole request (s)", "requests")
