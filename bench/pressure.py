"""`turnkeep bench pressure`: a random load around the memory limit, checked against what MLX measures.

Prompts are random token ids, so that the bench knows the exact size of every request.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final
from uuid import uuid4

import click
from msgspec.structs import replace

from turnkeep_client.client import Client, connect
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import Metrics, decode_result
from turnkeep_client.session import Session

from .checks import STRETCHES, Check, bounded, count
from .faults import in_background, together
from .figures import number
from .plan import Option, Seed, TurnTimeout
from .run import Run, class_of
from .spec import Bench, Findings, Plot
from .turns import Measure, Sample, Turn

#: Cases by the share of the limit that a session will use. The last case repeats sessions alone.
SHORT, LONG, ALONE, NEVER, AGAIN = CASES = ("short", "long", "fits alone", "never fits", "held again")
LONG_FROM, ALONE_FROM, MOST = 0.2, 0.8, 1.4
WEIGHTS: Final = (60, 22, 10, 8)
#: The share of "fits alone" and "never fits" turns that are at the limit, or one token above it.
EDGE: Final = 0.25
GENERATES, CANCELLED = 0.7, 0.12
SHORT_ANSWER: Final = 32
#: Ids that are neither special nor beyond the smallest vocabulary.
FIRST_ID, LAST_ID = 32, 240
#: Above this share of the limit a session may be rewound or closed.
FULL: Final = 0.6
REFUSED: Final = "memory_exceeded"
#: A load that stays below this share of its limit proves nothing.
NEAR: Final = 0.75
#: How much a process may grow beyond what MLX allocates: buffers kept for reuse, snapshots being written,
#: Python's own memory.
BESIDE_BYTES: Final = 192 * 2**20

Tokens = tuple[int, ...]
Room = Annotated[
    int, Option("Tokens of KV that fit; a context must hold twice as many.", 640, click.IntRange(min=256))
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A worker at its memory limit: never above it, refusing nothing that fits, answering everything else.

    Sessions of random length are opened and closed; some fit only alone, some never; some requests are
    cancelled. Afterwards some of the sessions are repeated alone, and must get the same answers.
    """

    duration: Annotated[float, Option("How long requests are sent.", smoke=1.5, metavar="SECONDS")] = 600.0
    room: Room = 1024
    clients: Annotated[int, Option("Requests at a time.")] = 12
    rows: Annotated[int, Option("Answers at a time: the worker's max_batch.")] = 4
    sample: Annotated[int, Option("Sessions that are held again alone.", smoke=4)] = 12
    turn_timeout: TurnTimeout = 600.0
    seed: Seed = 0


REQUEST = Measure("request", "s", of=lambda turn: None if turn.facts.get("cancelled") else turn.total_s)
DEVICE = Measure("memory of the device", "bytes", log=False)
KV = Measure("KV", "bytes", log=False)
PROCESS = Measure("the worker's process", "bytes", log=False)
RESULTS = Measure("results in the log", "", log=False)
ALLOCATED, PEAK = "allocated", "peak so far"

PLOTS = (
    Plot("over time", "Memory of the device", (DEVICE,), "What MLX has allocated, and the most so far."),
    Plot("over time", "KV", (KV,), "Reserved by requests that run, and held by idle sessions."),
    Plot("over time", "The process", (PROCESS,), "Resident memory of the worker."),
    Plot("cdf", "Time of a request", (REQUEST,), "Those that were carried out and not cancelled.", log=True),
)


def checks(found: Findings[Plan]) -> Iterator[Check]:
    """Check the memory limits, the refusals, the results in the log, the answers, and the load itself."""
    limits = ("device_memory", "max_memory", "without sessions")
    device, kv, idle = (found.facts.get(name, 0) for name in limits)
    active, held, process = found.of(DEVICE, ALLOCATED), found.of(KV), found.of(PROCESS)
    yield _within("what MLX allocates stays within device_memory", found.of(DEVICE, PEAK), device)
    yield _within("KV stays within max_memory", held, kv)
    sent = [turn for turn in found.turns if turn.case != AGAIN]
    fits, never = [t for t in sent if t.case != NEVER], [t for t in sent if t.case == NEVER]
    yield count("no request that fits was refused", fits, lambda t: t.error == REFUSED, "requests")
    name = "no request was carried out that can never fit"
    yield count(name, never, lambda t: t.error is None and not t.facts["cancelled"], "requests")
    name = "every request has one result in the log"
    yield count(name, found.of(RESULTS), lambda results: results.value != 1, "requests")
    done = [t for t in sent if t.error is None and (t.tokens or t.facts["verb"] == "append")]
    name = "no answer ran over another context than was sent"
    sizes = ((t.position, (t.fact("held") or 0) + (t.own_tokens or 0) + len(t.tokens)) for t in done)
    yield count(name, [*sizes], lambda size: size[0] != size[1], "answers")
    again = [turn for turn in found.answered if turn.case == AGAIN]
    name = "answers are those of the same sessions alone"
    yield count(name, again, lambda turn: turn.facts["same"] != "yes", "answers")
    if held and active:
        near = min(_most(active) - idle, _most(held)) / kv
        name = f"the load came near the limit: at least {NEAR:.0%} of it were used"
        yield bounded(name, {"": near}, unit="share", at_least=NEAR)
    if process:
        beyond = _most(process) - process[0].value - (device - idle)
        name = f"the process grows by at most {number(BESIDE_BYTES, 'bytes')} more than the device's memory"
        yield bounded(name, {"": beyond}, unit="bytes", at_most=BESIDE_BYTES)


def _within(name: str, readings: Sequence[Sample], limit: int) -> Check:
    found = count(name, readings, lambda reading: reading.value > limit, "readings")
    most = f"at the most {number(_most(readings), 'bytes')} of {number(limit, 'bytes')}"
    return replace(found, detail=f"{most}, in {len(readings):,} readings") if readings else found


def _most(readings: Sequence[Sample]) -> float:
    return max((one.value for one in readings), default=0.0)


def planned(turn: Turn) -> bool:
    """Say whether the bench intended a turn to fail: it cancelled the request, or expects refusals.

    Other checks decide whether each refusal was right.
    """
    return turn.error == REFUSED or (turn.error == "expired" and bool(turn.facts["cancelled"]))


async def measure(run: Run[Plan]) -> None:
    """Measure a session's size, set the memory limits by it, send the load; repeat some sessions alone."""
    plan = run.plan
    options = ["--metrics-interval-s", "0.1s", "--max-batch", f"{plan.rows}"]
    options += ["--spare-memory", "0"]  # spare memory would hide the growth of the process
    async with run.worker(*options, "--max-context", f"{plan.room}") as (_, client):
        await _size(run, client)
    # `device_memory` leaves exactly `room` tokens for KV, which some requests need in full. `max_context` is
    # larger, so that only memory refuses requests.
    options += ["--device-memory", f"{run.facts['device_memory']}", "--max-context", f"{2 * plan.room}"]
    async with run.worker(*options) as (worker, client):
        load = _Load(run, client)
        async with run.watching(client, load.watch):
            for load.block in range(STRETCHES):
                done_s = load.block * plan.duration / STRETCHES
                run.progress(done_s, plan.duration, f"request {len(run.turns):,}")
                await load.stretch(plan.duration / STRETCHES)
            await load.read_log()
            async with connect(worker.url, tenant="alone") as other:  # a new tenant, without a cache
                await load.again(other)


async def _size(run: Run[Plan], client: Client) -> None:
    """Measure the bytes of `room` tokens' KV, and those that a worker reserves for weights and largest step.

    The run's facts get them as the limits `max_memory` and `device_memory`.
    """
    timeout_s, probe, last = run.plan.turn_timeout, client.session("probe"), client.session("last")
    full = await probe.append(tokens=(FIRST_ID,) * run.plan.room, timeout_s=timeout_s)
    kv = full.kv_live_bytes + full.kv_live_bytes // full.tokens  # the last token has no KV yet
    await probe.close(timeout_s=timeout_s)
    # Metrics are updated after a step, so run the step of a tiny session.
    await last.append(tokens=(FIRST_ID, FIRST_ID), timeout_s=timeout_s)
    worker = await run.wait_for_snapshots(last)
    beside_kv = worker.device_memory_bytes - worker.max_memory_bytes
    run.facts |= {"max_memory": kv, "device_memory": kv + beside_kv}
    run.facts |= {"without sessions": worker.mlx_active_bytes}


@dataclass(slots=True)
class _Member:
    """A session of the load. `held` is the number of its tokens after the last result.

    `done` has the verb, the arguments and the answer's tokens of each request, so that it can be repeated.
    """

    name: str
    held: int = 0
    done: list[tuple[str, dict[str, Any], Tokens]] = field(default_factory=list)


class _Load:
    """The sessions of the load, shared by many clients."""

    def __init__(self, run: Run[Plan], client: Client) -> None:
        self.block = 0
        self._run, self._client, self._plan = run, client, run.plan
        self._members: list[_Member] = []
        self._idle: list[_Member] = []
        self._dice = [random.Random(f"{run.plan.seed}-{i}") for i in range(run.plan.clients)]  # noqa: S311

    def watch(self, at_s: float, metrics: Metrics) -> None:
        """Record the memory readings of a metrics message."""
        sizes = [(PROCESS, "", metrics.process_bytes)]
        if metrics.mlx_active_bytes:  # 0 before the first step
            sizes += [(DEVICE, ALLOCATED, metrics.mlx_active_bytes), (DEVICE, PEAK, metrics.mlx_peak_bytes)]
            sizes += [(KV, "", metrics.resident_kv_bytes)]
        for measure, case, size_bytes in sizes:
            self._run.sample(measure, case, at_s, self.block, size_bytes)

    async def stretch(self, seconds: float) -> None:
        """Run one block of the statistics: send requests for `seconds`, and wait for all answers."""
        end_s = self._run.elapsed_s + seconds
        await together(*(self._ask(dice, end_s) for dice in self._dice))

    async def read_log(self) -> None:
        """Record how many results the log has for each request."""
        for block, member in enumerate(self._members):
            log = await self._client.log(member.name)
            results = Counter(decode_result(entry.body).seq for entry in log if entry.kind == "out")
            for seq in [entry.seq for entry in log if entry.kind == "in"]:
                self._run.sample(RESULTS, "", None, block, results[seq])

    async def again(self, client: Client) -> None:
        """Repeat some of the sessions, one after another, and compare their answers."""
        answered = [member for member in self._members if any(answer for *_, answer in member.done)]
        step = max(1, len(answered) // self._plan.sample)
        for block, member in enumerate(answered[::step][: self._plan.sample]):
            session = client.session(member.name)
            for verb, request, answer in member.done:
                turn = await self._send(session, verb, request)
                if verb == "generate":
                    facts = turn.facts | {"same": "yes" if turn.tokens == answer else "no"}
                    self._run.keep(replace(turn, case=AGAIN, block=block, facts=facts))
                    if turn.tokens != answer:
                        break  # later answers have different contexts
            await session.close(timeout_s=self._plan.turn_timeout)

    async def _ask(self, dice: random.Random, end_s: float) -> None:
        while self._run.elapsed_s < end_s:
            few = len(self._idle) < 2 * self._plan.clients
            if not self._idle or dice.random() < (0.6 if few else 0.15):
                self._members.append(member := _Member(f"s{len(self._members)}"))
            else:
                member = self._idle.pop(dice.randrange(len(self._idle)))
            verb, request, cancel_after_s = draw(dice, self._plan.room, member.held)
            turn = await self._send(self._client.session(member.name), verb, request, cancel_after_s)
            if "tokens" in request:
                own = len(request["tokens"])
                case = kind_of(member.held + own + min(request.get("max_tokens", 0), 1), self._plan.room)
                facts = {"verb": verb, "held": member.held, "cancelled": "yes" if cancel_after_s else None}
                self._run.keep(replace(turn, case=case, block=self.block, own_tokens=own, facts=facts))
            if turn.error is None:
                member.held = turn.position or 0
                if turn.finish_reason == "cancelled":  # the repetition's answer must be as long
                    request = request | {"max_tokens": len(turn.tokens)}
                if turn.tokens or verb in {"append", "rewind"}:
                    member.done.append((verb, request, turn.tokens))
            if verb != "close" and turn.error in {None, REFUSED, "expired"}:
                self._idle.append(member)

    async def _send(
        self, session: Session, verb: str, request: dict[str, Any], cancel_after_s: float | None = None
    ) -> Turn:
        """Call the method `verb` of a session and time it; a fault is returned in the turn, not raised.

        With `cancel_after_s` also cancel the request after that time.
        """
        run, name, at_s = self._run, uuid4().hex, self._run.elapsed_s

        async def cancel() -> None:
            if cancel_after_s is not None:
                await asyncio.sleep(cancel_after_s)
                with contextlib.suppress(TurnkeepError):  # answered meanwhile
                    await session.cancel(name)

        async with in_background(cancel()):
            if verb == "generate":
                return await run.ask(session, request_id=name, **request)
            found: dict[str, Any]
            with run.timing():
                try:
                    call = getattr(session, verb)
                    result = await call(request_id=name, timeout_s=self._plan.turn_timeout, **request)
                    found = {"position": result.position}
                except TurnkeepError as fault:
                    found = {"error": class_of(fault), "message": str(fault)}
            return Turn(at_s=at_s, total_s=run.elapsed_s - at_s, **found)


def kind_of(size: int, room: int) -> str:
    """Return the case (table row) of a request after which its session has `size` tokens.

    `room` is the number of tokens for which the worker's memory has room.
    """
    if size > room:
        return NEVER
    return ALONE if size > ALONE_FROM * room else LONG if size > LONG_FROM * room else SHORT


def draw(dice: random.Random, room: int, held: int) -> tuple[str, dict[str, Any], float | None]:
    """Draw the next request of a session that has `held` tokens, in a memory for `room` tokens.

    Returns the method, its arguments, and the seconds after which to cancel the request (None: never). A
    worker must refuse a request only if the prompt and one token of the answer do not fit.
    """
    if held > FULL * room and dice.random() < 0.5:
        if dice.random() < 0.5:
            return "close", {}, None
        return "rewind", {"position": dice.randrange(held // 2)}, None
    kind = dice.choices((SHORT, LONG, ALONE, NEVER), WEIGHTS)[0]
    low, high = {
        SHORT: (held + 4, held + max(8, room // 20)),
        LONG: (round(LONG_FROM * room), round(FULL * room)),
        ALONE: (round(ALONE_FROM * room) + 1, room),
        NEVER: (room + 1, round(MOST * room)),
    }[kind]
    if dice.random() < EDGE:
        low, high = {ALONE: (room, room), NEVER: (room + 1, room + 1)}.get(kind, (low, high))
    added, answer = max(dice.randint(low, high), held + 2) - held, 0
    cancel_after_s = dice.uniform(0, 3) if dice.random() < CANCELLED else None
    if dice.random() < GENERATES:
        answer = dice.randint(1, min(SHORT_ANSWER, added - 1))
        if added > SHORT_ANSWER and dice.random() < 0.15:
            # A long answer instead of a long prompt: its memory grows while it runs.
            answer = added - dice.randint(1, SHORT_ANSWER)
            cancel_after_s = dice.uniform(0.2, 3)
    request = {"tokens": tuple(dice.randint(FIRST_ID, LAST_ID) for _ in range(added - answer))}
    if not answer:
        return "append", request, cancel_after_s
    return "generate", request | {"max_tokens": answer}, cancel_after_s


BENCH = Bench(
    name="pressure",
    plan=Plan,
    cases=CASES,
    measures=(REQUEST, DEVICE, KV, PROCESS),
    plots=PLOTS,
    checks=checks,
    measure=measure,
    planned=planned,
)
