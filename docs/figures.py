"""The look of the pictures that `draw_*.py` make: SVG with light colours, and dark ones where the page is."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Colours on light paper and on dark.
INK, GRID, PAPER = ("#1f2328", "#e6edf3"), ("#d8dee4", "#3d444d"), ("#ffffff", "#0d1117")
LINES: Final = (("#0969da", "#58a6ff"), ("#8250df", "#bc8cff"), ("#bc4c00", "#f0883e"))


@contextmanager
def axes(picture: Path, **settings: Any) -> Iterator[Any]:
    """Yield matplotlib's axes, set so; at the end, `picture` is written. Lines take colours of `LINES`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK[0])
    with rc_context({**style, "axes.edgecolor": GRID[0], "svg.hashsalt": "turnkeep"}):
        figure = Figure(figsize=(7.6, 3.9), layout="constrained", facecolor=PAPER[0])
        made = figure.add_subplot(facecolor=PAPER[0])
        made.set(**settings)
        yield made
        for axis in (made.xaxis, made.yaxis):
            axis.set_major_formatter("{x:,.0f}")
        made.grid(color=GRID[0], linewidth=0.6)
        made.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper left", ncols=3, frameon=False)
        figure.savefig(picture, format="svg", metadata={"Date": None, "Creator": None})
    rule = '[style*="{0}: {1}"]{{{0}:{2}!important}}'
    pairs = (INK, GRID, PAPER, *LINES)
    rules = "".join(rule.format(side, *pair) for pair in pairs for side in ("fill", "stroke"))
    css = f"<style>@media(prefers-color-scheme:dark){{{rules}}}</style>\n <defs>"
    picture.write_text(picture.read_text("utf-8").replace("<defs>", css, 1), "utf-8")
