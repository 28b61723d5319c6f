"""A long prompt among running answers: how long they stand still while it is prefilled.

Answers are watched alone and beside the prompt in turns, so that both see the same machine.
"""

from __future__ import annotations

import asyncio
import contextlib
from time import monotonic
from typing import TYPE_CHECKING, Final

from bench.faults import BenchError
from bench.together import together
from turnkeep_client.errors import RequestFailedError, TurnkeepError

from .turns import Stall, gaps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.corpus import Corpus
    from turnkeep_client.client import Client

#: Text from which the length of a token is told, in characters.
SAMPLE_CHARS: Final = 1000
#: How often is looked whether all answers run.
POLL_S: Final = 0.005
#: Waiting for that longer than this, a prompt is sent beside those that do.
PATIENCE_S: Final = 30.0
CLOSE_TIMEOUT_S: Final = 5.0


class Beside:
    """Answers that run all the time, and a long prompt now and then."""

    def __init__(
        self,
        client: Client,
        corpus: Corpus,
        *,
        run: str,
        answers: int,
        answer_tokens: int,
        timeout_s: float,
        pause_s: float,
    ) -> None:
        """`answers` of `answer_tokens` run at a time; between two prompts they are alone for `pause_s`.

        Long answers leave few pauses between answers, in which nothing could stand still.
        """
        self._client = client
        self._texts = corpus.texts()
        self._run = run
        self._answers = answers
        self._answer_tokens = answer_tokens
        self._running: dict[int, int] = {}
        self._timeout_s = timeout_s
        self._pause_s = pause_s
        self._chunks_s: list[list[float]] = []
        self._ending = asyncio.Event()

    async def measure(self, num_tokens: int, rounds: int, stalls: list[Stall]) -> None:
        """Prefill `rounds` prompts of about `num_tokens`, and add what they cost to `stalls` at the end.

        Raises `BenchError` where one is refused.
        """
        per_token = await self._chars_per_token()
        windows: list[tuple[float, float, int, int]] = []
        started_s = monotonic()

        async def prompts() -> None:
            for number in range(rounds):
                await self._until_all_run()
                await asyncio.sleep(self._pause_s)
                await self._until_all_run()
                text = self._prompt(number, round(num_tokens * per_token))
                before_s = monotonic()
                tokens, prefilled = await self._append(f"{self._run}-long-{number}", text)
                windows.append((before_s, monotonic(), tokens, prefilled))
            await asyncio.sleep(self._pause_s)
            self._ending.set()

        await together(prompts(), *(self._answer(i) for i in range(self._answers)))
        stood = [pair for chunks in self._chunks_s for pair in gaps(chunks)]
        stalls.extend(by_round(stood, windows, started_s))

    async def _chars_per_token(self) -> float:
        text = self._prompt(0, SAMPLE_CHARS)
        tokens, _ = await self._append(f"{self._run}-sample", text)
        return len(text) / max(tokens, 1)

    def _prompt(self, number: int, chars: int) -> str:
        parts, size = [f"[{number}-{self._run}]"], 0
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
        while not self._ending.is_set():
            turn += 1
            name = f"{turn}-{number}-beside-{self._run}"
            session = self._client.session(name)
            chunks_s: list[float] = []
            self._chunks_s.append(chunks_s)
            self._running[number] = 0
            generation = session.generate(
                messages=[{"role": "user", "content": f"[{name}] {next(self._texts)}"}],
                max_tokens=self._answer_tokens,
                timeout_s=self._timeout_s,
            )
            try:
                async for chunk in generation:
                    chunks_s.append(monotonic())
                    self._running[number] += len(chunk.tokens)
                    if self._ending.is_set():
                        await generation.cancel()
                        break
            except RequestFailedError as error:
                if not self._ending.is_set():
                    raise BenchError(f"an answer beside the long prompt failed: {error}") from None
            del self._running[number]
            with contextlib.suppress(TurnkeepError):
                await session.close(timeout_s=CLOSE_TIMEOUT_S)

    async def _until_all_run(self) -> None:
        """Wait until every answer has begun, and none of them is about to end."""
        deadline = monotonic() + PATIENCE_S
        while monotonic() < deadline:
            tokens = self._running.values()
            if len(tokens) == self._answers and all(0 < count <= self._answer_tokens / 2 for count in tokens):
                return
            await asyncio.sleep(POLL_S)


def by_round(
    stood: Sequence[tuple[float, float]],
    windows: Sequence[tuple[float, float, int, int]],
    started_s: float,
) -> Iterator[Stall]:
    """Sort the gaps: those that overlap a prompt's window, and those since the window before."""
    before_s = started_s
    for start_s, end_s, tokens, prefilled in windows:
        during = [b - a for a, b in stood if a < end_s and b > start_s]
        alone = [b - a for a, b in stood if a >= before_s and b <= start_s]
        yield Stall(
            tokens=tokens,
            prefilled_tokens=prefilled,
            seconds=end_s - start_s,
            alone_s=tuple(alone),
            during_s=tuple(during),
        )
        before_s = end_s
