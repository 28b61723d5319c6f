"""Words wrap as they come, and a model cannot drive the terminal."""

from __future__ import annotations

from itertools import pairwise

import pytest
from rich.cells import cell_len

from worker.commands.screen import WordWrap, printable, wrapped

TEXT = (
    "A short line.\n\n    indented, and then on and on past the edge\n"
    "a-word-that-is-longer-than-any-line-could-ever-be-on-this-terminal then\n"
    "\ttabbed \u4f60\u597d\uff0c\u4e16\u754c\u4f60\u597d\uff0c\u4e16\u754c\u4f60\u597d"
    " \u0e01\u0e34 e\u0301t\u00e9 end"
)


@pytest.fixture(params=[20, 40, 80])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def test_no_line_reaches_the_edge_and_no_word_is_lost(columns: int) -> None:
    shown = wrapped(TEXT)
    assert max(map(cell_len, shown.split("\n"))) < columns
    assert "".join(shown.split()) == "".join(TEXT.split())


def test_lines_break_between_words(columns: int) -> None:
    words = "the quick brown fox jumps over the lazy dog " * 3
    shown = wrapped(words).split("\n")
    assert " ".join(line.strip() for line in shown) == words.strip()
    assert all(cell_len(line) + 1 + len(after.split()[0]) >= columns for line, after in pairwise(shown))


@pytest.mark.parametrize("piece", [1, 2, 3, 7])
def test_pieces_make_the_same_lines_as_the_whole(columns: int, piece: int) -> None:
    words = WordWrap()
    parts = [words.feed(TEXT[i : i + piece]) for i in range(0, len(TEXT), piece)]
    assert "".join(parts) + words.rest() == wrapped(TEXT)


def test_a_word_is_held_back_until_it_is_whole() -> None:
    words = WordWrap()
    assert words.feed("hello wor") == "hello"
    assert words.feed("ld") == ""
    assert words.feed("\n") == " world\n"


def test_control_characters_are_left_out_and_spaces_and_joiners_are_not() -> None:
    assert printable("a\x1b[2Jb\x07\r\n\tc\x9b\x7f") == "a[2Jb\n\tc"
    whole = "10\u202f000\u00a0km \U0001f468\u200d\U0001f469 \u0645\u06cc\u200c\u062e"
    assert printable(whole) == whole
