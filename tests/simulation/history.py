"""Runs one simulated history, checks its invariants, and records its story: what happened when."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final

import structlog

import gateway.http.handlers
import turnkeep_client.wire
import worker.wire.connection
from cache.names import marks, tokens
from gateway import conversations, latest_metrics, planning, recovery, removal
from turnkeep_client.client import connect
from turnkeep_client.history import read_history
from turnkeep_client.messages import Closed, Opened, Rewound
from turnkeep_client.subjects import CONSUMER, SessionKey
from worker import parts
from worker.cluster import endpoints
from worker.observe import telemetry
from worker.process import clock
from worker.sessions import limits, record, sessions
from worker.text import segments
from worker.wire import consistent_reads, erasures, intake, retention
from worker.wire.erasures import Erasures

from .actors import PLAIN, SUBJECTS, History, Plan, Read, Supervisor
from .checks import check, copies, is_imported, logs, unanswered, unforgotten
from .loop import DeadlockError, Loop, _process, run, simulated
from .world import Server

#: The gateway's modules that read clocks.
_TIMED: Final = (gateway.http.handlers, conversations, planning, latest_metrics, recovery, removal)
#: Limits: the worker reads one log at a time, answers one question, keeps no idle and no closed session.
_TIGHT: Final[tuple[tuple[Any, str, Any], ...]] = (
    (parts, "_MAX_READINGS", 1),
    (endpoints, "_MAX_OPEN", 1),
    (sessions, "_MAX_IDLE_BYTES", 0),
    (sessions, "_NUM_KEPT", 0),
    (retention, "_NEARLY_FULL", 0.0),
    (retention, "_RELIEVED", 0.0),
)
#: What the tasks run that never end.
_STAYING: Final = {
    *("App._run_part", "Retention._run_queue", "Routing._take_over", "Supervisor._life", "sweep"),
    *("Subscription._wait_for_msgs", "Connection._reconnect"),
}
#: The time limit of each step after the last fault.
PATIENCE_S: Final = 150.0


@dataclass
class Outcome:
    """The result of a simulated history. `wrong` has one line for each violation of an invariant."""

    seed: int
    wrong: list[str]
    story: list[str] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)
    #: The acts and disturbances that the history can be run without.
    acts: list[str] = field(default_factory=list)
    trace: int = 0
    counts: dict[str, int] = field(default_factory=dict)


def simulate(
    seed: int,
    *,
    tell: bool = False,
    favoured: Mapping[str, Any] | None = None,
    without: frozenset[str] = frozenset(),
) -> Outcome:
    """Run the simulated history of a seed, and check it; with `tell` record its story, a line per event.

    `favoured` replaces fields of the plan that the seed determines. `without` names the acts, and the
    disturbances (`PLAIN`), to leave out.
    """
    outcome = Outcome(seed, [])
    with simulated(seed) as loop, world(loop, outcome, tell=tell) as (server, note):
        plain = {name: value for name, value in PLAIN.items() if name in without}
        plan = replace(Plan.of(Random(f"{seed} plan")), **{**(favoured or {}), **plain})
        loop.most_handles *= max(1, plan.num_workers // 3)
        history = History(loop, server, plan, note, seed=seed, without=without)
        with patched(history):
            try:
                run(loop, _live(history))
                outcome.wrong = check(history) + outcome.logged
            except (DeadlockError, TimeoutError) as error:
                outcome.wrong = [f"{error!r}, left over: {history.left}"]
            outcome.trace = server.trace
            outcome.counts = _counts(history)
            disturbed = [name for name, value in PLAIN.items() if getattr(plan, name) != value]
            outcome.acts = [*disturbed, *history.acts]
    return outcome


def _counts(history: History) -> dict[str, int]:
    found = logs(history.server.jetstream.streams[SUBJECTS.log_stream]).values()
    answers = [one for log in found for told in log.results.values() for _, one in told]
    results = [one for one in answers if one.repeat_of is None]
    return {
        "requests": sum(len(log.requests) for log in found),
        "lives of workers": sum(one.num_lives for one in history.supervisors),
        "faults": history.num_faults,
        "repeats": len(answers) - len(results),
        "rewinds": sum(isinstance(one, Rewound) for one in results),
        "forks": sum(isinstance(one, Opened) and one.parent is not None for one in results),
        "closes": sum(isinstance(one, Closed) for one in results),
        "cancels": sum(getattr(one, "finish_reason", "") == "cancelled" for one in results),
        "imported requests": sum(is_imported(one) for log in found for one in log.asked.values()),
        **history.server.counts,
        "messages": history.server.num_messages,
        "handles": history.loop.num_handles,
    }


@contextmanager
def world(loop: Loop, outcome: Outcome, *, tell: bool) -> Iterator[Any]:
    def note(who: str, what: str) -> None:
        if tell and not loop.is_over:
            outcome.story.append(f"{loop.time():9.4f} {who}: {what}")

    def log(logger: Any, method: str, event: dict[str, Any]) -> str:
        if loop.is_over:  # logged by coroutines that are being closed
            raise structlog.DropEvent
        process, event = _process.get(), structlog.processors.format_exc_info(logger, method, event)
        said = " ".join(f"{name}={value}" for name, value in event.items() if name != "event")
        if "exception" in event:
            outcome.logged.append(f"{event['event']}: {event['exception'].splitlines()[-1]}")
        note(process.name if process else "?", f"[{method}] {event['event']} {said}")
        raise structlog.DropEvent

    class Logged(logging.Handler):
        """Records each error that a gateway logs as a fault of the history."""

        def emit(self, record: logging.LogRecord) -> None:
            if not loop.is_over:
                outcome.logged.append(f"{record.getMessage()}: {record.exc_info and record.exc_info[1]!r}")

    server = Server(loop, note if tell else None)

    def make() -> Any:
        return server.connection(_process.get())

    with ExitStack() as stack:
        for module in (turnkeep_client.wire, worker.wire.connection):
            stack.enter_context(_set(module, "Nats", make))
        before = structlog.get_config()
        level = logging.DEBUG if tell else logging.ERROR
        structlog.configure(processors=[log], wrapper_class=structlog.make_filtering_bound_logger(level))
        stack.callback(structlog.configure, **before)
        of_gateways = logging.getLogger("gateway")
        stack.enter_context(_set(of_gateways, "handlers", [Logged(logging.ERROR)]))
        stack.enter_context(_set(of_gateways, "propagate", False))
        stack.callback(loop.abandon)  # first, while logging is still redirected
        yield server, note


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def patched(history: History) -> Iterator[None]:
    """Set constants that are meant for long sessions to small values, which short sessions reach."""
    plan = history.plan
    with ExitStack() as stack:
        for owner, name, value in (
            (record, "_CHECKPOINT_EVERY", plan.checkpoint_every),
            (limits, "_MOST_INPUT", 16),
            (limits, "_MOST_REQUEST", 400 if plan.seeing else 120),  # images make requests longer
            (consistent_reads, "_BATCH", plan.batch),
            (turnkeep_client.wire, "READ_BATCH", plan.batch),
            (tokens, "_PART", 4),
            (segments, "_PART", 2),
            (retention, "_PERIOD_S", 0.1 if plan.sync_s else 1.0),  # often between a close and a power cut
            (retention, "_FILLING", 0.0),
            (erasures, "_PERIOD_S", 1.0),
            (marks, "STRIDE", 4),
            (sessions, "_LEAST_SWEEP_S", 0.25),
            (telemetry, "_LAG_PERIOD_S", 60.0),  # in virtual time no callback is late
            (intake, "_GONE_S", 3.0),
            *(_TIGHT if plan.tight else ()),
            *((module, "time", clock.source) for module in _TIMED),
        ):
            stack.enter_context(_set(owner, name, value))
        yield


async def _live(history: History) -> None:
    server, plan = history.server, history.plan
    supervisors = [asyncio.ensure_future(one.run()) for one in history.supervisors]
    while not history.ready:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    faults = server.faults
    faults.late_ack, faults.busy, faults.lag_s = plan.late_ack, plan.busy, plan.lag_s
    for one in (*history.gates, *history.clients):
        one.start()
    await history.break_things()
    for client in history.clients:
        if not client.is_done.is_set():
            await _at_most(client.is_done.wait(), 2.0)
    history.loop.at_handle.clear()
    server.on_stored = lambda _: None
    server.faults = type(faults)()
    history.note("chance", "is over")
    for client in history.clients:
        if not await _at_most(client.is_done.wait(), PATIENCE_S):
            history.faults.append(f"{client.process.name} waits for ever")
            return
    for deed in history.deeds:
        if not await _at_most(deed, PATIENCE_S):
            history.faults.append("an operator waits for ever")
    await _settle(history)
    for gate in history.gates:
        await gate.close()
    for one in history.supervisors:
        one.is_ending = True
        if one.worker is not None and one.process is not None and not one.process.is_dead:
            one.worker.stop()
    for task in supervisors:
        if not await _at_most(asyncio.shield(task), PATIENCE_S):
            history.faults.append("a worker does not stop")
    if not await _at_most(_read_anew(history), PATIENCE_S):
        history.faults.append("a fresh worker does not read the logs")


async def _read_anew(history: History) -> None:
    """Read all sessions with a fresh worker, for `checks` to compare.

    The worker first answers all waiting requests: a stalled worker may have stored an `ask`, then stopped.
    """
    reader = Supervisor(history, len(history.supervisors))
    worker = reader.prepare(leases=False)
    assert reader.process is not None
    running = reader.process.start(worker.run())
    await worker.ready.wait()
    stream = history.server.jetstream.streams[SUBJECTS.log_stream]
    while unanswered(stream):  # noqa: ASYNC110
        await asyncio.sleep(0.1)

    async def stored(seq: int) -> bytes | None:
        message = stream.get(seq)
        return message.data if message else None

    async def read(key: SessionKey) -> None:
        begun_s = history.loop.time()
        shown = await read_history(client.stored, key)
        with worker._parts.sessions.in_use(key) as session:
            await session.refresh()
            session.services.journal.get = stored  # type: ignore[method-assign]  # sends no messages
            names = {request.id for request in found[key].requests.values()}
            known = {name: await session.log.find_answered(name) for name in names}
            answered = {name: one.result.seq for name, one in known.items() if one is not None}
            times_s = begun_s, history.loop.time()
            history.read[key] = Read(*times_s, session.history, session.log.record.diverged, answered, shown)

    found = logs(stream)
    async with connect("nats://world:4222") as client:
        for key in found:
            await reader.process.start(read(key))
    for one in history.supervisors:  # as the next worker of each directory would
        erasures = Erasures(worker._parts.erasures._journal, "next", one.disk)
        await reader.process.start(erasures._look(lambda _: set()))
    worker.stop()
    await running


async def _at_most(waiting: Any, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await waiting
    except TimeoutError:
        return False
    return True


def _held(history: History) -> dict[str, int]:
    """Count what workers and gateways still hold, and the tasks that they still run."""
    found: Counter[str] = Counter()
    for one in history.supervisors:
        if one.is_serving:
            assert one.worker is not None
            assert one.process is not None
            found += one.worker.leftovers + Counter(history.loop.unfinished(one.process))
    for gate in history.gates:
        found += gate.leftovers + Counter(history.loop.unfinished(gate.process))
    return {name: number for name, number in found.items() if name not in _STAYING}


async def _settle(history: History) -> None:
    """Wait until log and workers have no work left; record a fault if some is left after `PATIENCE_S`."""
    stream = history.server.jetstream.streams[SUBJECTS.log_stream]
    consumer = stream.consumers[CONSUMER]
    deadline_s = history.loop.time() + PATIENCE_S
    await asyncio.sleep(0.05)
    while history.loop.time() < deadline_s:
        left = {"requests": unanswered(stream), "deliveries": len(consumer.pending)}
        left["forgotten"] = len(unforgotten(history))
        left["undelivered"] = consumer.info()["num_pending"]
        left["to be stored"] = history.server.num_queued
        left = {name: number for name, number in left.items() if number}
        left = left or {name: number for name, number in {"copies": len(copies(history))}.items() if number}
        if not stream.lost:  # else an ask may wait for the result of a lost request until its time is over
            left = left or _held(history)
        history.left = left
        if not left and history.ready:
            return
        await asyncio.sleep(0.1)
    history.faults.append(f"left over: {history.left}" if history.left else "no worker serves")
