"""Leads sessions through what can happen to them, on a worker of the bench's own, and times the next turn.

Every session of one length gets the same tokens, each under a tenant of its own: across tenants nothing is
shared, so that none finds what another one has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from bench.baseline.messages import Load, Loaded
from bench.faults import BenchError
from bench.old.ask import ask
from bench.old.run import closing
from turnkeep_client.client import connect
from turnkeep_client.errors import TurnkeepError

from .files import Files, leave_memory
from .turns import COLD, KILL, LASTING, RESTARTED, RESTORED, SPILLED, WARM, Limit, Measured

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from bench.baseline.process import Baseline
    from bench.local import LocalWorker
    from bench.old.ask import Asked
    from turnkeep_client.client import Client
    from turnkeep_client.messages import Metrics
    from turnkeep_client.session import Session

SETTLE_TIMEOUT_S: Final = 120.0
SETTLE_PAUSE_S: Final = 0.02
CLOSE_TIMEOUT_S: Final = 10.0

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Event:
    """What has happened to a session: on which connection it goes on, and how long that took."""

    client: Client
    resident: bool | None = None
    restored_bytes: int = 0
    began_s: float | None = None
    down_s: float | None = None
    start_s: float | None = None


class Lives:
    """The sessions of all lengths and kinds. `options` are what the worker is started with again."""

    def __init__(
        self,
        worker: LocalWorker,
        baseline: Baseline,
        *,
        options: tuple[str, ...],
        max_context: int,
        max_tokens: int,
        timeout_s: float,
        from_disk: bool,
    ) -> None:
        self.metrics: Metrics | None = None
        self._worker = worker
        self._baseline = baseline
        self._options = options
        self._max_context = max_context
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._from_disk = from_disk
        self._run = uuid4().hex[:8]
        self._files = Files(worker.data_dir)
        self._histories: dict[int, Tokens] = {}  # of the warm sessions
        self._contexts: dict[int, Tokens] = {}  # what their last turn was an answer to

    async def begin(self, length: int, tokens: Tokens) -> None:
        """Prefill a session of every lasting kind."""
        self._histories[length] = tokens
        for kind in LASTING:
            async with self._connected(self._tenant(kind)) as client:
                session = client.session(_name(length))
                await session.append(tokens=tokens, timeout_s=self._timeout_s)
                await self._settle(session)
                self._files.claim((kind, length))

    async def turn(
        self, number: int, length: int, kind: str, lead: Tokens, tokens: Tokens, *, limit_first: bool
    ) -> Measured:
        """Give the session a turn, let happen what the kind says, and measure the next turn.

        A cold session gets at once what the warm one has had; measure that one first. Raises
        `TurnkeepError`, `BenchError`.
        """
        if kind == COLD:
            return await self._cold(number, length, tokens)
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(self._connected(self._tenant(kind)))
            led = await self._ask(client.session(_name(length)), lead)
            event = await self._happen(kind, length, client, stack)
            session = event.client.session(_name(length))
            reads = kind in RESTORED
            limit = await self._limit((kind, length)) if reads and limit_first else None
            if self._from_disk and reads:
                with self._files.held((kind, length)) as files:
                    leave_memory(files)
            asked = await self._ask(session, tokens)
            metrics = await self._settle(session)
            self._files.claim((kind, length))
            if reads and not limit_first:
                limit = await self._limit((kind, length))
            if kind == WARM:
                self._contexts[length] = (*self._histories[length], *lead, *_answer(led), *tokens)
                self._histories[length] = (*self._contexts[length], *_answer(asked))
            restored = metrics.snapshots.restored_bytes - event.restored_bytes
            return self._measured(number, length, kind, tokens, asked, restored, event, limit)

    async def _happen(
        self, kind: str, length: int, client: Client, stack: contextlib.AsyncExitStack
    ) -> _Event:
        """Let happen what the kind says; afterwards the worker is ready, and idle but for a kill."""
        if kind in RESTARTED:
            return await self._restarted(kind, length, stack)
        session = client.session(_name(length))
        await self._settle(session)
        self._files.claim((kind, length))
        if kind == SPILLED:
            await self._push_out()
        info = await session.info()
        return _Event(client, info.resident, info.worker.snapshots.restored_bytes)

    async def _restarted(self, kind: str, length: int, stack: contextlib.AsyncExitStack) -> _Event:
        began_s = time.monotonic()
        if kind == KILL:
            self._worker.kill()
        else:
            self._worker.stop()
        down_s = time.monotonic() - began_s
        self._worker.start(*self._options)
        client = await stack.enter_async_context(closing(await self._worker.ready(self._tenant(kind))))
        start_s = time.monotonic() - began_s - down_s
        self._files.claim((kind, length))
        return _Event(client, began_s=began_s, down_s=down_s, start_s=start_s)

    async def _push_out(self) -> None:
        """Send a prompt as long as the memory has room for: all others have to leave it. Then cancel."""
        async with self._connected(f"push-{uuid4().hex[:12]}") as client:
            session = client.session("push")
            await session.append(tokens=(0,), timeout_s=self._timeout_s)
            generation = session.generate(
                tokens=(0,) * (self._max_context - 2), max_tokens=1, timeout_s=self._timeout_s
            )
            over = asyncio.ensure_future(generation)
            while not over.done() and (await session.info()).state != "running":  # noqa: ASYNC110 - over the wire
                await asyncio.sleep(SETTLE_PAUSE_S)
            with contextlib.suppress(TurnkeepError):  # it was over already
                await generation.cancel()
            await over
            await self._settle(session)
            self._files.claim("push")
            await session.close(timeout_s=CLOSE_TIMEOUT_S)

    async def _cold(self, number: int, length: int, tokens: Tokens) -> Measured:
        """Send all that the warm session's last turn was an answer to, under a tenant that is new."""
        async with self._connected(f"cold-{uuid4().hex[:12]}") as client:
            session = client.session(_name(length))
            asked = await self._ask(session, self._contexts[length])
            metrics = await self._settle(session)
            self._files.claim(COLD)
            await session.close(timeout_s=CLOSE_TIMEOUT_S)
            event = _Event(client, None, metrics.snapshots.restored_bytes)
            return self._measured(number, length, COLD, tokens, asked, 0, event, None)

    async def _ask(self, session: Session, tokens: Tokens) -> Asked:
        asked = await ask(session, timeout_s=self._timeout_s, tokens=tokens, max_tokens=self._max_tokens)
        if asked.fault is not None:
            raise asked.fault
        return asked

    async def _limit(self, owner: tuple[str, int]) -> Limit:
        with self._files.held(owner) as files:
            if self._from_disk:
                leave_memory(files)
            loaded = await self._baseline.ask(Load(tuple(map(str, files))), Loaded)
        return Limit(size_bytes=loaded.size_bytes, seconds=loaded.seconds)

    async def _settle(self, session: Session) -> Metrics:
        """Wait until all snapshots are on disk. Raises `BenchError`."""
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                metrics = (await session.info()).worker
                while metrics.snapshots.in_flight:
                    await asyncio.sleep(SETTLE_PAUSE_S)
                    metrics = (await session.info()).worker
        except TimeoutError:
            raise BenchError(f"the worker still writes snapshots after {SETTLE_TIMEOUT_S:g} s") from None
        self.metrics = self.metrics or metrics
        return metrics

    @contextlib.asynccontextmanager
    async def _connected(self, tenant: str) -> AsyncGenerator[Client]:
        async with closing(await connect(self._worker.url, tenant=tenant)) as client:
            yield client

    def _tenant(self, kind: str) -> str:
        return f"bench-{kind.replace(' ', '')}-{self._run}"

    def _measured(
        self,
        number: int,
        length: int,
        kind: str,
        tokens: Tokens,
        asked: Asked,
        restored_bytes: int,
        event: _Event,
        limit: Limit | None,
    ) -> Measured:
        if asked.result is None:
            raise AssertionError("a fault was raised")
        usage = asked.result.usage
        felt_s = None if event.began_s is None else asked.sent_s + asked.first_chunk_s - event.began_s
        return Measured(
            round=number,
            length=length,
            kind=kind,
            prompt_tokens=usage.prompt_tokens,
            own_tokens=len(tokens),
            cached_tokens=usage.cached_tokens,
            prefilled_tokens=usage.prefilled_tokens,
            first_s=asked.first_chunk_s,
            answer=asked.result.tokens,
            restored_bytes=restored_bytes,
            resident=event.resident,
            felt_s=felt_s,
            down_s=event.down_s,
            start_s=event.start_s,
            limit=limit,
        )


def _name(length: int) -> str:
    return f"s{length}"


def _answer(asked: Asked) -> Tokens:
    return asked.result.tokens if asked.result is not None else ()
