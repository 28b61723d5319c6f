"""Prints tables and lines: wrapped to a terminal's width, but unwrapped in a pipe."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

import click

#: The smallest width of a truncated column; below it the column is left out.
_LEAST_CUT = 12
#: How wide a truncated column shall be before others are left out for it.
_ENOUGH_CUT = 24

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from rich.text import Text


def in_whole_words(line: str) -> list[str]:
    """Wrap a line between words to the terminal's width, with its indent; in a pipe, return it unchanged."""
    if not sys.stdout.isatty():
        return [line]
    words = line.lstrip()
    indent = line[: len(line) - len(words)]
    width = max(1, shutil.get_terminal_size().columns - len(indent))
    parts = textwrap.wrap(
        words,
        width,
        expand_tabs=False,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [indent + part for part in parts] or [line]


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    *,
    cut: str | None = None,
    same: Collection[str] = (),
    spare: Sequence[str] = (),
) -> None:
    """Print a table: wrapped to a terminal's width, but one line per row in a pipe or file.

    On a terminal the column `cut` is truncated to the remaining width, or left out if that is too small. A
    column in `same` is left out if all its cells are equal. The columns `spare` are left out, the first one
    first, until `cut` has room. Columns of single words, such as names, are not wrapped if the other columns
    then still show whole words. Cells are printed literally, never as markup.
    """
    if not sys.stdout.isatty():
        _print_plain([[str(cell) for cell in row] for row in (heads, *rows)])
        return
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    told = [i for i, head in enumerate(heads) if head not in same or len({str(row[i]) for row in rows}) != 1]
    of = {i: max(cell_len(str(cell)) for cell in (heads[i], *(row[i] for row in rows))) for i in told}

    def room() -> int:
        return console.width - sum(2 + of[i] for i in told if heads[i] != cut)

    enough = max((min(of[i], _ENOUGH_CUT) for i in told if heads[i] == cut), default=0)
    for head in spare:
        if room() < enough:
            told = [i for i in told if heads[i] != head]
    left = room()
    told = [i for i in told if heads[i] != cut or left >= _LEAST_CUT]
    layout = Table(box=None, header_style="bold", pad_edge=False)
    longest = {i: _longest_word((heads[i], *(row[i] for row in rows))) for i in told}
    has_room = sum(2 + longest[i] for i in told if heads[i] != cut) <= console.width
    for i in told:
        is_cut = heads[i] == cut
        layout.add_column(
            Text(heads[i]),
            overflow="ellipsis" if is_cut else "fold",
            no_wrap=is_cut or (has_room and longest[i] == of[i]),
            width=min(left, of[i]) if is_cut else None,
        )
    for row in rows:
        layout.add_row(*(Text(cell) if isinstance(cell := row[i], str) else cell for i in told))
    console.print(layout)


def _longest_word(cells: Iterable[str | Text]) -> int:
    from rich.cells import cell_len

    return max((cell_len(word) for cell in cells for word in str(cell).split()), default=0)


def _print_plain(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        click.echo("  ".join(map(str.ljust, line, widths)).rstrip())
