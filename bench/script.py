"""What many sessions say: each one its own part of a corpus, and a history to begin with.

A session's first words carry its name, so that no two sessions share them: a worker keeps KV by content, and
would find in its cache what another session, or an earlier run, has said. So names should differ early.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .corpus import Corpus

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Script:
    """One session's part: `history` is said in its opening, then `turns` one after another."""

    history: tuple[str, ...]
    turns: tuple[str, ...]

    @property
    def has_opening(self) -> bool:
        """Say whether there is something to say before the first turn."""
        return bool(self.history)

    def opening(self, name: str) -> Messages:
        """Return the messages that bring the session to its history."""
        text = "\n\n".join([f"[{name}]", *self.history])
        return [{"role": "user", "content": text}]

    def turn(self, name: str, number: int) -> Messages:
        """Return the messages of a turn, counted from 0."""
        text = self.turns[number]
        if number == 0 and not self.has_opening:
            text = f"[{name}]\n\n{text}"
        return [{"role": "user", "content": text}]


def scripts(corpus: Corpus, lengths: Iterable[tuple[int, int]]) -> list[Script]:
    """Cut a corpus into scripts of (utterances of history, turns).

    Each begins with a conversation of its own and goes on into the next ones where that is too short.
    """
    conversations = cycle(corpus.conversations)
    found = []
    for history, turns in lengths:
        first = next(conversations)
        texts = [said.text for said in first.utterances]
        while len(texts) < history + turns:
            texts += [said.text for said in next(conversations).utterances]
        found.append(Script(tuple(texts[:history]), tuple(texts[history : history + turns])))
    return found
