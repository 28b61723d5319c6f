"""Draws five kinds of plot of a bench's findings, as SVG with the page's colours.

Matplotlib draws with placeholder colours. This module replaces them by the page's CSS variables, so that a
plot suits light and dark mode.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import Any, Final

from .figures import Unit, scale
from .spec import Findings, Plot
from .stats import Estimate
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
#: The most shapes of a plot, since more make a page slow; points are left out evenly.
MAX_SHAPES: Final = 1500
#: Up to this many levels each level has a tick.
MAX_TICKS: Final = 5
#: How many characters of an axis's name fit.
MAX_LABEL: Final = 34


def draw(plot: Plot, findings: Findings[Any]) -> str | None:
    """Draw one plot as an SVG element; None if there is nothing to show."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    shown = (sample for measure in plot.measures for sample in findings.of(measure))
    if all(plot.kind == "by x" and sample.x is None for sample in shown):
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
    divisor, name = _scale(plot.measures, findings)
    for label, colour, some in _groups(plot, findings):
        axes.ecdf([sample.value / divisor for sample in some], color=colour, label=label)
    axes.set(xlabel=_name(plot, name), ylabel="share of values", ylim=(0, 1.02))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _numbers(axes.xaxis, log=plot.log)


def _cloud(axes: Any, plot: Plot, findings: Findings[Any]) -> None:
    """Draw single values as points, or as lines over time."""
    over_time = plot.kind == "over time"
    groups = _groups(plot, findings, all_levels=True)
    divisor, name = _scale(plot.measures, findings)
    most = max(sample.x or 0.0 for _, _, some in groups for sample in some)
    span, span_name = scale(most or 1.0, "s") if over_time else (1.0, "")
    line: dict[str, Any] = {"linewidth": 1.3}
    for i, (label, colour, some) in enumerate(groups, 1):
        # Earlier groups have larger markers, so that they show around later ones at the same place.
        mark = {"marker": "o", "linestyle": "", "markersize": 3 + 2 * (len(groups) - i), "alpha": 0.7}
        points = sorted((sample.x or 0.0, sample.value) for sample in some)
        points = points[:: max(1, len(points) // MAX_SHAPES)]
        xs, ys = zip(*((x / span, y / divisor) for x, y in points), strict=True)
        axes.plot(xs, ys, color=colour, label=label, **(line if over_time else mark))
    axis = findings.level_name(plot.measures[0]) or plot.x
    axes.set(xlabel=f"time ({span_name})" if over_time else axis, ylabel=_name(plot, name))
    _numbers(axes.xaxis, log=False, whole=not over_time)
    _vertical(axes, plot)


def _by_x(axes: Any, plot: Plot, findings: Findings[Any]) -> None:
    """Draw the typical values at each x, with their intervals if these are known."""
    measure = plot.measures[0]
    divisor, name = _scale([measure], findings)
    xs = sorted({sample.x for sample in findings.of(measure) if sample.x is not None})
    cases = findings.cases(measure)
    apart = min((later - sooner for sooner, later in pairwise(xs)), default=1.0)
    for i, case in enumerate(cases):
        found = [(x, one) for x in xs if (one := findings.estimate(measure, case, x)) is not None]
        if not found:
            continue
        sizes = [_sizes(one, measure) for _, one in found]
        axes.errorbar(
            [x + 0.05 * apart * (i - (len(cases) - 1) / 2) for x, _ in found],  # so intervals do not overlap
            [one.value / divisor for _, one in found],
            yerr=[[size / divisor for size in side] for side in zip(*sizes, strict=True)],
            color=_LINES[i % len(_LINES)],
            label=case or None,
            marker="o",
            markersize=4,
            linewidth=1.3,
            capsize=3,
        )
    axes.set(xlabel=findings.level_name(measure) or plot.x, ylabel=_name(plot, name))
    _numbers(axes.xaxis, log=False, whole=True)
    if len(xs) <= MAX_TICKS:
        axes.set_xticks(xs)
    axes.set_xlim(xs[0] - 0.4 * apart, xs[-1] + 0.4 * apart)
    _vertical(axes, plot)


def _sizes(estimate: Estimate, measure: Measure) -> tuple[float, float]:
    """Return how far an estimate's interval reaches below and above its value; (0, 0) without an interval.

    A share's interval is limited to the range from 0 to 100%.
    """
    value, low, high = estimate.value, estimate.low, estimate.high
    if math.isinf(high):
        return 0.0, 0.0
    if measure.unit == "share":
        low, high = max(low, min(value, 0.0)), min(high, max(value, 1.0))
    return value - low, high - value


def _bars(axes: Any, plot: Plot, findings: Findings[Any]) -> None:
    """Draw a bar for each level and case, stacked from the typical values of all measures."""
    measures = [measure for measure in plot.measures if findings.of(measure)]
    divisor, name = _scale(measures, findings)
    places = findings.places(measures[0])
    labels = [case if level is None else f"{level:,g}, {case}" for level, case in places]
    left = [0.0] * len(places)
    for i, measure in enumerate(measures):
        sizes = [(e.value if (e := findings.estimate(measure, c, at)) else 0.0) / divisor for at, c in places]
        axes.barh(labels, sizes, left=left, color=_LINES[i], label=measure.name, height=0.6)
        left = [low + high for low, high in zip(left, sizes, strict=True)]
    axes.set(xlabel=_name(plot, name))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    _numbers(axes.xaxis, log=plot.log)


_KINDS: Final[dict[str, Callable[[Any, Plot, Findings[Any]], None]]] = {
    "cdf": _cdf,
    "over time": _cloud,
    "by x": _by_x,
    "bars": _bars,
    "points": _cloud,
}


def _groups(
    plot: Plot, findings: Findings[Any], *, all_levels: bool = False
) -> list[tuple[str | None, str, list[Sample]]]:
    """Return the plot's lines, each as label, colour and samples: one for each measure, case and level.

    With `all_levels` a line has the samples of all levels. If there are more lines than colours, only the
    last level is shown.
    """
    found = []
    for measure in plot.measures:
        cases = findings.cases(measure)
        places = [(None, case) for case in cases] if all_levels else findings.places(measure)
        if len(places) > len(_LINES):
            places = places[-len(cases) :]
        for level, case in places:
            parts = [measure.name] if len(plot.measures) > 1 else []
            if level is not None:
                parts.append(f"{level:,g}")
            parts += [case] if case else []
            found.append((", ".join(parts) or None, findings.of(measure, case, level)))
    return [(label, _LINES[i % len(_LINES)], some) for i, (label, some) in enumerate(found)]


def _scale(measures: Sequence[Measure], findings: Findings[Any]) -> tuple[float, str]:
    """Return the divisor and name of the unit that suits the third quartile of the measures' samples."""
    unit: Unit = measures[0].unit
    sizes = sorted(abs(sample.value) for measure in measures for sample in findings.of(measure))
    return scale(sizes[int(0.75 * (len(sizes) - 1))], unit)


def _name(plot: Plot, unit: str) -> str:
    several = len(plot.measures) > 1
    name = ("time" if plot.measures[0].unit == "s" else "") if several else plot.measures[0].name
    return fill(f"{name} ({unit})" if name and unit else name or unit, MAX_LABEL)


def _vertical(axes: Any, plot: Plot) -> None:
    if not plot.log:
        low, high = min(axes.dataLim.intervaly[0], 0.0), max(axes.dataLim.intervaly[1], 0.0)
        room = 0.03 * (high - low) or 1.0  # so that a marker at the top is not clipped
        axes.set_ylim(low - room if low else 0.0, high + room)
    _numbers(axes.yaxis, log=plot.log)


def _numbers(axis: Any, *, log: bool, whole: bool = False) -> None:
    """Label an axis with plain numbers; a short logarithmic axis has ticks at 1, 2 and 5 times each power."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    if log:
        axis.axes.set_xscale("log") if axis.axis_name == "x" else axis.axes.set_yscale("log")
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,), numticks=12))
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    else:
        least = 2 if whole else 4
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=whole, min_n_ticks=least))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
