"""Puts load on a worker, in closed loops and open ones; sessions are opened before and closed after."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Final

from bench.script import scripts
from bench.together import together

from . import arrivals
from .talk import Talk
from .turns import Span

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from bench.corpus import Corpus
    from bench.watch import Watch
    from turnkeep_client.client import Client

    from .plan import Level, Plan
    from .turns import Turn

#: Sessions that are opened at a time before an open loop, and closed after any level.
AT_ONCE: Final = 8
ABANDON_S: Final = 3.0
#: After a turn that failed: a broken worker must not be asked as fast as it refuses.
FAULT_PAUSE_S: Final = 0.2


class Driver:
    """Runs one level."""

    def __init__(
        self,
        client: Client,
        plan: Plan,
        corpus: Corpus,
        watch: Watch,
        *,
        run: str,
        on_turn: Callable[[Turn, str | None], None],
    ) -> None:
        """`run` ends the names of all sessions; `on_turn` also gets the message of a fault."""
        self._client = client
        self._plan = plan
        self._corpus = corpus
        self._watch = watch
        self._run = run
        self._on_turn = on_turn

    async def level(self, number: int, level: Level) -> Span:
        """Run a level to its end. Its sessions are closed on the way out."""
        dues = self.dues(number, level)
        talks = self._talks(number, level, dues)
        try:
            await self._each(talks, self._open, int(level.amount) if level.kind == "closed" else AT_ONCE)
            before_s, started_s = self._watch.elapsed_s, monotonic()
            if dues is None:
                busy_s = await self._closed(talks, int(level.amount), started_s)
            else:
                busy_s = await self._open_loop(talks, dues, started_s)
            span = Span(started_s=before_s, busy_s=busy_s, ended_s=self._watch.elapsed_s)
        except BaseException:
            # Who interrupts a run, or whose worker is gone, does not wait for sessions one by one.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABANDON_S):
                    await self._each(talks, Talk.close, len(talks))
            raise
        await self._each(talks, Talk.close, AT_ONCE)
        return span

    def dues(self, number: int, level: Level) -> list[list[float]] | None:
        """Return when each session's turns are due; None for a closed loop."""
        plan = self._plan
        seed = plan.seed + number
        match level.kind:
            case "closed":
                return None
            case "poisson":
                return arrivals.poisson(level.amount, plan.duration_s, plan.sessions, seed)
            case "recorded":
                return arrivals.recorded(self._corpus, level.amount, plan.duration_s, plan.sessions, seed)

    def _talks(self, number: int, level: Level, dues: Sequence[Sequence[float]] | None) -> list[Talk]:
        plan = self._plan
        # Recorded times belong to what was said at them, from the first word on.
        begins = [0 if level.kind == "recorded" else plan.history_of(i) for i in range(plan.sessions)]
        counts = [plan.turns] * plan.sessions if dues is None else [len(one) for one in dues]
        made = scripts(self._corpus, zip(begins, counts, strict=True))
        return [
            Talk(
                self._client,
                script,
                f"{i}-{number}-{self._run}",
                level=number,
                session=i,
                timeout_s=plan.turn_timeout_s,
            )
            for i, script in enumerate(made)
        ]

    async def _open(self, talk: Talk) -> None:
        turn = await talk.open()
        if turn is not None:
            await self._tell(talk, turn)

    async def _closed(self, talks: Sequence[Talk], concurrency: int, started_s: float) -> float:
        """Return for how long there was work for everyone."""
        waiting = deque(talks)
        out_of_work_s: list[float] = []

        async def work() -> None:
            while waiting:
                talk = waiting.popleft()
                while talk.num_left:
                    await self._tell(talk, await talk.turn(self._plan.max_tokens, started_s))
            out_of_work_s.append(monotonic() - started_s)

        await together(*(work() for _ in range(concurrency)))
        return out_of_work_s[0]

    async def _open_loop(
        self, talks: Sequence[Talk], dues: Sequence[Sequence[float]], started_s: float
    ) -> float:
        """Send each session's turns when they are due, or as soon as the one before is answered.

        Returns for how long more of them were due.
        """

        async def work(talk: Talk, times: Sequence[float]) -> None:
            for due_s in times:
                await asyncio.sleep(started_s + due_s - monotonic())
                await self._tell(talk, await talk.turn(self._plan.max_tokens, started_s, due_s))

        await together(*(work(talk, times) for talk, times in zip(talks, dues, strict=True)))
        return min(self._plan.duration_s, monotonic() - started_s)

    async def _tell(self, talk: Talk, turn: Turn) -> None:
        self._on_turn(turn, None if turn.error is None else str(talk.fault))
        if turn.error is not None:
            await asyncio.sleep(FAULT_PAUSE_S)

    async def _each(
        self, talks: Sequence[Talk], act: Callable[[Talk], Awaitable[None]], at_once: int
    ) -> None:
        waiting = deque(talks)

        async def work() -> None:
            while waiting:
                await act(waiting.popleft())

        await together(*(work() for _ in range(at_once)))
