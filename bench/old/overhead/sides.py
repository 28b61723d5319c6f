"""The sides of the comparison: each runs the same turn for the same sessions, and says what it took.

A side keeps its sessions' caches from turn to turn, as its user would.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from bench.baseline.messages import Batch, Done, Forget, Ran, Stream
from bench.faults import BenchError
from bench.old.run import closing
from turnkeep_client.client import connect
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.subjects import DEFAULT_PREFIX

from .cpu import of_process, of_worker
from .turns import ALONE, WITHOUT_SNAPSHOTS, WORKER

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from bench.baseline.process import Baseline
    from bench.local import LocalWorker
    from turnkeep_client.client import Client
    from turnkeep_client.messages import Metrics
    from turnkeep_client.session import Session

    from .cpu import Processes

#: How long a worker may take to write what it has queued, before the next side may begin.
SETTLE_TIMEOUT_S: Final = 60.0
SETTLE_PAUSE_S: Final = 0.02
CLOSE_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Said:
    """One session's answer; times count from the turn's start. The counts are a worker's account."""

    tokens: tuple[int, ...]
    first_s: float
    last_s: float
    cached_tokens: int | None = None
    prefilled_tokens: int | None = None
    context_tokens: int | None = None


class Side(ABC):
    """What runs the turns of a batch of sessions."""

    name: str
    processes: Processes

    @contextlib.asynccontextmanager
    async def sessions(self, number: int) -> AsyncGenerator[None]:
        """Begin `number` new sessions; afterwards nothing of them is left in memory."""
        await self._begin(number)
        try:
            yield
        finally:
            await self._end()

    @abstractmethod
    async def turn(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> tuple[float, list[Said]]:
        """Run one turn of all sessions: seconds in all, and each one's answer."""

    @abstractmethod
    async def settle(self) -> None:
        """Wait until it is idle."""

    @abstractmethod
    async def _begin(self, number: int) -> None: ...

    @abstractmethod
    async def _end(self) -> None: ...


class InProcess(Side):
    """mlx-lm by itself: `generate_step` for one sequence, or `BatchGenerator`."""

    def __init__(self, name: str, baseline: Baseline) -> None:
        self.name = name
        self.processes = of_process(baseline.pid)
        self._baseline = baseline
        self._names: tuple[str, ...] = ()

    async def turn(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> tuple[float, list[Said]]:
        """Run it there; the time is that program's own."""
        if self.name == ALONE:
            ran = await self._baseline.ask(Stream(self._names[0], prompts[0], max_tokens), Ran)
        else:
            ran = await self._baseline.ask(Batch(self._names, tuple(prompts), max_tokens), Ran)
        return ran.seconds, [Said(row.tokens, row.times_s[0], row.times_s[-1]) for row in ran.rows]

    async def settle(self) -> None:
        """Do nothing: it is idle once it has answered."""

    async def _begin(self, number: int) -> None:
        self._names = tuple(f"{i}" for i in range(number))

    async def _end(self) -> None:
        await self._baseline.ask(Forget(), Done)


class ThroughWorker(Side):
    """A worker over NATS, as any client of it: all prompts at once, each answer as it comes."""

    def __init__(
        self, worker: LocalWorker, *, snapshots: bool, timeout_s: float, prefix: str = DEFAULT_PREFIX
    ) -> None:
        self.name = WORKER if snapshots else WITHOUT_SNAPSHOTS
        self.processes = of_worker(worker)
        self.metrics: Metrics | None = None
        self._url = worker.url
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._client: Client | None = None
        self._stack = contextlib.AsyncExitStack()
        self._sessions: list[Session] = []

    async def turn(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> tuple[float, list[Said]]:
        """Send all, and wait for the last recorded answer."""
        started_s = time.monotonic()
        asking = [
            asyncio.create_task(self._ask(session, prompt, max_tokens, started_s))
            for session, prompt in zip(self._sessions, prompts, strict=True)
        ]
        try:
            said = await asyncio.gather(*asking)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return time.monotonic() - started_s, list(said)

    async def settle(self) -> None:
        """Wait until its snapshots are on disk. Raises `BenchError`."""
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                while (await self._look()).snapshots.in_flight:  # noqa: ASYNC110  # only the worker knows
                    await asyncio.sleep(SETTLE_PAUSE_S)
        except TimeoutError:
            raise BenchError(f"the worker still writes snapshots after {SETTLE_TIMEOUT_S:g} s") from None

    async def _ask(
        self, session: Session, prompt: tuple[int, ...], max_tokens: int, started_s: float
    ) -> Said:
        generation = session.generate(tokens=prompt, max_tokens=max_tokens, timeout_s=self._timeout_s)
        times_s = [time.monotonic() - started_s async for _ in generation]
        result = generation.result
        ended_s = time.monotonic() - started_s
        usage = result.usage
        return Said(
            result.tokens,
            times_s[0] if times_s else ended_s,
            times_s[-1] if times_s else ended_s,
            usage.cached_tokens,
            usage.prefilled_tokens,
            usage.prompt_tokens,
        )

    async def _begin(self, number: int) -> None:
        """Take a tenant that nobody has had: what another one left in the cache is of no use to it."""
        stack = contextlib.AsyncExitStack()
        client = await stack.enter_async_context(
            closing(await connect(self._url, prefix=self._prefix, tenant=f"bench-{uuid4().hex[:12]}"))
        )
        self._stack, self._sessions = stack, [client.session(f"s{i}") for i in range(number)]

    async def _end(self) -> None:
        with contextlib.suppress(TurnkeepError):
            await asyncio.gather(*(session.close(timeout_s=CLOSE_TIMEOUT_S) for session in self._sessions))
        self._sessions = []
        await self._stack.aclose()

    async def _look(self) -> Metrics:
        metrics = (await self._sessions[0].info()).worker
        self.metrics = self.metrics or metrics
        return metrics
