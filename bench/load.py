"""`turnkeep bench load`: throughput, waiting, stalls and fairness with many sessions, at several loads.

Each level of load opens sessions, sends turns to them in one of several ways, and closes them. A block is the
unit of statistics. In a closed loop it is two waves of turns; a wave has one turn for each session served at
a time. In an open loop a block has the turns that are due in a tenth of the level's time; with a crowd (more
sessions than fit into memory) a tenth of the crowd's turns. With a long prompt it is one prefill of this
prompt, and the answers that run beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, islice, pairwise
from itertools import count as counted
from statistics import median
from typing import Annotated, Any, Final
from uuid import uuid4

import numpy as np
from msgspec.structs import replace

from turnkeep_client.client import Client
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import Metrics
from turnkeep_client.session import Session

from . import stats
from .checks import STRETCHES, Check, bounded, count, held_tokens_are_cheap, keeps_its_size
from .faults import BenchError, together
from .plan import Corpus, Option, Seed, TurnTimeout
from .run import FAULT_PAUSE_S, Run
from .spec import Against, Bench, Findings, Plot
from .turns import Measure, Sample, Turn

#: Waves in a block: a wave shares steps with the next one, so a single wave would not be independent.
WAVES: Final = 2
#: The default number of sessions begun at a time, and the number closed at a time.
AT_ONCE: Final = 8
CLOSE_TIMEOUT_S: Final = 5.0
#: An opening only needs its prompt, so its answer is as short as templates allow.
OPENING_TOKENS: Final = 4
#: Chunks closer than this arrived in one packet: no reader sees a gap between them.
ONE_ARRIVAL_S: Final = 0.0005
#: Sessions whose token counts are within this share of the median had equal work.
EQUAL: Final = 0.1
#: The number of answers beside a long prompt, and the range of its token ids, which all vocabularies have.
ANSWERS, IDS = 4, (32, 240)
#: A shorter prefill is over within a few steps, so its stalls are not informative.
MIN_PROMPT_S: Final = 2.0
#: How many sessions of a crowd are begun at a time, and the exponent of Zipf's law for its turns.
CROWD_AT_ONCE, SKEW = 64, 1.1
#: A session of a crowd is rewound after this many turns, so that popular sessions stay small.
KEPT_TURNS: Final = 4
MIN_MEMORY_BYTES: Final = 2**20

OPENING, BEGINNING, ANSWER = "opening", "a beginning", "answer beside a prompt"
ALONE, BESIDE = "alone", "beside a long prompt"
MEMORY, SSD, NOWHERE = FOUND_IN = ("found in memory", "found on SSD", "prefilled")

CLOSED: Final = "Closed loops: sessions at a time. [default: 1,2,4,8,16; none with other levels]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Many sessions at once: throughput, waiting, stalls and fairness at each load.

    In a closed loop a fixed number of sessions is served at a time. In an open loop turns are due whatever
    the worker does, at random times, and a turn's time counts from when it was due. A crowd is more sessions
    than fit in memory: all are begun, then asked in a random order, some of them often; the report
    separates turns by where their KV was found: in memory, on SSD, or nowhere.
    """

    concurrency: Annotated[tuple[int, ...] | None, Option(CLOSED, smoke=(1, 4))] = None
    rate: Annotated[tuple[float, ...] | None, Option("Open loops: turns due a second.", smoke=(2.0,))] = None
    duration: Annotated[float, Option("Of an open loop.", smoke=2.0, metavar="SECONDS")] = 60.0
    sessions: Annotated[int, Option("Sessions of each level.", smoke=4)] = 16
    turns: Annotated[int, Option("Turns of a session in a closed loop.", smoke=3)] = 5
    history: Annotated[int, Option("Most utterances that a session begins with.", smoke=3)] = 6
    max_tokens: Annotated[int, Option("Most of one answer.", smoke=6)] = 64
    long_prompt: Annotated[int | None, Option("Prefill so many tokens beside answers.", smoke=256)] = None
    rounds: Annotated[int, Option("How often the long prompt is sent.", smoke=1)] = 5
    answer_tokens: Annotated[int, Option("Most of an answer beside the long prompt.", smoke=64)] = 256
    pause: Annotated[float, Option("Answers are alone before it.", smoke=0.3, metavar="SECONDS")] = 2.0
    crowd: Annotated[int | None, Option("So many sessions, more than fit in memory.", smoke=20)] = None
    crowd_turns: Annotated[int | None, Option("Turns of the crowd. [default: two for each]")] = None
    room: Annotated[int, Option("Sessions of the crowd that fit in memory.", smoke=2)] = 8
    turn_timeout: TurnTimeout = 300.0
    seed: Seed = 0
    corpus: Corpus = "mt-bench"

    @property
    def closed(self) -> tuple[int, ...]:
        """The levels of the closed loops, in sessions at a time."""
        others = self.rate or self.crowd
        return self.concurrency or (() if others else (1, 2, 4, 8, 16))


def _user(of: Callable[[Turn], Any]) -> Callable[[Turn], Any]:
    """Wrap `of` to return None for turns outside the load: openings, and answers beside a long prompt."""
    return lambda turn: None if turn.case in {OPENING, ANSWER} else of(turn)


def _late(turn: Turn) -> float:
    """Return how many seconds after it was due a turn was sent. A user waits for that time too."""
    return turn.fact("late_s") or 0.0


def _gaps(turn: Turn) -> list[float]:
    return [gap for gap in turn.gaps_s if gap >= ONE_ARRIVAL_S]


GENERATED = Measure("generated", "tokens/s", "higher", log=False)
FIRST = Measure("first chunk", "s", of=_user(lambda turn: _late(turn) + (turn.first_s or turn.total_s)))
WHOLE = Measure("whole turn", "s", of=_user(lambda turn: _late(turn) + turn.total_s))
PACE = Measure("time per token", "s", of=_user(lambda turn: turn.per_token_s))
GAP = Measure("gap between chunks", "s", of=_user(_gaps))
QUEUED = Measure("queued", "s", of=_user(lambda turn: turn.queued_s), log=False)
FAIR = Measure("slowest, of the median", "share", "higher", log=False)
STAND = Measure("running answers stand still", "s")
HELD_UP = Measure("longest stand, of the long prompt's time", "share", log=False)
PROMPT = Measure("a long prompt", "s")
PER_SESSION = Measure("process memory of a session, KV left out", "bytes", log=False)
STORED = Measure("bytes on SSD of a session", "bytes")
PROCESS = Measure("process without KV", "bytes", levels="")
KV = Measure("KV on the device, of its limit", "share", log=False, levels="")
LEVELS = (GENERATED, FIRST, WHOLE, PACE, GAP, QUEUED, FAIR)

PLOTS = (
    Plot("by x", "Throughput", (GENERATED,), "Of all sessions of a closed loop together."),
    Plot("by x", "Fairness", (FAIR,), "Tokens a second of those who were served side by side."),
    Plot("cdf", "First chunk", (FIRST,), "From when a turn was due: what a user waits.", log=True),
    Plot("cdf", "Time per token", (PACE,), "After the first chunk, turn by turn.", log=True),
    Plot("cdf", "Gaps between chunks", (GAP,), "A long shoulder waits for the prefill of others.", log=True),
    Plot("cdf", "Answers beside a long prompt", (STAND,), "Gaps between their chunks.", log=True),
    Plot("over time", "KV on the device", (KV,), "As the worker publishes it, of its limit."),
    Plot("over time", "Process without KV", (PROCESS,), "It grows with a crowd's sessions, by little."),
)


def follows(turns: Sequence[Turn]) -> Iterator[Sample]:
    """Yield samples computed from several turns: rates, fairness, and stalls beside a long prompt."""
    sent = [turn for turn in turns if turn.fact("late_s") is not None]
    for (case, x), level in stats.grouped(((turn.case, turn.x), turn) for turn in sent).items():
        yield from (Sample(GENERATED.name, case, x, *rate) for rate in enumerate(_generated(level)))
    for place, wave in stats.grouped((turn.place, turn) for turn in sent if (turn.x or 0) > 1).items():
        rates = _served(wave)
        if len(rates) > 1 and median(rates) > 0:
            yield Sample(FAIR.name, "", *place, min(rates) / median(rates))
    yield from _stalls([turn for turn in turns if turn.case == ANSWER and turn.first_s is not None])


def _generated(turns: Sequence[Turn]) -> list[float]:
    """Return the tokens generated per second in each of several equal parts of the time at full load.

    The tokens of an answer are assumed to be spread evenly from its first chunk to its end.
    """
    ends = {turn.fact("number"): turn.at_s + turn.total_s for turn in turns}  # of each session's last turn
    # A closed loop is at full load while no client is idle, an open one until the last turn is sent.
    at_once = min(int(turns[0].x or 0), len(ends))
    end_s = sorted(ends.values())[-at_once] if at_once else max(turn.at_s for turn in turns)
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


def _served(turns: Sequence[Turn]) -> list[float]:
    """Return the tokens per second of each session with about as many tokens as the median session.

    Sessions with a failed turn count too, with the few tokens that they got.
    """
    by_number = stats.grouped((turn.fact("number"), turn) for turn in turns)
    tokens = {one: sum(len(turn.tokens) for turn in some) for one, some in by_number.items()}
    seconds = {one: sum(_late(turn) + turn.total_s for turn in some) for one, some in by_number.items()}
    failed = {turn.fact("number") for turn in turns if turn.error is not None}
    middle = median([size for one, size in tokens.items() if one not in failed] or [0])
    alike = [one for one, size in tokens.items() if one in failed or abs(size - middle) <= EQUAL * middle]
    return [tokens[one] / seconds[one] for one in alike if seconds[one] > 0]


def _stalls(answers: Sequence[Turn]) -> Iterator[Sample]:
    """Yield the gaps between chunks of answers: before a long prompt is sent, and while it is prefilled.

    Also yield each block's longest gap beside the prompt, as a share of the prompt's time.
    """
    longest: defaultdict[int, float] = defaultdict(float)
    for turn in answers:
        alone_s, sent_s, over_s = (turn.fact(name) or 0.0 for name in ("alone_s", "sent_s", "over_s"))
        arrivals = accumulate(turn.gaps_s, initial=turn.at_s + (turn.first_s or 0.0))
        for start_s, end_s in pairwise(arrivals):
            beside, gap = end_s > sent_s, end_s - start_s
            if gap >= ONE_ARRIVAL_S and alone_s <= start_s < over_s:
                yield Sample(STAND.name, BESIDE if beside else ALONE, None, turn.block, gap)
                if beside and over_s - sent_s >= MIN_PROMPT_S:
                    longest[turn.block] = max(longest[turn.block], gap / (over_s - sent_s))
    yield from (Sample(HELD_UP.name, "", None, *longest_share) for longest_share in longest.items())


def checks(found: Findings[Plan]) -> Iterator[Check]:
    """Check the cost of cached tokens, fairness, stalls, the KV limit, and that no session was lost."""
    plan = found.plan
    one = [turn for turn in found.turns if turn.x == 1 and turn.case in {"", OPENING}]
    crowd = [turn for turn in found.turns if turn.case in {BEGINNING, *FOUND_IN}]
    by_session = [replace(turn, block=int(turn.fact("number") or 0)) for turn in one]
    runs = {"one at a time": by_session, "crowd": crowd}
    yield held_tokens_are_cheap({name: turns for name, turns in runs.items() if turns})
    waves = {f"{x:g}": [*found.blocks(FAIR, "", x).values()] for x in plan.closed if x > 1}
    if waves:
        name = "the slowest of those served side by side gets a quarter of their median, and more"
        yield bounded(name, {x: some for x, some in waves.items() if some}, at_least=0.25, unit="share")
    name = "KV on the device stays within its limit"
    yield count(name, found.of(KV), lambda reading: reading.value > 1, "readings")
    if plan.long_prompt is not None:
        shares = [*found.blocks(HELD_UP, "").values()]
        name = "running answers stand still for a quarter of a long prompt's time at most"
        yield bounded(name, {"": shares}, at_most=0.25, unit="share")
    if plan.crowd is not None:
        asked = [turn for turn in crowd if turn.case != BEGINNING]
        sessions = len({turn.fact("number") for turn in asked})
        yield count("no session was forgotten", asked, _forgotten, f"turns of {sessions:,} sessions")
        began_s = min((turn.at_s for turn in asked), default=0.0)
        yield keeps_its_size([one for one in found.of(PROCESS) if (one.x or 0.0) >= began_s])


def _forgotten(turn: Turn) -> bool:
    """Say whether the worker lost a part of the session: the turn does not continue at its last position."""
    held, told = turn.fact("held"), turn.fact("told")
    if held is None:
        return False
    kept = held if turn.rewritten_from is None else turn.rewritten_from
    short = turn.position is not None and turn.position - len(turn.tokens) <= kept
    return short or told not in {None, held}


async def measure(run: Run[Plan]) -> None:
    """Run all levels one after the other, then the rounds of the long prompt, then the crowd."""
    plan, most_bytes = run.plan, 0
    sizes: list[tuple[int, int]] = []

    def note(at_s: float, metrics: Metrics) -> None:
        beside_bytes = metrics.process_bytes - metrics.resident_kv_bytes
        sizes.append((len(run.turns), beside_bytes))  # not `metrics.sessions`: workers unload idle sessions
        run.sample(PROCESS, "", at_s, 0, beside_bytes)
        run.sample(KV, "", at_s, 0, metrics.resident_kv_bytes / max(metrics.kv_limit_bytes, 1))

    async with run.target() as client, run.watching(client, note):
        for at_once in plan.closed:
            dues = [[None] * plan.turns] * max(plan.sessions, at_once)
            await _loop(run, client, dues, at_once, x=at_once)
        for rate in plan.rate or ():
            await _loop(run, client, _poisson(run, rate), plan.sessions, case=f"{rate:g} a second")
        for block in range(plan.rounds if plan.long_prompt is not None else 0):
            await _long_prompt(run, client, block)
        if plan.crowd is not None:
            most_bytes, metrics = await _most_bytes(run, client), await client.worker_metrics()
    if plan.crowd is not None:
        memory = run.limited(metrics, max(MIN_MEMORY_BYTES, plan.room * most_bytes))
        async with run.target(*memory) as client, run.watching(client, note):
            await _crowd(run, client, plan.crowd, sizes)


@dataclass(slots=True)
class _Talk:
    """A session and its next messages. `held` is the number of its tokens, None if that is unknown."""

    run: Run[Plan]
    session: Session
    number: int
    texts: Iterator[str]
    held: int | None = 0
    beginning: int = 0
    turns: int = 0

    async def say(
        self, max_tokens: int, utterances: int = 1, *, begun: asyncio.Event | None = None, **facts: Any
    ) -> Turn:
        """Send a turn of `utterances` messages, and wait for the answer.

        The first text contains the session's name, so that sessions share no KV.
        """
        name = () if self.held else (f"[{self.session.key.session}]",)
        text = "\n\n".join((*name, *islice(self.texts, utterances)))
        messages = [{"role": "user", "content": text}]
        facts = {"number": self.number, "held": self.held} | facts
        turn = await self.run.ask(self.session, messages=messages, max_tokens=max_tokens, begun=begun)
        self.held, self.turns = turn.position, self.turns + 1
        if turn.error is not None:
            await asyncio.sleep(FAULT_PAUSE_S)
        return replace(turn, facts=facts)


@contextlib.asynccontextmanager
async def _level(
    run: Run[Plan], client: Client, utterances: Sequence[int], at_once: int = AT_ONCE, **opening: Any
) -> AsyncGenerator[list[_Talk]]:
    """Begin a session for each number in `utterances`, which is the number of messages in its first prompt.

    The sessions are closed after the block.
    """
    chats, name = run.corpus.conversations, uuid4().hex[:8]

    def talk(number: int) -> _Talk:
        some = islice(cycle(chats), number % len(chats), None)
        texts = (said for chat in some for said in chat)
        return _Talk(run, client.session(f"{number}-{name}"), number, texts)

    async def begin(talk: _Talk) -> None:
        if utterances[talk.number]:
            run.progress(len(run.turns), None, f"beginning {len(talks):,} sessions")
            run.keep(replace(await talk.say(OPENING_TOKENS, utterances[talk.number]), **opening))
            talk.beginning, talk.turns = talk.held or 0, 0

    async def close(talk: _Talk) -> None:
        with contextlib.suppress(TurnkeepError):
            await talk.session.close(timeout_s=CLOSE_TIMEOUT_S)

    talks = [talk(number) for number in range(len(utterances))]
    limit_s: float | None = CLOSE_TIMEOUT_S  # after an interrupt, do not wait for a whole crowd
    try:
        await _each(talks, begin, at_once)
        yield talks
        limit_s = None
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await _each(talks, close, AT_ONCE)


async def _each(talks: Iterable[_Talk], act: Callable[[_Talk], Awaitable[None]], at_once: int) -> None:
    waiting = iter(talks)

    async def work() -> None:
        for talk in waiting:
            await act(talk)

    await together(*(work() for _ in range(at_once)))


async def _loop(
    run: Run[Plan], client: Client, dues: Sequence[Sequence[float | None]], at_once: int, **place: Any
) -> None:
    """Send each session's turns, `at_once` sessions at a time.

    `dues` has, for each session, when its turns are due, in seconds from the level's start; None means
    directly after the answer before it.
    """
    plan, sent = run.plan, counted()

    async def converse(talk: _Talk) -> None:
        for due_s in dues[talk.number]:
            late_s, block = 0.0, next(sent) // (WAVES * at_once)
            if due_s is not None:
                await asyncio.sleep(max(0.0, began_s + due_s - run.elapsed_s))
                late_s = max(0.0, run.elapsed_s - began_s - due_s)
                block = int(STRETCHES * due_s / plan.duration)
            run.keep(replace(await talk.say(plan.max_tokens, late_s=late_s), block=block, **place))
            run.progress(len(run.turns), None, place.get("case") or f"{at_once} at a time")

    histories = [number % (plan.history + 1) for number in range(len(dues))]
    opening = place | {"case": OPENING}
    async with _level(run, client, histories, min(at_once, AT_ONCE), **opening) as talks:
        began_s = run.elapsed_s
        await _each(talks, converse, at_once)


def _poisson(run: Run[Plan], rate: float) -> list[list[float]]:
    """Draw when each session's turns are due, in seconds: a Poisson process with `rate` turns per second.

    The session of each turn is drawn uniformly.
    """
    plan, draw = run.plan, np.random.default_rng(run.plan.seed)
    times = np.sort(draw.uniform(0, plan.duration, draw.poisson(rate * plan.duration)))
    owners = draw.integers(plan.sessions, size=times.size)
    return [times[owners == number].tolist() for number in range(plan.sessions)]


async def _long_prompt(run: Run[Plan], client: Client, block: int) -> None:
    """Time answers beside a long prompt, which is sent when all these answers have begun."""
    plan, begun = run.plan, [asyncio.Event() for _ in range(ANSWERS)]
    answers: list[Turn] = []
    times: list[float] = []

    async def answer(talk: _Talk) -> None:
        answers.append(await talk.say(plan.answer_tokens, begun=begun[talk.number]))
        begun[talk.number].set()  # after a failure too

    async def prefill(session: Session) -> None:
        await asyncio.gather(*(event.wait() for event in begun))
        times.append(run.elapsed_s)
        await asyncio.sleep(plan.pause)
        times.append(run.elapsed_s)
        with run.timing():
            await session.append(tokens=tokens, timeout_s=plan.turn_timeout)
        times.append(run.elapsed_s)

    run.progress(len(run.turns), None, f"a long prompt, round {block + 1} of {plan.rounds}")
    tokens = np.random.default_rng().integers(*IDS, plan.long_prompt).tolist()
    async with _level(run, client, [0] * (ANSWERS + 1)) as talks:
        await together(prefill(talks[-1].session), *map(answer, talks[:-1]))
    facts = dict(zip(("alone_s", "sent_s", "over_s"), times, strict=True))
    run.keep(*(replace(turn, case=ANSWER, block=block, facts=facts) for turn in answers))
    run.sample(PROMPT, "", None, block, times[2] - times[1])


async def _most_bytes(run: Run[Plan], client: Client) -> int:
    """Run a session of the length that the crowd's sessions reach; return the bytes of its KV."""
    plan = run.plan
    run.progress(len(run.turns), None, "sizing the crowd's sessions")
    async with _level(run, client, [0]) as (talk,):
        turn = await talk.say(KEPT_TURNS * plan.max_tokens, plan.history + KEPT_TURNS)
    if turn.error is not None:
        raise BenchError(f"a session of the crowd cannot have its full length: {turn.message}")
    return turn.kv_live_bytes


async def _crowd(run: Run[Plan], client: Client, size: int, sizes: Sequence[tuple[int, int]]) -> None:
    """Begin a crowd of `size` sessions, many at a time; then send turns one by one, in random order."""
    plan, before, turns = run.plan, len(sizes), len(run.turns)
    asked = order(size, plan.crowd_turns or 2 * size, plan.seed)
    async with _level(run, client, [plan.history] * size, CROWD_AT_ONCE, case=BEGINNING) as talks:
        # The first sessions are left out, since they fill the process's own caches.
        late = [(sent - turns, taken) for sent, taken in sizes[before:] if sent - turns > size / 4]
        points = [(STRETCHES * begun // (size + 1), begun, taken) for begun, taken in late]
        for block, slope in enumerate(stats.slopes(points)):
            run.sample(PER_SESSION, "", None, block, slope)
        metrics = await run.wait_for_snapshots(talks[0].session)
        run.sample(STORED, "", None, 0, max(metrics.snapshots.stored_bytes / size, 1))
        for i, number in enumerate(asked):
            run.progress(i, len(asked), f"turn {i + 1:,} of a crowd's {len(asked):,}")
            run.keep(replace(await _ask(run, talks[number]), block=STRETCHES * i // len(asked)))


async def _ask(run: Run[Plan], talk: _Talk) -> Turn:
    """Send a turn to a session of the crowd; first ask the worker where the session's KV is."""
    told, resident = None, False
    with contextlib.suppress(TurnkeepError):  # the following turn reports it
        if talk.turns == KEPT_TURNS:
            rewound = await talk.session.rewind(talk.beginning, timeout_s=run.plan.turn_timeout)
            talk.held, talk.turns = rewound.position, 0
        info = await talk.session.info()
        told, resident = info.position, info.resident
    turn = await talk.say(run.plan.max_tokens, told=told)
    found = turn.cached_tokens >= (turn.fact("held") or 0) / 2
    return replace(turn, case=MEMORY if resident else SSD if found else NOWHERE)


def order(sessions: int, turns: int, seed: int) -> list[int]:
    """Draw the session of each turn, in random order: each session once, further turns by Zipf's law."""
    draw = np.random.default_rng(seed)
    shares = 1.0 / np.arange(1, sessions + 1) ** SKEW
    popular = draw.choice(draw.permutation(sessions), max(turns - sessions, 0), p=shares / shares.sum())
    every = np.concatenate((draw.permutation(sessions)[:turns], popular))
    chosen: list[int] = draw.permutation(every).tolist()
    return chosen


BENCH = Bench(
    name="load",
    plan=Plan,
    levels="sessions at a time",
    measures=(*LEVELS, STAND, HELD_UP, PROMPT, PER_SESSION, STORED, PROCESS, KV),
    against=(Against(STAND, ALONE),),
    plots=PLOTS,
    checks=checks,
    measure=measure,
    remote=True,
    follows=follows,
)
