"""The page of `bench restart`: what a session's next turn costs after what it has lived through."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

from bench.old.about import about, endings, subject
from bench.old.figures import BLUE, GREEN, GREY, ORANGE, legend
from bench.old.page import Page, Plot, Rows

from .turns import COLD, KILL, KINDS, RESTART, RESTARTED, RESTORED, SPILLED, WARM

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.old.stats import Middle

    from .summary import Life, RestartReport

MS: Final = 1000.0
MIB: Final = 2.0**20
COLOURS: Final = {WARM: GREEN, SPILLED: "#cc79a7", RESTART: BLUE, KILL: ORANGE, COLD: GREY}


def page_of(report: RestartReport) -> Page:
    """Lay out a report."""
    rounds = max((turn.round for turn in report.turns), default=0)
    return Page(
        title="The next turn after a restart",
        subtitle=f"{subject(report)}, {rounds} rounds, {report.started_at}",
        notes=[*endings(report), *_notes(report)],
        checks=report.checks,
        tables=(_firsts(report), _restores(report), _restarts(report)),
        plots=_plots(report),
        details=(about(report),),
    )


def _notes(report: RestartReport) -> list[str]:
    if report.settings.get("from_disk"):
        return [
            "Before each restore, and before MLX alone read its files, the page cache was emptied of them."
        ]
    return [
        "Snapshots were read soon after they were written, so most of their bytes came from the page cache."
    ]


def _firsts(report: RestartReport) -> Rows:
    rows = [
        (
            f"{life.length:,} tokens, {life.kind}",
            f"{life.turns}",
            f"{_middle(life.first_s, MS, 0)} ms",
            "-" if life.of_cold is None else f"{_middle(life.of_cold, 100, 1)} %",
            f"{life.prefilled_tokens:,.0f}",
            f"{life.prefilled_share:.1%}",
        )
        for life in report.summary.lives
    ]
    head = ("median and 95% interval", "turns", "first token", "of a cold one", "prefilled", "of the context")
    return Rows("The first token, from sending the turn to a worker that is ready", head, rows)


def _restores(report: RestartReport) -> Rows:
    rows = [
        (
            f"{life.length:,} tokens, {life.kind}",
            f"{life.restored_bytes / MIB:,.1f} MiB",
            "-" if life.added_s is None else f"{_middle(life.added_s, MS, 0)} ms",
            _rate(life.restore_rate),
            _rate(life.limit_rate),
            "-" if life.of_limit is None else f"{life.of_limit:.2f}",
        )
        for life in report.summary.lives
        if life.kind in RESTORED
    ]
    head = ("", "restored", "added to the first token", "restored a second", "MLX alone", "ratio")
    return Rows("Restoring", head, rows)


def _restarts(report: RestartReport) -> Rows:
    rows = [
        (
            f"{life.length:,} tokens, {life.kind}",
            *("-" if part is None else f"{_middle(part, 1, 2)} s" for part in parts),
        )
        for life in report.summary.lives
        if life.kind in RESTARTED and (parts := (life.down_s, life.start_s, life.felt_s))
    ]
    head = ("", "to the end of the old worker", "from there to ready", "all, to the first token")
    return Rows("As a user feels it", head, rows)


def _rate(value: Middle | None) -> str:
    return "-" if value is None else f"{_middle(value, 1 / MIB, 0)} MiB/s"


def _middle(value: Middle, scale: float, digits: int) -> str:
    low, high = value.low * scale, value.high * scale
    return f"{value.median * scale:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def _plots(report: RestartReport) -> tuple[Plot, ...]:
    lives = report.summary.lives
    if not lives:
        return ()
    return (
        Plot(
            "First token",
            "From sending the turn to its first token, by what the session had lived through. Medians with"
            " their 95% intervals.",
            lambda axes: _waits(axes, lives),
            wide=True,
        ),
        Plot(
            "Tokens prefilled",
            "Share of the session's tokens that had to be run for the turn.",
            lambda axes: _shares(axes, lives),
        ),
        Plot(
            "Restored bytes per second",
            "What was restored, by the time that the first token came later than in a warm session; dashed:"
            " MLX alone reading the same files.",
            lambda axes: _rates(axes, lives),
        ),
        Plot(
            "From the end of the old worker to the first token",
            "Until the old process is gone, until the new one is ready, and until the first token, in the"
            " median.",
            lambda axes: _felt(axes, report),
            wide=True,
        ),
    )


def _waits(axes: Any, lives: Sequence[Life]) -> None:
    for kind in KINDS:
        _line(axes, kind, lives, lambda life: life.first_s)
    axes.set(xlabel="tokens of the session", ylabel="time (s)", yscale="log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:.2g}")
    legend(axes)


def _shares(axes: Any, lives: Sequence[Life]) -> None:
    for kind in KINDS:
        some = [life for life in lives if life.kind == kind]
        axes.plot(
            [life.length for life in some],
            [max(life.prefilled_share, 1e-4) for life in some],
            color=COLOURS[kind],
            marker="o",
            markersize=4,
            linewidth=1.2,
            label=kind,
        )
    axes.set(xlabel="tokens of the session", ylabel="share prefilled", yscale="log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.2%}" if value < 0.01 else f"{value:.0%}")
    axes.legend(loc="center right")


def _rates(axes: Any, lives: Sequence[Life]) -> None:
    for kind in RESTORED:
        _line(axes, kind, lives, lambda life: life.restore_rate, 1 / MIB)
        _line(axes, kind, lives, lambda life: life.limit_rate, 1 / MIB, linestyle="--", label=None)
    axes.set(xlabel="tokens of the session", ylabel="MiB/s", yscale="log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if axes.containers:
        legend(axes)


def _felt(axes: Any, report: RestartReport) -> None:
    names, bottom = [], []
    parts: list[list[float]] = [[], [], []]
    for life in report.summary.lives:
        some = [t for t in report.turns if (t.length, t.kind) == (life.length, life.kind)]
        if life.kind in RESTARTED:
            names.append(f"{life.length:,}\n{life.kind}")
            parts[0].append(statistics.median(turn.down_s or 0.0 for turn in some))
            parts[1].append(statistics.median(turn.start_s or 0.0 for turn in some))
            parts[2].append(statistics.median(turn.first_s for turn in some))
    bottom = [0.0] * len(names)
    for part, name, colour in zip(
        parts, ("ending", "starting", "first token"), (GREY, GREEN, BLUE), strict=True
    ):
        axes.bar(names, part, bottom=bottom, color=colour, label=name, width=0.6)
        bottom = [low + high for low, high in zip(bottom, part, strict=True)]
    axes.set(ylabel="time (s)")
    if names:
        legend(axes)


def _line(
    axes: Any,
    kind: str,
    lives: Sequence[Life],
    pick: Callable[[Life], Middle | None],
    scale: float = 1.0,
    **style: Any,
) -> None:
    points = [
        (life.length, value) for life in lives if life.kind == kind and (value := pick(life)) is not None
    ]
    if not points:
        return
    axes.errorbar(
        [length for length, _ in points],
        [value.median * scale for _, value in points],
        yerr=[
            [(value.median - value.low) * scale for _, value in points],
            [(value.high - value.median) * scale for _, value in points],
        ],
        **{"label": kind, "linewidth": 1.2, **style},
        color=COLOURS[kind],
        marker="o",
        markersize=4,
        capsize=3,
    )
