"""The sides that are compared, each with chats to be held and, where the bench runs it, a process to end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import psutil

from bench import blas
from bench.faults import BenchError
from bench.old.ask import ask
from turnkeep_client.errors import TurnkeepError

from .turns import Side, Turn

if TYPE_CHECKING:
    from bench.local import LocalWorker
    from turnkeep_client.client import Client
    from turnkeep_client.messages import Metrics

    from .openai import Message, Server
    from .server import MlxServer
    from .turns import Ending

TURNKEEP: Final = "turnkeep"
WARM_TIMEOUT_S: Final = 180.0
CLOSE_TIMEOUT_S: Final = 5.0
#: What is written after a turn must not slow the next side's turn down; it is waited for at most so long.
SETTLE_TIMEOUT_S: Final = 20.0


class Chat(ABC):
    """One conversation with one side."""

    @abstractmethod
    async def ask(self, text: str, *, max_tokens: int, timeout_s: float) -> Turn:
        """Say something and time the answer. An error is an outcome, and leaves the chat as it was."""

    async def settle(self) -> None:  # noqa: B027  # most have nothing to wait for
        """Wait until the side has nothing left to do for this chat."""

    async def close(self) -> None:  # noqa: B027  # a server that keeps no chat has nothing to end
        """End it."""


class Contender(ABC):
    """One side while the bench runs. `messages` has the first message of every class of error."""

    name: str
    messages: dict[str, str]

    @abstractmethod
    def chat(self) -> Chat:
        """Begin a conversation."""

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The process of its model, where the bench runs it."""

    @property
    def restartable(self) -> bool:
        """Say whether the bench may end and start it."""
        return self.pid is not None

    @abstractmethod
    async def restart(self, ending: Ending) -> None:
        """End the process and start it again. Raises `BenchError` where it does not come back."""

    @abstractmethod
    async def describe(self) -> Side:
        """Say what it is."""

    @abstractmethod
    def check(self) -> None:
        """Raise `BenchError` where a process of the bench's has ended by itself."""

    async def warm_up(self) -> None:
        """Hold a short chat, so that the model is loaded. Raises `BenchError` where there is no answer."""
        chat = self.chat()
        turn = await chat.ask("Hello!", max_tokens=2, timeout_s=WARM_TIMEOUT_S)
        await chat.close()
        self.check()
        if turn.error is not None:
            raise BenchError(f"{self.name} does not answer: {turn.error}: {self.messages[turn.error]}")

    async def come_back(self, ending: Ending) -> float:
        """Restart; returns the seconds until it has answered a short chat."""
        started_s = time.monotonic()
        await self.restart(ending)
        await self.warm_up()
        return time.monotonic() - started_s

    def cpu_s(self) -> float:
        """Return the CPU time that its processes have used so far; 0 where they are not the bench's."""
        total = 0.0
        with contextlib.suppress(psutil.Error):
            if self.pid is not None:
                process = psutil.Process(self.pid)
                for one in (process, *process.children(recursive=True)):
                    times = one.cpu_times()
                    total += times.user + times.system
        return total


class TurnkeepChat(Chat):
    """A session of a worker."""

    def __init__(self, client: Client, messages: dict[str, str]) -> None:
        self._session = client.session(f"bench-{uuid4().hex[:12]}")
        self._messages = messages
        self._begun = False

    async def ask(self, text: str, *, max_tokens: int, timeout_s: float) -> Turn:
        """Send one generate."""
        asked = await ask(
            self._session,
            messages=[{"role": "user", "content": text}],
            max_tokens=max_tokens,
            temperature=0.0,
            timeout_s=timeout_s,
        )
        result = asked.result
        if result is None:
            self._messages.setdefault(asked.error or "", str(asked.fault))
            return Turn(started_s=asked.sent_s, latency_s=asked.latency_s, error=asked.error)
        self._begun = True
        return Turn(
            started_s=asked.sent_s,
            latency_s=asked.latency_s,
            first_s=asked.first_text_s,
            tokens=result.usage.completion_tokens,
            context_tokens=result.usage.prompt_tokens,
            cached_tokens=result.usage.cached_tokens,
            text=result.text,
        )

    async def settle(self) -> None:
        """Wait until every snapshot is on the disk."""
        with contextlib.suppress(TurnkeepError, TimeoutError):
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                while self._begun and await self._num_unwritten():  # noqa: ASYNC110  # it tells nobody unasked
                    await asyncio.sleep(0.02)

    async def _num_unwritten(self) -> int:
        return (await self._session.info()).worker.snapshots.in_flight

    async def close(self) -> None:
        """End the session."""
        if self._begun:
            with contextlib.suppress(TurnkeepError):
                await self._session.close(timeout_s=CLOSE_TIMEOUT_S)


class Turnkeep(Contender):
    """A worker: the bench's own where `worker` is given."""

    name = TURNKEEP

    def __init__(self, client: Client, worker: LocalWorker | None = None) -> None:
        self.messages = {}
        self.metrics: Metrics | None = None
        self._client = client
        self._worker = worker

    @property
    def pid(self) -> int | None:
        """The worker's process."""
        return self._worker.pid if self._worker else None

    def chat(self) -> Chat:
        """Begin a session."""
        return TurnkeepChat(self._client, self.messages)

    def check(self) -> None:
        """Raise `BenchError` where the bench's worker has died."""
        if self._worker is not None and self._worker.exit_code is not None:
            raise BenchError(f"the bench's worker ended with exit code {self._worker.exit_code}")

    async def restart(self, ending: Ending) -> None:
        """End and start the worker; the connection comes back by itself."""
        if self._worker is None:
            raise BenchError("a worker that was running is not restarted")
        if ending == "kill":
            self._worker.kill()
        else:
            self._worker.stop()
        self._worker.start()
        await (await self._worker.ready(self._client.tenant)).close()

    async def describe(self) -> Side:
        """Look at the worker that answers."""
        session = self._client.session(f"bench-{uuid4().hex[:12]}")
        await session.open(timeout_s=WARM_TIMEOUT_S)
        self.metrics = metrics = (await session.info()).worker
        await session.close(timeout_s=CLOSE_TIMEOUT_S)
        return Side(
            name=self.name,
            software=f"turnkeep {metrics.version}",
            model=metrics.model,
            own_process=self._worker is not None,
            blas=blas.names(blas.mapped(self.pid)) if self.pid else None,
        )


class PeerChat(Chat):
    """A conversation with a server that keeps none: the whole of it goes along with every turn."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._messages: list[Message] = []

    async def ask(self, text: str, *, max_tokens: int, timeout_s: float) -> Turn:
        """Send the conversation so far, and `text`."""
        messages = [*self._messages, {"role": "user", "content": text}]
        turn = await self._server.complete(messages, max_tokens=max_tokens, timeout_s=timeout_s)
        if turn.error is None:
            self._messages = [*messages, {"role": "assistant", "content": turn.text}]
        return turn


class Peer(Contender):
    """An OpenAI-compatible server: one that was running, or the bench's own `process`."""

    def __init__(self, server: Server, software: str, process: MlxServer | None = None) -> None:
        self.name = server.address.name
        self.messages = server.messages
        self._server = server
        self._software = software
        self._process = process

    @property
    def pid(self) -> int | None:
        """Its process, where the bench runs it."""
        return self._process.pid if self._process else None

    def chat(self) -> Chat:
        """Begin a conversation."""
        return PeerChat(self._server)

    def check(self) -> None:
        """Raise `BenchError` where the bench's own server has died."""
        if self._process is not None:
            self._process.check()

    async def restart(self, ending: Ending) -> None:
        """End and start the server."""
        if self._process is None:
            raise BenchError(f"{self.name} is not the bench's to restart")
        if ending == "kill":
            self._process.kill()
        else:
            self._process.stop()
        self._process.start()
        await self._process.ready()

    async def describe(self) -> Side:
        """Say what is known of it."""
        return Side(
            name=self.name,
            software=self._software,
            model=await self._server.model(),
            own_process=self._process is not None,
            blas=blas.names(blas.mapped(self.pid)) if self.pid else None,
        )
