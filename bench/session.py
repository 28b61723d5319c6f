"""`turnkeep bench session`: one session over many turns, and the cost of each turn as the session grows.

A block of the statistics is a section of the run. A session under the policy `full` is rewound to its
beginning when its context is full; the report counts this. A session under `sink_window` never ends, and the
size of its KV must stay constant.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import linear_regression
from typing import Annotated, Final

import click
from msgspec.structs import replace

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import CachePolicy
from turnkeep_client.session import Session

from . import stats
from .checks import STRETCHES, Check, bounded, cached_tokens_are_cheap, count, keeps_its_size
from .plan import Corpus, Option
from .run import FAULT_PAUSE_S, TURN_TIMEOUT_S, BenchRun
from .spec import Bench, Findings, Plot
from .turns import Measure, Sample, TimedTurn

DEFAULT_TURNS: Final = 50
#: The errors of a session that has no room left.
FULL: Final = frozenset({"context_exceeded", "memory_exceeded"})
#: The fewest turns of a block; a shorter one is hardly independent of its neighbours.
MIN_TURNS: Final = 5
#: How much longer a turn at the end may take than one at the beginning, as a share.
DRIFT: Final = 0.5

LIMIT: Final = f"Turns of the session. [default: {DEFAULT_TURNS}, or no limit with --duration]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One session, many turns: what each turn costs as the session grows.

    A turn is sent every --every seconds, or when the previous turn is answered, if that takes longer. Four
    hours of a turn every half minute: --duration 14400 --every 30.
    """

    duration: Annotated[float | None, Option("Stop after so long.", metavar="SECONDS")] = None
    every: Annotated[float, Option("Turn to turn.", type=click.FloatRange(min=0), metavar="SECONDS")] = 0.0
    turns: Annotated[int | None, Option(LIMIT, smoke=12)] = None
    max_tokens: Annotated[int, Option("Most tokens of an answer.", smoke=16)] = 64
    window: Annotated[int | None, Option("Keep the KV of so many tokens, behind those of --sink.")] = None
    sink: Annotated[int, Option("First tokens that stay in sight, with --window.")] = 4
    corpus: Corpus = "mt-bench"

    @property
    def limit(self) -> int | None:
        """The number of turns after which the run ends; None if only `duration` ends it."""
        return DEFAULT_TURNS if self.turns is None and self.duration is None else self.turns

    def stretch(self, turn: int, elapsed_s: float) -> int:
        """Return the number of the block, from 0, to which a turn belongs."""
        if self.limit is None:
            return int(STRETCHES * elapsed_s / (self.duration or 1.0))
        return turn // max(MIN_TURNS, math.ceil(self.limit / STRETCHES))


WHOLE = Measure("whole turn", "s", of=lambda turn: turn.total_s)
FIRST = Measure("first chunk", "s", of=lambda turn: turn.first_s)
PACE = Measure("each token after it", "s", of=lambda turn: turn.per_token_s)
PREFILLED = Measure("prefilled", "tokens", of=lambda turn: turn.prefilled_tokens)
CONTEXT = Measure("whole context", "tokens", of=lambda turn: turn.prompt_tokens)
BESIDE = Measure("process without KV", "bytes", of=lambda turn: turn.fact("beside_bytes"))
KV = Measure("KV of the session", "bytes", of=lambda turn: turn.kv_live_bytes)
STORED = Measure("on SSD", "bytes", of=lambda turn: turn.fact("stored_bytes"))
WRITTEN = Measure("written for a generated token", "bytes")

PLOTS = (
    Plot("over time", "Time of each turn", (WHOLE, FIRST), "Level, where turns cost the same at any length."),
    Plot("cdf", "First chunk, and each token after it", (FIRST, PACE), "Each step is a turn.", log=True),
    Plot("over time", "Tokens prefilled", (CONTEXT, PREFILLED), "A turn prefills its own only.", log=True),
    Plot("over time", "Memory", (BESIDE, KV), "Of the worker's process without KV; of the session's KV."),
    Plot("over time", "Snapshots", (WRITTEN,), "The KV of prompts is among what is written."),
    Plot("over time", "All snapshots on SSD", (STORED,), "Level, once --max-disk is reached."),
)


def follows(turns: Sequence[TimedTurn]) -> Iterator[Sample]:
    """Yield the bytes written to SSD for each generated token, by block.

    A turn's snapshots are written after the turn, so a single turn says little.
    """
    known = [(turn, size) for turn in turns if (size := turn.fact("written_bytes")) is not None]
    steps = ((turn.block, (later - size, turn)) for (_, size), (turn, later) in pairwise(known))
    for block, some in stats.grouped(steps).items():
        if tokens := sum(len(turn.tokens) for _, turn in some):
            yield Sample(WRITTEN.name, "", some[-1][1].x, block, sum(more for more, _ in some) / tokens)


def checks(found: Findings[Plan]) -> Iterator[Check]:
    """Check a session's KV, prefilled tokens, disk use, drift of turn times, and process memory."""
    several = found.answered if len(found.answered) > 1 else []  # a single turn would fit any formula
    a_token = _bytes_per_token(several)
    name = "KV is not empty and has the same size for each token at every turn"
    yield count(
        name, several, lambda t: not t.kv_live_bytes or t.kv_live_bytes not in {n * a_token for n in _held(t)}
    )
    name = "only a turn's own tokens are prefilled"
    yield count(name, found.answered, lambda turn: turn.prefilled_tokens > _own_tokens(turn))
    known = [turn for turn in found.answered if turn.fact("capacity_bytes") is not None]
    name = "snapshots on SSD stay within their limit"
    yield count(
        name, known, lambda turn: (turn.fact("stored_bytes") or 0) > (turn.fact("capacity_bytes") or 0)
    )
    yield cached_tokens_are_cheap(found.turns)
    name = f"turns at the end take at most {DRIFT:.0%} longer than those at the beginning"
    yield bounded(name, {"": _drift(found.blocks(WHOLE, ""))}, at_most=DRIFT, unit="share")
    yield keeps_its_size(found.of(BESIDE))


def _drift(medians: stats.Blocks) -> float | None:
    """Return by which share a line through the blocks' medians rises from the first block to the last.

    None with too few blocks: single turns differ more than that.
    """
    if len(medians) < stats.MIN_BLOCKS:
        return None
    slope, start = linear_regression([*medians], [*medians.values()])
    first, last = min(medians), max(medians)
    return slope * (last - first) / (start + slope * first)


def _bytes_per_token(turns: Sequence[TimedTurn]) -> float:
    """Return the bytes of KV of a token, as most turns report them; 0 if no turn has KV."""
    votes = Counter(turn.kv_live_bytes / tokens for turn in turns for tokens in _held(turn))
    return max(votes, key=votes.__getitem__, default=0)


def _held(turn: TimedTurn) -> list[float]:
    """Return the possible numbers of tokens with KV after a turn: all in sight, or all but the last."""
    kept, position = turn.fact("kept") or math.inf, turn.position or 0
    return [min(tokens, kept) for tokens in (position, position - 1) if tokens > 0]


def _own_tokens(turn: TimedTurn) -> float:
    """Return how many tokens a turn may prefill: new and rewritten ones, and the last token before them.

    Infinity if the session's position before the turn is unknown.
    """
    held = turn.fact("held")
    kept = held if turn.rewritten_from is None else turn.rewritten_from
    if held is None or kept is None:
        return math.inf
    return turn.prompt_tokens - kept + (1 if kept else 0)


def _cache(plan: Plan) -> CachePolicy | None:
    """Return the cache policy, None for the default."""
    return None if plan.window is None else CachePolicy("sink_window", plan.sink, plan.window)


async def measure(run: BenchRun[Plan]) -> None:
    """Run the conversation."""
    async with run.worker() as (_, client):
        await _Conversation(run).run(client.session("bench", cache=_cache(run.plan)))


class _Conversation:
    """Runs the turns of the session, and remembers the session's position before the next turn."""

    def __init__(self, run: BenchRun[Plan]) -> None:
        self._run, self._texts = run, run.corpus.texts()
        self._began_anew = 0
        self._held: int | None = 0  # None after a fault

    @property
    def _elapsed_s(self) -> float:
        """The seconds since the first turn."""
        return self._run.elapsed_s - self._run.turns[0].at_s if self._run.turns else 0.0

    @property
    def is_over(self) -> bool:
        """Whether the plan's last turn has run."""
        plan = self._run.plan
        ended = plan.duration is not None and self._elapsed_s >= plan.duration
        return ended or (plan.limit is not None and len(self._run.turns) >= plan.limit)

    async def run(self, session: Session) -> None:
        """Run all turns of the plan."""
        plan = self._run.plan
        while not self.is_over:
            due_s = self._elapsed_s + plan.every
            turn = await self._turn(session)
            if turn.error is not None:
                due_s = max(due_s, self._elapsed_s + FAULT_PAUSE_S)
            if not self.is_over:
                end_s = due_s if plan.duration is None else min(due_s, plan.duration)
                await asyncio.sleep(max(0.0, end_s - self._elapsed_s))

    async def _turn(self, session: Session) -> TimedTurn:
        run, plan, held, text = self._run, self._run.plan, self._held, next(self._texts)
        number, elapsed_s = len(run.turns), self._elapsed_s
        done, total = (elapsed_s, plan.duration) if plan.limit is None else (number, plan.limit)
        run.progress(done, total, f"turn {number + 1}")
        turn = await _ask(run, session, text, held)
        if turn.error in FULL and held != 0:
            with contextlib.suppress(TurnkeepError):  # the following turn reports it
                await session.rewind(0, timeout_s=TURN_TIMEOUT_S)
            self._began_anew += 1
            run.facts["began anew"] = f"{self._began_anew:,} times, last at {held} tokens: {turn.error}"
            turn = await _ask(run, session, text, 0)
        run.keep(replace(turn, x=turn.at_s, block=plan.stretch(number, elapsed_s)))
        self._held = turn.position
        return turn


async def _ask(run: BenchRun[Plan], session: Session, text: str, held: int | None) -> TimedTurn:
    """Send one turn to a session of `held` tokens; then record the worker's memory and disk use as facts."""
    messages = [{"role": "user", "content": text}]
    turn = await run.ask(session, messages=messages, max_tokens=run.plan.max_tokens)
    facts: dict[str, float | str | None] = {"held": held}
    if run.plan.window is not None:
        facts["kept"] = run.plan.sink + run.plan.window
    with contextlib.suppress(TurnkeepError):
        metrics = (await session.info()).worker
        run.metrics = run.metrics or metrics
        facts["beside_bytes"] = metrics.process_bytes - metrics.resident_kv_bytes
        facts["written_bytes"] = metrics.snapshots.written_bytes
        facts["stored_bytes"] = metrics.snapshots.stored_bytes
        facts["capacity_bytes"] = metrics.snapshots.capacity_bytes
    return replace(turn, facts=facts)


BENCH = Bench(
    name="session",
    plan=Plan,
    measures=(WHOLE, FIRST, PACE, PREFILLED, CONTEXT, WRITTEN, STORED, BESIDE, KV),
    plots=PLOTS,
    checks=checks,
    measure=measure,
    follows=follows,
)
