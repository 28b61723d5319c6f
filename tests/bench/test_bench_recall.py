"""`turnkeep bench recall`: facts lie where they should, and what cannot be is one line."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from bench import recall
from bench.corpus import Texts, paragraphs

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path


def test_facts_lie_at_their_depths_and_the_rest_is_the_text(tiny_model: Path) -> None:
    texts = Texts(tiny_model, itertools.repeat("abc"))
    facts = [recall.Fact(10, "Greta", "4711"), recall.Fact(50, "Anton", "8352")]
    said = recall.planted(texts, 1000, facts)
    sentences = [texts.tokens_of(fact.said) for fact in facts]
    begin, middle = sentences
    assert said[100 : 100 + len(begin)] == begin
    assert said[500 + len(begin) :][: len(middle)] == middle
    text = said[:100] + said[100 + len(begin) : 500 + len(begin)] + said[500 + len(begin) + len(middle) :]
    assert text == Texts(tiny_model, itertools.repeat("abc")).next_tokens(1000)


def test_a_file_is_read_by_paragraphs_again_and_again(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("one\ntwo\n\n\n\nthree\n")
    assert list(itertools.islice(paragraphs(file), 3)) == ["one two", "three", "one two"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("options", "content", "message"),
    [
        (("--resident", "2048", "--tokens", "1000"), b"abc", "take fewer resident tokens than the 1,000"),
        (("--depths", "10,110"), b"abc", "depths of up to 100%"),
        ((), b" \n\n", "text has no text"),
        ((), b"\xff", "cannot be read"),
        (("--resident", "64"), b"abc", "a window of 60 tokens is smaller than this"),
    ],
)
def test_what_cannot_be_is_one_line(
    tmp_path: Path,
    tiny_model: Path,
    turnkeep: Callable[..., subprocess.Popen[str]],
    options: tuple[str, ...],
    content: bytes,
    message: str,
) -> None:
    file = tmp_path / "text"
    file.write_bytes(content)
    process = turnkeep("recall", "--smoke", *options, "--text", file, "--model", tiny_model)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err.count("\n")) == (1, 1), err
    assert message in err
