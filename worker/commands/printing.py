"""How commands print: tables that a pipe gets whole; sizes and times in the words that people use."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

_DAY_S = 86400


def table(heads: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
    """Print a table: folded to a terminal's width, elsewhere one whole line for each row.

    Cells are printed as they are: what they hold is no markup.
    """
    from rich.text import Text

    if not sys.stdout.isatty():
        lines = [[str(cell) for cell in row] for row in (heads, *rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            click.echo("  ".join(map(str.ljust, line, widths)).rstrip())
        return
    from rich.console import Console
    from rich.table import Table

    layout = Table(box=None, header_style="bold", pad_edge=False)
    for head in heads:
        layout.add_column(Text(head), overflow="fold")
    for row in rows:
        layout.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    Console().print(layout)


def size(size_bytes: float) -> str:
    """Write a size in the unit that leaves it short: `512 B`, `13 MiB`, `1.5 GiB`, `20 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f}".removesuffix(".0") + " GiB"


def span(seconds: float) -> str:
    """Write a time in its largest unit: `45 s`, `3 min`, `2 h`, `5 days`."""
    for unit_s, name in ((2 * _DAY_S, "days"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / min(unit_s, _DAY_S):.0f} {name}"
    return f"{seconds:.0f} s"
