"""The page of `bench peers`: the ratios first, then how each side did over turns, streams and restarts."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

from bench.old.about import about, endings, subject
from bench.old.figures import BLUE, GREEN, GREY, ORANGE, legend, percent, steps
from bench.old.page import Page, Plot, Rows
from bench.old.stats import MIN_PAIRS

from .summary import AFTER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .summary import Against, PeersReport
    from .turns import Turn

#: By side, in the order of the report; more sides than colours begin anew.
COLOURS: Final = (BLUE, ORANGE, GREEN, "#cc79a7", GREY)
MS: Final = 1000.0


def page_of(report: PeersReport) -> Page:
    """Lay out a report."""
    names = [side.side for side in report.summary.sides]
    return Page(
        title=f"{names[0]} and {', '.join(names[1:])}",
        subtitle=f"{subject(report)}, {report.elapsed_s / 60:.0f} min, {report.started_at}",
        notes=[*endings(report), *_notes(report)],
        checks=report.checks,
        tables=(_ratios(report), *_growth(report)),
        plots=_plots(report, names),
        details=(about(report, _sides(report)), *_errors(report)),
    )


def _notes(report: PeersReport) -> list[str]:
    return [
        f"{one.other} held contexts that are up to {one.largest_share:.1%} apart, from turn"
        f" {one.first_difference} on: it did not do the same work."
        for one in report.summary.contexts
        if one.differing
    ]


def _ratios(report: PeersReport) -> Rows:
    rows = [
        (
            row.measure,
            row.other,
            f"{row.pairs}",
            *(size(value, row.unit) for value in (row.first_p50, row.other_p50)),
            f"{row.ratio:.3f}",
            interval(row),
            _reading(row),
        )
        for row in report.summary.against
    ]
    head = ("median of", "against", "pairs", "worker", "peer", "worker / peer", "95% interval", "")
    return Rows("Ratios", head, rows)


def interval(row: Against) -> str:
    """Write a ratio's interval."""
    return "-" if row.low is None or row.high is None else f"{row.low:.3f} to {row.high:.3f}"


def _reading(row: Against) -> str:
    if row.low is None or row.high is None:
        return f"fewer than {MIN_PAIRS} pairs"
    if row.low <= 1 <= row.high:
        return "no difference"
    return "the worker is better" if (row.ratio < 1) == (row.better == "lower") else "the peer is better"


def size(value: float, unit: str) -> str:
    """Write a measure's value."""
    if unit != "s":
        return f"{value:.1f} /s"
    return f"{value * MS:.0f} ms" if value < 10 else f"{value:.1f} s"


def _growth(report: PeersReport) -> tuple[Rows, ...]:
    rows = [
        (
            one.side,
            f"{one.points}",
            f"{one.seconds * MS:+.1f} ms",
            f"{one.low * MS:+.1f} to {one.high * MS:+.1f} ms",
            "-" if one.ratio is None else f"{one.ratio:.3f}",
        )
        for one in report.summary.growth
    ]
    head = (
        "time to first token, for 1,000 more tokens of context",
        "turns",
        "grows by",
        "95% interval",
        "worker / this",
    )
    return (Rows("Growth", head, rows),) if rows else ()


def _plots(report: PeersReport, names: Sequence[str]) -> tuple[Plot, ...]:
    plots: list[Plot] = []
    if any(t.turn.first_s is not None for t in report.turns):
        plots += (
            Plot(
                "Time to the first token of each turn",
                "Points are turns, lines their medians over the chats. Every turn adds about as many tokens:"
                " a side that starts from what it holds runs level.",
                lambda axes: _over_turns(axes, report, names),
                wide=True,
            ),
            Plot(
                "How often the first token took how long",
                "Share of turns whose first token came within this time.",
                lambda axes: _cdf(axes, report, names, lambda turn: turn.first_s, "time to first token"),
            ),
            Plot(
                "How often a token took how long",
                "The same for the time per token after the first.",
                lambda axes: _cdf(axes, report, names, lambda turn: turn.per_token_s, "time per token"),
            ),
        )
    if any(one.tokens_per_s is not None for one in report.rounds):
        plots.append(
            Plot(
                "Throughput against concurrency",
                "All streams' tokens per second, prefill included: median, least and most of the rounds.",
                lambda axes: _throughput(axes, report, names),
            )
        )
    if any(one.turn.first_s is not None for one in report.restarts):
        plots.append(
            Plot(
                "First token after a restart",
                "From sending the turn, once the process has answered another, short chat.",
                lambda axes: _restarts(axes, report, names),
                wide=True,
            )
        )
    return tuple(plots)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _over_turns(axes: Any, report: PeersReport, names: Sequence[str]) -> None:
    for i, name in enumerate(names):
        points = [(t.number, t.turn.first_s) for t in report.turns if t.side == name and t.turn.error is None]
        seen = [(number, first) for number, first in points if first is not None]
        if not seen:
            continue
        axes.plot(
            [number for number, _ in seen],
            [first for _, first in seen],
            color=_colour(i),
            linestyle="none",
            marker="o",
            markersize=3,
            alpha=0.5,
        )
        numbers = sorted({number for number, _ in seen})
        middles = [statistics.median(first for at, first in seen if at == number) for number in numbers]
        axes.plot(numbers, middles, color=_colour(i), linewidth=1.4, label=name)
    axes.set(xlabel="turn", ylabel="time to first token (s)")
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", integer=True)
    legend(axes)


def _cdf(
    axes: Any, report: PeersReport, names: Sequence[str], read: Callable[[Turn], float | None], label: str
) -> None:
    for i, name in enumerate(names):
        turns = [t.turn for t in report.turns if t.side == name and t.turn.error is None]
        values = [value * MS for turn in turns if (value := read(turn)) is not None]
        if values:
            steps(axes, values, name, _colour(i))
    axes.set(xlabel=f"{label} (ms)", ylabel="share of turns")
    axes.set_xlim(left=0)
    percent(axes)
    legend(axes)


def _throughput(axes: Any, report: PeersReport, names: Sequence[str]) -> None:
    levels = sorted({one.streams for one in report.rounds})
    for i, name in enumerate(names):
        rates = {
            streams: [
                rate
                for one in report.rounds
                if one.side == name and one.streams == streams and (rate := one.tokens_per_s) is not None
            ]
            for streams in levels
        }
        seen = [streams for streams in levels if rates[streams]]
        middles = [statistics.median(rates[streams]) for streams in seen]
        spans = [
            [middle - min(rates[streams]) for streams, middle in zip(seen, middles, strict=True)],
            [max(rates[streams]) - middle for streams, middle in zip(seen, middles, strict=True)],
        ]
        axes.errorbar(seen, middles, yerr=spans, color=_colour(i), marker="o", capsize=3, label=name)
    axes.set(xlabel="streams at once", ylabel="tokens per second", xticks=levels)
    axes.set_ylim(bottom=0)
    legend(axes)


def _restarts(axes: Any, report: PeersReport, names: Sequence[str]) -> None:
    wanted = sorted({(one.length, one.ending) for one in report.restarts}, key=lambda pair: pair[0])
    groups = [(length, ending) for ending in AFTER for length, of in wanted if of == ending]
    values = {
        (name, one[0], one[1]): [
            r.turn.first_s
            for r in report.restarts
            if (r.side, r.length, r.ending) == (name, *one) and r.turn.first_s is not None
        ]
        for name in names
        for one in groups
    }
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        for at, group in enumerate(groups):
            seen = values[name, group[0], group[1]]
            place = at + (i - (len(names) - 1) / 2) * width
            if seen:
                label = name if at == 0 else None
                axes.bar(place, statistics.median(seen), width * 0.9, color=_colour(i), label=label)
                axes.plot([place] * len(seen), seen, "o", color="black", markersize=2.5)
    axes.set_xticks(range(len(groups)), [f"{length:,} tokens\n{AFTER[of]}" for length, of in groups])
    axes.set(ylabel="time to first token (s)")
    legend(axes)


def _sides(report: PeersReport) -> list[tuple[str, str]]:
    rows = []
    for side in report.sides:
        arithmetic = f", {side.blas}" if side.blas else ""
        own = "a process of the bench's" if side.own_process else "was running"
        rows.append((side.name, f"{side.software}, model {side.model}, {own}{arithmetic}"))
    if (busy := report.summary.others_busy) is not None:
        rows.append(("CPU used by idle sides", f"{busy[0]:.1%} in the median, {busy[1]:.1%} at most"))
    return rows


def _errors(report: PeersReport) -> tuple[Rows, ...]:
    rows = [
        (side.side, name, f"{count}", report.messages.get(side.side, {}).get(name, ""))
        for side in report.summary.sides
        for name, count in side.errors.items()
    ]
    return (Rows("Errors", ("side", "class", "turns", "the first one"), rows, numbers=False),) if rows else ()
