"""`turnkeep bench pressure`: a random load around the memory limit, held to it by what MLX measures.

Prompts are random token ids: only so does the bench know, to the token, what a request is going to hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import uuid4

import click
import psutil
from msgspec.structs import replace

from turnkeep_client.errors import InvalidMessageError, TurnkeepError
from turnkeep_client.messages import decode_result

from .ask import error_class
from .checks import Check, count, judged
from .figures import number
from .plan import Option, Seed, TurnTimeout
from .samples import Sample, Turn
from .spec import Bench, Measure, Plot
from .stats import Estimate
from .together import beside, together

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from turnkeep_client.client import Client
    from turnkeep_client.session import Session

    from .run import Run
    from .samples import Findings

#: By the share of the limit that a session comes to hold. The last are held again, by themselves.
SHORT, LONG, ALONE, NEVER, AGAIN = CASES = ("short", "long", "fits alone", "never fits", "held again")
LONG_FROM, ALONE_FROM, MOST = 0.2, 0.8, 1.4
WEIGHTS: Final = (60, 22, 10, 8)
#: Of the turns that fit alone, and of those that never fit, so many are at the limit to the token.
EDGE: Final = 0.25
CANCELLED: Final = 0.12
SHORT_ANSWER: Final = 32
#: Ids that are neither special nor beyond the smallest vocabulary.
FIRST_ID, LAST_ID = 32, 240
#: Above this share of the limit a session is more often rewound or closed than asked again.
FULL: Final = 0.6
REFUSED: Final = "memory_exceeded"
#: A load that never comes so close to its limit proves nothing.
NEAR: Final = 0.75
#: What a process may grow by besides what MLX has allocated: freed buffers that are kept for reuse, snapshots
#: that are being written, Python's own.
BESIDE_BYTES: Final = 192 * 2**20
METRICS_S: Final = 0.1
#: So often all answers are waited for, which makes a block; none is shorter than so many seconds.
STRETCHES, MIN_STRETCH_S = 10, 2.0
#: The sessions by which the bytes of a token are found out: two lengths give both parts of the formula.
PROBES: Final = (40, 72)

Tokens = tuple[int, ...]
Duration = Annotated[float, Option("How long requests are sent.", smoke=4.0, metavar="SECONDS")]
Room = Annotated[
    int, Option("Tokens of KV that fit; a context must hold twice as many.", 640, click.IntRange(min=256))
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A worker at its memory limit: never above it, refusing nothing that fits, answering everything else.

    Sessions of random length come and go, some of them so long that they fit alone, or never; some requests
    are cancelled. Afterwards some of the sessions are held again alone: they must get the same answers.
    """

    duration: Duration = 600.0
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
ALLOCATED, PEAK, HELD, LIMIT = "allocated", "peak so far", "reserved and held", "limit"
MEASURES = (REQUEST, DEVICE, KV, PROCESS)

PLOTS = (
    Plot("over time", "Memory of the device", (DEVICE,), "What MLX has allocated, and the most so far."),
    Plot("over time", "KV", (KV,), "Reserved by requests that run, and held by idle sessions."),
    Plot("over time", "The process", (PROCESS,), "Resident memory of the worker's process."),
    Plot("cdf", "Time of a request", (REQUEST,), "Those that were carried out and not cancelled.", log=True),
)


def checks(found: Findings[Plan]) -> Iterator[Check]:
    """Hold the worker against what it is promised to do around its memory limit."""
    facts: dict[str, Any] = found.facts
    device, kv, idle = (facts.get(name, 0) for name in ("device_memory", "max_memory", "without sessions"))
    peaks, held = found.of(DEVICE, PEAK), found.of(KV, HELD)
    yield _within("what MLX allocates stays within device_memory", peaks, device)
    yield _within("KV stays within max_memory", held, kv)
    limits = [(found.of(DEVICE, LIMIT), device), (found.of(KV, LIMIT), kv)]
    other = [one for some, limit in limits for one in some if one.value != limit]
    yield count("the limits are those that the worker was given", other, limits[0][0], "readings")
    sent = [turn for turn in found.turns if turn.case != AGAIN]
    fits, never = [t for t in sent if t.case != NEVER], [t for t in sent if t.case == NEVER]
    yield count("no request that fits was refused", [t for t in fits if t.error == REFUSED], fits, "requests")
    taken = [turn for turn in never if turn.error is None and not turn.facts.get("cancelled")]
    yield count("no request was carried out that can never fit", taken, never, "requests")
    results = found.of(RESULTS)
    odd = [one for one in results if one.value != 1]
    yield count("every request has one result in the log", odd, results, "requests")
    done = [t for t in sent if t.error is None and (t.tokens or t.facts["verb"] == "append")]
    contexts = [t for t in done if t.position != (t.fact("held") or 0) + (t.own_tokens or 0) + len(t.tokens)]
    yield count("no answer ran over another context than was sent", contexts, done, "answers")
    again = [turn for turn in found.turns if turn.case == AGAIN and turn.error is None]
    wrong = [turn for turn in again if turn.facts["same"] != "yes"]
    yield count("answers are those of the same sessions alone", wrong, again, "answers")
    if held and (active := found.of(DEVICE, ALLOCATED)):
        near = min(_most(active) - idle, _most(held)) / kv
        name = f"the load came near the limit: at least {NEAR:.0%} of it were used"
        yield _one(name, near, "share", at_least=NEAR)
    if process := found.of(PROCESS):
        beyond = _most(process) - process[0].value - (device - idle)
        name = f"the process grows by at most {number(BESIDE_BYTES, 'bytes')} more than the device's memory"
        yield _one(name, beyond, "bytes", at_most=BESIDE_BYTES)


def _within(name: str, readings: Sequence[Sample], limit: int) -> Check:
    found = count(name, [one for one in readings if one.value > limit], readings, "readings")
    most = f"at the most {number(_most(readings), 'bytes')} of {number(limit, 'bytes')}"
    return replace(found, detail=f"{most}, in {len(readings):,} readings") if readings else found


def _one(name: str, value: float, unit: Any, **bound: float) -> Check:
    """Hold a single value, such as the most of all readings, against a bound."""
    return judged(name, {"": Estimate(value, value, value, 1)}, unit=unit, **bound)


def _most(readings: Sequence[Sample]) -> float:
    return max((one.value for one in readings), default=0.0)


def planned(turn: Turn) -> bool:
    """Say whether a refusal has a check of its own, or is the end of a request that was cancelled."""
    return turn.error == REFUSED or (turn.error == "expired" and bool(turn.facts["cancelled"]))


async def measure(run: Run[Plan]) -> None:
    """Find out what sessions take, set the limits, load the worker, and hold some sessions again."""
    plan = run.plan
    options = ["--metrics-interval-s", f"{METRICS_S}s", "--max-batch", f"{plan.rows}"]
    options += ["--spare-memory", "0"]  # it would hide what the process grows by
    async with run.worker(*options, "--max-context", f"{plan.room}") as (_, client):
        await _size(run, client)
    # Of which the worker has to leave for KV what the room takes, to the byte: a check holds it to that.
    # The context must not be what refuses a request.
    options += ["--device-memory", f"{run.facts['device_memory']}", "--max-context", f"{2 * plan.room}"]
    async with run.worker(*options) as (worker, client):
        process = psutil.Process(worker.pid)
        run.sample(PROCESS, "process", 0.0, 0, process.memory_info().rss)
        load = _Load(run, client)
        async with beside(_watch(run, client, process, load)):
            stretch_s = max(MIN_STRETCH_S, plan.duration / STRETCHES)
            for block in range(max(1, round(plan.duration / stretch_s))):
                run.step(block * stretch_s, plan.duration, f"request {len(run.turns):,}")
                await load.stretch(block, stretch_s)
            await load.read_log()
            async with run.connect(worker, "alone") as other:  # finds nothing that was cached for the first
                await load.again(other)
    for kind in CASES[:-1]:
        outcomes = Counter(turn.error or "ok" for turn in run.turns if turn.case == kind)
        run.facts[f"requests, {kind}"] = ", ".join(f"{times:,} {name}" for name, times in outcomes.items())


async def _size(run: Run[Plan], client: Client) -> None:
    """Find out what a token takes, and what a worker keeps free beside KV: its weights and largest step."""
    found: list[tuple[int, int]] = []
    timeout_s = run.plan.turn_timeout
    for length in PROBES:
        session = client.session(f"probe-{length}")
        done = await session.append(tokens=[length] * length, timeout_s=timeout_s)
        found.append((done.tokens, done.kv_live_bytes))
        await session.close(timeout_s=timeout_s)
    # What is allocated is told after a step: this one's session is next to nothing.
    last = client.session("probe-last")
    await last.append(tokens=[1, 1], timeout_s=timeout_s)
    worker = await run.settle(last)
    (first, small), (second, large) = found
    per_token = (large - small) // (second - first)
    kv = small - first * per_token + run.plan.room * per_token
    beside_kv = worker.device_memory_bytes - worker.max_memory_bytes
    run.facts |= {"KV of a token": per_token, "max_memory": kv, "device_memory": kv + beside_kv}
    run.facts |= {"without sessions": worker.mlx_active_bytes}


async def _watch(run: Run[Plan], client: Client, process: psutil.Process, load: _Load) -> None:
    """Keep what the worker publishes of its memory, and the system of its process."""
    async for metrics in client.metrics():
        at_s = time.monotonic() - run.began_s
        with contextlib.suppress(psutil.Error):  # it has died, which ends the run
            run.sample(PROCESS, "process", at_s, load.block, process.memory_info().rss)
        if metrics.mlx_active_bytes:  # 0 before the first step
            for measure, case, size_bytes in (
                (DEVICE, ALLOCATED, metrics.mlx_active_bytes),
                (DEVICE, PEAK, metrics.mlx_peak_bytes),
                (DEVICE, LIMIT, metrics.device_memory_bytes),
                (KV, HELD, metrics.resident_kv_bytes),
                (KV, LIMIT, metrics.max_memory_bytes),
            ):
                run.sample(measure, case, at_s, load.block, size_bytes)
        run.facts["restored from SSD"] = metrics.snapshots.restored_bytes


@dataclass(slots=True)
class _Member:
    """A session: its position, by its last result, and what changed it, to get there again."""

    number: int
    held: int = 0
    done: list[tuple[str, dict[str, Any], Tokens]] = field(default_factory=list)


class _Load:
    """All sessions, which many clients ask in turn."""

    def __init__(self, run: Run[Plan], client: Client) -> None:
        self.block = 0
        self._run, self._client = run, client
        self._members: list[_Member] = []
        self._idle: list[_Member] = []
        self._dice = [random.Random(f"{run.plan.seed}-{i}") for i in range(run.plan.clients)]  # noqa: S311

    async def stretch(self, block: int, seconds: float) -> None:
        """Send requests for so long, and wait for the answers to the last of them."""
        self.block, end_s = block, time.monotonic() + seconds
        await together(*(self._ask(dice, end_s) for dice in self._dice))

    async def read_log(self) -> None:
        """Count in the log what every request got."""
        for member in self._members:
            asked, results = [], Counter[int]()
            for entry in await self._client.log(f"s{member.number}"):
                if entry.kind == "in":
                    asked.append(entry.seq)
                else:
                    with contextlib.suppress(InvalidMessageError):
                        results[decode_result(entry.body).seq or 0] += 1
            for seq in asked:
                self._run.sample(RESULTS, "", None, member.number, results[seq])

    async def again(self, client: Client) -> None:
        """Hold some of the sessions again, one after another, and compare their answers."""
        answered = [member for member in self._members if any(answer for *_, answer in member.done)]
        step = max(1, len(answered) // self._run.plan.sample)
        for member in answered[::step][: self._run.plan.sample]:
            session = client.session(f"s{member.number}")
            for verb, request, answer in member.done:
                turn = await self._send(session, verb, request)
                if verb == "generate":
                    same = "yes" if turn.tokens == answer else "no"
                    facts = turn.facts | {"same": same}
                    self._run.take(replace(turn, case=AGAIN, block=member.number, facts=facts))
                    if same == "no":
                        break
            await session.close(timeout_s=self._run.plan.turn_timeout)

    async def _ask(self, dice: random.Random, end_s: float) -> None:
        clients, room = self._run.plan.clients, self._run.plan.room
        while time.monotonic() < end_s:
            if not self._idle or dice.random() < (0.6 if len(self._idle) < 2 * clients else 0.15):
                self._members.append(member := _Member(len(self._members)))
            else:
                member = self._idle.pop(dice.randrange(len(self._idle)))
            verb, request, cancel_after_s = draw(dice, room, member.held)
            session = self._client.session(f"s{member.number}")
            turn = await self._send(session, verb, request, cancel_after_s)
            own = len(request.get("tokens", ()))
            size = member.held + own + min(request.get("max_tokens", 0), 1)
            if verb in {"append", "generate"}:
                facts = {"verb": verb, "held": member.held, "cancelled": "yes" if cancel_after_s else None}
                case = kind_of(size, room)
                self._run.take(replace(turn, case=case, block=self.block, own_tokens=own, facts=facts))
            if turn.error is None and verb != "close":
                member.held = turn.position or 0
                if turn.finish_reason == "cancelled":  # asked for again by its length
                    request = request | {"max_tokens": len(turn.tokens)}
                if turn.tokens or verb != "generate":
                    member.done.append((verb, request, turn.tokens))
            if verb != "close" and turn.error in {None, REFUSED, "expired"}:
                self._idle.append(member)

    async def _send(
        self, session: Session, verb: str, request: dict[str, Any], cancel_after_s: float | None = None
    ) -> Turn:
        """Send a request; what went wrong is an outcome."""
        run, name, at_s = self._run, uuid4().hex, time.monotonic()
        timeout_s = run.plan.turn_timeout

        async def cancel() -> None:
            if cancel_after_s is not None:
                await asyncio.sleep(cancel_after_s)
                with contextlib.suppress(TurnkeepError):  # it was answered meanwhile
                    await session.cancel(name)

        async with beside(cancel()):
            if verb == "generate":
                return await run.ask(session, request_id=name, **request)
            error = message = position = None
            with run.timing():
                try:
                    call = getattr(session, verb)
                    position = (await call(request_id=name, timeout_s=timeout_s, **request)).position
                except TurnkeepError as fault:
                    error, message = error_class(fault), str(fault)
            seconds = time.monotonic() - at_s
            at_s -= run.began_s
            return Turn(at_s=at_s, total_s=seconds, error=error, message=message, position=position)


def kind_of(size: int, room: int) -> str:
    """Say what a request is that brings its session to `size` tokens, where `room` are the limit."""
    if size > room:
        return NEVER
    return ALONE if size > ALONE_FROM * room else LONG if size > LONG_FROM * room else SHORT


def draw(dice: random.Random, room: int, held: int) -> tuple[str, dict[str, Any], float | None]:
    """Draw the next request of a session that holds so many tokens, and when it is cancelled.

    An answer gets as many tokens as there is room for; what it has to hold is the prompt, and one of it.
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
    edge = {ALONE: room, NEVER: room + 1}.get(kind)
    size = edge if edge is not None and dice.random() < EDGE else dice.randint(low, high)
    added = max(size, held + 2) - held
    generate, answer = dice.random() >= 0.3, 0
    cancel_after_s = dice.uniform(0, 3) if dice.random() < CANCELLED else None
    if generate:
        answer = dice.randint(1, min(SHORT_ANSWER, added - 1))
        if added > SHORT_ANSWER and dice.random() < 0.15:
            # A long answer instead of a long prompt: it takes its room as it grows.
            answer = added - dice.randint(1, SHORT_ANSWER)
            cancel_after_s = dice.uniform(0.2, 3)
    tokens = tuple(dice.randint(FIRST_ID, LAST_ID) for _ in range(added - answer))
    if not generate:
        return "append", {"tokens": tokens}, cancel_after_s
    return "generate", {"tokens": tokens, "max_tokens": answer}, cancel_after_s


BENCH = Bench(
    name="pressure",
    title="At the memory limit",
    plan=Plan,
    cases=CASES,
    measures=MEASURES,
    against=(),
    plots=PLOTS,
    checks=checks,
    measure=measure,
    planned=planned,
)
