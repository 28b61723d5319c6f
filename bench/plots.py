"""Draws three kinds of plot of a bench's findings, as SVG with the page's colours.

Matplotlib draws with placeholder colours. This module replaces them by the page's CSS variables, so that a
plot suits light and dark mode.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from .figures import scale
from .spec import Findings, Plot
from .turns import Measure, Sample

_STYLE: Final = Path(__file__).with_name("plots.mplstyle")
#: The placeholder colours, and the page's CSS variables that replace them.
_COLOURS: Final = {
    "#010101": "var(--ink)",
    "#020202": "var(--faint)",
    "#030303": "var(--grid)",
    **{f"#0{i}0{i}0{i}": f"var(--line{i - 4})" for i in range(4, 10)},
}
_LINES: Final = tuple(f"#0{i}0{i}0{i}" for i in range(4, 10))
#: The most points of a line, since more make a page slow; points are left out evenly.
MAX_POINTS: Final = 1500


def draw(plot: Plot, findings: Findings[Any]) -> str | None:
    """Draw one plot as an SVG element; None if there is nothing to show."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    shown = [sample for measure in plot.measures for sample in findings.of(measure)]
    if not shown or (plot.kind == "by x" and all(sample.x is None for sample in shown)):
        return None
    with mpl.rc_context(fname=_STYLE):
        figure = Figure(figsize=(4.5, 3.1), layout="constrained")
        axes = figure.add_subplot()
        _KINDS[plot.kind](axes, plot, findings)
        if axes.get_legend_handles_labels()[1]:
            figure.legend(loc="outside upper left", ncols=3, columnspacing=1.2, handlelength=1.4)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = drawn.getvalue()
    text = text[text.index("<svg") :]
    for colour, variable in _COLOURS.items():
        text = text.replace(colour, variable)
    # The page sets the width; the view box keeps the proportions.
    return re.sub(r' (?:width|height)="[^"]*"', "", text[: text.index(">")]) + text[text.index(">") :]


def _cdf(axes: Any, plot: Plot, findings: Findings[Any]) -> None:
    """Draw which share of the values is at most as large as the value on the x axis."""
    divisor, name = _scale(plot.measures, findings)
    for label, colour, some in _groups(plot, findings):
        axes.ecdf([sample.value / divisor for sample in some], color=colour, label=label)
    axes.set(xlabel=_name(plot, name), ylabel="share of values", ylim=(0, 1.02))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if plot.log:
        axes.set_xscale("log")
    _plain_numbers(axes.xaxis)


def _over_time(axes: Any, plot: Plot, findings: Findings[Any]) -> None:
    """Draw each value at the time at which it was measured."""
    divisor, name = _scale(plot.measures, findings)
    groups = _groups(plot, findings)
    span, span_name = scale(max(sample.x or 0.0 for _, _, some in groups for sample in some) or 1.0, "s")
    for label, colour, some in groups:
        points = sorted((sample.x or 0.0, sample.value) for sample in some)
        points = points[:: max(1, len(points) // MAX_POINTS)]
        xs, ys = zip(*((x / span, y / divisor) for x, y in points), strict=True)
        axes.plot(xs, ys, color=colour, label=label, linewidth=1.3)
    axes.set(xlabel=f"time ({span_name})", ylabel=_name(plot, name))
    _vertical(axes, plot)


def _by_x(axes: Any, plot: Plot, findings: Findings[Any]) -> None:
    """Draw the typical values at each x, with their intervals if these are known."""
    measure = plot.measures[0]
    divisor, name = _scale([measure], findings)
    xs = sorted({sample.x for sample in findings.of(measure) if sample.x is not None})
    for i, case in enumerate(findings.cases(measure)):
        found = [(x, one) for x in xs if (one := findings.estimate(measure, case, x)) is not None]
        if not found:
            continue
        known = [(x, one) for x, one in found if math.isfinite(one.high)]
        colour, values = _LINES[i % len(_LINES)], [one.value / divisor for _, one in found]
        axes.plot([x for x, _ in found], values, color=colour, label=case or None, marker="o", markersize=4)
        ends = (
            [end / divisor for end in side] for side in zip(*((e.low, e.high) for _, e in known), strict=True)
        )
        if known:
            axes.vlines([x for x, _ in known], *ends, color=colour)
    axes.set(xlabel=findings.level_name(measure) or plot.x, ylabel=_name(plot, name))
    _plain_numbers(axes.xaxis)
    _vertical(axes, plot)


_KINDS: Final[dict[str, Callable[[Any, Plot, Findings[Any]], None]]] = {
    "cdf": _cdf,
    "over time": _over_time,
    "by x": _by_x,
}


def _groups(plot: Plot, findings: Findings[Any]) -> list[tuple[str | None, str, list[Sample]]]:
    """Return the plot's lines, each as label, colour and samples: one for each measure, case and level.

    If there are more lines than colours, only the last level is shown.
    """
    found = []
    for measure in plot.measures:
        places = findings.places(measure)
        if len(places) > len(_LINES):
            places = places[-len(findings.cases(measure)) :]
        for level, case in places:
            parts = [measure.name] if len(plot.measures) > 1 else []
            parts += [f"{level:,g}"] if level is not None else []
            parts += [case] if case else []
            found.append((", ".join(parts) or None, findings.of(measure, case, level)))
    return [(label, _LINES[i % len(_LINES)], some) for i, (label, some) in enumerate(found)]


def _scale(measures: Sequence[Measure], findings: Findings[Any]) -> tuple[float, str]:
    """Return the divisor and name of the unit that suits the third quartile of the measures' samples."""
    sizes = sorted(abs(sample.value) for measure in measures for sample in findings.of(measure))
    return scale(sizes[int(0.75 * (len(sizes) - 1))], measures[0].unit)


def _name(plot: Plot, unit: str) -> str:
    several = len(plot.measures) > 1
    name = ("time" if plot.measures[0].unit == "s" else "") if several else plot.measures[0].name
    return f"{name} ({unit})" if name and unit else name or unit


def _vertical(axes: Any, plot: Plot) -> None:
    if plot.log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=min(axes.dataLim.intervaly[0], 0.0))
    _plain_numbers(axes.yaxis)


def _plain_numbers(axis: Any) -> None:
    """Label an axis with plain numbers; matplotlib would write powers of ten on a logarithmic one."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if axis.get_scale() == "log":
        axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
