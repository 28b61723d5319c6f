"""One self-contained HTML page per report: tables as text, plots as inline SVG drawn by matplotlib.

Knows how a page looks, not what it is about: a bench hands it a `Page`.
"""

from __future__ import annotations

import importlib.util
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jinja2

from .report import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .report import Check

TEMPLATE: Final = Path(__file__).with_name("page.html")
_STYLE: Final[Any] = {
    "svg.fonttype": "path",  # the same letters in every browser
    "svg.hashsalt": "turnkeep",  # the same run gives the same page
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#9ca3af",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure: `draw` gets matplotlib's axes, `caption` says how to read it."""

    title: str
    caption: str
    draw: Callable[[Any], object]
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """A table. The first column is text, the others are right-aligned where `numbers` is set."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: bool = True


@dataclass(frozen=True, slots=True)
class Page:
    """What a page shows, from top to bottom."""

    title: str
    subtitle: str
    notes: Sequence[str]
    checks: Sequence[Check]
    tables: Sequence[Rows]
    plots: Sequence[Plot]
    details: Sequence[Rows]


def render(page: Page, *, warn: Callable[[str], None]) -> str | None:
    """Return the page as HTML; None, after a warning, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        warn("no page is made of the report: matplotlib is not installed (pip install 'turnkeep[bench]')")
        return None
    templates = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    figures = [(plot, svg(plot)) for plot in page.plots]
    return templates.from_string(TEMPLATE.read_text("utf-8")).render(
        page=page, figures=figures, version=VERSION
    )


def svg(plot: Plot) -> str:
    """Draw one plot as an SVG element."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11.0 if plot.wide else 5.4, 3.4), layout="constrained")
        axes = figure.add_subplot()
        plot.draw(axes)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    text = drawn.getvalue()
    text = text[text.index("<svg") :]
    # The page sets the width; the view box keeps the proportions.
    return re.sub(r' (?:width|height)="[^"]*"', "", text[: text.index(">")]) + text[text.index(">") :]
