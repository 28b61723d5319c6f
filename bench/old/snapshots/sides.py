"""One side of the comparison: a worker of the bench's own, and how long it reads and answers prompts."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bench.faults import BenchError

from .takes import Heard, became

if TYPE_CHECKING:
    from collections.abc import Sequence

    from turnkeep_client.client import Client
    from turnkeep_client.messages import Metrics
    from turnkeep_client.session import Session

    from .takes import Snapshots

#: How long a worker may take to write what it has queued.
SETTLE_TIMEOUT_S: Final = 60.0
SETTLE_PAUSE_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Measured:
    """What one side made of the prompts."""

    prompt_tokens: int
    prefill_s: float
    answers: list[Heard]
    snapshots: Snapshots


class Side:
    """A worker. `settles` says that its disk is quick enough to wait until all is written."""

    def __init__(self, name: str, client: Client, *, settles: bool, timeout_s: float) -> None:
        self.name = name
        self._client = client
        self._settles = settles
        self._timeout_s = timeout_s
        self._num_takes = 0
        self._idle = client.session("idle")  # only asked how the worker is

    async def begin(self) -> Metrics:
        """Open the session that is asked; return the worker's own account."""
        await self._idle.open(timeout_s=self._timeout_s)
        return await self._look()

    async def take(self, prompts: Sequence[str], max_tokens: int) -> Measured:
        """Read the prompts, all at once, then answer all of them; nothing is left of the sessions.

        What the prompts leave to be written is on disk before the answers begin, where that comes to an end.
        """
        self._num_takes += 1
        sessions = [self._client.session(f"take{self._num_takes}-{i}") for i in range(len(prompts))]
        before = (await self._look()).snapshots
        started_s = time.monotonic()
        appended = await _all(
            session.append(text=prompt, timeout_s=self._timeout_s)
            for session, prompt in zip(sessions, prompts, strict=True)
        )
        prefill_s = time.monotonic() - started_s
        await self._settle()
        answers = await _all(
            self._answer(session, one.position, max_tokens)
            for session, one in zip(sessions, appended, strict=True)
        )
        await self._settle()
        after = (await self._look()).snapshots
        # Also gives up what waits for the disk: the next side has the machine to itself.
        await _all(session.close(forget=True, timeout_s=self._timeout_s) for session in sessions)
        return Measured(sum(one.tokens for one in appended), prefill_s, answers, became(before, after))

    async def _answer(self, session: Session, position: int, max_tokens: int) -> Heard:
        times_s, counts = [], []
        generation = session.generate(max_tokens=max_tokens, timeout_s=self._timeout_s)
        async for chunk in generation:
            times_s.append(time.monotonic())
            counts.append(len(chunk.tokens))
        return Heard(position, tuple(generation.result.tokens), tuple(times_s), tuple(counts))

    async def _settle(self) -> None:
        """Wait until its snapshots are settled. Raises `BenchError`."""
        if not self._settles:
            return
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                while (await self._look()).snapshots.in_flight:  # noqa: ASYNC110  # only the worker knows
                    await asyncio.sleep(SETTLE_PAUSE_S)
        except TimeoutError:
            raise BenchError(f"the worker still writes snapshots after {SETTLE_TIMEOUT_S:g} s") from None

    async def _look(self) -> Metrics:
        return (await self._idle.info()).worker


async def _all(work: Any) -> list[Any]:
    """Run all at once, in their order; where one fails the others are ended."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
    return [task.result() for task in tasks]
