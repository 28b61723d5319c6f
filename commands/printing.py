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
    from collections.abc import Collection, Iterable, Mapping, Sequence

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
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    told = [i for i, head in enumerate(heads) if head not in same or len({str(row[i]) for row in rows}) != 1]
    columns = {i: [str(cell) for cell in (heads[i], *(row[i] for row in rows))] for i in told}
    widths = _widths({heads[i]: cells for i, cells in columns.items()}, console.width, cut, spare)
    told = [i for i in told if heads[i] in widths]
    layout = Table(box=None, header_style="bold", pad_edge=False)
    longest = {i: _longest_word(columns[i]) for i in told}
    has_room = sum(2 + longest[i] for i in told if heads[i] != cut) <= console.width
    for i in told:
        is_cut, width = heads[i] == cut, widths[heads[i]]
        layout.add_column(
            Text(heads[i]),
            overflow="ellipsis" if is_cut else "fold",
            no_wrap=is_cut or (has_room and longest[i] == width),
            width=width if is_cut else None,
        )
    for row in rows:
        layout.add_row(*(Text(cell) if isinstance(cell := row[i], str) else cell for i in told))
    console.print(layout)


def _widths(
    columns: Mapping[str, Sequence[str]], most: int, cut: str | None, spare: Sequence[str]
) -> dict[str, int]:
    """Return the widths of the columns that are shown, of which `cut` gets at most what the others leave."""
    from rich.cells import cell_len

    widths = {head: max(map(cell_len, cells)) for head, cells in columns.items()}

    def room() -> int:
        return most - sum(2 + width for head, width in widths.items() if head != cut)

    whole = widths.get(cut or "", 0)
    for head in spare:
        if room() < min(whole, _ENOUGH_CUT):
            widths.pop(head, None)
    if cut in widths:
        widths[cut] = min(room(), whole)
        if room() < _LEAST_CUT:
            del widths[cut]
    return widths


def _longest_word(cells: Iterable[str]) -> int:
    from rich.cells import cell_len

    return max((cell_len(word) for cell in cells for word in cell.split()), default=0)


def _print_plain(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        click.echo("  ".join(map(str.ljust, line, widths)).rstrip())
