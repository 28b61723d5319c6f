"""The page of `bench session`: which tables and plots say what one session cost over time."""

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
    cdf,
    duration,
    legend,
    percent,
    sizes_over,
    steps,
)
from bench.old.page import Page, Plot, Rows

from .summary import written_over_time
from .turns import per_token_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.old.stats import Spread

    from .summary import SessionReport, Slope
    from .turns import Answer, Memory, Turn

#: Rewinds that are drawn; more would hide the turns.
MAX_LINES: Final = 40
MS: Final = 1000.0
MIB: Final = 2.0**20
DAY_S: Final = 86_400.0


def page_of(report: SessionReport) -> Page:
    """Lay out a report."""
    summary = report.summary
    span, unit = duration(report.elapsed_s)
    return Page(
        title="One session, many turns",
        subtitle=f"{subject(report)}, {summary.turns} turns in {report.elapsed_s / span:.1f} {unit},"
        f" {report.started_at}",
        notes=_notes(report),
        checks=report.checks,
        tables=(_spreads(report),),
        plots=_plots(report),
        details=(about(report, _more(report)), *_errors(report), *_buckets(report)),
    )


def _notes(report: SessionReport) -> list[str]:
    notes = endings(report)
    if report.rewinds:
        first = report.rewinds[0]
        notes.append(
            f"The session was full {len(report.rewinds)} times and went on from its beginning, first before"
            f" turn {first.turn} at {first.position:,} tokens ({first.reason})."
        )
    return notes


def _spreads(report: SessionReport) -> Rows:
    summary = report.summary
    named = (
        ("whole turn", summary.latency, 1.0, "s"),
        ("time to the first chunk", summary.first_chunk, MS, "ms"),
        ("time per token after it", summary.per_token, MS, "ms"),
    )
    rows = [_spread(name, spread, scale, unit) for name, spread, scale, unit in named if spread is not None]
    head = ("measured by the client", "answers", "min", "p50", "p95", "p99", "max", "drift", "of p50")
    return Rows("Times", head, rows)


def _spread(name: str, spread: Spread, scale: float, unit: str) -> tuple[str, ...]:
    digits = 2 if unit == "s" else 1
    values = (spread.min, spread.p50, spread.p95, spread.p99, spread.max)
    drift = "-" if spread.drift is None else f"{spread.drift * scale:+.{digits}f} {unit}"
    share = "-" if spread.drift_share is None else f"{spread.drift_share:+.1%}"
    times = (f"{value * scale:.{digits}f} {unit}" for value in values)
    return (name, f"{spread.count}", *times, drift, share)


def _plots(report: SessionReport) -> tuple[Plot, ...]:
    answered = [(turn, turn.answer) for turn in report.turns if turn.answer is not None]
    if not answered:
        return ()
    memories = [turn.memory for turn in report.turns if turn.memory is not None]
    turns = [turn for turn, _ in answered]
    paces = [pace * MS for turn in turns if (pace := per_token_s(turn)) is not None]
    firsts = [answer.first_chunk_s * MS for _, answer in answered]
    return (
        Plot(
            "Time of each turn",
            "From sending a turn to its recorded result, and to its first chunk. A session whose turns cost"
            " the same at every length runs level.",
            lambda axes: _latency(axes, report),
            wide=True,
        ),
        Plot(
            "How often a turn took how long",
            "Share of turns that were at most this long. Steep is steady; a long shoulder is a tail.",
            lambda axes: cdf(axes, [turn.latency_s for turn in turns], "whole turn (s)", BLUE),
        ),
        Plot(
            "First chunk and time per token",
            "The same for the wait at a turn's start, and for each token after it.",
            lambda axes: _cdfs(axes, firsts, paces),
        ),
        Plot(
            "Tokens prefilled",
            "A turn should prefill its own tokens only, however many the session holds.",
            lambda axes: _prefilled(axes, answered),
        ),
        Plot(
            "KV and process memory",
            "What the session's KV holds, and the resident memory of the worker's whole process.",
            lambda axes: _memory(axes, answered, memories, report.elapsed_s),
        ),
        *(_written_plot(memories) if memories else ()),
    )


def _latency(axes: Any, report: SessionReport) -> None:
    answered = [(turn, turn.answer) for turn in report.turns if turn.answer is not None]
    numbers = [turn.turn for turn, _ in answered]
    style = {"linewidth": 0.8, "marker": "o", "markersize": 3 if len(numbers) <= MAX_SHAPES else 1}
    style["rasterized"] = len(numbers) > MAX_SHAPES
    axes.plot(numbers, [turn.latency_s for turn, _ in answered], color=BLUE, label="whole turn", **style)
    firsts = [answer.first_chunk_s for _, answer in answered]
    axes.plot(numbers, firsts, color=ORANGE, label="first chunk", **style)
    failed = [turn for turn in report.turns if turn.error is not None]
    if failed:
        axes.plot(
            [turn.turn for turn in failed],
            [turn.latency_s for turn in failed],
            color="#b91c1c",
            linestyle="none",
            marker="x",
            label="failed",
        )
    for i, rewind in enumerate(report.rewinds[:MAX_LINES]):
        label = None if i else "rewound to the beginning"
        axes.axvline(rewind.turn, color=GREY, linewidth=0.8, linestyle=":", label=label)
    axes.set(xlabel="turn", ylabel="time (s)")
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", integer=True)
    legend(axes)


def _cdfs(axes: Any, firsts: Sequence[float], paces: Sequence[float]) -> None:
    steps(axes, firsts, "first chunk", ORANGE)
    if paces:
        steps(axes, paces, "per token after it", GREEN)
    axes.set(xlabel="time (ms)", ylabel="share of turns")
    if max(firsts) > 20 * max(min([*firsts, *paces]), 0.001):
        axes.set_xscale("log")
    percent(axes)
    legend(axes)


def _prefilled(axes: Any, answered: Sequence[tuple[Turn, Answer]]) -> None:
    numbers = [turn.turn for turn, _ in answered]
    raster = len(numbers) > MAX_SHAPES
    contexts = [answer.prompt_tokens for _, answer in answered]
    prefilled = [answer.prefilled_tokens for _, answer in answered]
    axes.plot(numbers, contexts, color=GREY, linewidth=1, label="whole context", rasterized=raster)
    axes.plot(
        numbers,
        prefilled,
        color=BLUE,
        linewidth=0.8,
        marker="o",
        markersize=3,
        label="prefilled",
        rasterized=raster,
    )
    axes.set(xlabel="turn", ylabel="tokens", yscale="log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.locator_params(axis="x", integer=True)
    legend(axes)


def _memory(
    axes: Any, answered: Sequence[tuple[Turn, Answer]], memories: Sequence[Memory], elapsed_s: float
) -> None:
    span, unit = duration(elapsed_s)
    sizes = [answer.kv_live_bytes for _, answer in answered]
    scale, name = byte_unit(max([*sizes, *(memory.process_bytes for memory in memories)]))
    if memories:
        times = [memory.at_s / span for memory in memories]
        resident = [memory.process_bytes / scale for memory in memories]
        axes.plot(times, resident, color=GREY, linewidth=1.2, label="process")
    ends = [(turn.started_s + turn.latency_s) / span for turn, _ in answered]
    axes.plot(ends, [size / scale for size in sizes], color=BLUE, linewidth=1.2, label="KV of the session")
    axes.set(xlabel=f"time ({unit})", ylabel=f"memory ({name})")
    axes.set_ylim(bottom=0)
    legend(axes)


def _written_plot(memories: Sequence[Memory]) -> tuple[Plot, ...]:
    points = written_over_time(memories)
    line = Line([size for _, size in points], GREEN)
    return (
        Plot(
            "Bytes written to SSD",
            "Snapshots of KV, counted by the worker since the first turn.",
            lambda axes: sizes_over(axes, [at_s for at_s, _ in points], line, name="written"),
            wide=True,
        ),
    )


def _more(report: SessionReport) -> list[tuple[str, str]]:
    rows = [
        (f"growth of the {name}", _growth(slope))
        for name, slope in (
            ("process", report.summary.process),
            ("process without KV", report.summary.beyond_kv),
        )
        if slope is not None
    ]
    if report.summary.written_per_token is not None:
        rows.append(("written to SSD per generated token", _written_rate(report)))
    return [*rows, ("KV on one level (within 10%)", _word(report.summary.kv_bounded))]


def _written_rate(report: SessionReport) -> str:
    per_token = report.summary.written_per_token or 0.0
    per_day = (report.summary.written_bytes or 0) / report.elapsed_s * DAY_S
    (scale, name), (day_scale, day_name) = byte_unit(per_token), byte_unit(per_day)
    return f"{per_token / scale:.1f} {name}; {per_day / day_scale:.1f} {day_name} a day at this pace"


def _growth(slope: Slope) -> str:
    low, high = slope.low / MIB, slope.high / MIB
    rate = f"{slope.bytes_per_hour / MIB:+.1f} MiB an hour"
    return f"{rate}, 95% {low:+.1f} to {high:+.1f}, {slope.readings} readings"


def _errors(report: SessionReport) -> tuple[Rows, ...]:
    if not report.summary.errors:
        return ()
    rows = [
        (name, f"{count}", report.messages.get(name, "")) for name, count in report.summary.errors.items()
    ]
    return (Rows("Errors", ("class", "turns", "the first one"), rows, numbers=False),)


def _buckets(report: SessionReport) -> tuple[Rows, ...]:
    if len(report.summary.buckets) < 2:
        return ()
    rows = [
        (
            f"{bucket.start_s / 60:.0f} min",
            f"{bucket.turns}",
            f"{bucket.errors}",
            "-" if bucket.p50_s is None else f"{bucket.p50_s:.2f} s",
            "-" if bucket.p95_s is None else f"{bucket.p95_s:.2f} s",
        )
        for bucket in report.summary.buckets
    ]
    return (Rows("By ten minutes", ("from", "turns", "errors", "p50", "p95"), rows),)


def _word(value: bool | None) -> str:
    return {
        True: "yes",
        False: "no; a cache that keeps everything grows with its session",
        None: "cannot tell",
    }[value]
