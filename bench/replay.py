"""`turnkeep bench replay`: recorded sessions, replayed in their order and at their pace.

A request that was sent after the previous answer waits for that answer here too, then for the sender's pause;
other requests are sent without waiting. So a slower worker gets the same conversation later, not a burst of
requests. A session is a block; its record is the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import uuid4

from msgspec.structs import replace

from turnkeep_client.client import connect
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import Close, Failed, Generated
from turnkeep_client.session import build
from turnkeep_client.subjects import DEFAULT_PREFIX, DEFAULT_TENANT, SessionKey

from .ask import error_class
from .checks import Check, bounded, count
from .faults import BenchError
from .figures import number
from .plan import Corpus, Option, TurnTimeout
from .record import AFTER, COMPARABLE, OTHER, Exchange, Record, fold, models, pair_up, standings
from .run import closing
from .samples import Turn
from .spec import Against, Bench, Measure, Plot
from .together import together

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from turnkeep_client.calls import Call
    from turnkeep_client.client import Client
    from turnkeep_client.messages import Request

    from .run import Run
    from .samples import Findings

#: The prefix of replayed sessions' names, which are not replayed again.
PREFIX: Final = "replay-"
#: The pause after an answer, in a record that the bench makes itself.
PAUSE_S: Final = 0.2
TEMPERATURE: Final = 0.8
LATE_BOUND_S: Final = 0.05

RECORDED, REPLAYED = CASES = ("recorded", "replayed")

Free = partial(Option, free=True)
THERE: Final = "Replay what the worker there has recorded. [default: made for it]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Recorded sessions, played again at another worker: the same answers, and as fast?

    Requests keep their ids, order and spacing, under new session names; a generate without a seed gets the
    one that was derived for it. Answers are compared token by token. Behind one that differs the context is
    another: later answers of that session are timed and not compared.
    """

    record_nats: Annotated[str | None, Free(THERE, metavar="URL")] = None
    record_prefix: Annotated[str, Free("First part of that worker's subjects.")] = DEFAULT_PREFIX
    record_tenant: Annotated[str, Free("Whose sessions they are.")] = DEFAULT_TENANT
    session: Annotated[tuple[str, ...], Option("Only this one. [default: all of them]", metavar="NAME")] = ()
    record_sessions: Annotated[int, Option("Sessions of a record of its own.", smoke=3)] = 8
    record_turns: Annotated[int, Option("Turns of each of them.", smoke=2)] = 6
    max_tokens: Annotated[int, Option("Most of one answer in them.", smoke=8)] = 64
    corpus: Corpus = "mt-bench"
    serve: Annotated[str, Free("Settings of the bench's own worker, in quotes.", metavar="OPTIONS")] = ""
    pace: Annotated[float, Option("1 as recorded, 2 twice as fast.")] = 1.0
    turn_timeout: TurnTimeout = 300.0


def _fact(name: str) -> Callable[[Turn], float | None]:
    return lambda turn: turn.fact(name)


TURNAROUND = Measure("turnaround in the log", "s", of=_fact("turnaround_s"), at=lambda turn: turn.at_s)
FIRST = Measure("first token", "s", of=lambda turn: turn.first_s)
PER_TOKEN = Measure("time per token", "s", of=lambda turn: turn.per_token_s)
WHOLE = Measure("whole generate", "s", of=lambda turn: turn.total_s if turn.tokens else None)
EQUAL = Measure("answer equal up to the first difference", "share", "higher", _fact("equal"), log=False)
LATE = Measure("sent later than due", "s", of=_fact("late_s"), log=False)
TIMES = (TURNAROUND, FIRST, PER_TOKEN, WHOLE)

SENT = "By when it was sent. At the recorded pace both have the same load behind them."
PLOTS = (
    *(Plot("cdf", one.name.capitalize(), (one,), "Each step is a request.") for one in TIMES),
    Plot("points", "Turnaround of each request", (TURNAROUND,), SENT, x="sent (s)"),
    Plot("points", "How far the answers agree", (EQUAL,), "Those with the record's context.", x="request"),
)


def checks(found: Findings[Plan]) -> Iterator[Check]:
    """Compare a replay with its record, if one model made both."""
    recorded, replayed = (found.facts.get(f"{case} by") for case in CASES)
    name = "the same model gives the same tokens"
    answers = [turn for turn in found.turns if turn.case == REPLAYED and turn.facts.get("standing")]
    standing = [turn for turn in answers if turn.facts["standing"] in {COMPARABLE, OTHER}]
    wrong = [turn for turn in standing if turn.fact("equal") != 1]
    check = count(name, wrong, standing if recorded and recorded == replayed else (), "answers")
    told = [] if recorded == replayed else ["the record is another model's"]
    told.append(check.detail)
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
    """Say what a ratio compares."""
    yield (
        "The record was made at another time than the replay: a ratio tells of both machines, and of whatever"
        " else they had to do, and its interval only of how sessions differ, not of the hour. First token,"
        " time per token and whole generate are the workers' own account."
    )


async def measure(run: Run[Plan]) -> None:
    """Read or make the record, and replay it."""
    plan = run.plan
    if run.where.nats is not None and plan.serve:
        raise BenchError("--serve is for the bench's own worker, not for the one at --nats")
    if plan.record_nats is None and plan.session:
        raise BenchError("--session names what the worker at --record-nats has recorded; name that too")
    record = await (_make(run) if plan.record_nats is None else _read(run, plan.record_nats))
    left_out = ", ".join(f"{times:,} {reason}" for reason, times in record.left_out.items())
    run.facts |= {"record": record.digest, "left out of it": left_out or "nothing"}
    run.facts |= {f"{RECORDED} by": models(record.exchanges), "sessions of it": len(record.sessions)}
    run.facts["target served with"] = plan.serve or "-"
    for block, (name, exchanges) in enumerate(record.sessions.items()):
        for x, exchange in enumerate(exchanges, 1):
            at_s = (exchange.asked.stored - record.begin).total_seconds()
            run.keep(replace(_turn(exchange, name, at_s), case=RECORDED, x=x, block=block))
    async with run.target(*shlex.split(plan.serve)) as client:
        await _replay(run, client, record)


async def _read(run: Run[Plan], url: str) -> Record:
    plan = run.plan
    try:
        there = connect(url, prefix=plan.record_prefix, tenant=plan.record_tenant)
        async with closing(await there) as client:
            entries = await client.log()
    except TurnkeepError as error:
        raise BenchError(f"the record cannot be read: {error}") from None
    record = fold([one for one in entries if _wanted(plan, one.key.session)])
    if not record.sessions:
        whose = ", ".join(plan.session) or f"the tenant {plan.record_tenant}"
        raise BenchError(f"there is nothing to replay: the log holds no answered request of {whose}")
    return record


def _wanted(plan: Plan, session: str) -> bool:
    return session in plan.session if plan.session else not session.startswith(PREFIX)


async def _make(run: Run[Plan]) -> Record:
    """Record a few concurrent conversations; every second one samples, with seeds derived from the log.

    The recorded worker has default settings; the replaying one gets the options under test.
    """
    plan, texts = run.plan, run.corpus.texts()
    said = [[next(texts) for _ in range(plan.record_turns)] for _ in range(plan.record_sessions)]

    async def converse(client: Client, index: int) -> None:
        session = client.session(f"recorded-{index}")
        system = [{"role": "system", "content": "Answer in one sentence."}]
        await session.append(messages=system, timeout_s=plan.turn_timeout)
        for i, text in enumerate(said[index]):
            run.progress(i, plan.record_turns, f"recording session {index + 1}, turn {i + 1}")
            await session.generate(
                messages=[{"role": "user", "content": text}],
                max_tokens=plan.max_tokens,
                temperature=TEMPERATURE if index % 2 else 0.0,
                timeout_s=plan.turn_timeout,
            )
            await asyncio.sleep(PAUSE_S)

    async with run.worker() as (_, client):
        await together(*(converse(client, index) for index in range(plan.record_sessions)))
        return fold(await client.log())


async def _replay(run: Run[Plan], client: Client, record: Record) -> None:
    """Replay all sessions, and read their answers from the log."""
    session = client.session(f"{PREFIX}{uuid4().hex[:12]}")
    await session.open(timeout_s=run.plan.turn_timeout)
    await run.wait_for_snapshots(session)
    await session.close(timeout_s=run.plan.turn_timeout)
    began_s, name = run.elapsed_s, f"{PREFIX}{uuid4().hex[:8]}"
    done: list[Exchange] = []

    async def one(block: int, of: str, exchanges: Sequence[Exchange]) -> None:
        key, sent, answers = (
            SessionKey(client.tenant, f"{name}-{block}"),
            dict[str, _Sent](),
            list[Exchange](),
        )
        submit = partial(client.submit, key, timeout_s=run.plan.turn_timeout)
        try:
            await _play(run, submit, record, exchanges, began_s, sent)
        finally:  # keep the answers of an interrupted session too
            with contextlib.suppress(TurnkeepError):
                answers += pair_up(await client.log(key.session))
            done.extend(answers)
            run.facts[f"{REPLAYED} by"] = models(done)
            turns = _compared(of, exchanges, sent, {told.request.id: told for told in answers})
            run.keep(*(replace(turn, case=REPLAYED, block=block) for turn in turns))

    await together(*(one(i, *item) for i, item in enumerate(record.sessions.items())))


@dataclass(slots=True)
class _Sent:
    at_s: float
    late_s: float
    fault: TurnkeepError | None = None


async def _play(
    run: Run[Plan],
    submit: Callable[[Request], Awaitable[Call]],
    record: Record,
    exchanges: Sequence[Exchange],
    began_s: float,
    sent: dict[str, _Sent],
) -> None:
    """Send the requests of one session, and wait for their answers; fills `sent`."""
    waiting: list[tuple[_Sent, Call]] = []
    then, then_s = record.begin, 0.0  # the event before a request, in the record and here

    async def answers() -> None:
        while waiting:
            one, pending = waiting.pop(0)
            try:
                await pending
            except TurnkeepError as fault:
                one.fault = fault

    with ExitStack() as flights:
        for i, exchange in enumerate(exchanges):
            if i and exchange.asked.seq > exchanges[i - 1].answered.seq:  # it may have been read
                await answers()
                flights.close()
                run.progress(len(run.turns), 2 * len(record.exchanges), f"replaying, request {i + 1}")
                then, then_s = exchanges[i - 1].answered.stored, run.elapsed_s - began_s
            due_s = then_s + (exchange.asked.stored - then).total_seconds() / run.plan.pace
            await asyncio.sleep(max(0.0, due_s - (run.elapsed_s - began_s)))
            then, then_s = exchange.asked.stored, run.elapsed_s - began_s
            one = sent[exchange.request.id] = _Sent(then_s, max(0.0, then_s - due_s))
            flights.enter_context(run.timing())
            try:
                waiting.append((one, await submit(exchange.request)))
            except TurnkeepError as fault:
                one.fault = fault
        await answers()
    with contextlib.suppress(TurnkeepError):
        if not isinstance(exchanges[-1].request, Close):
            await (await submit(build(Close)))


def _compared(
    session: str, exchanges: Sequence[Exchange], sent: dict[str, _Sent], answers: dict[str, Exchange]
) -> Iterator[Turn]:
    """Yield a turn for each request that was answered or failed, compared with the record."""
    pairs = zip(exchanges, standings(exchanges, answers), strict=True)
    for x, (exchange, (standing, index)) in enumerate(pairs, 1):
        one, answer = sent.get(exchange.request.id), answers.get(exchange.request.id)
        if one is None:
            continue
        if one.fault is not None:
            turn = Turn(total_s=0.0, error=error_class(one.fault), message=str(one.fault))
        elif answer is not None:
            turn = _turn(answer, session, one.at_s)
        else:
            continue  # the run ended before the answer
        facts: dict[str, Any] = {"late_s": one.late_s, "standing": standing, "first_difference": index}
        if standing == COMPARABLE and isinstance(exchange.result, Generated):
            facts["equal"] = 1.0 if index is None else index / len(exchange.result.tokens)
        yield replace(turn, x=x, facts=turn.facts | facts)


def _turn(one: Exchange, session: str, at_s: float) -> Turn:
    """Return an exchange as a turn: times by the log, and a generate's by the worker."""
    result = one.result
    turn = Turn(session=session, at_s=at_s, total_s=one.took_s, facts={"turnaround_s": one.took_s})
    if isinstance(result, Failed):
        return replace(turn, error=result.code, message=result.message)
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
    remote=True,
    same=("record",),
    notes=notes,
)
