"""Renders Markdown on a terminal: shows each block as raw text, and redraws it with rich once it is complete.

Used by `chat`. In a pipe the text stays as the model wrote it.
"""

from __future__ import annotations

import io
import re
import shutil
from functools import cached_property
from typing import TYPE_CHECKING, Final

from .screen import Screen, WordWrap, printable, width

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

_UP: Final = "\x1b[A\x1b[K"
#: Kinds of blocks that end at an empty line.
_ENDED: Final = frozenset({"blockquote_open", "fence", "heading_open", "hr", "paragraph_open", "table_open"})
_PADDING: Final = re.compile(r" +$", re.MULTILINE)
#: Empty lines at the start and at the end of rendered text.
_EMPTY: Final = re.compile(r"\A(?:(?:\x1b\[[\d;]*m| )*\n)+|(?:\n(?:\x1b\[[\d;]*m| )*)+\Z")


class MarkdownScreen(Screen):
    """The output of one answer in Markdown; in a pipe, as `Screen`. A too tall block stays raw text."""

    def __init__(self) -> None:
        super().__init__()
        #: The text of the last, unfinished block, and the number of terminal lines that it takes.
        self._block = ""
        self._num_lines = 0

    def write(self, text: str, *, dim: bool = False) -> None:
        """Print more text of the answer; dimmed text is not Markdown."""
        super().write(text, dim=dim)
        if dim or self._words is None or not (self._block or text.strip()):
            self._num_lines = 0
            return
        self._block += printable(text)
        if begin := self._last_begin() if "\n" in text else 0:
            self._replace(self._block[:begin], self._block[begin:], "\n")

    def end(self) -> None:
        """Render the last block, and end the answer's last line."""
        if self._words is None or not self._block.strip():
            super().end()
        else:
            self._print(self._words.rest())
            self._replace(self._block, "", "")

    def _print(self, text: str) -> None:
        super()._print(text)
        self._num_lines += text.count("\n")

    def _last_begin(self) -> int:
        """Return the length of the text's beginning whose blocks are complete: later text cannot change them.

        It excludes the last block, unless an empty line has ended it. Only complete lines are parsed: the
        beginning of a line may look like a paragraph, and the whole line be an item of the list above.
        """
        whole = self._block[: self._block.rindex("\n") + 1]
        spans = [
            (token.map, token.type) for token in self._parser.parse(whole) if token.level == 0 and token.map
        ]
        if not spans:
            return 0
        (begin, end), kind = max(spans)
        if kind in _ENDED and end < whole.count("\n"):
            return len(whole)
        return sum(map(len, whole.split("\n")[:begin])) + begin

    @cached_property
    def _parser(self) -> MarkdownIt:
        from markdown_it import MarkdownIt

        return MarkdownIt().enable(["table", "strikethrough"])  # the same as in rich

    def _replace(self, whole: str, rest: str, between: str) -> None:
        """Replace the raw text `whole` on the terminal by its rendered blocks, then print the text `rest`."""
        if self._num_lines < shutil.get_terminal_size().lines - 1:
            self._words = WordWrap()
            more = f"{between}{self._words.feed(rest)}"
            self._print(f"\r\x1b[K{_UP * self._num_lines}{_drawn(whole)}{more}")
        elif not (rest or between):
            super().end()
        self._block = rest
        self._num_lines = WordWrap().feed(rest).count("\n")


def _drawn(text: str) -> str:
    from rich.console import Console
    from rich.markdown import Markdown

    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width())
    console.print(Markdown(text, code_theme="ansi_dark", hyperlinks=False))
    return _EMPTY.sub("", _PADDING.sub("", file.getvalue())) + "\n"
