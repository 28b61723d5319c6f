"""`turnkeep bench replay`: recorded sessions, played again in their order and at their pace.

A request whose sender could have read the answer before it waits for that answer here too, and for the pause
that the sender made; one that was sent without waiting is sent without waiting. So a slower worker gets the
same conversation later, and not a heap of requests. A session is a block, and its record the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import uuid4

import click
import msgspec
from msgspec.structs import replace

from turnkeep_client.client import connect
from turnkeep_client.errors import RequestFailedError, TurnkeepError
from turnkeep_client.messages import Close, Failed, Generate, Generated
from turnkeep_client.session import build
from turnkeep_client.subjects import DEFAULT_PREFIX, DEFAULT_TENANT, SessionKey

from .ask import error_class
from .checks import Check, bounded, count
from .faults import BenchError
from .figures import number
from .plan import Corpus, Option, TurnTimeout
from .record import AFTER, COMPARABLE, OTHER, Following, Record, Step, fold
from .run import closing
from .samples import Turn
from .spec import Against, Bench, Measure, Plot
from .together import together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from turnkeep_client.calls import Pending
    from turnkeep_client.client import Client
    from turnkeep_client.log import Entry
    from turnkeep_client.messages import Result

    from .run import Run
    from .samples import Findings

#: Names that begin so are replays: they are not taken for recorded sessions.
PREFIX: Final = "replay-"
#: Tenant of the sessions that the bench records itself: what one tenant has said is in no other's cache.
RECORDER: Final = "recorder"
#: A pause between an answer and the next question of those, so that there is a pace to keep.
PAUSE_S: Final = 0.2
TEMPERATURE: Final = 0.8
LATE_BOUND_S: Final = 0.05

RECORDED, REPLAYED = CASES = ("recorded", "replayed")
BY: Final = f"{REPLAYED} by"


Free = partial(Option, free=True)
Url = partial(Free, metavar="URL")
NOT_NEGATIVE: Final = click.FloatRange(min=0)
Pace = Annotated[
    float, Option("1 as recorded, 2 twice as fast, 0 as fast as answers come.", type=NOT_NEGATIVE)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Recorded sessions, played again at another worker: the same answers, and as fast?

    Requests keep their ids, order and spacing, under new session names; a generate without a seed gets the
    one that was derived for it. Answers are compared token by token. Behind one that differs the context is
    another: later answers of that session are timed and not compared.
    """

    nats: Annotated[str | None, Url("Replay what the worker there has recorded. [default: made for it]")] = (
        None
    )
    prefix: Annotated[str, Free("First part of that worker's subjects.")] = DEFAULT_PREFIX
    tenant: Annotated[str, Free("Whose sessions they are.")] = DEFAULT_TENANT
    session: Annotated[tuple[str, ...], Option("Only this one. [default: all of them]", metavar="NAME")] = ()
    target_nats: Annotated[str | None, Url("Replay at the worker there. [default: one made for it]")] = None
    target_prefix: Annotated[str, Free("Prefix of the target.")] = DEFAULT_PREFIX
    target_tenant: Annotated[str, Free("Tenant of the replayed sessions.")] = "bench"
    serve: Annotated[str, Free("Settings of the bench's own target, in quotes.", metavar="OPTIONS")] = ""
    pace: Pace = 1.0
    turn_timeout: TurnTimeout = 300.0
    record_sessions: Annotated[int, Option("Sessions of a record of its own.", smoke=3)] = 8
    record_turns: Annotated[int, Option("Turns of each of them.", smoke=2)] = 6
    max_tokens: Annotated[int, Option("Most of one answer in them.", smoke=8)] = 64
    corpus: Corpus = "mt-bench"


def _fact(name: str) -> Callable[[Turn], float | None]:
    return lambda turn: turn.fact(name)


TURNAROUND = Measure("turnaround in the log", "s", of=_fact("turnaround_s"), at=lambda turn: turn.at_s)
FIRST = Measure("first token", "s", of=lambda turn: turn.first_s)
PER_TOKEN = Measure("time per token", "s", of=lambda turn: turn.per_token_s)
WHOLE = Measure("whole generate", "s", of=lambda turn: turn.total_s if turn.tokens else None)
EQUAL = Measure("answer equal up to the first difference", "share", "higher", _fact("equal"), log=False)
LATE = Measure("sent later than due", "s", of=_fact("late_s"), log=False)
TIMES = (TURNAROUND, FIRST, PER_TOKEN, WHOLE)

SENT = "By when it was sent. At the recorded pace both lines have the same load behind them."
PLOTS = (
    *(Plot("cdf", one.name.capitalize(), (one,), "Each step is a request.") for one in TIMES),
    Plot("points", "Turnaround of each request", (TURNAROUND,), SENT, x="sent (s)"),
    Plot("points", "How far the answers agree", (EQUAL,), "Those with the record's context.", x="request"),
)


def checks(found: Findings[Plan]) -> Iterator[Check]:
    """Hold a replay against its record, where the same model gave both."""
    recorded, replayed = (found.facts.get(f"{case} by") for case in CASES)
    name = "the same model gives the same tokens"
    answers = [turn for turn in found.turns if turn.case == REPLAYED and turn.facts.get("standing")]
    standing = [turn for turn in answers if turn.facts["standing"] in {COMPARABLE, OTHER}]
    wrong = [turn for turn in standing if turn.fact("equal") != 1]
    check = count(name, wrong, standing if recorded and recorded == replayed else (), "answers")
    told = [] if recorded == replayed else ["the record is another model's"]
    told += [check.detail, f"{sum(bool(turn.facts['sampled']) for turn in standing)} of them sampled"]
    if len(answers) > len(standing):
        told.append(f"{len(answers) - len(standing):,} more come {AFTER} and are not compared")
    told += [_told(turn) for turn in wrong[:3]]
    yield replace(check, detail="; ".join(told))
    late, name = found.blocks(LATE, REPLAYED), f"requests are sent at most {number(LATE_BOUND_S, 's')} late"
    yield bounded(name, {"": [*late.values()]}, at_most=LATE_BOUND_S, unit="s")


def _told(turn: Turn) -> str:
    index = turn.fact("first_difference")
    what = turn.facts["standing"] if index is None else f"differs at token {index:.0f}"
    return f"{turn.session}, request {turn.x:.0f}: {what}"


def notes(_: Plan) -> Iterator[str]:
    """Say what a ratio is of."""
    yield (
        "The record was made at another time than the replay: a ratio tells of both machines, and of whatever"
        " else they had to do, and its interval only of how sessions differ, not of the hour. First token,"
        " time per token and whole generate are the workers' own account."
    )


async def measure(run: Run[Plan]) -> None:
    """Read the record, or make one, and play it."""
    plan = run.plan
    if plan.target_nats is not None and (run.where.model is not None or plan.serve):
        raise BenchError("--model and --serve are for the bench's own worker, not for --target-nats")
    if plan.nats is None and plan.session:
        raise BenchError("--session names what the worker at --nats has recorded; name that too")
    async with AsyncExitStack() as stack:
        if plan.nats is None and plan.target_nats is None and not plan.serve:
            worker, client = await stack.enter_async_context(run.worker())
            record = await _make(run, worker.url)
        else:
            record = await _record(run)
            if plan.target_nats is None:
                _, client = await stack.enter_async_context(run.worker(*shlex.split(plan.serve)))
            else:
                there = connect(plan.target_nats, prefix=plan.target_prefix, tenant=plan.target_tenant)
                client = await stack.enter_async_context(closing(await there))
        left_out = ", ".join(f"{times:,} {reason}" for reason, times in record.left_out.items())
        run.facts |= {"record": record.digest, "left out of it": left_out or "nothing"}
        run.facts |= {f"{RECORDED} by": record.models, "sessions of it": len(record.sessions)}
        run.facts["target served with"] = plan.serve or ("-" if plan.target_nats is None else "not known")
        for block, (name, steps) in enumerate(record.sessions.items()):
            for x, step in enumerate(steps, 1):
                taken = _turn(step, step.result, name, step.asked_s, step.answered_s - step.asked_s)
                run.take(replace(taken, case=RECORDED, x=x, block=block))
        await _play(run, client, record)


async def _record(run: Run[Plan]) -> Record:
    """Read the record; or make one by a worker without options, so that the replay shows what those do."""
    plan = run.plan
    if plan.nats is None:
        async with run.worker() as (worker, _):
            return await _make(run, worker.url)
    if (plan.nats, plan.prefix, plan.tenant) == (plan.target_nats, plan.target_prefix, plan.target_tenant):
        run.warn("the record's own tenant is the target: what it has cached makes the replay faster")
    try:
        async with closing(await connect(plan.nats, prefix=plan.prefix, tenant=plan.tenant)) as client:
            entries = [entry for name in plan.session or (None,) for entry in await client.log(name)]
    except TurnkeepError as error:
        raise BenchError(f"the record cannot be read: {error}") from None
    if not plan.session:
        entries = [entry for entry in entries if not entry.key.session.startswith(PREFIX)]
    record = fold(entries)
    if not record.sessions:
        whose = f"the sessions {', '.join(plan.session)}" if plan.session else f"the tenant {plan.tenant}"
        raise BenchError(f"there is nothing to replay: the log holds no answered request of {whose}")
    return record


async def _make(run: Run[Plan], url: str) -> Record:
    """Hold a few conversations at once; every second one samples, without naming a seed."""
    plan, texts = run.plan, run.corpus.texts()
    said = [[next(texts) for _ in range(plan.record_turns)] for _ in range(plan.record_sessions)]

    async def hold(client: Client, index: int) -> None:
        session = client.session(f"recorded-{index}")
        system = [{"role": "system", "content": "Answer in one sentence."}]
        await session.append(messages=system, timeout_s=plan.turn_timeout)
        for i, text in enumerate(said[index]):
            run.step(i, plan.record_turns, f"recording session {index + 1}, turn {i + 1}")
            await session.generate(
                messages=[{"role": "user", "content": text}],
                max_tokens=plan.max_tokens,
                temperature=TEMPERATURE if index % 2 else 0.0,
                timeout_s=plan.turn_timeout,
            )
            await asyncio.sleep(PAUSE_S)

    async with closing(await connect(url, tenant=RECORDER)) as client:
        await together(*(hold(client, index) for index in range(plan.record_sessions)))
        return fold(await client.log())


async def _play(run: Run[Plan], client: Client, record: Record) -> None:
    """Play every session; where there is no pace to keep, as many at once as were recorded."""
    session = client.session(f"{PREFIX}{uuid4().hex[:12]}")
    await session.open(timeout_s=run.plan.turn_timeout)
    await run.settle(session)
    await session.close(timeout_s=run.plan.turn_timeout)
    places = asyncio.Semaphore(record.num_at_once if run.plan.pace == 0 else len(record.sessions))
    began_s, name = time.monotonic(), f"{PREFIX}{uuid4().hex[:8]}"

    async def one(block: int, of: str, steps: Sequence[Step]) -> None:
        async with places:
            playing = _Playing(run, client, f"{name}-{block}", began_s)
            try:
                await playing.play(steps, len(record.steps))
            finally:  # what a session that was cut short has is worth keeping
                run.take(*(replace(turn, case=REPLAYED, block=block) for turn in playing.turns(of)))

    await together(*(one(i, *item) for i, item in enumerate(record.sessions.items())))


@dataclass(slots=True)
class _Sent:
    step: Step
    sent_s: float
    late_s: float
    pending: Pending | None = None
    result: Result | None = None
    fault: TurnkeepError | None = None


class _Playing:
    """One session while it is played."""

    def __init__(self, run: Run[Plan], client: Client, name: str, began_s: float) -> None:
        self._run, self._client, self._name, self._began_s = run, client, name, began_s
        self._sent: list[_Sent] = []
        self._log: list[Entry] = []

    @property
    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    async def play(self, steps: Sequence[Step], total: int) -> None:
        """Send all requests and wait for the answers; then see what the log has of them."""
        waiting: list[_Sent] = []
        done_s = 0.0
        with ExitStack() as flights:
            for i, step in enumerate(steps):
                if step.waits:
                    await self._answers(waiting)
                    flights.close()
                    waiting, done_s = [], self._now_s
                    self._run.step(len(self._run.turns) - total + i, total, f"{self._name}, request {i + 1}")
                due_s = self._due(steps, i, done_s)
                await asyncio.sleep(max(0.0, due_s - self._now_s))
                sent = _Sent(step, self._now_s, max(0.0, self._now_s - due_s))
                waiting.append(sent)
                flights.enter_context(self._run.timing())
                try:
                    sent.pending = await self._submit(step.request)
                except TurnkeepError as fault:
                    sent.fault = fault
                self._sent.append(sent)
            await self._answers(waiting)
        with contextlib.suppress(TurnkeepError):
            if not isinstance(steps[-1].request, Close):
                await (await self._submit(build(Close)))
            self._log = await self._client.log(self._name)

    def _submit(self, request: Any) -> Any:
        key = SessionKey(self._client.tenant, self._name)
        return self._client.submit(key, request, timeout_s=self._run.plan.turn_timeout)

    def _due(self, steps: Sequence[Step], i: int, done_s: float) -> float:
        pace, step = self._run.plan.pace, steps[i]
        if pace == 0:  # nothing is due
            return self._now_s
        if i == 0:
            return step.asked_s / pace
        if step.waits:
            return done_s + (step.asked_s - steps[i - 1].answered_s) / pace
        return self._sent[-1].sent_s + (step.asked_s - steps[i - 1].asked_s) / pace

    async def _answers(self, waiting: list[_Sent]) -> None:
        for sent in waiting:
            if sent.pending is not None:
                try:
                    result = await sent.pending
                except TurnkeepError as fault:
                    sent.fault = fault
                    continue
                if isinstance(result, Failed):
                    sent.fault = RequestFailedError(result.code, result.message, retryable=result.retryable)
                else:
                    sent.result = result

    def turns(self, name: str) -> Iterator[Turn]:
        """Tell of all that were answered, held against the record."""
        asked = {entry.seq: entry for entry in self._log if entry.kind == "in"}
        results = [entry for entry in reversed(self._log) if entry.kind == "out"]
        answers = {msgspec.json.decode(entry.body)["seq"]: entry for entry in results}
        models = {entry.model for entry in results if entry.model} | set(self._run.facts.get(BY, ()))  # type: ignore[arg-type]  # names
        self._run.facts |= {BY: tuple(sorted(models))} if models else {}
        following = Following()
        for x, sent in enumerate(self._sent, 1):
            if sent.result is None and sent.fault is None:
                continue  # the run ended before its answer came
            seq = sent.pending.seq or 0 if sent.pending is not None else 0
            told, answer = asked.get(seq), answers.get(seq)
            took_s = (answer.stored - told.stored).total_seconds() if told and answer else None
            standing, index = following.take(sent.step, sent.result, answer.history if answer else None)
            facts: dict[str, Any] = {"late_s": sent.late_s, "standing": standing, "first_difference": index}
            if standing == COMPARABLE and isinstance(sent.step.result, Generated):
                facts["equal"] = 1.0 if index is None else index / len(sent.step.result.tokens)
            turn = _turn(sent.step, sent.result, name, sent.sent_s, took_s, sent.fault)
            yield replace(turn, x=x, facts=turn.facts | facts)


def _turn(
    step: Step,
    result: Result | None,
    session: str,
    at_s: float,
    turnaround_s: float | None,
    fault: TurnkeepError | None = None,
) -> Turn:
    """Take from a result what is compared: of a generate the worker's own account, of all the log's."""
    facts: dict[str, Any] = {
        "kind": str(step.request.__struct_config__.tag),
        "sampled": float(isinstance(step.request, Generate) and step.request.temperature > 0),
        "turnaround_s": turnaround_s,
    }
    turn = Turn(session=session, at_s=at_s, total_s=turnaround_s or 0.0, facts=facts)
    if result is None:
        return replace(turn, error=error_class(fault) if fault else "no answer", message=str(fault))
    if not isinstance(result, Generated):
        return replace(turn, position=result.position)
    return replace(
        turn,
        position=result.position,
        total_s=result.seconds.total,
        first_s=result.seconds.first_token,
        tokens=result.tokens,
        prompt_tokens=result.usage.prompt_tokens,
        cached_tokens=result.usage.cached_tokens,
        prefilled_tokens=result.usage.prefilled_tokens,
        finish_reason=result.finish_reason,
    )


BENCH = Bench(
    name="replay",
    title="Recorded sessions, played again",
    plan=Plan,
    cases=CASES,
    measures=(*TIMES, EQUAL, LATE),
    against=tuple(Against(one, RECORDED) for one in TIMES),
    plots=PLOTS,
    checks=checks,
    measure=measure,
    same=("record",),
    notes=notes,
)
