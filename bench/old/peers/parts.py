"""The three parts: chats turn by turn, many streams at once, and the turn after a restart.

The sides take turns with every single measurement, each going first as often as the others, and all but one
are idle at any time. What is measured is kept in `Measured`, so that a run that is cut short has it.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from .turns import ChatTurn, Restart, Round

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.old.report import Setting

    from .script import Script
    from .sides import Chat, Contender
    from .turns import Ending, Turn

PARTS: Final = ("chat", "concurrent", "restart")
#: A restarted side is asked little, so that a conversation keeps about the length that it is named after.
RESTART_TURN_TOKENS: Final = 30
RESTART_ANSWER_TOKENS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much of everything."""

    parts: tuple[str, ...]
    chats: int
    turns: int
    turn_tokens: int
    max_tokens: int
    turn_timeout_s: float
    concurrency: tuple[int, ...]
    rounds: int
    lengths: tuple[int, ...]
    restarts: int
    endings: tuple[Ending, ...]

    def settings(self) -> dict[str, Setting]:
        """Return the settings as a report holds them."""
        return {
            name: ", ".join(map(str, value)) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    def num_steps(self, num_sides: int, num_restartable: int) -> int:
        """Count the measurements, each one a step of the progress bar."""
        steps = {
            "chat": self.chats * self.turns * num_sides,
            "concurrent": len(self.concurrency) * self.rounds * num_sides,
            "restart": len(self.lengths) * self.restarts * (1 + len(self.endings)) * num_restartable,
        }
        return sum(steps[part] for part in self.parts)


@dataclass(slots=True)
class Measured:
    """What was measured so far."""

    turns: list[ChatTurn] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)


class Parts:
    """Runs the parts of a plan. `on_step` is called after every measurement with what it was."""

    def __init__(
        self, plan: Plan, sides: Sequence[Contender], script: Script, on_step: Callable[[str], None]
    ) -> None:
        self.measured = Measured()
        self._plan = plan
        self._sides = sides
        self._script = script
        self._on_step = on_step
        self._num_rotations = 0

    async def run(self) -> None:
        """Run every part. Raises `BenchError` where a process of the bench's own has died."""
        for part in self._plan.parts:
            match part:
                case "chat":
                    for number in range(self._plan.chats):
                        await self._chat(number)
                case "concurrent":
                    for streams in self._plan.concurrency:
                        await self._concurrent(streams)
                case _:
                    for number in range(self._plan.restarts):
                        for length in self._plan.lengths:
                            await self._restart(length, number)

    async def _chat(self, number: int) -> None:
        talk, chats = self._script.conversation(), {side.name: side.chat() for side in self._sides}
        for turn in range(1, self._plan.turns + 1):
            text = talk.say(self._plan.turn_tokens)
            for side in self._in_turn(self._sides):
                done = await self._ask(side, chats[side.name], text, self._plan.max_tokens)
                self.measured.turns.append(ChatTurn(side=side.name, chat=number, number=turn, turn=done))
                self._step(side, f"chat {number + 1}, turn {turn}, {side.name}: {_told(done)}")
        for chat in chats.values():
            await chat.close()

    async def _concurrent(self, streams: int) -> None:
        talks = [self._script.conversation() for _ in range(streams)]
        chats = {side.name: [side.chat() for _ in talks] for side in self._sides}
        for number in range(self._plan.rounds):
            texts = [talk.say(self._plan.turn_tokens) for talk in talks]
            for side in self._in_turn(self._sides):
                done = await self._round(side, chats[side.name], texts, number)
                self.measured.rounds.append(done)
                rate = done.tokens_per_s
                told = "failed" if rate is None else f"{rate:.1f} tokens a second"
                self._step(side, f"{streams} at once, round {number + 1}, {side.name}: {told}")
        for some in chats.values():
            for chat in some:
                await chat.close()

    async def _round(
        self, side: Contender, chats: Sequence[Chat], texts: Sequence[str], number: int
    ) -> Round:
        plan = self._plan
        started_s = time.monotonic()
        turns = await asyncio.gather(
            *(
                chat.ask(text, max_tokens=plan.max_tokens, timeout_s=plan.turn_timeout_s)
                for chat, text in zip(chats, texts, strict=True)
            )
        )
        seconds = time.monotonic() - started_s
        for chat in chats:
            await chat.settle()
        return Round(side=side.name, streams=len(chats), number=number, seconds=seconds, turns=tuple(turns))

    async def _restart(self, length: int, number: int) -> None:
        sides = [side for side in self._sides if side.restartable]
        talk, chats = self._script.conversation(), {side.name: side.chat() for side in sides}
        answer_tokens = min(RESTART_ANSWER_TOKENS, self._plan.max_tokens)
        for _ in range(math.ceil(length / self._plan.turn_tokens)):
            text = talk.say(min(self._plan.turn_tokens, length))
            for side in list(sides):
                done = await self._ask(side, chats[side.name], text, answer_tokens)
                if done.error is not None:  # its conversation would be shorter than the others'
                    self._keep(side, length, number, "warm", None, done)
                    sides.remove(side)
        for ending in self._endings(number):
            text = talk.say(RESTART_TURN_TOKENS)
            for side in self._in_turn(sides):
                ready_s = None if ending == "warm" else await side.come_back(ending)
                done = await self._ask(side, chats[side.name], text, answer_tokens)
                self._keep(side, length, number, ending, ready_s, done)
        for chat in chats.values():
            await chat.close()

    def _endings(self, number: int) -> tuple[Ending, ...]:
        endings = self._plan.endings
        return ("warm", *(endings if number % 2 == 0 else endings[::-1]))

    def _keep(
        self, side: Contender, length: int, number: int, ending: Ending, ready_s: float | None, turn: Turn
    ) -> None:
        self.measured.restarts.append(
            Restart(side=side.name, length=length, number=number, ending=ending, ready_s=ready_s, turn=turn)
        )
        self._step(side, f"{length} tokens, {ending}, {side.name}: {_told(turn)}")

    async def _ask(self, side: Contender, chat: Chat, text: str, max_tokens: int) -> Turn:
        """Time one turn, with an eye on the processes that should be idle, and let the side come to rest."""
        others = [other for other in self._sides if other is not side]
        before_s = sum(other.cpu_s() for other in others)
        turn = await chat.ask(text, max_tokens=max_tokens, timeout_s=self._plan.turn_timeout_s)
        used_s = sum(other.cpu_s() for other in others) - before_s
        await chat.settle()
        busy = max(0.0, used_s) / turn.latency_s if any(other.pid for other in others) else None
        return msgspec.structs.replace(turn, others_busy=busy)

    def _in_turn(self, sides: Sequence[Contender]) -> list[Contender]:
        first = self._num_rotations % max(1, len(sides))
        self._num_rotations += 1
        return [*sides[first:], *sides[:first]]

    def _step(self, side: Contender, what: str) -> None:
        self._on_step(what)
        side.check()


def _told(turn: Turn) -> str:
    return turn.error or f"{turn.latency_s:.2f} s"
