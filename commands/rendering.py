"""Markdown on a terminal: a block is shown as it comes, and drawn by rich once it is whole.

Used by `chat` on a terminal; what goes into a pipe stays as the model wrote it.
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
#: Blocks that an empty line ends.
_ENDED: Final = frozenset({"blockquote_open", "fence", "heading_open", "hr", "paragraph_open", "table_open"})
_PADDING: Final = re.compile(r" +$", re.MULTILINE)
#: Lines before the first and behind the last visible character.
_EMPTY: Final = re.compile(r"\A(?:(?:\x1b\[[\d;]*m| )*\n)+|(?:\n(?:\x1b\[[\d;]*m| )*)+\Z")


class MarkdownScreen(Screen):
    """The output of one answer in Markdown. A block taller than the terminal stays as it came."""

    def __init__(self) -> None:
        super().__init__()
        #: The text from the last block's beginning on, and the lines that it takes on the terminal.
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
        """End the answer's last line."""
        if self._words is None or not self._block.strip():
            super().end()
        else:
            self._print(self._words.rest())
            self._replace(self._block, "", "")

    def _print(self, text: str) -> None:
        super()._print(text)
        self._num_lines += text.count("\n")

    def _last_begin(self) -> int:
        """Return up to where no more text changes the blocks: to the last one, or behind it if it has ended.

        Only whole lines count: the first characters of one may be a paragraph, and with the next one an item
        of the list above.
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

        return MarkdownIt().enable(["table", "strikethrough"])  # as rich has it

    def _replace(self, whole: str, rest: str, between: str) -> None:
        """Draw a whole block over what was shown of it, and go on with the rest."""
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
