"""Words wrap as they stream; a model cannot control the terminal."""

import io
import sys
from collections.abc import Callable
from itertools import pairwise

import click
import pytest
from command_runs import seen
from rich.cells import cell_len

from commands.rendering import MarkdownScreen
from commands.screen import Screen, WordWrap, printable, wrapped

TEXT = (
    "A short line.\n\n    indented, and then on and on past the edge\n"
    "a-word-that-is-longer-than-any-line-could-ever-be-on-this-terminal then\n"
    "\ttabbed \u4f60\u597d\uff0c\u4e16\u754c\u4f60\u597d\uff0c\u4e16\u754c\u4f60\u597d"
    " \u0e01\u0e34 e\u0301t\u00e9 end"
)


def test_with_no_color_and_on_a_dumb_terminal_no_note_is_drawn_below_an_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for color in (False, None):
        with click.Context(click.Command("ask"), color=color):
            Screen().note("waiting for its turn")
        assert bool(capsys.readouterr().err) == (color is None)


@pytest.fixture(params=[20, 40, 80])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def test_wrapped_terminal_lines_fit_the_terminal_width_and_lose_no_word(columns: int) -> None:
    shown = wrapped(TEXT)
    assert max(map(cell_len, shown.split("\n"))) < columns
    assert "".join(shown.split()) == "".join(TEXT.split())


def test_terminal_output_wraps_between_words_and_fills_each_line_as_far_as_possible(columns: int) -> None:
    words = "the quick brown fox jumps over the lazy dog " * 3
    shown = wrapped(words).split("\n")
    assert " ".join(line.strip() for line in shown) == words.strip()
    assert all(cell_len(line) + 1 + len(after.split()[0]) >= columns for line, after in pairwise(shown))


def test_a_word_streamed_to_the_terminal_is_printed_only_after_the_word_is_complete() -> None:
    words = WordWrap()
    assert words.feed("hello wor") == "hello"
    assert words.feed("ld") == ""
    assert words.feed("\n") == " world\n"


def test_text_printed_to_the_terminal_loses_control_characters_but_keeps_unicode_spaces_and_joiners() -> None:
    assert printable("a\x1b[2Jb\x07\r\n\tc\x9b\x7f") == "a[2Jb\n\tc"
    whole = "10\u202f000\u00a0km \U0001f468\u200d\U0001f469 \u0645\u06cc\u200c\u062e"
    assert printable(whole) == whole


ANSWER = """A **bold** word, and words that go on behind the edge of it.

1. one

2. two
- other

```python
x = 1
```
| a | b |
|---|--:|
| 1 | 2 |

An end."""
LOOKS = """A bold word, and words that go on
behind the edge of it.

 1 one
 2 two

 \u2022 other

 x = 1

 a  b
 \u2500\u2500\u2500\u2500
 1  2

An end."""


def terminal(monkeypatch: pytest.MonkeyPatch, lines: int = 24) -> Callable[[], list[str]]:
    """Make standard output a terminal of 40 columns; return a function that returns its lines."""
    printed = io.StringIO()
    monkeypatch.setattr(printed, "isatty", lambda: True, raising=False)
    for name, value in (("COLUMNS", "40"), ("LINES", str(lines)), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", printed)
    return lambda: seen(printed.getvalue().replace("\n", "\r\n"), 40)


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
def test_each_complete_markdown_block_is_rendered_in_place_of_its_raw_text_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    shown = terminal(monkeypatch)
    screen = MarkdownScreen()
    screen.write("I think.", dim=True)
    screen.write("\n\n")
    for i in range(0, len(ANSWER), piece):
        screen.write(ANSWER[i : i + piece])
    screen.end()
    lines = [line.rstrip() for line in shown()]
    whole = "\n".join(
        line for i, line in enumerate(lines) if line or lines[i - 1]
    )  # one empty line is enough
    assert whole.strip("\n") == f"I think.\n\n{LOOKS}"


def test_streamed_markdown_is_shown_raw_until_its_block_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    screen = MarkdownScreen()
    screen.write("A **bold** w")
    assert shown() == ["A **bold**"]
    screen.write("ord\n\n```\nx")
    assert shown() == ["A bold word", "", "```", ""]
    screen.write("=1\n```\n\nThen")  # an empty line ends the code, but not a list
    assert "\n".join(shown()).rstrip() == "A bold word\n\n x=1"
    screen.write("\n\n1. one\n\nAn")
    assert "\n".join(shown()).rstrip() == "A bold word\n\n x=1\n\nThen\n\n1. one"


def test_a_markdown_block_taller_than_the_terminal_is_not_rendered_and_stays_raw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = terminal(monkeypatch, 5)
    screen = MarkdownScreen()
    for piece in ("```\n", *["x\n"] * 9, "```\n\n", "*Then*\n\n"):
        screen.write(piece)
    screen.end()
    assert "\n".join(shown()).rstrip().endswith("x\n```\n\nThen")


def test_escape_sequences_in_markdown_lose_their_escape_character(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    screen = MarkdownScreen()
    screen.write("&#27;[2J \x1b[2J `\x1b[2J` &#x9b;2J\n")
    screen.end()
    assert "[2J [2J [2J" in shown()[0].replace("\ufffd", "")
