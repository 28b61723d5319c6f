"""Shows a streaming answer on a terminal: wraps words, shows a temporary note below, hides typed keys.

If the output is a pipe, prints only the text, unchanged.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import termios
import tty
import unicodedata
from typing import TYPE_CHECKING

import click
from rich.cells import cell_len, set_cell_size

if TYPE_CHECKING:
    from collections.abc import Iterator

_CLEAR = "\r\x1b[K"
_TAB = "    "


def width() -> int:
    """Return how many cells of a terminal's line are used: all but the last, or 8 if there are fewer.

    After the last cell the cursor's position would be undefined.
    """
    return max(shutil.get_terminal_size().columns - 1, 8)


def printable(text: str) -> str:
    """Return a text without control characters but line ends and tabs: no model controls the terminal."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) not in {"Cc", "Cs"})


def wrapped(text: str) -> str:
    """Return a whole text wrapped between words at the terminal's current width."""
    words = WordWrap()
    return words.feed(text) + words.rest()


def complain(text: str) -> None:
    """Print a message on standard error after `turnkeep: `: on one line, or wrapped on a terminal."""
    said = f"turnkeep: {text}"
    click.echo(wrapped(said) if sys.stderr.isatty() else said, err=True)


def drop_unwritable() -> None:
    """Drop output that a closed terminal or a full disk does not take; Python would exit with code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class WordWrap:
    """Wraps text that arrives in pieces to the terminal's width; holds a word back until it is complete."""

    def __init__(self) -> None:
        #: How many cells of the last line are used.
        self.column = 0
        self._gap = ""
        self._word = ""

    def feed(self, text: str) -> str:
        """Add text; return the text that can be printed now."""
        out = ""
        for char in text:
            if char == "\n":
                out += self.rest() + char
                self.column = 0
            elif char in " \t":
                out += self._place()
                self._gap += _TAB if char == "\t" else char
            elif _is_ideograph(char):  # a line may break between any two of these
                out += self._place()
                self._word = char
                out += self._place()
            else:
                if cell_len(self._word + char) > width():
                    out += self._place()
                self._word += char
        return out

    def rest(self) -> str:
        """Return the text that was held back, without spaces at its end."""
        out = self._place()
        self._gap = ""
        return out

    def _place(self) -> str:
        if not self._word:
            return ""
        gap, word, room = self._gap, self._word, width() - self.column
        self._gap = self._word = ""
        if len(gap) + cell_len(word) > room:
            if self.column:
                self.column = cell_len(word)
                return f"\n{word}"
            gap = gap[: max(room - cell_len(word), 0)]
        self.column += len(gap) + cell_len(word)
        return gap + word


class Screen:
    """The output of one answer: its text, and a temporary note below it while no text arrives."""

    def __init__(self) -> None:
        self._words = WordWrap() if sys.stdout.isatty() else None
        context = click.get_current_context(silent=True)
        #: Whether notes are visible: they need escape codes.
        self.shows_notes = sys.stderr.isatty() and (context is None or context.color is not False)
        self._noted = ""
        #: Used cells of the answer's last line on the terminal; the note is on the next line.
        self._column = 0

    def write(self, text: str, *, dim: bool = False) -> None:
        """Print more text of the answer, dimmed on a terminal."""
        text = printable(text)
        if self._words is None:
            self._print(text)
        elif ready := self._words.feed(text):
            self._print(click.style(ready, dim=True) if dim else ready)

    def end(self) -> None:
        """End the answer's last line."""
        self._print(self._words.feed("\n") if self._words else "\n")

    def note(self, text: str) -> None:
        """Show a note below the text until more text arrives; an empty note removes it."""
        if not self.shows_notes or text == self._noted:
            return
        self._clear()
        if text:
            below = "\n" if self._column else ""
            text = set_cell_size(text, min(cell_len(text), width()))
            click.echo(f"{below}{_CLEAR}{click.style(text, dim=True)}", nl=False, err=True, color=True)
        self._noted = text

    def _print(self, text: str) -> None:
        self._clear()
        click.echo(text, nl=False)
        self._column = self._words.column if self._words else 0

    def _clear(self) -> None:
        if self._noted:
            back = f"\x1b[A\x1b[{self._column}C" if self._column else ""
            click.echo(f"{_CLEAR}{back}", nl=False, err=True, color=True)
            self._noted = ""


@contextlib.contextmanager
def unechoed() -> Iterator[None]:
    """Turn off the echo of typed keys while an answer streams; the next prompt receives these keys."""
    terminal = next(
        (stream.fileno() for stream in (sys.stdin, sys.stdout) if stream and stream.isatty()), None
    )
    if terminal is None or not _in_foreground(terminal):
        yield
        return
    before = termios.tcgetattr(terminal)
    # Character by character, so that the prompt receives Ctrl-D and backspace as keys.
    tty.setcbreak(terminal, termios.TCSADRAIN)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _in_foreground(terminal: int) -> bool:
    """Return whether this process is in the terminal's foreground.

    The system stops a background process that changes the terminal's settings.
    """
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # it is another session's terminal
        return False


def _is_ideograph(char: str) -> bool:
    return unicodedata.category(char) == "Lo" and unicodedata.east_asian_width(char) in "WF"
