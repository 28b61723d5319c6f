"""The page of `bench load`: which tables say what a worker does under load; its plots are in `plots`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bench.old.about import about, endings, subject
from bench.old.figures import duration
from bench.old.page import Page, Rows

from .plots import plots

if TYPE_CHECKING:
    from bench.old.stats import Spread

    from .shares import Throughput
    from .summary import LevelSummary, LoadReport

MS: Final = 1000.0


def page_of(report: LoadReport) -> Page:
    """Lay out a report."""
    span, unit = duration(report.elapsed_s)
    return Page(
        title="Many sessions at once",
        subtitle=f"{subject(report)}, {len(report.turns)} turns in {report.elapsed_s / span:.1f} {unit},"
        f" {report.started_at}",
        notes=endings(report),
        checks=report.checks,
        tables=(_levels(report), *_details(report), *_stall(report)),
        plots=plots(report),
        details=(about(report), *_errors(report)),
    )


def _levels(report: LoadReport) -> Rows:
    """Return the line of each level that says most."""
    head = (
        "load",
        "answered",
        "generated/s (p5 to p95)",
        "first chunk p50",
        "p99",
        "gap p50",
        "p99",
    )
    rows = [
        (
            level.name,
            f"{level.answered}/{level.turns}",
            _throughput(level.generated),
            *_times(level.first_chunk),
            *_times(level.gaps),
        )
        for level in report.levels
    ]
    return Rows("Levels", head, rows)


def glance(report: LoadReport) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return what a terminal has room for: names of columns, and a line for each level."""
    rows: list[tuple[str, ...]] = [
        (
            level.name,
            f"{level.answered}/{level.turns}",
            "-" if level.generated is None else f"{level.generated.mean:,.1f}",
            *_times(level.first_chunk),
            *((_ms(level.gaps.p99),) if level.gaps else ("-",)),
            "-" if level.fairness is None else f"{level.fairness.jain:.3f}",
        )
        for level in report.levels
    ]
    return ("", "answered", "tokens/s", "first chunk", "p99", "gaps p99", "Jain"), rows


def _details(report: LoadReport) -> tuple[Rows, ...]:
    queues = [
        (
            level.name,
            *_times(level.whole),
            *_times(level.queued),
            *_times(level.lateness),
            *_times(level.per_token),
        )
        for level in report.levels
    ]
    shared = [
        (
            level.name,
            "-" if level.fairness is None else f"{level.fairness.max_min:.2f}, {level.fairness.jain:.3f}",
            "-" if level.fairness is None else f"{level.fairness.sessions}",
            _throughput(level.prefilled),
            _lag(level),
            "-" if level.process_bytes is None else f"{level.process_bytes / 2**20:,.0f} MiB",
        )
        for level in report.levels
    ]
    head = ("load", "whole turn", "p99", "queued", "p99", "sent late", "p99", "per token", "p99")
    more = ("load", "best/worst, Jain", "of sessions", "prefilled/s (p5 to p95)", "loop late, p99", "process")
    return (
        Rows("Times from when a turn was due, medians and p99", head, queues),
        Rows("Fairness and the process", more, shared),
    )


def _stall(report: LoadReport) -> tuple[Rows, ...]:
    found = report.stall
    if found is None:
        return ()
    rows = [
        (
            name,
            f"{gaps.count}",
            f"{gaps.p50 * MS:.1f} ms",
            f"{gaps.p99 * MS:.1f} ms",
            f"{gaps.max * MS:.1f} ms",
        )
        for name, gaps in (("alone", found.alone), ("beside the prompt", found.during))
        if gaps is not None
    ]
    ratio = (
        "" if found.ratio is None else ": {:.2f} times the median, 95% {:.2f} to {:.2f}".format(*found.ratio)
    )
    title = f"Running answers beside {found.rounds} prompts of {found.tokens:,.0f} tokens{ratio}"
    return (Rows(title, ("gaps", "count", "p50", "p99", "max"), rows),)


def _throughput(measured: Throughput | None) -> str:
    return "-" if measured is None else f"{measured.mean:,.1f} ({measured.low:,.1f} to {measured.high:,.1f})"


def _times(measured: Spread | None) -> tuple[str, str]:
    return ("-", "-") if measured is None else (_ms(measured.p50), _ms(measured.p99))


def _ms(seconds: float) -> str:
    return f"{seconds * MS:,.1f} ms"


def _lag(level: LevelSummary) -> str:
    if level.lag is None:
        return "-"
    bound = "above all bounds" if level.lag.p99_s is None else f"<= {level.lag.p99_s * MS:g} ms"
    return f"{level.lag.mean_s * MS:.1f} ms, {bound}"


def _errors(report: LoadReport) -> tuple[Rows, ...]:
    rows = [
        (name, level.name, f"{count}", report.messages.get(name, ""))
        for level in report.levels
        for name, count in level.errors.items()
    ]
    return (Rows("Errors", ("class", "load", "turns", "the first one"), rows, numbers=False),) if rows else ()
