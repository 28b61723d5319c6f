"""The load of `bench pressure`: sessions that many clients ask in turn, and what became of each request."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import msgspec

from bench.old.ask import error_class
from bench.together import beside, together
from turnkeep_client.errors import InvalidMessageError, TurnkeepError
from turnkeep_client.messages import (
    Append,
    Appended,
    Close,
    Failed,
    Generate,
    Generated,
    Request,
    Result,
    Rewind,
    Rewound,
    decode_result,
)

from .plan import Dice, kind_of
from .turns import Answers, Replayed, Sent

if TYPE_CHECKING:
    from collections.abc import Callable

    from turnkeep_client.client import Client

    from .plan import Plan, Wanted

#: After a request that failed for another reason than memory.
FAULT_PAUSE_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class _Done:
    """A request that changed its session: what to send to get there again, and the tokens it answered."""

    request: Request
    answer: tuple[int, ...] = ()


@dataclass(slots=True)
class _Member:
    """A session; `held` is its position, by its last result."""

    number: int
    name: str
    held: int = 0
    done: list[_Done] = field(default_factory=list)


class Load:
    """All sessions, and the requests that were sent; both grow as it goes on."""

    def __init__(self, client: Client, plan: Plan, clock: Callable[[], float]) -> None:
        """`clock` gives the seconds that a report counts in."""
        self.sent: list[Sent] = []
        self.messages: dict[str, str] = {}
        self._client = client
        self._plan = plan
        self._clock = clock
        self._run = uuid4().hex[:8]
        self._members: list[_Member] = []
        self._idle: list[_Member] = []

    async def run(self) -> None:
        """Send requests until the time is over, and wait for the answers to the last of them."""
        end_s = self._clock() + self._plan.duration_s
        await together(*(self._ask(number, end_s) for number in range(self._plan.clients)))

    async def answers(self) -> Answers:
        """Count in the log what every request got. Raises `NoWorkerError` where that cannot be read."""
        requests = unanswered = repeated = 0
        for member in self._members:
            results: Counter[int] = Counter()
            asked = []
            for entry in await self._client.log(member.name):
                if entry.kind == "in":
                    asked.append(entry.seq)
                else:
                    with contextlib.suppress(InvalidMessageError):
                        results[decode_result(entry.body).seq or 0] += 1
            requests += len(asked)
            unanswered += sum(results[seq] == 0 for seq in asked)
            repeated += sum(results[seq] > 1 for seq in asked)
        return Answers(requests=requests, unanswered=unanswered, repeated=repeated)

    async def alone(self, client: Client, on_session: Callable[[Replayed], None]) -> None:
        """Hold a sample of the sessions again, one after another, and compare their answers.

        `client` is another tenant's, which finds nothing of what was cached for the first.
        """
        answered = [member for member in self._members if any(done.answer for done in member.done)]
        step = max(1, len(answered) // self._plan.sample)
        for member in answered[::step][: self._plan.sample]:
            on_session(await self._again(client, member))

    async def _ask(self, client: int, end_s: float) -> None:
        dice = Dice(self._plan, client)
        while self._clock() < end_s:
            if dice.begins_anew(len(self._idle), self._plan.clients):
                member = _Member(len(self._members), f"s{len(self._members)}-{self._run}")
                self._members.append(member)
            else:
                member = self._idle.pop(dice.choose(len(self._idle)))
            if await self._send(member, dice.next(member.held)):
                self._idle.append(member)

    async def _send(self, member: _Member, wanted: Wanted) -> bool:
        """Send a request and note what became of it; False where the session is over for the bench."""
        request = _request(wanted)
        sent_s = self._clock()
        result: Result | None = None
        outcome = "ok"
        try:
            result = await self._result(member, request, wanted.cancel_after_s)
        except TurnkeepError as error:
            outcome = error_class(error)
            self.messages.setdefault(outcome, str(error))
        if isinstance(result, Failed):
            outcome = result.code
            self.messages.setdefault(outcome, result.message)
        if isinstance(request, Append | Generate):
            self._note(member, wanted, sent_s, outcome, result)
        if result is None or isinstance(request, Close):
            return False
        if isinstance(result, Failed):
            if not result.retryable and result.code != "memory_exceeded":
                await asyncio.sleep(FAULT_PAUSE_S)
            return True
        member.held = result.position
        again = _again(request, result)
        if again is not None:
            member.done.append(again)
        return True

    async def _result(self, member: _Member, request: Request, cancel_after_s: float | None) -> Result:
        session = self._client.session(member.name)
        pending = await self._client.submit(session.key, request, timeout_s=self._plan.turn_timeout_s)

        async def cancel(after_s: float) -> None:
            await asyncio.sleep(after_s)
            with contextlib.suppress(TurnkeepError):  # it was answered meanwhile
                await session.cancel(request.id)

        if cancel_after_s is None:
            return await pending
        async with beside(cancel(cancel_after_s)):
            return await pending

    def _note(
        self, member: _Member, wanted: Wanted, sent_s: float, outcome: str, result: Result | None
    ) -> None:
        size = wanted.holds(member.held)
        prompt = generated = expected = 0
        if isinstance(result, Generated) and result.usage.prompt_tokens:
            prompt, generated = result.usage.prompt_tokens, len(result.tokens)
            expected = member.held + len(wanted.tokens)
        elif isinstance(result, Appended):
            prompt, expected = result.position, member.held + len(wanted.tokens)
        self.sent.append(
            Sent(
                session=member.number,
                verb=wanted.verb,
                kind=kind_of(size, self._plan.room),
                at_s=sent_s,
                latency_s=self._clock() - sent_s,
                size=size,
                cancelled=wanted.cancel_after_s is not None,
                outcome=outcome,
                expected=expected,
                prompt=prompt,
                generated=generated,
            )
        )

    async def _again(self, client: Client, member: _Member) -> Replayed:
        name = f"alone-{member.name}"
        key, answers, tokens = client.session(name).key, 0, 0
        differs_at = None
        for done in member.done:
            fresh = msgspec.structs.replace(done.request, id=uuid4().hex)
            result = await (await client.submit(key, fresh, timeout_s=self._plan.turn_timeout_s))
            if isinstance(result, Generated) and isinstance(done.request, Generate):
                answers += 1
                tokens += len(done.answer)
                if result.tokens != done.answer:
                    differs_at = answers
                    break
            elif isinstance(result, Failed | Generated):
                self.messages.setdefault("alone", str(result)[:200])
                differs_at = answers
                break
        with contextlib.suppress(TurnkeepError):
            await client.session(name).close(timeout_s=self._plan.turn_timeout_s)
        return Replayed(session=member.number, answers=answers, tokens=tokens, differs_at=differs_at)


def _request(wanted: Wanted) -> Request:
    name = uuid4().hex
    match wanted.verb:
        case "append":
            return Append(id=name, tokens=wanted.tokens)
        case "generate":
            return Generate(id=name, tokens=wanted.tokens, max_tokens=wanted.max_tokens)
        case "rewind":
            return Rewind(id=name, position=wanted.position)
        case "close":
            return Close(id=name)


def _again(request: Request, result: Result) -> _Done | None:
    """Say how a session gets to where this result has brought it; None where it changed nothing.

    An answer that was cancelled is asked for again by its length.
    """
    if isinstance(request, Generate) and isinstance(result, Generated):
        if not result.tokens:
            return None
        if result.finish_reason == "cancelled":
            request = msgspec.structs.replace(request, max_tokens=len(result.tokens))
        return _Done(request, result.tokens)
    return _Done(request) if isinstance(result, Appended | Rewound) else None
