"""A scripted conversation with one session, measured turn by turn.

Owns the session and its clock. What is made of the turns is in `summary`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from bench.old.ask import ask
from turnkeep_client.errors import TurnkeepError

from .turns import Memory, Rewind, Turn, answer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from turnkeep_client.client import Client
    from turnkeep_client.messages import Metrics

    from .turns import Answer

#: What a worker says to a session that has no room left.
FULL: Final = frozenset({"context_exceeded", "memory_exceeded"})
CLOSE_TIMEOUT_S: Final = 2.0
REWIND_TIMEOUT_S: Final = 60.0
#: A pause after a turn that failed at once, so that a broken worker is not asked as fast as it refuses.
FAULT_PAUSE_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Plan:
    """How long a run lasts, and what its turns are. Without `turns` and `duration_s` it never ends."""

    turns: int | None
    duration_s: float | None
    every_s: float
    max_tokens: int
    turn_timeout_s: float

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """Return the settings as a report holds them."""
        return asdict(self)


class Conversation:
    """One session under measurement. `turns` and `rewinds` grow as it goes on."""

    def __init__(
        self, client: Client, plan: Plan, texts: Iterator[str], on_turn: Callable[[Turn], None]
    ) -> None:
        self.turns: list[Turn] = []
        self.rewinds: list[Rewind] = []
        self.messages: dict[str, str] = {}
        self.worker: Metrics | None = None
        self._session = client.session(f"bench-{uuid4().hex[:12]}")
        self._plan = plan
        self._texts = texts
        self._on_turn = on_turn
        self._started_s = time.monotonic()
        self._ended_s: float | None = None
        self._position: int | None = 0
        self._full = False

    @property
    def elapsed_s(self) -> float:
        """Seconds since the conversation began, or that it lasted."""
        return (self._ended_s or time.monotonic()) - self._started_s

    async def run(self) -> None:
        """Hold it to its end. A turn that fails is counted.

        The session is closed on the way out, whatever ends the run.
        """
        self._started_s = time.monotonic()
        try:
            while self._wants_more():
                due_s = self.elapsed_s + self._plan.every_s
                turn = await self._turn(len(self.turns) + 1, next(self._texts))
                self.turns.append(turn)
                self._on_turn(turn)
                if turn.error is not None:
                    due_s = max(due_s, self.elapsed_s + FAULT_PAUSE_S)
                if self._wants_more():
                    await asyncio.sleep(self._until(due_s))
        finally:
            self._ended_s = time.monotonic()
            with contextlib.suppress(TurnkeepError):
                await self._session.close(timeout_s=CLOSE_TIMEOUT_S)

    def _wants_more(self) -> bool:
        plan = self._plan
        if plan.turns is not None and len(self.turns) >= plan.turns:
            return False
        return plan.duration_s is None or self.elapsed_s < plan.duration_s

    def _until(self, due_s: float) -> float:
        if self._plan.duration_s is not None:
            due_s = min(due_s, self._plan.duration_s)
        return max(0.0, due_s - self.elapsed_s)

    async def _turn(self, number: int, text: str) -> Turn:
        """Send one turn; where the session is full, rewind it and send the turn again."""
        if self._full:
            await self._rewind(number, "the answer before was cut by the end of the context")
        turn, code = await self._try(number, text)
        if code in FULL and self._position:
            await self._rewind(number, code)
            turn, _ = await self._try(number, text)
        return turn

    async def _try(self, number: int, text: str) -> tuple[Turn, str | None]:
        before = self._position
        sent_s = self.elapsed_s
        asked = await ask(
            self._session,
            messages=[{"role": "user", "content": text}],
            max_tokens=self._plan.max_tokens,
            timeout_s=self._plan.turn_timeout_s,
        )
        answer: Answer | None = None
        error = asked.error
        if asked.result is not None:
            answer = answer_of(asked.result, asked.first_chunk_s, before)
            self._full = (
                asked.result.finish_reason == "length" and answer.completion_tokens < self._plan.max_tokens
            )
        elif error is not None:
            self.messages.setdefault(error, str(asked.fault))
        memory = await self._look(answer)
        turn = Turn(
            turn=number,
            started_s=sent_s,
            latency_s=asked.latency_s,
            answer=answer,
            error=error,
            memory=memory,
        )
        return turn, error

    async def _look(self, answer: Answer | None) -> Memory | None:
        """Ask the worker that holds the session for its memory, outside of the time that is measured."""
        try:
            info = await self._session.info()
        except TurnkeepError:
            # Without an answer the turn may still be carried out: where the session is, nobody knows.
            self._position = answer.position if answer is not None else None
            return None
        self._position = info.position
        metrics = info.worker
        self.worker = self.worker or metrics
        return Memory(
            at_s=self.elapsed_s,
            worker=metrics.worker,
            uptime_s=metrics.uptime_s,
            process_bytes=metrics.process_bytes,
            resident_kv_bytes=metrics.resident_kv_bytes,
            written_bytes=metrics.snapshots.written_bytes,
        )

    async def _rewind(self, number: int, reason: str) -> None:
        self._full = False
        with contextlib.suppress(TurnkeepError):  # the turn that follows will tell
            await self._session.rewind(0, timeout_s=REWIND_TIMEOUT_S)
            self.rewinds.append(Rewind(turn=number, position=self._position or 0, reason=reason))
            self._position = 0
