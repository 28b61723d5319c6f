"""`turnkeep bench load`: many sessions at once: throughput, waiting, stalls and fairness, level by level.

In a closed loop a block is two waves, each of as many turns as are served at a time. In an open one, and of a
crowd's turns, it is a stretch of the level. What a long prompt does to running answers is measured in rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import accumulate, cycle, islice, pairwise
from itertools import count as counted
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal
from uuid import uuid4

import click
import numpy as np
from msgspec.structs import replace

from turnkeep_client.errors import TurnkeepError

from . import promises, stats
from .ask import FAULT_PAUSE_S, FULL
from .checks import Check, bounded, count
from .faults import BenchError
from .plan import Corpus, Option, Seed, TurnTimeout
from .samples import Sample
from .spec import Against, Bench, Measure, Plot
from .together import together

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence

    from turnkeep_client.client import Client
    from turnkeep_client.messages import Metrics

    from .run import Run
    from .samples import Findings, Turn

METRICS: Final = ("--metrics-interval-s", "0.25s")
MIN_MEMORY_BYTES: Final = 2**20
STRETCHES: Final = 10
#: In a block: a wave shares its passes with the next one, so that one alone is not independent of it.
WAVES: Final = 2
#: Sessions that are opened at a time before an open loop, and closed after any level.
AT_ONCE: Final = 8
CLOSE_TIMEOUT_S: Final = 5.0
#: An opening is there for its prompt; its answer is as short as templates allow.
OPENING_TOKENS: Final = 4
#: Answers that run beside a long prompt; text from which the length of its tokens is told.
ANSWERS: Final = 4
SAMPLE_CHARS: Final = 1000
#: Chunks closer than this came in one packet: their reader cannot see a gap between them.
ONE_ARRIVAL_S: Final = 0.0005
#: Answers whose lengths lie within this share of the median's were equal work.
EQUAL: Final = 0.1
#: One of a crowd is rewound to its beginning after so many turns: popular ones must not outgrow the memory.
KEPT_TURNS: Final = 4
#: Of a session's tokens so many must have been cached for it to count as found.
FOUND: Final = 0.5
#: A long prompt that takes less is over within a few passes, whatever the worker does.
MIN_PROMPT_S: Final = 2.0

OPENING, BEGINNING, ANSWER = "opening", "a beginning", "answer beside a prompt"
ALONE, BESIDE = "alone", "beside a long prompt"
MEMORY, SSD, NOWHERE = FOUND_IN = ("found in memory", "found on SSD", "prefilled")

Levels = Annotated[
    tuple[int, ...] | None,
    Option("Closed loops: sessions at a time. [default: 1,2,4,8,16; none with other levels]", smoke=(1, 4)),
]
Rates = Annotated[tuple[float, ...] | None, Option("Open loops: turns due a second.", smoke=(2.0,))]
Arrivals = Annotated[
    Literal["poisson", "recorded"],
    Option(
        "recorded: also an open loop at the times of --corpus chitchat.",
        type=click.Choice(("poisson", "recorded")),
    ),
]
Pace = Annotated[float, Option("How many times as fast as recorded.")]
Duration = Annotated[float, Option("Of an open loop.", smoke=2.0, metavar="SECONDS")]
History = Annotated[
    int,
    Option("Most utterances that a session begins with; they differ.", smoke=3, type=click.IntRange(min=0)),
]
Prompt = Annotated[int | None, Option("Also prefill this beside answers.", smoke=256, metavar="TOKENS")]
Rounds = Annotated[int, Option("How often the long prompt is sent.", smoke=1)]
Answer = Annotated[int, Option("Most of an answer beside the long prompt.", smoke=64)]
Pause = Annotated[float, Option("Answers are alone before it for so long.", smoke=0.3, metavar="SECONDS")]
Crowd = Annotated[
    int | None, Option("Also so many sessions, far more than fit in memory.", smoke=20, metavar="SESSIONS")
]
CrowdTurns = Annotated[int | None, Option("Turns of the crowd. [default: two for each]")]
Room = Annotated[int, Option("Sessions of the crowd that fit in memory.", smoke=2)]
InFlight = Annotated[int, Option("Sessions of the crowd that are begun at a time.")]
Skew = Annotated[
    float,
    Option("Exponent of Zipf's law by which a crowd is asked; 0: all alike.", type=click.FloatRange(min=0)),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Many sessions at once: throughput, waiting, stalls and fairness at each load.

    In a closed loop so many sessions are served at a time. In an open loop turns are due whatever the worker
    does, and their times count from then. A crowd is more sessions than fit in memory: all are begun, then
    asked in a random order in which few are asked often; what is found in memory, on SSD or nowhere is told
    apart.
    """

    concurrency: Levels = None
    rate: Rates = None
    arrivals: Arrivals = "poisson"
    pace: Pace = 10.0
    duration: Duration = 60.0
    sessions: Annotated[int, Option("Sessions of each level.", smoke=4)] = 16
    turns: Annotated[int, Option("Turns of a session in a closed loop.", smoke=3)] = 5
    history: History = 6
    max_tokens: Annotated[int, Option("Most of one answer.", smoke=6)] = 64
    long_prompt: Prompt = None
    rounds: Rounds = 5
    answer_tokens: Answer = 256
    pause: Pause = 2.0
    crowd: Crowd = None
    crowd_turns: CrowdTurns = None
    room: Room = 8
    in_flight: InFlight = 64
    skew: Skew = 1.1
    turn_timeout: TurnTimeout = 300.0
    seed: Seed = 0
    corpus: Corpus = "mt-bench"

    @property
    def closed(self) -> tuple[int, ...]:
        """The levels of the closed loops."""
        others = self.rate or self.crowd or self.arrivals == "recorded"
        return self.concurrency or (() if others else (1, 2, 4, 8, 16))

    @property
    def open(self) -> dict[str, float]:
        """The open loops by their names, each with its rate or its pace."""
        recorded = {f"recorded x{self.pace:g}": self.pace} if self.arrivals == "recorded" else {}
        return {f"{rate:g} a second": rate for rate in self.rate or ()} | recorded


def _user(of: Callable[[Turn], Any]) -> Callable[[Turn], Any]:
    """Leave out the openings, which are no part of the load, and the answers beside a long prompt."""
    return lambda turn: None if turn.case in {OPENING, ANSWER} else of(turn)


def _late(turn: Turn) -> float:
    """How long after it was due a turn was sent: a late start is part of what its user waits."""
    return turn.fact("late_s") or 0.0


def _gaps(turn: Turn) -> list[float]:
    return [gap for gap in turn.gaps_s if gap >= ONE_ARRIVAL_S]


FIRST = Measure("first chunk", "s", of=_user(lambda turn: _late(turn) + (turn.first_s or turn.total_s)))
WHOLE = Measure("whole turn", "s", of=_user(lambda turn: _late(turn) + turn.total_s))
PACE = Measure("time per token", "s", of=_user(lambda turn: turn.per_token_s))
GAP = Measure("gap between chunks", "s", of=_user(_gaps))
QUEUED = Measure("queued", "s", of=_user(lambda turn: turn.queued_s), log=False)
SENT_LATE = Measure(
    "sent late", "s", of=lambda turn: turn.fact("late_s") if turn.x is None else None, log=False
)
OWN = Measure("prefilled in a turn", "tokens", of=_user(lambda turn: turn.prefilled_tokens), log=False)
GENERATED = Measure("generated", "tokens/s", "higher", log=False)
PREFILLED = Measure("prefilled", "tokens/s", "higher", log=False)
FAIR = Measure("slowest, of the median", "share", "higher", log=False)
JAIN = Measure("Jain's index of the sessions", "", "higher", log=False)
STAND = Measure("running answers stand still", "s")
HELD_UP = Measure("longest stand, of the long prompt's time", "share", log=False)
PROMPT = Measure("a long prompt", "s")
LAG = Measure("the worker's loop was late, mean", "s", log=False)
LAG_P99 = Measure("the worker's loop was late, p99 within", "s", log=False)
PER_SESSION = Measure("process memory of a session, KV left out", "bytes", log=False)
STORED = Measure("bytes on SSD of a session", "bytes")
GROWN = Measure("process without KV", "bytes", levels="", table=False)
TURNING = Measure("process without KV, asked", "bytes", levels="", table=False)
PROCESS = Measure("process", "bytes", levels="")
KV = Measure("KV on the device, of its limit", "share", log=False, levels="")
WRITTEN = Measure("written to SSD", "bytes", log=False, levels="", table=False)
RESTORED = Measure("restored", "bytes", log=False, levels="", table=False)
_TIMES = (GENERATED, FIRST, WHOLE, PACE, GAP, QUEUED, SENT_LATE, PREFILLED, OWN, FAIR, JAIN, STAND, HELD_UP)
_SIZES = (PROMPT, PER_SESSION, STORED, LAG, LAG_P99, PROCESS, KV, GROWN, TURNING, WRITTEN, RESTORED)

PLOTS = (
    Plot("by x", "Throughput", (GENERATED,), "Of all sessions of a closed loop together."),
    Plot("by x", "Fairness", (FAIR,), "Tokens a second of those who were served side by side."),
    Plot("cdf", "First chunk", (FIRST,), "From when a turn was due: what a user waits.", log=True),
    Plot("cdf", "Time per token", (PACE,), "After the first chunk, turn by turn.", log=True),
    Plot("cdf", "Gaps between chunks", (GAP,), "A long shoulder waits for the prefill of others.", log=True),
    Plot("cdf", "Answers beside a long prompt", (STAND,), "Gaps between their chunks.", log=True),
    Plot("points", "Memory of a crowd", (GROWN,), "The process without KV.", x="sessions begun"),
    Plot("over time", "KV on the device", (KV,), "As the worker publishes it, of its limit."),
    Plot("over time", "Process", (PROCESS,), "All of the worker's memory."),
    Plot("over time", "Snapshots", (WRITTEN, RESTORED), "Since the worker began; a crowd has its own."),
)


def follows(turns: Sequence[Turn]) -> Iterator[Sample]:
    """Make what all turns of a level are together, and what a long prompt does to answers."""
    levels: defaultdict[tuple[str, float | None], list[Turn]] = defaultdict(list)
    for turn in turns:
        if turn.fact("late_s") is not None:
            levels[turn.case, turn.x].append(turn)
    for (case, x), some in levels.items():
        for measure, rates in zip((GENERATED, PREFILLED), _rates(some), strict=True):
            yield from (Sample(measure.name, case, x, block, rate) for block, rate in enumerate(rates))
        sessions = _served(some, lambda turn: turn.fact("number"))
        yield from (
            Sample(JAIN.name, case, x, 0, jain(rates)) for rates in [[*sessions.values()]] if any(rates)
        )
        waves: defaultdict[int, list[Turn]] = defaultdict(list)
        for turn in some:
            waves[turn.block].append(turn)
        for block, wave in waves.items():
            rates = [*_served(wave, lambda turn: turn.fact("number")).values()]
            if x is not None and x > 1 and len(rates) > 1 and median(rates) > 0:
                yield Sample(FAIR.name, case, x, block, min(rates) / median(rates))
    yield from _stalls([turn for turn in turns if turn.case == ANSWER and turn.first_s is not None])


def _rates(turns: Sequence[Turn]) -> tuple[list[float], list[float]]:
    """Return the tokens generated and prefilled a second, in equal parts of the time when the load was full.

    An answer's tokens are spread evenly from its first chunk to its end, a prompt's from its queue's end on.
    """
    begin_s, at_once = min(turn.at_s for turn in turns), int(turns[0].x or 0)
    ends: dict[object, float] = {}
    for turn in turns:
        number = turn.fact("number")
        ends[number] = max(ends.get(number, 0.0), turn.at_s + turn.total_s)
    # A closed loop is full until somebody finds no session left, an open one until the last turn is sent.
    end_s = sorted(ends.values())[-min(at_once, len(ends))] if at_once else max(turn.at_s for turn in turns)
    num_parts = min(STRETCHES, 1 + max(turn.block for turn in turns))
    edges = np.linspace(begin_s, max(end_s, begin_s + 1e-9), num_parts + 1)
    done = np.zeros((2, num_parts))
    for turn in turns:
        if turn.error is None and turn.first_s is not None:
            first_s = turn.at_s + turn.first_s
            begun_s = min(turn.at_s + turn.queued_s, first_s)
            spans = (
                (first_s, turn.at_s + turn.total_s, len(turn.tokens)),
                (begun_s, first_s, turn.prefilled_tokens),
            )
            for i, (start_s, stop_s, amount) in enumerate(spans):
                reached = np.clip((edges - start_s) / max(stop_s - start_s, 1e-9), 0, 1)
                done[i] += amount * np.diff(reached)
    generated, prefilled = (done / (edges[1] - edges[0])).tolist()
    return generated, prefilled


def _served(turns: Sequence[Turn], by: Callable[[Turn], object]) -> dict[object, float]:
    """Return the tokens a second of each that did equal work; one with a failed turn had as much to do."""
    tokens: defaultdict[object, int] = defaultdict(int)
    seconds: defaultdict[object, float] = defaultdict(float)
    for turn in turns:
        tokens[by(turn)] += len(turn.tokens)
        seconds[by(turn)] += _late(turn) + turn.total_s
    failed = {by(turn) for turn in turns if turn.error is not None}
    middle = median([size for one, size in tokens.items() if one not in failed] or [0])
    alike = [one for one, size in tokens.items() if one in failed or abs(size - middle) <= EQUAL * middle]
    return {one: tokens[one] / seconds[one] for one in alike if seconds[one] > 0}


def jain(rates: Sequence[float]) -> float:
    """Return Jain's index (1984): 1 where all are equal, 1/n where one has it all."""
    return sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates))


def _stalls(answers: Sequence[Turn]) -> Iterator[Sample]:
    """Sort the gaps of answers: alone, once all had begun and none was prefilled, and beside the prompt."""
    longest: defaultdict[int, float] = defaultdict(float)
    for turn in answers:
        alone_s, sent_s, over_s = (turn.fact(name) or 0.0 for name in ("alone_s", "sent_s", "over_s"))
        arrivals = accumulate(turn.gaps_s, initial=turn.at_s + (turn.first_s or 0.0))
        for start_s, end_s in pairwise(arrivals):
            if end_s - start_s < ONE_ARRIVAL_S or start_s < alone_s or start_s >= over_s:
                continue
            beside, gap = end_s > sent_s, end_s - start_s
            yield Sample(STAND.name, BESIDE if beside else ALONE, None, turn.block, gap)
            if beside and over_s - sent_s >= MIN_PROMPT_S:
                longest[turn.block] = max(longest[turn.block], gap / (over_s - sent_s))
    yield from (Sample(HELD_UP.name, "", None, block, share) for block, share in longest.items())


def checks(found: Findings[Plan]) -> Iterator[Check]:
    """Hold the worker against what it is promised to do under load."""
    plan = found.plan
    one = [turn for turn in found.turns if turn.x == 1 and turn.case in {"", OPENING}]
    crowd = [turn for turn in found.turns if turn.case in {BEGINNING, *FOUND_IN}]
    by_session = [replace(turn, block=int(turn.fact("number") or 0)) for turn in one]
    runs = {"one at a time": by_session, "crowd": crowd}
    yield promises.held_tokens_are_cheap({name: turns for name, turns in runs.items() if turns})
    waves = {f"{x:g}": [*found.blocks(FAIR, "", x).values()] for x in plan.closed if x > 1}
    if waves:
        name = "the slowest of those served side by side gets a quarter of their median, and more"
        yield bounded(name, {x: some for x, some in waves.items() if some}, at_least=0.25, unit="share")
    over = [sample for sample in found.of(KV) if sample.value > 1]
    yield count("KV on the device stays within its limit", over, found.of(KV), "readings")
    if plan.long_prompt is not None:
        shares = [*found.blocks(HELD_UP, "").values()]
        name = "running answers stand still for a quarter of a long prompt's time at most"
        yield bounded(name, {"": shares}, at_most=0.25, unit="share")
    if plan.crowd is not None:
        asked = [turn for turn in crowd if turn.case != BEGINNING]
        sessions = len({turn.fact("number") for turn in asked})
        things = f"turns of {sessions:,} sessions"
        yield count("no session was forgotten", [turn for turn in asked if _forgotten(turn)], asked, things)
        account, here = found.facts.get("the worker's account"), _account(crowd)
        known = account is not None and account[0] == here[0] and not any(turn.error for turn in crowd)
        odd = [pair for pair in zip(here, account or here, strict=True) if pair[0] != pair[1]]
        yield count("the worker worked on as many tokens as it told", odd, here if known else (), "sums")
        yield promises.keeps_its_size(found.of(TURNING))


def _account(turns: Sequence[Turn]) -> tuple[int, int, int, int]:
    """Add up the requests, and the tokens that were cached, prefilled and generated."""
    cached, prefilled = (
        sum(turn.cached_tokens for turn in turns),
        sum(turn.prefilled_tokens for turn in turns),
    )
    return len(turns), cached, prefilled, sum(len(turn.tokens) for turn in turns)


def _forgotten(turn: Turn) -> bool:
    """Say whether a turn does not go on where its session's last answer had stopped."""
    held, told = turn.fact("held"), turn.fact("told")
    if held is None or (told is not None and told != held):
        return held is not None
    kept = held if turn.rewritten_from is None else turn.rewritten_from
    return turn.position is not None and turn.position - len(turn.tokens) <= kept


async def measure(run: Run[Plan]) -> None:
    """Run all levels one after the other, then the rounds of the long prompt, then the crowd."""
    plan, most_bytes, own = run.plan, 0, run.where.nats is None
    readings: list[Metrics] = []

    def take(at_s: float, metrics: Metrics) -> None:
        readings.append(metrics)
        run.sample(PROCESS, "", at_s, 0, metrics.process_bytes)
        run.sample(KV, "", at_s, 0, metrics.resident_kv_bytes / max(metrics.max_memory_bytes, 1))
        run.sample(WRITTEN, "", at_s, 0, metrics.snapshots.written_bytes)
        run.sample(RESTORED, "", at_s, 0, metrics.snapshots.restored_bytes)

    dues = {name: _dues(run, name, amount) for name, amount in plan.open.items()}
    async with run.target(*METRICS) as client, run.watching(client, take):
        for level in plan.closed:
            await _level(run, client, level, "", None, readings)
        for name, due in dues.items():
            await _level(run, client, None, name, due, readings)
        if plan.long_prompt is not None:
            await _prompts(run, client, plan.long_prompt)
        if plan.crowd is not None and own:
            most_bytes = await _most_bytes(run, client)
    if plan.crowd is not None:
        # Memory that is ready before it is needed would hide what sessions take.
        memory = ("--max-memory", f"{max(MIN_MEMORY_BYTES, plan.room * most_bytes)}", "--spare-memory", "0")
        async with run.target(*METRICS, *memory) as client, run.watching(client, take):
            await _crowd(run, client, plan.crowd, readings)


def _dues(run: Run[Plan], name: str, amount: float) -> list[list[float]]:
    """Return when each session's turns are due, in seconds from the level's start.

    A Poisson process, each turn one of a session drawn evenly; or the times at which people wrote, where each
    conversation begins at a time drawn evenly from the median length of all.
    """
    plan, draw = run.plan, random.Random(f"{run.plan.seed} {name}")  # noqa: S311  # repeatable, not secret
    if not name.startswith("recorded"):
        dues: list[list[float]] = [[] for _ in range(plan.sessions)]
        at_s = draw.expovariate(amount)
        while at_s < plan.duration:
            draw.choice(dues).append(at_s)
            at_s += draw.expovariate(amount)
        return dues
    chats = islice(cycle(run.corpus.conversations), plan.sessions)
    times = [[said.at_s for said in chat.utterances if said.at_s is not None] for chat in chats]
    if not all(times):
        source = run.corpus.source.name
        raise BenchError(f"{source} has no recorded times for --arrivals recorded; take --corpus chitchat")
    middle_s = median(at[-1] for at in times)
    starts = [draw.uniform(0, middle_s) for _ in times]
    every = [[(start + at) / amount for at in one] for start, one in zip(starts, times, strict=True)]
    return [[due for due in one if due < plan.duration] for one in every]


class _Talk:
    """A session, what it says next, and where it stands; None where nobody knows."""

    def __init__(self, run: Run[Plan], client: Client, number: int, name: str, texts: Sequence[str]) -> None:
        self.session = client.session(f"{number}-{name}")
        self.texts = texts
        self.held: int | None = 0
        self.turns = self.beginning = 0
        self._run, self._number = run, number

    async def say(
        self, text: str, max_tokens: int, *, begun: asyncio.Event | None = None, **facts: Any
    ) -> Turn:
        """Send a turn. A session's first words carry its name: KV is found by content, and none is shared."""
        text = text if self.held else f"[{self.session.key.session}]\n\n{text}"
        messages, facts = (
            [{"role": "user", "content": text}],
            {"number": self._number, "held": self.held} | facts,
        )
        turn = await self._run.ask(self.session, messages=messages, max_tokens=max_tokens, begun=begun)
        self.held = turn.position
        if turn.error is not None:
            await asyncio.sleep(FAULT_PAUSE_S)
        return replace(turn, facts=facts)

    async def close(self) -> None:
        """End the session."""
        with contextlib.suppress(TurnkeepError):
            await self.session.close(timeout_s=CLOSE_TIMEOUT_S)


def _talks(run: Run[Plan], client: Client, lengths: Iterable[int]) -> list[_Talk]:
    """Make sessions that say so much; each has a conversation of its own, and goes on into the next ones."""
    chats, name, made = cycle(run.corpus.conversations), uuid4().hex[:8], []
    for number, length in enumerate(lengths):
        texts: list[str] = []
        while len(texts) < max(length, 1):
            texts += [said.text for said in next(chats).utterances]
        made.append(_Talk(run, client, number, name, texts[:length]))
    return made


async def _each(things: Iterable[Any], act: Callable[[Any], Awaitable[None]], at_once: int) -> None:
    waiting = deque(things)

    async def work() -> None:
        while waiting:
            await act(waiting.popleft())

    await together(*(work() for _ in range(at_once)))


async def _level(
    run: Run[Plan],
    client: Client,
    at_once: int | None,
    case: str,
    dues: list[list[float]] | None,
    readings: Sequence[Metrics],
) -> None:
    """Open the sessions, run a level to its end, and close them."""
    plan, sent = run.plan, counted()
    lengths = [plan.turns] * max(plan.sessions, at_once or 1) if dues is None else [len(due) for due in dues]
    # Recorded times belong to what was said at them, from the first word on.
    histories = [0 if case.startswith("recorded") else i % (plan.history + 1) for i in range(len(lengths))]
    talks = _talks(run, client, map(sum, zip(histories, lengths, strict=True)))

    async def begin(part: tuple[_Talk, int]) -> None:
        talk, history = part
        if history:
            turn = await talk.say("\n\n".join(talk.texts[:history]), OPENING_TOKENS)
            run.take(replace(turn, case=OPENING, x=at_once))
        talk.texts = talk.texts[history:]

    async def converse(talk: _Talk) -> None:
        for text in talk.texts:
            block = next(sent) // (WAVES * (at_once or 1))
            turn = await talk.say(text, plan.max_tokens, late_s=0.0)
            run.take(replace(turn, case=case, x=at_once, block=block))
            run.step(len(run.turns), None, f"{at_once} at a time")

    async def keep_time(part: tuple[_Talk, list[float]]) -> None:
        for text, due_s in zip(part[0].texts, part[1], strict=True):
            await asyncio.sleep(max(0.0, began_s + due_s - run.elapsed_s))
            turn = await part[0].say(text, plan.max_tokens, late_s=max(0.0, run.elapsed_s - began_s - due_s))
            run.take(replace(turn, case=case, block=int(STRETCHES * due_s / plan.duration)))
            run.step(len(run.turns), None, case)

    async with _closing(talks):
        await _each(zip(talks, histories, strict=True), begin, at_once or AT_ONCE)
        seen, began_s = len(readings), run.elapsed_s
        if dues is None:
            await _each(talks, converse, at_once or 1)
        else:
            await _each(zip(talks, dues, strict=True), keep_time, len(talks))
        if len(readings) > seen + 1:
            before, after = readings[seen].event_loop_lag, readings[-1].event_loop_lag
            ticks = max(after.count - before.count, 1)
            run.sample(LAG, case, at_once, 0, (after.sum - before.sum) / ticks)
            late = accumulate(b - a for a, b in zip(before.counts, after.counts, strict=True))
            bounds = [
                bound for bound, below in zip(after.bounds, late, strict=False) if below >= 0.99 * ticks
            ]
            for bound in bounds[:1]:  # none where it lies beyond them all
                run.sample(LAG_P99, case, at_once, 0, bound)


@contextlib.asynccontextmanager
async def _closing(talks: Sequence[_Talk]) -> AsyncGenerator[None]:
    """End the sessions afterwards; who interrupts a run does not wait for them one by one."""
    limit_s: float | None = CLOSE_TIMEOUT_S
    try:
        yield
        limit_s = None
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await _each(talks, _Talk.close, AT_ONCE)


async def _prompts(run: Run[Plan], client: Client, num_tokens: int) -> None:
    """Prefill long prompts beside answers, in rounds; all answers of a round begin together, before it."""
    plan, texts, name = run.plan, run.corpus.texts(), uuid4().hex[:8]

    async def append(key: str, chars: int) -> tuple[int, float]:
        text = f"[{key}-{name}]"
        while len(text) < chars:
            text += f"\n\n{next(texts)}"
        session = client.session(f"{key}-{name}")
        try:
            with run.timing():
                done = await session.append(text=text[:chars], timeout_s=plan.turn_timeout)
        except TurnkeepError as error:
            raise BenchError(f"the long prompt was refused: {error}; lower --long-prompt") from None
        over_s = run.elapsed_s
        await session.close(timeout_s=CLOSE_TIMEOUT_S)
        return done.tokens, over_s

    async def round_of(block: int, chars: int) -> None:
        talks = _talks(run, client, [1] * ANSWERS)
        begun = [asyncio.Event() for _ in talks]
        answers: list[Turn] = []
        times: list[float] = []

        async def answer(talk: _Talk, event: asyncio.Event) -> None:
            answers.append(await talk.say(talk.texts[0], plan.answer_tokens, begun=event))
            event.set()  # also where it failed

        async def prompt() -> None:
            await asyncio.gather(*(event.wait() for event in begun))
            times.append(run.elapsed_s)
            await asyncio.sleep(plan.pause)
            times.extend([run.elapsed_s, (await append(f"long-{block}", chars))[1]])

        async with _closing(talks):
            await together(prompt(), *map(answer, talks, begun))
        facts = dict(zip(("alone_s", "sent_s", "over_s"), times, strict=True))
        run.take(*(replace(turn, case=ANSWER, block=block, facts=facts) for turn in answers))
        run.sample(PROMPT, "", None, block, times[2] - times[1])

    chars = round(num_tokens * SAMPLE_CHARS / (await append("sample", SAMPLE_CHARS))[0])
    for block in range(plan.rounds):
        run.step(len(run.turns), None, f"a long prompt, round {block + 1} of {plan.rounds}")
        await round_of(block, chars)


async def _most_bytes(run: Run[Plan], client: Client) -> int:
    """Hold a few sessions of a crowd to their full length, and return the most bytes of KV."""
    plan, most = run.plan, 0
    for talk in _talks(run, client, [plan.history + KEPT_TURNS] * min(plan.room, plan.crowd or 1)):
        run.step(0, None, "sizing the crowd's sessions")
        history = max(plan.history, 1)
        for text in ("\n\n".join(talk.texts[:history]), *talk.texts[history:]):
            turn = await talk.say(text, plan.max_tokens)
            if turn.error in FULL and most:
                break
            if turn.error is not None:
                raise BenchError(f"a session cannot be held to its full length: {turn.message}")
            most = max(most, turn.kv_live_bytes)
        await talk.close()
    return most


async def _crowd(run: Run[Plan], client: Client, size: int, readings: Sequence[Metrics]) -> None:
    """Begin all sessions, many at a time; then ask them one by one, in a random order."""
    plan, texts, history = run.plan, run.corpus.texts(), max(run.plan.history, 1)
    talks = _talks(run, client, [history] * size)

    async def begin(talk: _Talk) -> None:
        turn = await talk.say("\n\n".join(talk.texts), OPENING_TOKENS)
        talk.beginning = talk.held or 0
        run.take(replace(turn, case=BEGINNING))
        run.step(len(run.turns), None, f"beginning {size:,} sessions")

    async with _closing([] if run.where.nats is None else talks):  # one's own ends with its worker
        before = len(readings)
        await _each(talks, begin, plan.in_flight)
        points = [(one.sessions, one.process_bytes - one.resident_kv_bytes) for one in readings[before:]]
        for sessions, size_bytes in points:
            run.sample(GROWN, "", sessions, 0, size_bytes)
        # The process fills its caches with the first sessions.
        late = [
            (STRETCHES * sessions // (size + 1), sessions, bytes_)
            for sessions, bytes_ in points
            if sessions > size / 4
        ]
        for block, slope in enumerate(stats.slopes(late)):
            run.sample(PER_SESSION, "", None, block, slope)
        metrics = await run.settle(talks[0].session)
        run.sample(STORED, "", None, 0, max(metrics.snapshots.stored_bytes / size, 1))
        asked = plan.crowd_turns or 2 * size
        for i, number in enumerate(islice(order(size, plan.skew, plan.seed), asked)):
            run.step(i, asked, f"turn {i + 1:,} of a crowd's {asked:,}")
            turn = await _ask(run, talks[number], next(texts))
            run.take(replace(turn, block=STRETCHES * i // asked))
        if run.where.nats is None:
            metrics = await run.settle(talks[0].session)
            counts = metrics.cached_tokens, metrics.prefilled_tokens, metrics.generated_tokens
            run.facts["the worker's account"] = (size + asked, *counts)


async def _ask(run: Run[Plan], talk: _Talk, text: str) -> Turn:
    """Ask one of the crowd, after looking where it is; one that is full goes back to its beginning."""
    for _ in range(2):
        if talk.turns >= KEPT_TURNS:
            with contextlib.suppress(TurnkeepError):  # the turn that follows will tell
                rewound = await talk.session.rewind(talk.beginning, timeout_s=run.plan.turn_timeout)
                talk.held, talk.turns = rewound.position, 0
        told, resident = None, False
        with contextlib.suppress(TurnkeepError):
            info = await talk.session.info()
            told, resident = info.position, info.resident
            run.sample(KV, "", run.elapsed_s, 0, info.worker.resident_kv_bytes / info.worker.max_memory_bytes)
            size_bytes = info.worker.process_bytes - info.worker.resident_kv_bytes
            run.sample(TURNING, "", run.elapsed_s, 0, size_bytes)
        turn = await talk.say(text, run.plan.max_tokens, told=told)
        talk.turns += 1
        if turn.error not in FULL or talk.turns == 1:
            break
        talk.turns = KEPT_TURNS
    found = turn.cached_tokens >= FOUND * (turn.fact("held") or 0)
    return replace(turn, case=MEMORY if resident else SSD if found else NOWHERE)


def order(sessions: int, skew: float, seed: int) -> Iterator[int]:
    """Yield which session is asked next, for ever.

    Every second turn is of one that was not asked yet, in random order, until all were; the others follow
    Zipf's law with the exponent `skew`: few sessions are asked often, most seldom.
    """
    draw = np.random.default_rng(seed)
    by_rank, unasked = draw.permutation(sessions), list(draw.permutation(sessions))
    shares = np.cumsum(1.0 / np.arange(1, sessions + 1) ** skew)
    while True:
        if unasked:
            yield int(unasked.pop())
        rank = int(np.searchsorted(shares, draw.random() * shares[-1], side="right"))
        yield int(by_rank[min(rank, sessions - 1)])


BENCH = Bench(
    name="load",
    title="Many sessions at once",
    plan=Plan,
    levels="sessions at a time",
    cases=("",),
    measures=(*_TIMES, *_SIZES),
    against=(Against(STAND, ALONE),),
    plots=PLOTS,
    checks=checks,
    measure=measure,
    remote=True,
    follows=follows,
)
