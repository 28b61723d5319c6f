"""The sessions of `bench many`: builds them many at a time, then asks them in a random order."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from bench.old.ask import ask
from bench.old.session.conversation import FULL
from bench.script import scripts
from bench.together import together
from turnkeep_client.errors import TurnkeepError

from .plan import KEPT_TURNS, order
from .turns import Account, Built, Turn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.corpus import Corpus
    from bench.old.ask import Asked
    from bench.script import Script
    from bench.watch import Watch
    from turnkeep_client.client import Client
    from turnkeep_client.messages import Metrics
    from turnkeep_client.session import Session

    from .plan import Plan

#: The first answer of a session: it is built for its prompt.
OPENING_TOKENS: Final = 4
#: After a turn that failed: a broken worker must not be asked as fast as it refuses.
FAULT_PAUSE_S: Final = 0.2
CLOSE_TIMEOUT_S: Final = 5.0
ABANDON_S: Final = 3.0
CLOSING: Final = 32


@dataclass(slots=True)
class _Member:
    """A session and what the bench knows of it; `position` is None after a turn of unknown outcome."""

    session: Session
    name: str
    script: Script
    beginning: int = 0
    position: int | None = None
    turns: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Crowd:
    """All sessions. What it measures grows as it goes on."""

    def __init__(self, client: Client, plan: Plan, corpus: Corpus, watch: Watch, run: str) -> None:
        """`run` ends the names of all sessions."""
        self.built: list[Built] = []
        self.turns: list[Turn] = []
        self.rewinds = 0
        self.looks = 0
        self.over_limit = 0
        self.messages: dict[str, str] = {}
        self.account: Account | None = None
        self._plan = plan
        self._watch = watch
        self._texts = corpus.texts()
        made = scripts(corpus, ((plan.history, 0) for _ in range(plan.sessions)))
        self._members = [
            _Member(client.session(f"{i}-{run}"), f"{i}-{run}", script) for i, script in enumerate(made)
        ]

    async def build(self) -> None:
        """Begin every session, many at a time."""
        numbers = iter(range(len(self._members)))
        await together(*(self._build(numbers) for _ in range(self._plan.in_flight)))

    async def converse(self) -> None:
        """Ask the sessions until the turns or the time are over, then take the worker's account."""
        plan, started_s = self._plan, self._watch.elapsed_s
        chosen = islice(order(len(self._members), plan.skew, plan.seed), plan.turns)

        async def work() -> None:
            for number in chosen:
                if plan.duration_s is not None and self._watch.elapsed_s - started_s >= plan.duration_s:
                    return
                member = self._members[number]
                async with member.turn:
                    await self._turn(number, member)

        await together(*(work() for _ in range(plan.concurrency)))
        self.account = await self._account()

    async def close(self, *, in_time: bool = False) -> None:
        """End the sessions that were begun; `in_time` gives up after a few seconds."""
        members = iter([member for member in self._members if member.beginning])

        async def work() -> None:
            for member in members:
                with contextlib.suppress(TurnkeepError):
                    await member.session.close(timeout_s=CLOSE_TIMEOUT_S)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABANDON_S if in_time else None):
                await together(*(work() for _ in range(CLOSING)))

    async def _build(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            member = self._members[number]
            asked = await ask(
                member.session,
                messages=member.script.opening(member.name),
                max_tokens=OPENING_TOKENS,
                timeout_s=self._plan.turn_timeout_s,
            )
            self.built.append(self._begun(number, member, asked))
            if asked.fault is not None:
                await asyncio.sleep(FAULT_PAUSE_S)

    def _begun(self, number: int, member: _Member, asked: Asked) -> Built:
        at_s, result = self._watch.elapsed_s, asked.result
        if result is None:
            self._note(asked)
            return Built(session=number, at_s=at_s, latency_s=asked.latency_s, error=asked.error)
        member.beginning = member.position = result.position
        return Built(
            session=number,
            at_s=at_s,
            latency_s=asked.latency_s,
            position=result.position,
            prefilled_tokens=result.usage.prefilled_tokens,
            cached_tokens=result.usage.cached_tokens,
            generated_tokens=len(asked.tokens),
            kv_live_bytes=result.kv_live_bytes,
        )

    async def _turn(self, number: int, member: _Member) -> None:
        if member.turns == KEPT_TURNS:
            await self._rewind(member)
        held, (told, resident) = member.position, await self._look(member)
        at_s, text = self._watch.elapsed_s, next(self._texts)
        asked = await self._say(member, text)
        if asked.error in FULL and member.turns:
            await self._rewind(member)
            held, (told, resident) = member.position, await self._look(member)
            at_s, asked = self._watch.elapsed_s, await self._say(member, text)
        member.turns += 1
        result = asked.result
        known = Turn(
            session=number,
            at_s=at_s,
            latency_s=asked.latency_s,
            held=held,
            told=told,
            resident=resident,
            error=asked.error,
        )
        if result is None:
            self._note(asked)
            member.position = None
            self.turns.append(known)
            await asyncio.sleep(FAULT_PAUSE_S)
            return
        member.position = result.position
        self.turns.append(_answered(known, asked))

    async def _say(self, member: _Member, text: str) -> Asked:
        return await ask(
            member.session,
            messages=[{"role": "user", "content": text}],
            max_tokens=self._plan.max_tokens,
            timeout_s=self._plan.turn_timeout_s,
        )

    async def _look(self, member: _Member) -> tuple[int | None, bool]:
        """Ask where a session is, outside of the time that is measured."""
        try:
            info = await member.session.info()
        except TurnkeepError:
            return None, False
        self._check_limit(info.worker)
        return info.position, info.resident

    def _check_limit(self, metrics: Metrics) -> None:
        self._watch.worker = self._watch.worker or metrics
        self.looks += 1
        self.over_limit += metrics.resident_kv_bytes > metrics.max_memory_bytes

    async def _rewind(self, member: _Member) -> None:
        member.turns = 0
        with contextlib.suppress(TurnkeepError):  # the turn that follows will tell
            done = await member.session.rewind(member.beginning, timeout_s=self._plan.turn_timeout_s)
            member.position = done.position
            self.rewinds += 1

    async def _account(self) -> Account | None:
        for member in self._members:
            with contextlib.suppress(TurnkeepError):
                metrics = (await member.session.info()).worker
                return Account(
                    cached=metrics.cached_tokens,
                    prefilled=metrics.prefilled_tokens,
                    generated=metrics.generated_tokens,
                )
        return None

    def _note(self, asked: Asked) -> None:
        if asked.error is not None:
            self.messages.setdefault(asked.error, str(asked.fault))


@dataclass(frozen=True, slots=True)
class Probe:
    """What a few sessions of full length told: the most bytes of KV, and seconds per prefilled token.

    The latter are those of their beginnings, which found next to nothing in a cache.
    """

    most_bytes: int
    cold_s: tuple[float, ...]


async def probe(client: Client, plan: Plan, corpus: Corpus, run: str) -> Probe:
    """Hold a few of the sessions to their full length, one after another.

    Raises the fault of a beginning that is not answered, or of a turn that fails for another reason than that
    its session is full.
    """
    texts, most, cold_s = corpus.texts(), 0, []
    made = scripts(corpus, ((plan.history, 0) for _ in range(min(plan.room, plan.sessions))))
    for number, script in enumerate(made):
        name = f"{number}-probe-{run}"
        session = client.session(name)
        turns = ([{"role": "user", "content": next(texts)}] for _ in range(KEPT_TURNS))
        for messages in (script.opening(name), *turns):
            asked = await ask(
                session, messages=messages, max_tokens=plan.max_tokens, timeout_s=plan.turn_timeout_s
            )
            if asked.error in FULL and most:
                break
            if asked.result is None:
                raise asked.fault or ValueError(asked)
            usage = asked.result.usage
            most = max(most, asked.result.kv_live_bytes)
            if usage.prefilled_tokens > usage.cached_tokens:
                cold_s.append(asked.first_chunk_s / usage.prefilled_tokens)
        with contextlib.suppress(TurnkeepError):
            await session.close(timeout_s=CLOSE_TIMEOUT_S)
    return Probe(most, tuple(cold_s))


def _answered(turn: Turn, asked: Asked) -> Turn:
    result = asked.result
    if result is None:  # told apart by its caller
        raise ValueError(asked)
    return msgspec.structs.replace(
        turn,
        first_chunk_s=asked.first_chunk_s,
        position=result.position,
        prompt_tokens=result.usage.prompt_tokens,
        cached_tokens=result.usage.cached_tokens,
        prefilled_tokens=result.usage.prefilled_tokens,
        generated_tokens=len(asked.tokens),
        rewritten_from=result.rewritten_from,
    )
