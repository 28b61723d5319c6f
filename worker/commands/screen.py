"""A terminal while an answer streams: words that wrap, a passing note below them, keys that do not show.

In a pipe the text comes out as it is, and nothing else does.
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
    """Return how many cells of a line may be used: in the last one a terminal's cursor has no clear place."""
    return max(shutil.get_terminal_size().columns - 1, 8)


def printable(text: str) -> str:
    """Leave out control characters: a model must not be able to drive the terminal."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) not in {"Cc", "Cs"})


def wrapped(text: str) -> str:
    """Break a whole text's lines between words, for the terminal as it is now."""
    words = WordWrap()
    return words.feed(text) + words.rest()


class WordWrap:
    """Breaks lines between words as their text comes in pieces; holds a word back until it is whole."""

    def __init__(self) -> None:
        #: Cells of the last line that are taken.
        self.column = 0
        self._gap = ""
        self._word = ""

    def feed(self, text: str) -> str:
        """Return what can be printed now."""
        out = ""
        for char in text:
            if char == "\n":
                out += self.rest() + char
                self.column = 0
            elif char in " \t":
                out += self._place()
                self._gap += _TAB if char == "\t" else char
            elif _is_ideograph(char):  # such text has no spaces, and breaks anywhere
                out += self._place()
                self._word = char
                out += self._place()
            else:
                if cell_len(self._word + char) > width():
                    out += self._place()
                self._word += char
        return out

    def rest(self) -> str:
        """Return what is held back; spaces at a line's end are not needed."""
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
    """Where one answer appears: its text, and for as long as nothing comes, a note below it."""

    def __init__(self) -> None:
        self._words = WordWrap() if sys.stdout.isatty() else None
        #: Whether notes are seen at all.
        self.takes_notes = sys.stderr.isatty()
        self._noted = ""
        #: Cells of the last line that the terminal shows; a note stands below it.
        self._column = 0

    def write(self, text: str) -> None:
        """Add to the answer's text."""
        text = printable(text)
        if self._words is None:
            self._print(text)
        elif ready := self._words.feed(text):
            self._print(ready)

    def end(self) -> None:
        """End the answer's last line."""
        self._print(self._words.feed("\n") if self._words else "\n")

    def note(self, text: str) -> None:
        """Say something below the text until more of it comes; an empty note takes the last one away."""
        if not self.takes_notes or text == self._noted:
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
    """Keep what is typed from showing up in an answer; it is there at the next prompt."""
    terminal = next(
        (stream.fileno() for stream in (sys.stdin, sys.stdout) if stream and stream.isatty()), None
    )
    if terminal is None or not _is_ours(terminal):
        yield
        return
    before = termios.tcgetattr(terminal)
    # By the character, so that a Ctrl-D or a backspace reaches the prompt as the key that it is.
    tty.setcbreak(terminal, termios.TCSADRAIN)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _is_ours(terminal: int) -> bool:
    """Say whether this process is in the terminal's foreground: elsewhere a change of it would stop it."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # another session's terminal
        return False


def _is_ideograph(char: str) -> bool:
    return unicodedata.category(char) == "Lo" and unicodedata.east_asian_width(char) in "WF"
