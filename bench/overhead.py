"""`turnkeep bench overhead`: what a worker costs beside the model in process, and what snapshots cost.

Every side has a process of its own, and all take turns: one answers while the others wait, in another order
each time. The same prompts go to each, in sessions of several turns; a round is what pairs the sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final
from uuid import uuid4

import click
import psutil
from msgspec.structs import replace

from . import blas
from .baseline.messages import Forget, Say
from .baseline.process import running
from .checks import Check, bounded, count
from .faults import BenchError
from .plan import Corpus, Option, Seed, TurnTimeout
from .samples import Sample, Turn
from .spec import Against, Bench, Measure, Plot
from .together import together
from .tokens import Texts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from turnkeep_client.messages import SnapshotCounters
    from turnkeep_client.session import Session

    from .baseline.messages import Row
    from .baseline.process import Baseline
    from .local import LocalWorker
    from .run import Run
    from .samples import Findings

IN_PROCESS, WORKER, OFF, ON, SLOW, FAILING = CASES = (
    *("in process", "worker", "snapshots off", "snapshots on", "slow disk", "failing disk"),
)
#: What is promised of the decoding speed without snapshots.
KEPT: Final = {ON: 0.98, SLOW: 0.95, FAILING: 0.95}
#: Of an answer in process, so much is to be said through a worker too: a near tie turns now and then.
AGREEING: Final = 0.9
#: CPUs that all waiting sides together may use without being a burden to the one that is measured.
IDLE_CPUS: Final = 0.05
#: The steps that a block's copying and writing can hold up, and how many on each side of them it cannot.
WINDOW: Final = 4
NEIGHBOURS: Final = 12
#: What a worker serves at a time by default, and more where a larger batch is measured.
MIN_BATCH: Final = 16
#: From one side to the next: acknowledgements and closed connections, which follow an answer, are over then.
PAUSE_S: Final = 0.1
#: Ids that are neither special nor beyond the smallest vocabulary.
FIRST_ID: Final = 32

Tokens = tuple[int, ...]
Batches = Annotated[tuple[int, ...], Option("Sessions at a time.", smoke=(1, 2))]
Sync = Annotated[
    float, Option("What the slow disk takes for every file.", type=click.FloatRange(min=0), metavar="SECONDS")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The same prompts in process, with mlx-lm alone, and through workers over NATS.

    One worker is as it ships; four guess nothing ahead, and have snapshots off, on, on a slow disk and on one
    that fails. Everywhere caches are kept from turn to turn, and answers stop at the same tokens. The two bad
    disks are those of the writer thread alone: each sync of a file takes long, or fails with EIO; what a
    worker has to say of that goes to the terminal.
    """

    batch: Batches = (1, 4, 8, 16)
    rounds: Annotated[int, Option("How often all sides run.", smoke=1)] = 8
    turns: Annotated[int, Option("Turns of a session.", smoke=2)] = 3
    prompt_tokens: Annotated[int, Option("Most tokens of a prompt; at least half as many.", smoke=24)] = 128
    max_tokens: Annotated[int, Option("Most of one answer.", smoke=32)] = 48
    block_tokens: Annotated[int, Option("Tokens of a block.", smoke=16)] = 128
    prefill_step: Annotated[int, Option("Step of the prefill in process.")] = 2048
    sync: Sync = 5.0
    turn_timeout: TurnTimeout = 300.0
    seed: Seed = 0
    corpus: Corpus = "mt-bench"


RATE = Measure("whole turns", "tokens/s", "higher")
FIRST = Measure("first token", "s", of=lambda turn: turn.first_s)
DECODING = Measure("decoding", "tokens/s", "higher")
PROMPTS = Measure("prompts", "tokens/s", "higher")
BESIDE = Measure("added by a block", "s", log=False)
MEASURES = (RATE, FIRST, DECODING, PROMPTS, BESIDE)
#: What became of the snapshots of all sessions at a time: on disk, given up, still on their way at the end.
WRITTEN, LOST, WAITING = (Measure(name, "", log=False) for name in ("written", "lost", "waiting"))
#: Whether a side is what it is called: which of them has some, every time, and which none.
STATES = (
    ("with snapshots on, some were written", (WORKER, ON), WRITTEN, True),
    ("with snapshots on, none was lost", (WORKER, ON), LOST, False),
    ("without snapshots, and on the failing disk, none was written", (OFF, FAILING), WRITTEN, False),
    ("the slow disk kept snapshots waiting", (SLOW,), WAITING, True),
    ("the failing disk lost snapshots", (FAILING,), LOST, True),
)
IDLE = Measure("CPUs of the sides that wait", "share", log=False)

AGAINST = (
    *(Against(measure, IN_PROCESS) for measure in (RATE, DECODING, PROMPTS)),
    Against(FIRST, IN_PROCESS, "difference"),
    *(Against(measure, OFF) for measure in (RATE, DECODING, PROMPTS)),
    Against(BESIDE, OFF, "difference"),
)

PLOTS = (
    Plot("by x", "Whole turns", (RATE,), "Tokens of all answers, prefill and the recorded results included."),
    Plot("by x", "Decoding", (DECODING,), "From when all answers have begun to the last token of all."),
    Plot("by x", "First token", (FIRST,), "From sending the turn."),
    Plot("cdf", "First token, most sessions", (FIRST,), "Each step is a turn of a session."),
    Plot("by x", "Prompts", (PROMPTS,), "Tokens of all prompts by the time until all answers have begun."),
    Plot(
        "by x",
        "A block of snapshots",
        (BESIDE,),
        "What four steps behind it take above their neighbours; without snapshots no block is cut.",
    ),
)


def checks(found: Findings[Plan]) -> Iterator[Check]:
    """Hold the sides against what they are called, and snapshots against what they may cost."""
    answered = [turn for turn in found.turns if turn.error is None]
    through = [turn for turn in answered if turn.case != IN_PROCESS]
    other = [turn for turn in through if turn.position != _held(turn) + _own(turn) + len(turn.tokens)]
    yield count("a worker ran the very tokens that were run in process", other, through)
    first, later = [t for t in through if not _held(t)], [t for t in through if _held(t)]
    cached = [turn for turn in first if turn.cached_tokens]
    yield count("no session began with what another one had left in a cache", cached, first)
    # One token of the turn before still waits for its forward pass.
    much = [turn for turn in later if turn.prefilled_tokens > _own(turn) + 1]
    yield count("later turns prefilled their own tokens only", much, later)
    for name, cases, measure, some in STATES:
        told = [sample for case in cases for sample in found.of(measure, case)]
        yield count(name, [sample for sample in told if (sample.value > 0) is not some], told, "times")
    idle = {"": list(found.blocks(IDLE, "").values())}
    name = f"the sides that waited took at most {IDLE_CPUS:.0%} of one CPU"
    yield bounded(name, idle, at_most=IDLE_CPUS, unit="share")
    name = f"at least {AGREEING:.0%} of the tokens in process are those of a worker"
    yield bounded(name, _agreeing(answered), at_least=AGREEING, unit="share")
    for where, sides in (("with snapshots on", (ON,)), ("on a bad disk", (SLOW, FAILING))):
        places = [(side, batch) for side in sides for batch in found.plan.batch]
        least = KEPT[sides[0]]
        whole = {
            f"{side}, {batch} at a time:": found.ratios(DECODING, side, OFF, batch) for side, batch in places
        }
        name = f"{where} answers decode at {least:.0%} of the speed without, or more"
        yield bounded(name, whole, at_least=least, unit="share", log=True)
        left = {f"{side}, {batch} at a time:": _left(found, side, batch) for side, batch in places}
        name = f"{where} the steps beside a block leave {least:.0%} of the speed, or more"
        yield bounded(name, left, at_least=least, unit="share")


def _left(found: Findings[Plan], side: str, batch: int) -> list[float]:
    """Return the speed that blocks leave by the steps beside them, round by round.

    Whole answers scatter by more than a block costs. So many tokens, of all sessions together, complete one.
    """
    off, on = (found.blocks(BESIDE, case, batch) for case in (OFF, side))
    rates = found.blocks(DECODING, OFF, batch)
    both = [block for block in off if block in on and block in rates]
    return [1 - (on[one] - off[one]) * rates[one] / found.plan.block_tokens for one in both]


def _agreeing(turns: Sequence[Turn]) -> dict[str, list[float]]:
    """Return the shares of equal tokens, round by round. What follows an answer that differs is left out."""
    meant = {_place(turn): turn.tokens for turn in turns if turn.case == IN_PROCESS}
    parted: set[tuple[object, ...]] = set()
    same: dict[str, dict[int, list[float]]] = {}
    for turn in turns:
        talk, tokens = (turn.case, turn.session, *turn.place), meant.get(_place(turn))
        if turn.case != IN_PROCESS and tokens is not None and talk not in parted:
            differs = (i for i, pair in enumerate(zip(turn.tokens, tokens, strict=False)) if len({*pair}) > 1)
            common = next(differs, min(len(turn.tokens), len(tokens)))
            same.setdefault(turn.case, {}).setdefault(turn.block, []).append(common / len(tokens))
            parted |= {talk} if turn.tokens != tokens else set()
    return {case: [statistics.fmean(some) for some in found.values()] for case, found in same.items()}


def follows(turns: Sequence[Turn]) -> Iterator[Sample]:
    """Make what takes all sessions of a side at a time: their speed, and the mean of what blocks add."""
    talks: defaultdict[tuple[str, float | None, int], list[Turn]] = defaultdict(list)
    for turn in turns:
        if turn.error is None:
            talks[turn.case, *turn.place].append(turn)
    for place, talk in talks.items():
        for number in {turn.facts["turn"] for turn in talk}:
            some = [turn for turn in talk if turn.facts["turn"] == number]
            sent_s = min(turn.at_s for turn in some)
            seconds = max(turn.at_s + turn.total_s for turn in some) - sent_s
            begun_s = max(turn.at_s + (turn.first_s or 0.0) for turn in some) - sent_s
            yield Sample(RATE.name, *place, sum(len(turn.tokens) for turn in some) / seconds)
            yield Sample(PROMPTS.name, *place, sum(map(_own, some)) / begun_s)
            if (rate := decoding(some)) is not None:
                yield Sample(DECODING.name, *place, rate)
        size = int(talk[0].fact("block_tokens") or 0)
        added = [added_s for turn in talk for added_s in beside_blocks(turn, size)]
        if added and place[0] not in {IN_PROCESS, WORKER}:
            yield Sample(BESIDE.name, *place, statistics.fmean(added))


def steps(turn: Turn) -> list[float]:
    """Return the times from token to token; those that came in one chunk came at once."""
    gaps_s = (0.0, *turn.gaps_s)  # to the first chunk there is none
    found: list[float] = []
    for gap_s, number in zip(gaps_s, turn.counts or (1,) * len(gaps_s), strict=True):
        found += (gap_s, *(number - 1) * (0.0,)) if number else ()
    return found[1:]


def decoding(turns: Sequence[Turn]) -> float | None:
    """Return the tokens per second of answers, from when all have begun to the last token.

    None where most of them came before: what is left is too short to tell.
    """
    begins = [turn.at_s + (turn.first_s or 0.0) for turn in turns]
    pairs = zip(turns, begins, strict=True)
    times_s = [at_s for turn, begin_s in pairs for at_s in itertools.accumulate(steps(turn), initial=begin_s)]
    later, seconds = sum(at_s > max(begins) for at_s in times_s), max(times_s) - max(begins)
    return later / seconds if 2 * later >= len(times_s) and seconds > 0 else None


def beside_blocks(turn: Turn, block_tokens: int) -> list[float]:
    """Tell what `WINDOW` steps took above the median of their neighbours, for each block that was completed.

    A block is full with the KV of the token that was drawn last, so the steps behind that token are those
    that its copying and writing can hold up; as many neighbours as there are, on both sides, say what steps
    take at that moment. This tells a cost of milliseconds where whole answers scatter by seconds.
    """
    steps_s, found = steps(turn), []
    first = block_tokens - ((turn.position or 0) - len(turn.tokens)) % block_tokens
    for drawn in range(first, len(steps_s) - WINDOW + 1, block_tokens):
        end = drawn + WINDOW
        around = steps_s[max(0, drawn - NEIGHBOURS) : drawn] + steps_s[end : end + NEIGHBOURS]
        if len(around) >= NEIGHBOURS:
            found.append(sum(steps_s[drawn:end]) - WINDOW * statistics.median(around))
    return found


def notes(plan: Plan) -> Iterator[str]:
    """Say what runs in process, and how a block's cost is taken."""
    yield "In process one session is answered by mlx-lm's generate_step, several by its BatchGenerator."
    yield (
        f"Every {plan.block_tokens} tokens of a session complete a block. The {WINDOW} steps behind it"
        f" are held against up to {NEIGHBOURS} on each side, and that against the same without snapshots."
    )


async def measure(run: Run[Plan]) -> None:
    """Start all sides, and go through the rounds; the one before the first has one turn, and is not kept."""
    plan, order = run.plan, random.Random(run.plan.seed)  # noqa: S311  # an order, not a secret
    async with contextlib.AsyncExitStack() as stack:
        sides, folder = await _start(run, stack)
        texts, done = Texts(folder, run.corpus.texts()), 0
        total = (plan.rounds + 1) * len(plan.batch) * len(sides)
        for block in range(-1, plan.rounds):
            waited_s = idle_s = 0.0
            for batch in order.sample(plan.batch, len(plan.batch)):
                prompts = [
                    [_prompt(texts, order, plan, number) for number in range(batch)]
                    for _ in range(plan.turns if block >= 0 else 1)
                ]
                for side in order.sample(sides, len(sides)):
                    run.step(
                        done, total, f"round {block + 1} of {plan.rounds}, {batch} at a time, {side.case}"
                    )
                    others = [one for other in sides if other is not side for one in other.processes]
                    began_s, before_s = time.monotonic(), _cpu_s(others)
                    talk = await side.answer(prompts)
                    waited_s += time.monotonic() - began_s
                    idle_s += _cpu_s(others) - before_s
                    await asyncio.sleep(PAUSE_S)
                    done += 1
                    if block >= 0:
                        _keep(run, side, block, prompts, talk)
            if block >= 0:
                run.sample(IDLE, "", None, block, idle_s / waited_s)


def _keep(
    run: Run[Plan], side: Side, block: int, prompts: list[list[Tokens]], talk: list[list[Turn]]
) -> None:
    """Keep the turns of sessions on one side. Raises `BenchError` where one failed."""
    held = [0] * len(prompts[0])
    for number, (asked, answers) in enumerate(zip(prompts, talk, strict=True)):
        for i, (prompt, turn) in enumerate(zip(asked, answers, strict=True)):
            facts = {"turn": number, "held": held[i], "block_tokens": run.plan.block_tokens}
            held[i] += len(prompt) + len(turn.tokens)
            position = held[i] if side.case == IN_PROCESS else turn.position
            whose = {"case": side.case, "x": len(asked), "block": block, "session": f"s{i}"}
            run.take(replace(turn, **whose, own_tokens=len(prompt), position=position, facts=facts))
            if turn.error is not None:  # the sides no longer have the same history
                raise BenchError(f"a turn failed: {turn.message}")
    for measure, became in zip((WRITTEN, LOST, WAITING), side.became, strict=False):
        run.sample(measure, side.case, len(prompts[0]), block, became)


class _InProcess:
    """mlx-lm by itself."""

    case: str = IN_PROCESS
    became: tuple[int, ...] = ()

    def __init__(self, run: Run[Plan], baseline: Baseline) -> None:
        self.processes = (psutil.Process(baseline.pid),)
        self._run, self._baseline = run, baseline

    async def answer(self, prompts: list[list[Tokens]]) -> list[list[Turn]]:
        """Hold as many sessions as a turn has prompts; times are that program's own."""
        run, talk = self._run, []
        names = tuple(f"s{i}" for i in range(len(prompts[0])))
        for own in prompts:
            at_s = time.monotonic() - run.began_s
            with run.timing():
                say = Say(names, tuple(own), run.plan.max_tokens)
                rows = await self._baseline.ask(say, run.plan.turn_timeout)
            talk.append([_turn(row, at_s) for row in rows])
        await self._baseline.ask(Forget(), run.plan.turn_timeout)
        return talk


class _Worker:
    """A worker over NATS, as any client of it: all prompts at once, each answer as it comes."""

    def __init__(self, run: Run[Plan], case: str, worker: LocalWorker, idle: Session) -> None:
        self.case = case
        self.became: tuple[int, ...] = ()
        self.processes = (psutil.Process(worker.pid), *worker.family)
        self._run, self._worker, self._idle = run, worker, idle  # the last is only asked how the worker is

    async def answer(self, prompts: list[list[Tokens]]) -> list[list[Turn]]:
        """Hold the sessions under a new tenant: what another one left in the cache is of no use to it."""
        run, talk = self._run, []
        timeout_s, max_tokens = run.plan.turn_timeout, run.plan.max_tokens
        before = await self._look()
        async with run.connect(self._worker, f"bench-{uuid4().hex[:12]}") as client:
            sessions = [client.session(f"s{i}") for i in range(len(prompts[0]))]
            for own in prompts:
                asked = zip(sessions, own, strict=True)
                asking = (run.ask(one, tokens=prompt, max_tokens=max_tokens) for one, prompt in asked)
                talk.append(list(await asyncio.gather(*asking)))
                after = await self._look()
            # Also gives up what waits for the disk: the next side has the machine to itself.
            await asyncio.gather(*(one.close(forget=True, timeout_s=timeout_s) for one in sessions))
        lost = [one.failed + sum(one.dropped.values()) for one in (before, after)]
        self.became = (after.durable - before.durable, lost[1] - lost[0], after.in_flight)
        return talk

    async def _look(self) -> SnapshotCounters:
        """Wait until what it has to write is written, except on the slow disk, and ask what became of it."""
        if self.case == SLOW:
            return (await self._idle.info()).worker.snapshots
        return (await self._run.settle(self._idle)).snapshots


Side = _InProcess | _Worker


async def _start(run: Run[Plan], stack: contextlib.AsyncExitStack) -> tuple[list[Side], Path]:
    """Start all sides; returns the folder of their model too."""
    plan = run.plan
    common = ("--max-batch", f"{max(MIN_BATCH, *plan.batch)}", "--block-tokens", f"{plan.block_tokens}")
    sides: list[Side] = []

    async def start(case: str, *options: str, disk: str | None = None) -> LocalWorker:
        program = () if disk is None else ("bench.disk", disk, *run.where.program)
        entered = run.worker(*common, *options, program=program)
        worker, client = await stack.enter_async_context(entered)
        idle = client.session("idle")
        await idle.open(timeout_s=plan.turn_timeout)
        sides.append(_Worker(run, case, worker, idle))
        return worker

    first = await start(WORKER)
    folder, mine = first.model_folder, blas.mapped(first.pid)
    # Guesses make a lone answer's speed jump with its text.
    same = ("--model", str(folder), "--max-draft", "0")
    await together(
        start(OFF, *same, "--snapshots", "off"),
        start(ON, *same),
        start(SLOW, *same, disk=f"{plan.sync}"),
        start(FAILING, *same, disk="fails"),
    )
    preload = blas.preload_of(mine)
    baseline = await stack.enter_async_context(
        running(folder, preload=preload, prefill_step=plan.prefill_step)
    )
    other = blas.mapped(baseline.pid)
    run.facts |= {"worker's BLAS": blas.names(mine), "BLAS in process": blas.names(other)}
    if mine != other:
        raise BenchError(
            f"the worker multiplies with {blas.names(mine)}, mlx-lm alone with {blas.names(other)}"
        )
    return [*sides, _InProcess(run, baseline)], folder


def _turn(row: Row, at_s: float) -> Turn:
    first_s, last_s = row.times_s[0], row.times_s[-1]
    gaps_s = tuple(later - sooner for sooner, later in itertools.pairwise(row.times_s))
    return Turn(at_s=at_s, first_s=first_s, total_s=last_s, gaps_s=gaps_s, tokens=row.tokens)


def _prompt(texts: Texts, order: random.Random, plan: Plan, number: int) -> Tokens:
    """Take a prompt that begins as no other of the same tenant does: a corpus repeats itself."""
    most = plan.prompt_tokens
    return (FIRST_ID + number, *texts.take(order.randint(most // 2, most) - 1))


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has died: the turn's failure will tell
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _held(turn: Turn) -> int:
    return int(turn.fact("held") or 0)


def _own(turn: Turn) -> int:
    return turn.own_tokens or 0


def _place(turn: Turn) -> tuple[object, ...]:
    return (*turn.place, turn.session, turn.facts["turn"])


BENCH = Bench(
    name="overhead",
    title="What a worker costs beside the model in process",
    plan=Plan,
    levels="at a time",
    cases=CASES,
    measures=MEASURES,
    against=AGAINST,
    plots=PLOTS,
    checks=checks,
    measure=measure,
    notes=notes,
    follows=follows,
)
