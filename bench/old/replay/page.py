"""The page of `bench replay`: were the answers the same, and did they come as fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.old.about import about, endings, subject
from bench.old.figures import BLUE, GREY, ORANGE, legend, percent, steps
from bench.old.page import Page, Plot, Rows
from bench.old.stats import MIN_PAIRS

from .summary import pairs

if TYPE_CHECKING:
    from .summary import Beside, ReplayReport

MS: Final = 1000.0
NOTE: Final = (
    "The record was made at another time than the replay: a ratio tells of both machines, and of whatever"
    " else they had to do."
)


def page_of(report: ReplayReport) -> Page:
    """Lay out a report."""
    return Page(
        title="Recorded sessions, played again",
        subtitle=f"{subject(report)}, {report.recorded_sessions} sessions with {report.recorded_requests}"
        f" requests, {report.started_at}",
        notes=[
            *endings(report),
            NOTE,
        ],
        checks=report.checks,
        tables=(_beside(report), *_answers(report)),
        plots=_plots(report),
        details=(about(report, _more(report)), *_errors(report)),
    )


def interval(row: Beside) -> str:
    """Write a ratio's interval."""
    if row.low is None or row.high is None:
        return f"fewer than {MIN_PAIRS} pairs"
    return f"{row.low:.3f} to {row.high:.3f}"


def _beside(report: ReplayReport) -> Rows:
    rows = [
        (
            row.measure,
            f"{row.pairs}",
            f"{row.recorded_p50 * MS:.1f} ms",
            f"{row.replayed_p50 * MS:.1f} ms",
            f"{row.ratio:.3f}",
            interval(row),
        )
        for row in report.summary.beside
    ]
    head = ("median of", "requests", "recorded", "replayed", "replayed / recorded", "95% interval")
    return Rows("Times", head, rows)


def _answers(report: ReplayReport) -> tuple[Rows, ...]:
    rows = [
        (
            one.session,
            f"{one.number}",
            "sampled" if one.sampled else "greedy",
            f"{one.recorded.tokens}",
            f"{one.replayed.tokens}" if one.replayed else "-",
            f"token {one.first_difference}" if one.first_difference is not None else one.standing,
            "yes" if one.forced else "",
        )
        for one in report.played
        if one.kind == "generate" and (one.first_difference is not None or one.standing != "comparable")
    ]
    head = ("session", "request", "", "tokens recorded", "replayed", "first difference", "forced")
    return (Rows("Answers that are not the record's", head, rows[:50]),) if rows else ()


def _plots(report: ReplayReport) -> tuple[Plot, ...]:
    plots = [
        Plot(
            name.capitalize(),
            "Share of requests that took at most this long, in the record and in the replay.",
            lambda axes, name=name: _cdf(axes, report, name),  # type: ignore[misc]  # bound early
        )
        for name in (row.measure for row in report.summary.beside)
    ]
    if any(pairs("turnaround in the log", report.played)):
        plots.append(
            Plot(
                "Turnaround of each request",
                "In the order in which the requests were sent. Where a replay keeps the pace, both lines have"
                " the same load behind them.",
                lambda axes: _over_time(axes, report),
                wide=True,
            )
        )
    if any(one.kind == "generate" and one.replayed for one in report.played):
        plots.append(
            Plot(
                "How far the answers agree",
                "Tokens up to the first difference, over all tokens of the recorded answer.",
                lambda axes: _agreement(axes, report),
                wide=True,
            )
        )
    return tuple(plots)


def _cdf(axes: Any, report: ReplayReport, name: str) -> None:
    found = pairs(name, report.played)
    steps(axes, [recorded * MS for recorded, _ in found], "recorded", GREY)
    steps(axes, [replayed * MS for _, replayed in found], "replayed", BLUE)
    axes.set(xlabel=f"{name} (ms)", ylabel="share of requests")
    axes.set_xlim(left=0)
    percent(axes)
    legend(axes)


def _over_time(axes: Any, report: ReplayReport) -> None:
    ordered = sorted(report.played, key=lambda one: one.sent_s)
    found = pairs("turnaround in the log", ordered)
    numbers = range(1, len(found) + 1)
    axes.plot(numbers, [one for one, _ in found], color=GREY, marker="o", markersize=3, label="recorded")
    axes.plot(numbers, [one for _, one in found], color=BLUE, marker="o", markersize=3, label="replayed")
    axes.set(xlabel="request", ylabel="turnaround (s)")
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", integer=True)
    legend(axes)


def _agreement(axes: Any, report: ReplayReport) -> None:
    answers = [one for one in report.played if one.kind == "generate" and one.replayed]
    groups = (
        ("comparable", BLUE, [one for one in answers if one.standing == "comparable"]),
        ("not comparable", ORANGE, [one for one in answers if one.standing != "comparable"]),
    )
    places = {id(one): number for number, one in enumerate(sorted(answers, key=lambda one: one.sent_s), 1)}
    for label, colour, some in groups:
        if some:
            shares = [
                0.0
                if one.standing != "comparable"
                else 1.0
                if one.first_difference is None
                else one.first_difference / max(1, one.recorded.tokens)
                for one in some
            ]
            axes.bar([places[id(one)] for one in some], shares, color=colour, label=label)
            if label == "not comparable":
                axes.plot([places[id(one)] for one in some], [0.01] * len(some), "x", color=colour)
    axes.set(xlabel="answer", ylabel="agreement")
    axes.locator_params(axis="x", integer=True)
    percent(axes)
    legend(axes)


def _more(report: ReplayReport) -> list[tuple[str, str]]:
    left_out = ", ".join(f"{count} {reason}" for reason, count in report.left_out.items())
    late = report.summary.late_s
    return [
        ("record", f"{report.record}, of {', '.join(report.recorded_models) or 'an unknown model'}"),
        ("settings of the bench's worker", report.serve or "-"),
        ("replayed with", ", ".join(report.replayed_models) or "-"),
        ("left out of the record", left_out or "nothing"),
        ("sent later than due", "-" if late is None else f"p50 {late.p50:.3f} s, max {late.max:.3f} s"),
    ]


def _errors(report: ReplayReport) -> tuple[Rows, ...]:
    rows = [
        (name, f"{report.summary.errors.get(name, 0)}", message) for name, message in report.messages.items()
    ]
    return (Rows("Errors", ("class", "requests", "the first one"), rows, numbers=False),) if rows else ()
