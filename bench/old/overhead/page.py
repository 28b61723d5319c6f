"""The page of `bench overhead`: what a worker costs beside the same model in process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.old.about import about, endings, subject
from bench.old.figures import BLUE, GREEN, GREY, ORANGE, legend, percent, steps
from bench.old.page import Page, Plot, Rows

from .summary import SIDES, groups
from .turns import ALONE, BATCHED, WITHOUT_SNAPSHOTS, WORKER, WORKERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.old.stats import Middle

    from .summary import Compared, Cost, OverheadReport

MS: Final = 1000.0
COLOURS: Final = {ALONE: GREY, BATCHED: ORANGE, WORKER: BLUE, WITHOUT_SNAPSHOTS: GREEN}


def page_of(report: OverheadReport) -> Page:
    """Lay out a report."""
    rounds = len({turn.round for turn in report.turns})
    return Page(
        title="What the worker costs beside the model in process",
        subtitle=f"{subject(report)}, {rounds} rounds, {report.started_at}",
        notes=endings(report),
        checks=report.checks,
        tables=(_compared(report), _costs(report)),
        plots=_plots(report),
        details=(_cpu(report), about(report)),
    )


def _compared(report: OverheadReport) -> Rows:
    rows = [
        (
            f"{one.side} against {one.base}, batch {one.batch}",
            _middle(one.rate, 1, 3),
            f"{_middle(one.added_first_s, MS, 1)} ms",
            "-" if one.added_per_token_s is None else f"{_middle(one.added_per_token_s, MS, 2)} ms",
        )
        for one in report.summary.compared
    ]
    head = ("median and 95% interval", "tokens/s, ratio", "added to the first token", "added per token")
    return Rows("The comparison", head, rows)


def _costs(report: OverheadReport) -> Rows:
    rows = [
        (
            f"{cost.side}, batch {cost.batch}",
            f"{cost.turns}",
            f"{cost.tokens}",
            _middle(cost.tokens_per_s, 1, 1),
            f"{_middle(cost.first_s, MS, 1)} ms",
            "-" if cost.per_token_s is None else f"{_middle(cost.per_token_s, MS, 2)} ms",
            f"{cost.agreeing_tokens / cost.compared_tokens:.1%}" if cost.compared_tokens else "-",
        )
        for cost in report.summary.costs
    ]
    head = ("side", "turns", "tokens", "tokens/s", "first token", "per token", "same tokens")
    return Rows("Each side", head, rows)


def _cpu(report: OverheadReport) -> Rows:
    rows = [
        (
            f"{cost.side}, batch {cost.batch}",
            "-" if cost.loop_share is None else f"{_middle(cost.loop_share, 100, 1)} %",
            f"{cost.process_cpu_s * MS:.2f} ms",
            f"{cost.server_cpu_s * MS:.2f} ms",
            f"{cost.client_cpu_s * MS:.2f} ms",
        )
        for cost in report.summary.costs
    ]
    head = ("side", "event loop's share of time", "process, a token", "NATS, a token", "client, a token")
    return Rows("CPU time", head, rows)


def _middle(value: Middle, scale: float, digits: int) -> str:
    low, high = value.low * scale, value.high * scale
    return f"{value.median * scale:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _plots(report: OverheadReport) -> tuple[Plot, ...]:
    if not report.turns:
        return ()
    summary = report.summary
    smallest = min(turn.batch for turn in report.turns)
    return (
        Plot(
            "Tokens per second",
            "All sessions' tokens by the time of a whole turn, prefill and the recorded result included."
            " Medians with their 95% intervals.",
            lambda axes: _rates(axes, summary.costs),
            wide=True,
        ),
        Plot(
            "Share of the batch generator's rate",
            "The worker's tokens per second by those of mlx-lm's BatchGenerator on the same prompts;"
            " 1 would be a worker that costs nothing.",
            lambda axes: _against(axes, summary.compared, lambda one: one.rate, "ratio", level=1.0),
        ),
        Plot(
            "Added to the first token",
            "How much later the first token comes through the worker than from BatchGenerator.",
            lambda axes: _against(axes, summary.compared, lambda one: one.added_first_s, "ms", scale=MS),
        ),
        Plot(
            f"Time to the first token, batch {smallest}",
            "Share of turns whose first token was there after this time.",
            lambda axes: _firsts(axes, report, smallest),
        ),
        Plot(
            "The worker's event loop",
            "CPU time of its main thread by the time that turns took. At 100% it would be what limits.",
            lambda axes: _loops(axes, summary.costs),
        ),
    )


def _rates(axes: Any, costs: Sequence[Cost]) -> None:
    for side in SIDES:
        _line(axes, side, [(cost.batch, cost.tokens_per_s) for cost in costs if cost.side == side], 1.0)
    _batches(axes, costs)
    axes.set(ylabel="tokens/s")
    axes.set_ylim(bottom=0)
    legend(axes)


def _against(
    axes: Any,
    compared: Sequence[Compared],
    pick: Callable[[Compared], Middle],
    unit: str,
    *,
    scale: float = 1.0,
    level: float = 0.0,
) -> None:
    some = [one for one in compared if one.base == BATCHED]
    for side in WORKERS:
        _line(axes, side, [(one.batch, pick(one)) for one in some if one.side == side], scale)
    axes.axhline(level, color=GREY, linewidth=1, linestyle="--")
    _batches(axes, some)
    axes.set(ylabel=unit)
    if some:
        legend(axes)


def _firsts(axes: Any, report: OverheadReport, batch: int) -> None:
    for (size, side), turns in groups(report.turns).items():
        if size == batch:
            steps(axes, [turn.first_s * MS for turn in turns], side, COLOURS[side])
    axes.set(xlabel="time (ms)", ylabel="share of turns")
    percent(axes)
    axes.legend(loc="lower right")


def _loops(axes: Any, costs: Sequence[Cost]) -> None:
    for side in WORKERS:
        shares = [(cost.batch, cost.loop_share) for cost in costs if cost.side == side]
        _line(axes, side, [(batch, share) for batch, share in shares if share is not None], 1.0)
    _batches(axes, costs)
    axes.set(ylabel="share of one CPU")
    percent(axes)
    if axes.lines:
        legend(axes)


def _line(axes: Any, side: str, points: Sequence[tuple[int, Middle]], scale: float) -> None:
    if not points:
        return
    batches = [batch for batch, _ in points]
    medians = [value.median * scale for _, value in points]
    below = [(value.median - value.low) * scale for _, value in points]
    above = [(value.high - value.median) * scale for _, value in points]
    axes.errorbar(
        batches,
        medians,
        yerr=[below, above],
        color=COLOURS[side],
        marker="o",
        markersize=4,
        linewidth=1.2,
        capsize=3,
        label=side,
    )


def _batches(axes: Any, of: Sequence[Cost | Compared]) -> None:
    axes.set(xlabel="sessions at a time")
    axes.set_xticks(sorted({one.batch for one in of}))
