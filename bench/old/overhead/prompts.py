"""What is said: real texts, as token ids of the model, that no cache has seen before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from uuid import uuid4

from bench.baseline.messages import Chat, Tokens
from bench.faults import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.baseline.process import Baseline

#: Texts that may be too long, one after the other, before it is said that none fits.
MAX_TRIES: Final = 1000


class Prompts:
    """Takes texts from a corpus, in its order, and leaves out those of more than `max_tokens`."""

    def __init__(self, baseline: Baseline, texts: Iterator[str], max_tokens: int) -> None:
        self._baseline = baseline
        self._texts = texts
        self._max_tokens = max_tokens

    async def conversations(self, number: int, turns: int) -> list[list[tuple[int, ...]]]:
        """Return the prompts of so many sessions for each turn.

        The first begins with words that no other has, so that nothing computed for another is of use to it.
        """
        salts = [f"Conversation {uuid4().hex[:12]}. Answer in whole sentences." for _ in range(number)]
        return [[await self._next(salt, first=not turn) for salt in salts] for turn in range(turns)]

    async def _next(self, system: str, *, first: bool) -> tuple[int, ...]:
        for _ in range(MAX_TRIES):
            chat = Chat(system, next(self._texts), first)
            tokens = (await self._baseline.ask(chat, Tokens)).tokens
            if len(tokens) <= self._max_tokens:
                return tokens
        raise BenchError(
            f"no text of the corpus has at most {self._max_tokens} tokens; raise --prompt-tokens"
        )
