"""A long prompt among running answers: how long they stand still while it is prefilled.

Answers are watched alone and beside the prompt in turns, so that both see the same machine.
"""

from __future__ import annotations

import asyncio
import contextlib
from itertools import pairwise
from time import monotonic
from typing import TYPE_CHECKING, Final

from bench.ask import ask
from bench.report import BenchError
from bench.together import together
from protocol.errors import TurnkeepError

from .turns import Stall

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.corpus import Corpus
    from protocol.client import Client

#: Text from which the length of a token is told, in characters.
SAMPLE_CHARS: Final = 1000
#: Long answers leave few gaps between answers, in which nothing could stand still.
ANSWER_TOKENS: Final = 256
CLOSE_TIMEOUT_S: Final = 5.0


class Beside:
    """Answers that run all the time, and a long prompt now and then."""

    def __init__(
        self, client: Client, corpus: Corpus, *, run: str, answers: int, timeout_s: float, pause_s: float
    ) -> None:
        """`answers` run at a time; between two prompts they are alone for `pause_s`."""
        self._client = client
        self._texts = corpus.texts()
        self._run = run
        self._answers = answers
        self._timeout_s = timeout_s
        self._pause_s = pause_s
        self._chunks_s: list[list[float]] = []
        self._ending = False

    async def measure(self, num_tokens: int, rounds: int, stalls: list[Stall]) -> None:
        """Prefill `rounds` prompts of about `num_tokens`, and add what they cost to `stalls` at the end.

        Raises `BenchError` where one is refused.
        """
        per_token = await self._chars_per_token()
        windows: list[tuple[float, float, int, int]] = []
        started_s = monotonic()

        async def prompts() -> None:
            for number in range(rounds):
                await asyncio.sleep(self._pause_s)
                text = self._prompt(number, round(num_tokens * per_token))
                before_s = monotonic()
                tokens, prefilled = await self._append(f"{self._run}-long-{number}", text)
                windows.append((before_s, monotonic(), tokens, prefilled))
            await asyncio.sleep(self._pause_s)
            self._ending = True

        await together(prompts(), *(self._answer(i) for i in range(self._answers)))
        gaps = [pair for chunks in self._chunks_s for pair in pairwise(chunks)]
        stalls.extend(by_round(gaps, windows, started_s))

    async def _chars_per_token(self) -> float:
        text = self._prompt(0, SAMPLE_CHARS)
        tokens, _ = await self._append(f"{self._run}-sample", text)
        return len(text) / max(tokens, 1)

    def _prompt(self, number: int, chars: int) -> str:
        parts, size = [f"[{self._run}-{number}]"], 0
        while size < chars:
            parts.append(next(self._texts))
            size += len(parts[-1]) + 2
        return "\n\n".join(parts)[: max(chars, 1)]

    async def _append(self, name: str, text: str) -> tuple[int, int]:
        session = self._client.session(name)
        try:
            done = await session.append(text=text, timeout_s=self._timeout_s)
        except TurnkeepError as error:
            raise BenchError(f"the long prompt was refused: {error}; lower --long-prompt") from None
        with contextlib.suppress(TurnkeepError):
            await session.close(timeout_s=CLOSE_TIMEOUT_S)
        return done.tokens, done.prefilled_tokens

    async def _answer(self, number: int) -> None:
        """Let one answer follow another, each in a session of its own, until the end."""
        turn = 0
        while not self._ending:
            turn += 1
            name = f"{self._run}-beside-{number}-{turn}"
            session = self._client.session(name)
            asked = await ask(
                session,
                messages=[{"role": "user", "content": f"[{name}] {next(self._texts)}"}],
                max_tokens=ANSWER_TOKENS,
                timeout_s=self._timeout_s,
            )
            if asked.fault is not None:
                raise BenchError(f"an answer beside the long prompt failed: {asked.fault}")
            self._chunks_s.append([asked.sent_s + chunk_s for chunk_s in asked.chunks_s])
            with contextlib.suppress(TurnkeepError):
                await session.close(timeout_s=CLOSE_TIMEOUT_S)


def by_round(
    gaps: Sequence[tuple[float, float]],
    windows: Sequence[tuple[float, float, int, int]],
    started_s: float,
) -> Iterator[Stall]:
    """Sort the gaps: those that overlap a prompt's window, and those since the window before."""
    before_s = started_s
    for start_s, end_s, tokens, prefilled in windows:
        during = [b - a for a, b in gaps if a < end_s and b > start_s]
        alone = [b - a for a, b in gaps if a >= before_s and b <= start_s]
        yield Stall(
            tokens=tokens,
            prefilled_tokens=prefilled,
            seconds=end_s - start_s,
            alone_s=tuple(alone),
            during_s=tuple(during),
        )
        before_s = end_s
