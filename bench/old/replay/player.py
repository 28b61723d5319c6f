"""Plays recorded sessions at a worker, in their order and at their pace, under names of their own.

A request whose sender could have read the answer before it waits for that answer here too, and for the pause
that the sender made; one that was sent without waiting is sent without waiting. So a slower worker gets the
same conversation later, and not a heap of requests.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from bench.old.ask import error_class
from turnkeep_client.errors import RequestFailedError, TurnkeepError
from turnkeep_client.messages import Append, Close, Failed, Generate, Generated, Rewind
from turnkeep_client.session import build
from turnkeep_client.subjects import SessionKey

from .standing import Following
from .turns import Played, Times, first_difference, times

if TYPE_CHECKING:
    from collections.abc import Callable

    from turnkeep_client.calls import Pending
    from turnkeep_client.client import Client
    from turnkeep_client.log import Entry
    from turnkeep_client.messages import Message, Request, Result

    from .record import Record, Recorded, Step
    from .turns import Standing

#: Names that begin so are replays: they are not taken for recorded sessions.
PREFIX: Final = "replay-"


@dataclass(frozen=True, slots=True)
class How:
    """How to play: `pace` 2 is twice as fast as recorded, 0 as fast as the worker answers.

    `force`: an answer that differs is replaced by the recorded one before the session goes on.
    """

    pace: float
    force: bool
    turn_timeout_s: float


@dataclass(slots=True)
class _Sent:
    step: Step
    number: int
    sent_s: float
    late_s: float
    pending: Pending | None = None
    result: Result | None = None
    error: str | None = None
    forced: bool = False


class Player:
    """Plays a whole record. `played` and `messages` (the first of each class of error) grow as it goes."""

    def __init__(self, client: Client, how: How, run_id: str, on_played: Callable[[str], None]) -> None:
        self.played: list[Played] = []
        self.messages: dict[str, str] = {}
        self.models: set[str] = set()
        self._client = client
        self._how = how
        self._run_id = run_id
        self._on_played = on_played
        self._started_s = time.monotonic()

    async def play(self, record: Record) -> None:
        """Play every session; where there is no pace to keep, as many at once as were recorded."""
        self._started_s = time.monotonic()
        places = asyncio.Semaphore(record.num_at_once if self._how.pace == 0 else len(record.sessions))

        async def one(index: int, recorded: Recorded) -> None:
            async with places:
                await _Playing(
                    self, self._client, recorded, f"{PREFIX}{self._run_id}-{index}", self._how
                ).run()

        async with asyncio.TaskGroup() as group:
            for index, recorded in enumerate(record.sessions):
                group.create_task(one(index, recorded))

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first session could begin."""
        return time.monotonic() - self._started_s

    def answered(self, what: str) -> None:
        """Count a request that has its answer."""
        self._on_played(what)

    def fault(self, fault: TurnkeepError) -> str:
        """Note a fault and return its class."""
        name = error_class(fault)
        self.messages.setdefault(name, str(fault))
        return name


class _Playing:
    """One session while it is played."""

    def __init__(self, player: Player, client: Client, recorded: Recorded, name: str, how: How) -> None:
        self._player = player
        self._client = client
        self._recorded = recorded
        self._key = SessionKey(client.tenant, name)
        self._how = how
        self._sent: list[_Sent] = []
        self._position = 0
        self._chat = False

    async def run(self) -> None:
        try:
            await self._run()
        finally:
            # What a session that was cut short has is worth keeping; the log's times are not known.
            self._keep([])

    async def _run(self) -> None:
        waiting: list[_Sent] = []
        done_s = 0.0
        for number, step in enumerate(self._recorded.steps, 1):
            if step.waits or self._how.force:
                for sent in waiting:
                    await self._finish(sent)
                waiting, done_s = [], self._player.elapsed_s
            due_s = self._due(number - 1, step, done_s)
            await asyncio.sleep(max(0.0, due_s - self._player.elapsed_s))
            now_s = self._player.elapsed_s
            sent = _Sent(step, number, now_s, max(0.0, now_s - due_s))
            self._sent.append(sent)
            await self._send(sent)
            waiting.append(sent)
        for sent in waiting:
            await self._finish(sent)
        if not isinstance(self._recorded.steps[-1].request, Close):
            await self._quietly(build(Close))
        entries = []
        try:
            entries = await self._client.log(self._key.session)
        except TurnkeepError as fault:
            self._player.fault(fault)
        self._keep(entries)

    def _due(self, index: int, step: Step, done_s: float) -> float:
        if self._how.pace == 0:
            return 0.0
        if index == 0:
            return step.asked_s / self._how.pace
        before = self._recorded.steps[index - 1]
        if step.waits:
            return done_s + (step.asked_s - before.answered_s) / self._how.pace
        return self._sent[-1].sent_s + (step.asked_s - before.asked_s) / self._how.pace

    async def _send(self, sent: _Sent) -> None:
        try:
            sent.pending = await self._client.submit(
                self._key, sent.step.request, timeout_s=self._how.turn_timeout_s
            )
        except TurnkeepError as fault:
            sent.error = self._player.fault(fault)

    async def _finish(self, sent: _Sent) -> None:
        """Wait for a request's answer; where it differs and that is wanted, put the recorded one there."""
        if sent.pending is not None and sent.result is None:
            try:
                result = await sent.pending
            except TurnkeepError as fault:
                sent.error = self._player.fault(fault)
            else:
                if isinstance(result, Failed):
                    refused = RequestFailedError(result.code, result.message, retryable=result.retryable)
                    sent.error = self._player.fault(refused)
                else:
                    sent.result = result
        before = self._position
        if sent.result is not None:
            self._position = sent.result.position or 0
            if self._how.force and _differs(sent):
                await self._force(sent, before)
        request = sent.step.request
        if isinstance(request, Append | Generate) and request.num_inputs:
            self._chat = request.messages is not None
        self._player.answered(f"{self._recorded.name}, request {sent.number}: {sent.error or 'answered'}")

    async def _force(self, sent: _Sent, before: int) -> None:
        """Make the session what it was: rewind the turn, add its input and the recorded answer.

        In a conversation the answer is added as the assistant's message, elsewhere token by token.
        """
        request, recorded = sent.step.request, sent.step.result
        if not isinstance(request, Generate) or not isinstance(recorded, Generated):
            return
        chat = request.messages is not None or (self._chat and not request.num_inputs)
        additions: list[Request] = []
        if chat and not request.raw:
            answer: dict[str, str] = {"role": "assistant", "content": recorded.text}
            said: list[Message | dict[str, str]] = [*(request.messages or ()), answer]
            additions.append(build(Append, messages=[msgspec.to_builtins(one) for one in said]))
        else:
            if request.num_inputs:
                given = {"messages": request.messages, "text": request.text, "tokens": request.tokens}
                additions.append(build(Append, **{k: msgspec.to_builtins(v) for k, v in given.items()}))
            additions.append(build(Append, tokens=recorded.tokens))
        sent.forced = True
        for one in (build(Rewind, position=before), *additions):
            await self._quietly(one)

    async def _quietly(self, request: Request) -> None:
        """Send what the record does not have; a fault of it is noted."""
        try:
            result = await (await self._client.submit(self._key, request, timeout_s=self._how.turn_timeout_s))
        except TurnkeepError as fault:
            self._player.fault(fault)
            return
        if isinstance(result, Failed):
            self._player.fault(RequestFailedError(result.code, result.message, retryable=result.retryable))
        elif result.position is not None:
            self._position = result.position

    def _keep(self, entries: list[Entry]) -> None:
        """Hold what was answered against the record; once, with the log's times where they are known."""
        stored = {entry.seq: entry for entry in entries if entry.kind == "in"}
        answers: dict[int, Entry] = {}
        for entry in entries:
            if entry.kind == "out":
                seq = msgspec.json.decode(entry.body)["seq"]
                answers.setdefault(seq, entry)
                if entry.model:
                    self._player.models.add(entry.model)
        sent, self._sent = self._sent, []
        standing = Following(force=self._how.force)
        for one in sent:
            if one.result is None and one.error is None:
                continue  # the run ended before its answer came
            seq = one.pending.seq if one.pending is not None else None
            asked, answered = (stored.get(seq), answers.get(seq)) if seq else (None, None)
            turnaround_s = (answered.stored - asked.stored).total_seconds() if asked and answered else None
            history = answered.history if answered else None
            self._player.played.append(
                _played(self._recorded.name, one, turnaround_s, *standing.take(one.step, one.result, history))
            )


def _differs(sent: _Sent) -> bool:
    result, recorded = sent.result, sent.step.result
    return (
        isinstance(result, Generated)
        and isinstance(recorded, Generated)
        and first_difference(recorded.tokens, result.tokens) is not None
    )


def _played(
    session: str, sent: _Sent, turnaround_s: float | None, standing: Standing, index: int | None
) -> Played:
    step = sent.step
    replayed: Times | None = None if sent.result is None else times(sent.result, turnaround_s)
    return Played(
        session=session,
        number=sent.number,
        kind=str(step.request.__struct_config__.tag),
        sampled=isinstance(step.request, Generate) and step.request.temperature > 0,
        sent_s=sent.sent_s,
        late_s=sent.late_s,
        recorded=times(step.result, step.answered_s - step.asked_s),
        replayed=replayed,
        standing=standing,
        first_difference=index,
        forced=sent.forced,
        error=sent.error,
    )
