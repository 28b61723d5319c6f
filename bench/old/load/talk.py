"""One session under load: its opening and its turns, in their order."""

from __future__ import annotations

import contextlib
from time import monotonic
from typing import TYPE_CHECKING, Final

from bench.old.ask import ask
from bench.old.session.turns import answer_of
from turnkeep_client.errors import TurnkeepError

from .turns import Turn, gaps

if TYPE_CHECKING:
    from bench.script import Messages, Script
    from turnkeep_client.client import Client

CLOSE_TIMEOUT_S: Final = 5.0
#: An opening is there for its prompt; its answer is as short as templates allow.
OPENING_TOKENS: Final = 4


class Talk:
    """A session by a name of its own, and how far its script has come."""

    def __init__(
        self, client: Client, script: Script, name: str, *, level: int, session: int, timeout_s: float
    ) -> None:
        self.fault: TurnkeepError | None = None
        self._session = client.session(name)
        self._script = script
        self._name = name
        self._level = level
        self._number = session
        self._timeout_s = timeout_s
        self._said = 0
        self._position: int | None = 0

    @property
    def num_left(self) -> int:
        """Turns that its script still has."""
        return len(self._script.turns) - self._said

    async def open(self) -> Turn | None:
        """Say the history, if there is one."""
        if not self._script.has_opening:
            return None
        started_s = monotonic()
        return await self._turn(0, self._script.opening(self._name), OPENING_TOKENS, started_s, started_s)

    async def turn(self, max_tokens: int, started_s: float, due_s: float | None = None) -> Turn:
        """Say the next turn now. `due_s` counts from `started_s`; without it the turn is due now."""
        messages = self._script.turn(self._name, self._said)
        self._said += 1
        due = monotonic() if due_s is None else started_s + due_s
        return await self._turn(self._said, messages, max_tokens, started_s, due)

    async def close(self) -> None:
        """End the session, if it ever began."""
        if self._position != 0:
            with contextlib.suppress(TurnkeepError):
                await self._session.close(timeout_s=CLOSE_TIMEOUT_S)

    async def _turn(
        self, number: int, messages: Messages, max_tokens: int, started_s: float, due: float
    ) -> Turn:
        before, self._position = self._position, None
        asked = await ask(self._session, messages=messages, max_tokens=max_tokens, timeout_s=self._timeout_s)
        answer = joined = None
        if asked.result is not None:
            answer = answer_of(asked.result, asked.first_chunk_s, before)
            joined = asked.tokens == asked.result.tokens
            self._position = answer.position
        else:
            self.fault = asked.fault
        return Turn(
            level=self._level,
            session=self._number,
            turn=number,
            due_s=min(due, asked.sent_s) - started_s,
            sent_s=asked.sent_s - started_s,
            latency_s=asked.latency_s,
            gaps_s=tuple(later - earlier for earlier, later in gaps(asked.chunks_s)),
            answer=answer,
            joined=joined,
            error=asked.error,
        )
