"""How the plots of all benches look: colours, units, distributions. Draws on matplotlib's axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from . import stats

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Okabe and Ito's colours, which the colour-blind can tell apart.
BLUE: Final = "#0072b2"
ORANGE: Final = "#d55e00"
GREEN: Final = "#009e73"
GREY: Final = "#6b7280"
MIB: Final = 2.0**20
#: More points than this are drawn as a picture within the SVG: thousands of shapes make a page slow.
MAX_SHAPES: Final = 2000


def steps(axes: Any, values: Sequence[float], label: str | None, colour: str) -> None:
    """Draw the share of values at or below each value."""
    points = stats.cdf(values)
    # From the axis up, so that the first value's share is seen as a step too.
    xs = [points[0][0], *(value for value, _ in points)]
    axes.step(xs, [0.0, *(share for _, share in points)], where="post", color=colour, label=label)


def percent(axes: Any) -> None:
    """Count the vertical axis in percent."""
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def legend(axes: Any) -> None:
    """Name the lines above the plot, where that hides no point."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, borderaxespad=0.2)


def logarithmic(axes: Any) -> None:
    """Make the horizontal axis logarithmic, with numbers that are read at a glance."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def cdf(axes: Any, values: Sequence[float], name: str, colour: str, of: str = "turns") -> None:
    """Draw the distribution of one measure, with its median and its 95th percentile."""
    steps(axes, values, None, colour)
    for share, style in ((0.5, "--"), (0.95, ":")):
        value = stats.percentile(values, share)
        axes.axvline(
            value, color=GREY, linewidth=1, linestyle=style, label=f"p{share * 100:.0f}: {value:.2f}"
        )
    axes.set(xlabel=name, ylabel=f"share of {of}")
    percent(axes)
    legend(axes)


def shares(axes: Any, name: str, of: str = "turns") -> None:
    """Name the axes of distributions that were drawn by `steps`, the horizontal one logarithmic."""
    axes.set(xlabel=name, ylabel=f"share of {of}")
    logarithmic(axes)
    percent(axes)
    legend(axes)


@dataclass(frozen=True, slots=True)
class Line:
    """Sizes in bytes over time; without a label the legend leaves it out."""

    sizes: Sequence[float]
    colour: str
    label: str | None = None


def sizes_over(
    axes: Any,
    times_s: Sequence[float],
    *lines: Line,
    name: str = "size",
    limit_bytes: float | None = None,
) -> float:
    """Draw sizes over time, and the limit over them; returns how many seconds the time's unit has."""
    span, unit = duration(times_s[-1])
    scale, size_unit = byte_unit(max(limit_bytes or 0.0, *(max(line.sizes) for line in lines)))
    times = [time_s / span for time_s in times_s]
    for line in lines:
        axes.plot(
            times,
            [size / scale for size in line.sizes],
            color=line.colour,
            linewidth=1.2,
            label=line.label,
            rasterized=len(times) > MAX_SHAPES,
        )
    if limit_bytes is not None:
        axes.axhline(limit_bytes / scale, color=ORANGE, linestyle="--", linewidth=1.2, label="limit")
    axes.set(xlabel=f"time ({unit})", ylabel=f"{name} ({size_unit})")
    axes.set_ylim(bottom=0)
    if limit_bytes is not None or any(line.label for line in lines):
        legend(axes)
    return span


def duration(seconds: float) -> tuple[float, str]:
    """Choose the unit of a time axis for a run of so many seconds: the divisor and the unit's name."""
    if seconds >= 2 * 3600:
        return 3600.0, "h"
    return (60.0, "min") if seconds >= 300 else (1.0, "s")


def byte_unit(size_bytes: float) -> tuple[float, str]:
    """Choose the unit of an axis of sizes: the divisor and the unit's name."""
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size_bytes >= 1024**power:
            return float(1024**power), name
    return 1.0, "B"
