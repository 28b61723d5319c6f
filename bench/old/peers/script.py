"""What is said to every side: real utterances, joined to turns of about as many tokens as are wanted."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final
from uuid import uuid4

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.corpus import Corpus
    from turnkeep_client.client import Client

SAMPLE_CHARS: Final = 600
SAMPLE_TIMEOUT_S: Final = 120.0


async def chars_per_token(client: Client, corpus: Corpus) -> float:
    """Have a worker tokenise some of the corpus. Raises `TurnkeepError`."""
    sample = _join(corpus.texts(), SAMPLE_CHARS)
    session = client.session(f"bench-{uuid4().hex[:12]}")
    appended = await session.append(text=sample, timeout_s=SAMPLE_TIMEOUT_S)
    await session.close(timeout_s=SAMPLE_TIMEOUT_S)
    return len(sample) / appended.position


class Script:
    """Texts for one conversation after another; the same corpus and seed give the same texts.

    Every conversation goes through the corpus in an order of its own, so that no two share a beginning that
    a server may remember.
    """

    def __init__(self, corpus: Corpus, chars: float, seed: int = 0) -> None:
        """`chars` are characters per token."""
        self._utterances = [u.text for c in corpus.conversations for u in c.utterances]
        self._chars = chars
        self._random = random.Random(seed)  # noqa: S311  # an order, no secret

    def conversation(self) -> Talk:
        """Begin another conversation."""
        return Talk(_shuffled(self._utterances, self._random.randrange(2**32)), self._chars)


class Talk:
    """The user's side of one conversation."""

    def __init__(self, utterances: Iterator[str], chars: float) -> None:
        self._utterances = utterances
        self._chars = chars

    def say(self, num_tokens: int) -> str:
        """Return the next text, of about `num_tokens` tokens."""
        return _join(self._utterances, round(num_tokens * self._chars))


def _shuffled(utterances: list[str], seed: int) -> Iterator[str]:
    order = random.Random(seed)  # noqa: S311  # an order, no secret
    while True:
        yield from order.sample(utterances, len(utterances))


def _join(utterances: Iterator[str], num_chars: int) -> str:
    """Join utterances up to a length, and cut the last one between two words."""
    text = ""
    while len(text) < num_chars:
        text = f"{text}\n\n{next(utterances)}" if text else next(utterances)
    if len(text) == num_chars:
        return text
    head = text[: num_chars + 1].rpartition(" ")[0]
    return head.rstrip() or text[:num_chars]
