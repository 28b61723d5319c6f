"""The page of `bench quality`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.old.about import about, endings
from bench.old.figures import BLUE, GREY, ORANGE, legend, percent, steps
from bench.old.page import Page, Plot, Rows

if TYPE_CHECKING:
    from .summary import QualityReport, Side

_COLOURS: Final = {8: BLUE, 4: ORANGE}
_NOTE: Final = (
    "Perplexity is exp of the mean -log p over {tokens:,} tokens, each with at least half a window before it."
    " Likeliest tokens are compared where all precisions have the same text before them; {answers} answers go"
    " their own way, and count up to the first difference."
)


def page_of(report: QualityReport) -> Page:
    """Lay out a report."""
    summary = report.summary
    return Page(
        title="KV in fewer bits",
        subtitle=f"what it costs, and what it saves, {report.started_at}",
        notes=[*endings(report), _NOTE.format(tokens=summary.tokens, answers=summary.answers)],
        checks=report.checks,
        tables=(_sides(report), _kept(report)),
        plots=_plots(report),
        details=(about(report),),
    )


def _name(bits: int | None) -> str:
    return f"{bits} bits" if bits else "full precision"


def _sides(report: QualityReport) -> Rows:
    head = ("", "perplexity", "of full, by window", "likeliest token equal", "answers equal", "whole ones")
    return Rows("What it costs", head, [_row(side, report.summary.answers) for side in report.summary.sides])


def _row(side: Side, answers: int) -> tuple[str, ...]:
    ratio = side.perplexity_ratio
    return (
        _name(side.kv_bits),
        f"{side.perplexity:.3f}",
        "-" if ratio is None else f"{ratio.median:.4f} ({ratio.low:.4f} to {ratio.high:.4f})",
        f"{side.likeliest_equal:.2%}",
        "-" if side.answers_equal is None else f"{side.answers_equal:.1%}",
        "-" if side.whole_answers_equal is None else f"{side.whole_answers_equal} of {answers}",
    )


def _kept(report: QualityReport) -> Rows:
    full = report.kept[0] if report.kept else None
    rows = [
        (
            _name(kept.kv_bits),
            f"{kept.kv_bytes_per_token:,}",
            f"{kept.disk_bytes_per_token:,.0f}",
            f"{kept.kv_bytes_per_token / full.kv_bytes_per_token:.3f}",
            kept.caches,
        )
        for kept in report.kept
        if full is not None
    ]
    head = ("", "bytes of a token in memory", "on disk", "of full", "caches")
    return Rows("What it saves", head, rows)


def _plots(report: QualityReport) -> tuple[Plot, ...]:
    others = [side.kv_bits for side in report.summary.sides if side.kv_bits is not None]
    if not others:
        return ()
    plots = [
        Plot(
            "Loss of each window, beside full precision",
            "Every point is a window; below the line is better than full precision.",
            lambda axes: _losses(axes, report),
        )
    ]
    if any(answer.kv_bits is not None for answer in report.answers):
        plots.append(
            Plot(
                "How far answers are equal",
                "Share of answers that differ from full precision's after this many tokens, or before.",
                lambda axes: _answers(axes, report),
            )
        )
    return tuple(plots)


def _losses(axes: Any, report: QualityReport) -> None:
    full = [window.loss / window.tokens for window in report.windows if window.kv_bits is None]
    for bits in (8, 4):
        mine = [window.loss / window.tokens for window in report.windows if window.kv_bits == bits]
        pairs = list(zip(full, mine, strict=False))
        axes.plot(
            [a for a, _ in pairs],
            [b - a for a, b in pairs],
            color=_COLOURS[bits],
            marker="o",
            markersize=3,
            linestyle="",
            label=_name(bits),
        )
    axes.axhline(0, color=GREY, linewidth=1)
    axes.set(xlabel="nats per token, full precision", ylabel="difference (nats)")
    legend(axes)


def _answers(axes: Any, report: QualityReport) -> None:
    for bits in (8, 4):
        same = [answer.same for answer in report.answers if answer.kv_bits == bits]
        if same:
            steps(axes, same, _name(bits), _COLOURS[bits])
    axes.set(xlabel="equal tokens", ylabel="share of answers")
    percent(axes)
    legend(axes)
