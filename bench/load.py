"""`turnkeep bench load`: throughput, waiting, stalls and fairness with many sessions, at several loads.

Each level of load opens sessions, sends turns to them, so many at a time, and closes them. A block is two
waves of turns; a wave has one turn for each session served at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count as counted
from itertools import cycle, islice
from statistics import median
from typing import Annotated, Any, Final
from uuid import uuid4

import numpy as np
from msgspec.structs import replace

from turnkeep_client.client import Client
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.session import Session

from . import stats
from .checks import STRETCHES, Check, bounded, cached_tokens_are_cheap, count
from .faults import together
from .plan import Corpus, Option
from .run import FAULT_PAUSE_S, TURN_TIMEOUT_S, BenchRun
from .spec import Bench, Findings, Plot
from .turns import Measure, Sample, TimedTurn

#: Waves in a block: a wave shares steps with the next one, so a single wave would not be independent.
WAVES: Final = 2
#: An opening only needs its prompt, so its answer is as short as templates allow.
OPENING_TOKENS: Final = 4
#: Chunks closer than this arrived in one packet: no reader sees a gap between them.
ONE_ARRIVAL_S: Final = 0.0005
#: Sessions whose token counts are within this share of the median had equal work.
EQUAL: Final = 0.1

OPENING: Final = "opening"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Many sessions at once: throughput, waiting, stalls and fairness at each load.

    At each level a fixed number of sessions is served at a time: a session's next turn is sent when the
    one before it is answered.
    """

    concurrency: Annotated[tuple[int, ...], Option("Sessions at a time.", smoke=(1, 4))] = (
        1,
        2,
        4,
        8,
        16,
    )
    sessions: Annotated[int, Option("Sessions of each level.", smoke=4)] = 16
    turns: Annotated[int, Option("Turns of a session.", smoke=3)] = 5
    history: Annotated[int, Option("Most utterances that a session begins with.", smoke=3)] = 6
    max_tokens: Annotated[int, Option("Most tokens of an answer.", smoke=6)] = 64
    corpus: Corpus = "mt-bench"


def _user(of: Callable[[TimedTurn], Any]) -> Callable[[TimedTurn], Any]:
    """Wrap `of` to return None for openings."""
    return lambda turn: None if turn.case == OPENING else of(turn)


def _gaps(turn: TimedTurn) -> list[float]:
    return [gap for gap in turn.gaps_s if gap >= ONE_ARRIVAL_S]


GENERATED = Measure("generated", "tokens/s")
FIRST = Measure("first chunk", "s", of=_user(lambda turn: turn.first_s))
WHOLE = Measure("whole turn", "s", of=_user(lambda turn: turn.total_s))
PACE = Measure("time per token", "s", of=_user(lambda turn: turn.per_token_s))
GAP = Measure("gap between chunks", "s", of=_user(_gaps))
FAIR = Measure("slowest, of the median", "share")
KV = Measure("KV on the device, of its limit", "share", levels="")

PLOTS = (
    Plot("by x", "Throughput", (GENERATED,), "Of all sessions together."),
    Plot("by x", "Fairness", (FAIR,), "Tokens a second of those who were served side by side."),
    Plot("cdf", "First chunk", (FIRST,), "From sending the turn: what a user waits.", log=True),
    Plot("cdf", "Time per token", (PACE,), "After the first chunk, turn by turn.", log=True),
    Plot("cdf", "Gaps between chunks", (GAP,), "A long shoulder waits for the prefill of others.", log=True),
    Plot("over time", "KV on the device", (KV,), "As the worker reports it, of its limit."),
)


def follows(turns: Sequence[TimedTurn]) -> Iterator[Sample]:
    """Yield the samples that take several turns: tokens per second of a level, fairness within a block."""
    sent = [turn for turn in turns if turn.x is not None and turn.case == ""]
    for (case, x), level in stats.grouped(((turn.case, turn.x), turn) for turn in sent).items():
        yield from (Sample(GENERATED.name, case, x, *rate) for rate in enumerate(_generated(level)))
    for place, wave in stats.grouped((turn.place, turn) for turn in sent if (turn.x or 0) > 1).items():
        rates = _served(wave)
        if len(rates) > 1 and median(rates) > 0:
            yield Sample(FAIR.name, "", *place, min(rates) / median(rates))


def _generated(turns: Sequence[TimedTurn]) -> list[float]:
    """Return the tokens generated per second in each of several equal parts of the time at full load.

    The tokens of an answer are assumed to be spread evenly from its first chunk to its end.
    """
    ends = {turn.fact("number"): turn.at_s + turn.total_s for turn in turns}  # of each session's last turn
    end_s = sorted(ends.values())[-min(int(turns[0].x or 1), len(ends))]  # until a client is idle
    begin_s = min(turn.at_s for turn in turns)
    num_parts = min(STRETCHES, 1 + max(turn.block for turn in turns))
    edges_s = np.linspace(begin_s, max(end_s, begin_s + 1e-9), num_parts + 1)
    reached = np.zeros(num_parts + 1)
    for turn in turns:
        if turn.error is None and turn.first_s is not None:
            times_s = (turn.at_s + turn.first_s, turn.at_s + turn.total_s)
            reached += np.interp(edges_s, times_s, (0, len(turn.tokens)))
    rates: list[float] = (np.diff(reached) / np.diff(edges_s)).tolist()
    return rates


def _served(turns: Sequence[TimedTurn]) -> list[float]:
    """Return the tokens per second of each session with about as many tokens as the median session.

    Sessions with a failed turn count too, with the few tokens that they got.
    """
    by_number = stats.grouped((turn.fact("number"), turn) for turn in turns)
    tokens = {one: sum(len(turn.tokens) for turn in some) for one, some in by_number.items()}
    seconds = {one: sum(turn.total_s for turn in some) for one, some in by_number.items()}
    failed = {turn.fact("number") for turn in turns if turn.error is not None}
    middle = median([size for one, size in tokens.items() if one not in failed] or [0])
    alike = [one for one, size in tokens.items() if one in failed or abs(size - middle) <= EQUAL * middle]
    return [tokens[one] / seconds[one] for one in alike if seconds[one] > 0]


def checks(found: Findings[Plan]) -> Iterator[Check]:
    """Check the cost of cached tokens, fairness, and the KV limit."""
    plan = found.plan
    one = [turn for turn in found.turns if turn.x == 1]
    yield cached_tokens_are_cheap([replace(turn, block=int(turn.fact("number") or 0)) for turn in one])
    waves = {f"{x:g}": [*found.blocks(FAIR, "", x).values()] for x in plan.concurrency if x > 1}
    if waves:
        name = "the slowest of those served side by side gets a quarter of their median, and more"
        yield bounded(name, {x: some for x, some in waves.items() if some}, at_least=0.25, unit="share")
    name = "KV on the device stays within its limit"
    yield count(name, found.of(KV), lambda reading: reading.value > 1, "readings")


async def measure(run: BenchRun[Plan]) -> None:
    """Run all levels one after the other."""
    async with run.worker() as (_, client):
        for at_once in run.plan.concurrency:
            await _level(run, client, at_once)


@dataclass(slots=True)
class _Talk:
    """A session and its next messages. `held` is the number of its tokens, None if that is unknown."""

    run: BenchRun[Plan]
    session: Session
    number: int
    texts: Iterator[str]
    held: int | None = 0

    async def say(self, max_tokens: int, utterances: int = 1) -> TimedTurn:
        """Send a turn of `utterances` messages, and wait for the answer.

        The first text contains the session's name, so that sessions share no KV.
        """
        name = () if self.held else (f"[{self.session.key.session}]",)
        text = "\n\n".join((*name, *islice(self.texts, utterances)))
        messages = [{"role": "user", "content": text}]
        facts: dict[str, float | str | None] = {"number": self.number, "held": self.held}
        turn = await self.run.ask(self.session, messages=messages, max_tokens=max_tokens)
        self.held = turn.position
        if turn.error is not None:
            await asyncio.sleep(FAULT_PAUSE_S)
        return replace(turn, facts=facts)


async def _level(run: BenchRun[Plan], client: Client, at_once: int) -> None:
    """Begin the sessions of a level, and send their turns, `at_once` sessions at a time; close them."""
    plan, sent, name = run.plan, counted(), uuid4().hex[:8]
    chats = run.corpus.conversations

    def talk(number: int) -> _Talk:
        some = islice(cycle(chats), number % len(chats), None)
        texts = (said for chat in some for said in chat)
        return _Talk(run, client.session(f"{number}-{name}"), number, texts)

    async def begin(talk: _Talk) -> None:
        if history := talk.number % (plan.history + 1):
            turn = await talk.say(OPENING_TOKENS, history)
            run.keep(replace(turn, case=OPENING, x=at_once))
            run.progress(len(run.turns), None, f"beginning {len(talks):,} sessions")

    async def converse(talk: _Talk) -> None:
        for _ in range(plan.turns):
            block = next(sent) // (WAVES * at_once)
            turn = await talk.say(plan.max_tokens)
            run.keep(replace(turn, block=block, x=at_once))
            await _note_memory(run, talk.session)
            run.progress(len(run.turns), None, f"{at_once} at a time")

    async def close(talk: _Talk) -> None:
        with contextlib.suppress(TurnkeepError):  # there is no session if its turns failed
            await talk.session.close(timeout_s=TURN_TIMEOUT_S)

    talks = [talk(number) for number in range(max(plan.sessions, at_once))]
    for act in (begin, converse, close):
        await _each(talks, act, at_once)


async def _note_memory(run: BenchRun[Plan], session: Session) -> None:
    """Record how much KV the worker says that it has on the device."""
    with contextlib.suppress(TurnkeepError):  # the following turn reports it
        metrics = (await session.info()).worker
        run.metrics = run.metrics or metrics
        run.sample(KV, "", run.elapsed_s, 0, metrics.resident_kv_bytes / max(metrics.kv_limit_bytes, 1))


async def _each(talks: Iterable[_Talk], act: Callable[[_Talk], Awaitable[None]], at_once: int) -> None:
    waiting = iter(talks)

    async def work() -> None:
        for talk in waiting:
            await act(talk)

    await together(*(work() for _ in range(at_once)))


BENCH = Bench(
    name="load",
    plan=Plan,
    levels="sessions at a time",
    measures=(GENERATED, FIRST, WHOLE, PACE, GAP, FAIR, KV),
    plots=PLOTS,
    checks=checks,
    measure=measure,
    follows=follows,
)
