"""`turnkeep bench overhead`: the cost of a worker compared with mlx-lm alone, and the cost of snapshots.

Every side is a process, and the sides take turns in a random order: while one answers, the others are idle.
All get the same prompts, in sessions of several turns. The sides are paired by round.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, NamedTuple
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from turnkeep_client.client import connect
from turnkeep_client.messages import SnapshotCounters
from turnkeep_client.session import Session

from . import stats
from .checks import Check, bounded, count
from .corpus import Texts
from .faults import BenchError, together
from .local import LocalWorker, Program, common_blas, cpu_s
from .plan import Corpus, Option, Seed, TurnTimeout
from .run import Run
from .spec import Against, Bench, Findings, Plot
from .turns import Measure, Sample, Turn

IN_PROCESS, WORKER = "in process", "worker"
OFF, ON, SLOW, FAILING = "snapshots off", "snapshots on", "slow disk", "failing disk"
CASES = (IN_PROCESS, WORKER, OFF, ON, SLOW, FAILING)
#: Checks of the decoding speed: name, sides, and the least share of the speed without snapshots.
KEPT: Final = (("with snapshots on", (ON,), 0.98), ("on a bad disk", (SLOW, FAILING), 0.95))
#: The share of equal tokens that is required: rounding sometimes decides a near tie otherwise.
AGREEING: Final = 0.9
#: The most CPUs that all idle sides together may use.
IDLE_CPUS: Final = 0.05
#: How many steps the copying and writing of a block can delay, and how many steps around them to compare.
WINDOW: Final = 4
NEIGHBOURS: Final = 12
#: How long the slow disk syncs every file.
SYNC_S: Final = 5.0
#: The least `--max-batch` of the workers; a larger measured batch raises it.
MIN_BATCH: Final = 16
#: The pause between sides, for the acknowledgements and closed connections after an answer.
PAUSE_S: Final = 0.1
#: Ids that are neither special nor beyond the smallest vocabulary.
FIRST_ID: Final = 32

Tokens = tuple[int, ...]
Prompts = list[list[Tokens]]  # by turn, then by session


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The same prompts in process, with mlx-lm alone, and through workers over NATS.

    One worker has the default settings. Four do not speculate, and have snapshots off, on, on a slow disk,
    and on a failing disk. All sides keep caches from turn to turn, and stop answers at the same tokens. The
    two bad disks are those of the writer thread alone: each sync of a file takes 5 s, or fails with EIO.
    """

    batch: Annotated[tuple[int, ...], Option("Sessions at once.", smoke=(1, 2))] = (1, 4, 8, 16)
    rounds: Annotated[int, Option("How often all sides run.", smoke=1)] = 8
    turns: Annotated[int, Option("Turns of a session.", smoke=2)] = 3
    prompt_tokens: Annotated[int, Option("Most tokens of a prompt; at least half as many.", smoke=24)] = 128
    max_tokens: Annotated[int, Option("Most of one answer.", smoke=32)] = 48
    block_tokens: Annotated[int, Option("Tokens of a block.", smoke=16)] = 128
    turn_timeout: TurnTimeout = 300.0
    seed: Seed = 0
    corpus: Corpus = "mt-bench"


RATE = Measure("whole turns", "tokens/s", "higher")
FIRST = Measure("first token", "s", of=lambda turn: turn.first_s)
DECODING = Measure("decoding", "tokens/s", "higher")
PROMPTS = Measure("prompts", "tokens/s", "higher")
BESIDE = Measure("added by a block", "s", log=False)
SPEED = Against(DECODING, OFF)
IDLE = Measure("CPUs of the sides that wait", "share", log=False)
#: Checks of the sides' settings: a fact of turns and whether it must be above 0, the sides, the name.
STATES = (
    (("written", True), (WORKER, ON), "with snapshots on, some were written"),
    (("lost", False), (WORKER, ON), "with snapshots on, none was lost"),
    (("written", False), (OFF, FAILING), "without snapshots, and on the failing disk, none was written"),
    (("waiting", True), (SLOW,), "the slow disk kept snapshots waiting"),
    (("lost", True), (FAILING,), "the failing disk lost snapshots"),
)

ALONE = "In process one session is answered by mlx-lm's generate_step, several by its BatchGenerator."
BLOCK = f"What the {WINDOW} steps behind it take above their neighbours; without snapshots none is cut."
PLOTS = (
    Plot("by x", "Whole turns", (RATE,), f"Of all answers, prefill and recorded results included. {ALONE}"),
    Plot("by x", "Decoding", (DECODING,), "From when all answers have begun to the last token of all."),
    Plot("by x", "First token", (FIRST,), "From sending the turn."),
    Plot("by x", "Prompts", (PROMPTS,), "Tokens of all prompts by the time until all answers have begun."),
    Plot("by x", "A block of snapshots", (BESIDE,), BLOCK),
)


def checks(found: Findings[Plan]) -> Iterator[Check]:
    """Check that each side ran with its intended settings, and check the cost of snapshots."""
    through = [turn for turn in found.answered if turn.case != IN_PROCESS]
    name = "a worker ran the very tokens that were run in process"
    yield count(name, through, lambda turn: turn.position != (turn.fact("sent") or 0) + len(turn.tokens))
    first = [turn for turn in through if turn.facts["turn"] == 0]
    name = "no session began with what another one had left in a cache"
    yield count(name, first, lambda turn: turn.cached_tokens)
    later = [turn for turn in through if turn.facts["turn"] != 0]
    # The last token of the turn before has no KV yet.
    name = "later turns prefilled their own tokens only"
    yield count(name, later, lambda turn: turn.prefilled_tokens > (turn.own_tokens or 0) + 1)
    for (fact, some), sides, name in STATES:
        told = [bool(turn.facts[fact]) for turn in later if turn.case in sides]
        yield count(name, told, some.__ne__)
    name = f"the sides that waited took at most {IDLE_CPUS:.0%} of one CPU"
    yield bounded(name, found.numbers(IDLE), at_most=IDLE_CPUS, unit="share")
    name = f"at least {AGREEING:.0%} of the tokens in process are those of a worker"
    yield bounded(name, _agreeing(found.answered), at_least=AGREEING, unit="share")
    for where, sides, least in KEPT:
        places = {f"{side}, {n} at a time:": (side, n) for side in sides for n in found.plan.batch}
        whole = {label: found.compared(SPEED, *place) for label, place in places.items()}
        name = f"{where} answers decode at {least:.0%} of the speed without, or more"
        yield bounded(name, whole, at_least=least, log=True)
        left = {label: _speed_left(found, *place) for label, place in places.items()}
        name = f"{where} the steps beside a block leave {least:.0%} of the speed, or more"
        yield bounded(name, left, at_least=least)


def _speed_left(found: Findings[Plan], side: str, batch: int) -> list[float]:
    """Return, for each round, the decoding speed with snapshots as a share of the speed without them.

    Computed from the delay of the steps after a completed block, since whole answers vary by more than this
    delay. All sessions together complete a block every `block_tokens` tokens.
    """
    off, on = (found.blocks(BESIDE, case, batch) for case in (OFF, side))
    rates = found.blocks(DECODING, OFF, batch)
    both = [block for block in off if block in on and block in rates]
    return [1 - (on[one] - off[one]) * rates[one] / found.plan.block_tokens for one in both]


def _agreeing(turns: Sequence[Turn]) -> dict[str, list[float]]:
    """Return, for each side and round, the share of tokens that equal those of mlx-lm alone.

    After a session's first different answer, its later answers do not count.
    """
    answers = stats.grouped((((turn.case, *turn.place), turn.session), turn.tokens) for turn in turns)
    equal, of = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for ((side, batch, block), session), some in answers.items():
        meant = answers.get(((IN_PROCESS, batch, block), session), ()) if side != IN_PROCESS else ()
        for said, alone in zip(some, meant, strict=False):
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(said, alone, strict=False))
            equal[side, block] += len(list(same))
            of[side, block] += len(alone)
            if said != alone:
                break
    shares = {side: [equal[one] / of[one] for one in of if one[0] == side] for side in CASES}
    return {side: some for side, some in shares.items() if some}


def follows(turns: Sequence[Turn]) -> Iterator[Sample]:
    """Yield samples of each side and round: tokens/s in all, of prompts and of decoding; cost of a save.

    The cost is the mean time by which the steps after a completed block are longer than the others.
    """
    pairs = [((turn.case, *turn.place), turn) for turn in turns if turn.error is None]
    at_once = stats.grouped(((place, turn.facts["turn"]), turn) for place, turn in pairs)
    for (place, _), some in at_once.items():
        sent_s = min(turn.at_s for turn in some)
        seconds = max(turn.at_s + turn.total_s for turn in some) - sent_s
        begun_s = max(turn.at_s + (turn.first_s or 0.0) for turn in some) - sent_s
        yield Sample(RATE.name, *place, sum(len(turn.tokens) for turn in some) / seconds)
        yield Sample(PROMPTS.name, *place, sum(turn.own_tokens or 0 for turn in some) / begun_s)
        if (rate := decoding(some)) is not None:
            yield Sample(DECODING.name, *place, rate)
    paired = [(place, turn) for place, turn in pairs if turn.case not in {IN_PROCESS, WORKER}]
    added = stats.grouped((place, cost_s) for place, turn in paired for cost_s in beside_blocks(turn))
    for place, costs_s in added.items():
        yield Sample(BESIDE.name, *place, statistics.fmean(costs_s))


def steps(turn: Turn) -> list[float]:
    """Return the seconds between an answer's tokens; 0 between tokens of the same chunk."""
    gaps_s = (0.0, *turn.gaps_s)  # the first chunk has no gap before it
    found: list[float] = []
    for gap_s, number in zip(gaps_s, turn.counts or (1,) * len(gaps_s), strict=True):
        found += (gap_s, *(number - 1) * (0.0,)) if number else ()
    return found[1:]


def decoding(turns: Sequence[Turn]) -> float | None:
    """Return the tokens per second from the moment when all answers have begun to the last token.

    None if most tokens came before that moment, since the remaining time is too short to measure.
    """
    begins = [turn.at_s + (turn.first_s or 0.0) for turn in turns]
    pairs = zip(turns, begins, strict=True)
    times_s = [at_s for turn, begin_s in pairs for at_s in itertools.accumulate(steps(turn), initial=begin_s)]
    later, seconds = sum(at_s > max(begins) for at_s in times_s), max(times_s) - max(begins)
    return later / seconds if 2 * later >= len(times_s) and seconds > 0 else None


def beside_blocks(turn: Turn) -> list[float]:
    """Return, for each completed block, how much longer `WINDOW` steps took than the steps around them.

    A sampled token completes the block, so copying and writing the block can delay the `WINDOW` steps after
    that token. These are compared with the median of the steps before and after them. So a cost of
    milliseconds is visible although whole answers vary by seconds.
    """
    steps_s, found, block_tokens = steps(turn), [], int(turn.fact("block_tokens") or 0)
    first = block_tokens - ((turn.position or 0) - len(turn.tokens)) % block_tokens
    for drawn in range(first, len(steps_s) - WINDOW + 1, block_tokens):
        end = drawn + WINDOW
        around = steps_s[max(0, drawn - NEIGHBOURS) : drawn] + steps_s[end : end + NEIGHBOURS]
        if len(around) >= NEIGHBOURS:
            found.append(sum(steps_s[drawn:end]) - WINDOW * statistics.median(around))
    return found


async def measure(run: Run[Plan]) -> None:
    """Start all sides and run the rounds, after a warm-up round of one turn that is not recorded."""
    plan, order = run.plan, random.Random(run.plan.seed)  # noqa: S311  # an order, not a secret
    async with contextlib.AsyncExitStack() as stack:
        sides, folder = await _start(run, stack)
        texts, done = Texts(folder, run.corpus.texts()), itertools.count()
        total = (plan.rounds + 1) * len(plan.batch) * len(sides)
        for block in range(-1, plan.rounds):
            for batch in order.sample(plan.batch, len(plan.batch)):
                turns = range(plan.turns if block >= 0 else 1)
                prompts = [[_prompt(texts, order, plan, i) for i in range(batch)] for _ in turns]
                for side in order.sample(sides, len(sides)):
                    where = f"round {block + 1} of {plan.rounds}, {batch} at a time, {side.case}"
                    run.progress(next(done), total, where)
                    others = [other.pid for other in sides if other is not side]
                    began_s, before_s = time.monotonic(), sum(map(cpu_s, others))
                    answers = await side.answer(prompts)
                    idle = (sum(map(cpu_s, others)) - before_s) / (time.monotonic() - began_s)
                    if block >= 0:
                        _keep(run, side.case, block, prompts, answers)
                        run.sample(IDLE, side.case, None, block, idle)
                    await asyncio.sleep(PAUSE_S)


def _keep(run: Run[Plan], case: str, block: int, prompts: Prompts, answers: list[list[Turn]]) -> None:
    """Record the answers of one side. Raises `BenchError` if a turn failed."""
    sent = [0] * len(prompts[0])
    for number, (asked, turns) in enumerate(zip(prompts, answers, strict=True)):
        for i, (prompt, turn) in enumerate(zip(asked, turns, strict=True)):
            sent[i] += len(prompt)
            facts = {"turn": number, "sent": sent[i], "block_tokens": run.plan.block_tokens}
            whose = {"case": case, "x": len(asked), "block": block, "session": f"s{i}"}
            position = sent[i] + len(turn.tokens) if case == IN_PROCESS else turn.position
            whose |= {"own_tokens": len(prompt), "position": position}
            run.keep(replace(turn, **whose, facts=turn.facts | facts))
            if turn.error is not None:  # the sides' histories now differ
                raise BenchError(f"a turn failed: {turn.message}")
            sent[i] += len(turn.tokens)


class Side(NamedTuple):
    """One side of the comparison: a process of mlx-lm, or a worker.

    `answer` runs new sessions of several turns, and sends the prompts of all sessions' next turn at once.
    """

    case: str
    pid: int
    answer: Callable[[Prompts], Awaitable[list[list[Turn]]]]


def _in_process(run: Run[Plan], program: Program) -> Side:
    """Make the side of mlx-lm alone, whose program measures the times itself."""

    async def answer(prompts: Prompts) -> list[list[Turn]]:
        at_s = run.elapsed_s
        asked = msgspec.json.encode((prompts, run.plan.max_tokens)) + b"\n"
        with run.timing():
            line = await program.exchange(asked, len(prompts) * run.plan.turn_timeout)
        answers = msgspec.json.decode(line, type=list[list[Turn]])
        return [[replace(turn, at_s=at_s + turn.at_s) for turn in turns] for turns in answers]

    return Side(IN_PROCESS, program.pid, answer)


def _through(run: Run[Plan], case: str, worker: LocalWorker) -> Side:
    """Make the side of a worker, which answers over NATS as for any client.

    Each call of `answer` uses a new tenant, for which the cache has nothing.
    """
    timeout_s, max_tokens = run.plan.turn_timeout, run.plan.max_tokens

    async def counters(idle: Session) -> SnapshotCounters:
        """Return the snapshot counters once all snapshots are written; on the slow disk at once."""
        metrics = (await idle.info()).worker if case == SLOW else await run.wait_for_snapshots(idle)
        return metrics.snapshots

    async def answer(prompts: Prompts) -> list[list[Turn]]:
        answers = []
        async with connect(worker.url, tenant=f"bench-{uuid4().hex[:12]}") as client:
            idle, *sessions = (client.session(f"s{i}") for i in range(-1, len(prompts[0])))
            await idle.open(timeout_s=timeout_s)  # only to read the worker's counters by `info`
            before = await counters(idle)
            for asked in prompts:
                pairs = zip(sessions, asked, strict=True)
                asking = (run.ask(one, tokens=prompt, max_tokens=max_tokens) for one, prompt in pairs)
                turns = await asyncio.gather(*asking)
                after = await counters(idle)
                sooner, later = (one.failed + sum(one.dropped.values()) for one in (before, after))
                facts = {"written": after.durable - before.durable, "lost": later - sooner}
                answers.append([replace(turn, facts=facts | {"waiting": after.in_flight}) for turn in turns])
            # This also drops snapshots that wait for the disk, so the next side has the machine to itself.
            await asyncio.gather(*(one.close(forget=True, timeout_s=timeout_s) for one in (idle, *sessions)))
        return answers

    return Side(case, worker.pid, answer)


async def _start(run: Run[Plan], stack: contextlib.AsyncExitStack) -> tuple[list[Side], Path]:
    """Start all sides; return the sides, and the folder of their common model."""
    plan, sides = run.plan, dict[str, Side]()
    common = ("--max-batch", f"{max(MIN_BATCH, *plan.batch)}", "--block-tokens", f"{plan.block_tokens}")

    async def start(case: str, *options: str, disk: str | None = None) -> LocalWorker:
        program = () if disk is None else ("bench.disk", disk, *run.where.program)
        worker, _ = await stack.enter_async_context(run.worker(*common, *options, program=program))
        sides[case] = _through(run, case, worker)
        return worker

    first = await start(WORKER)
    folder = first.model_folder
    # No drafts: with speculation the speed of a single answer depends on its text.
    same = ("--model", str(folder), "--max-draft", "0")
    await together(
        start(OFF, *same, "--snapshots", "off"),
        start(ON, *same),
        start(SLOW, *same, disk=f"{SYNC_S}"),
        start(FAILING, *same, disk="fails"),
    )
    program = Program("bench.programs.in_process", folder, like=first)
    stack.enter_context(run.owning(program))
    await program.exchange(timeout_s=plan.turn_timeout)  # its first line means ready
    sides[IN_PROCESS] = _in_process(run, program)
    run.facts["BLAS"] = common_blas(first, program)
    return [sides[case] for case in CASES], folder


def _prompt(texts: Texts, order: random.Random, plan: Plan, number: int) -> Tokens:
    """Return a prompt whose first token is unique among its turn's, since a corpus repeats itself."""
    most = plan.prompt_tokens
    return (FIRST_ID + number, *texts.next_tokens(order.randint(most // 2, most) - 1))


BENCH = Bench(
    name="overhead",
    plan=Plan,
    levels="at a time",
    cases=CASES,
    measures=(RATE, FIRST, DECODING, PROMPTS, BESIDE),
    against=(
        *(Against(measure, IN_PROCESS) for measure in (RATE, DECODING, PROMPTS)),
        Against(FIRST, IN_PROCESS, "difference"),
        *(Against(RATE, OFF), SPEED, Against(PROMPTS, OFF), Against(BESIDE, OFF, "difference")),
    ),
    plots=PLOTS,
    checks=checks,
    measure=measure,
    follows=follows,
)
