"""Sessions to replay where no record is given: a few conversations, some sampled, some greedy."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final
from uuid import uuid4

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.corpus import Corpus
    from turnkeep_client.client import Client

#: A pause between an answer and the next question, so that there is a pace to keep.
PAUSE_S: Final = 0.2
TEMPERATURE: Final = 0.8


async def record(
    client: Client,
    corpus: Corpus,
    *,
    sessions: int,
    turns: int,
    max_tokens: int,
    turn_timeout_s: float,
    on_turn: Callable[[str], None],
) -> None:
    """Hold so many conversations at once; every second one samples, without naming a seed.

    Raises `TurnkeepError` where a turn fails.
    """
    texts = corpus.texts()
    said = [[next(texts) for _ in range(turns)] for _ in range(sessions)]

    async def hold(index: int) -> None:
        session = client.session(f"recorded-{uuid4().hex[:12]}")
        await session.append(
            messages=[{"role": "system", "content": "Answer in one sentence."}], timeout_s=turn_timeout_s
        )
        for number, text in enumerate(said[index], 1):
            await session.generate(
                messages=[{"role": "user", "content": text}],
                max_tokens=max_tokens,
                temperature=TEMPERATURE if index % 2 else 0.0,
                timeout_s=turn_timeout_s,
            )
            on_turn(f"recording session {index + 1}, turn {number}")
            await asyncio.sleep(PAUSE_S)

    async with asyncio.TaskGroup() as group:
        for index in range(sessions):
            group.create_task(hold(index))
