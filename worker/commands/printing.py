"""Prints tables: wrapped to a terminal's width, but one line per row in a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text


def table(heads: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
    """Print a table: wrapped to a terminal's width, but one line per row in a pipe or file.

    Cells are printed literally, never as markup.
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
