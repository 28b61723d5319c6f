"""The actors of a simulated history: clients, supervisors of workers, and random faults."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import io
import json
import math
import random
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from PIL import Image

from cache.names.policy import FULL, Policy
from tests.parts import split
from turnkeep_client.calls import Call
from turnkeep_client.client import connect
from turnkeep_client.errors import InvalidMessageError, RequestFailedError, StreamBrokenError, TurnkeepError
from turnkeep_client.generation import Generation
from turnkeep_client.images import image
from turnkeep_client.log import HISTORY_HEADER, PARTS_HEADER
from turnkeep_client.messages import (
    Append,
    Close,
    Generate,
    Open,
    Rewind,
    decode_asked,
    decode_request,
    decode_result,
    encode,
)
from turnkeep_client.subjects import SessionKey, Subjects
from worker.process.setting_kinds import TenantLimits
from worker.wire.log_room import LIMIT_NOTE, open_bytes

from .device import POISON, Disk, Worker
from .gateways import Gate, Visitor
from .loop import Loop, Process
from .operators import operate

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from turnkeep_client.client import Client
    from turnkeep_client.history import History as ShownHistory
    from turnkeep_client.messages import Chunk, Request, Result
    from turnkeep_client.session import Session

    from .jetstream import Message, Stream
    from .world import Connection, Server

    Fault = Callable[["History", Random], Coroutine[Any, Any, None]]

EXPECT_HEADER: Final = "Nats-Expected-Last-Subject-Sequence"
SUBJECTS: Final = Subjects()
TENANT: Final = "t"
_SESSIONS: Final = ("a", "b", "chat", "c", "d")
#: The share of plans whose weights differ from the defaults.
_LEANING: Final = 0.5
#: The share of plans that have gateways.
_VISITED: Final = 0.25
_ASKED: Final = (Append, Generate, Rewind, Close, Open, "fork")
_ALL: Final = 10**6
_WORDS: Final = ("hello", "x", "what now?", "é", "the quick brown fox", "ja")


@dataclass(eq=False)
class Told:
    """What a client received for one request: the request's stream sequence, chunks, result and errors."""

    key: SessionKey
    request: Request
    chunks: list[Chunk] = field(default_factory=list)
    #: Whether the client has read the chunks to their end.
    is_whole: bool = False
    seq: int | None = None
    result: Result | None = None
    error: str = ""
    broken: str = ""


class Look(NamedTuple):
    """An answer to `info`: the session's position, or None if the session is unknown.

    `told` has the session's requests whose results clients had received before `info` was sent.
    """

    key: SessionKey
    told: tuple[Told, ...]
    position: int | None


class Read(NamedTuple):
    """A session that a fresh worker has read from the log, between the times `begun_s` and `ended_s`.

    `answered` maps each answered request id to the stream sequence of the first request with this id.
    """

    begun_s: float
    ended_s: float
    history: Any
    diverged: str | None
    answered: dict[str, int]
    #: The session as a client's reader of the log shows it.
    shown: ShownHistory


@dataclass
class Plan:
    """The parameters of a simulated history (one run), drawn from its seed. Times are in seconds."""

    num_clients: int
    num_requests: int
    num_faults: int
    kinds: tuple[str, ...]
    settings: dict[str, Any]
    checkpoint_every: int
    batch: int
    num_workers: int
    leases: bool
    late_ack: float
    busy: float
    lag_s: float
    skews: tuple[float, ...]
    roundings: int
    meddling: float
    #: The time between syncs of the server's files. A crash may lose the messages of this time.
    sync_s: float
    #: The time between syncs as the workers know it, if it is longer than it is.
    known_sync_s: float
    #: Whether the worker has the least limits (`history._TIGHT`), so that sessions wait for each other.
    tight: bool
    #: The relative frequencies of the request types in `_ASKED`.
    weights: tuple[float, ...] = (30, 45, 10, 6, 4, 5)
    num_sessions: int = 3
    #: The probability that a client repeats an earlier request.
    repeating: float = 0.1
    #: The probability that a client waits for a result before its next request.
    patience: float = 0.6
    #: The probability that an input has an image.
    seeing: float = 0.0
    #: The number of gateways' clients, and of gateways.
    num_visitors: int = 0
    num_gates: int = 1

    @classmethod
    def of(cls, random: Random) -> Plan:
        """Draw a random plan."""
        kinds = tuple(one for one in FAULTS if random.random() < 0.35)
        num_workers = random.choice((1, 1, 1, 2, 3))
        some = random.random
        plan = cls(
            num_clients=random.choice((1, 1, 2, 3)),
            num_requests=random.randint(2, 9),
            num_faults=random.choice((0, 1, 2, 3, 5)) if kinds else 0,
            kinds=kinds,
            settings={
                "ack_wait_s": random.choice((0.5, 1.0, 3.0)),
                "max_attempts": random.choice((2, 3)),
                "max_batch": random.choice((1, 2, 16)),
                "max_waiting": random.choice((1, 2, 100)),
                "tenants": TenantLimits(sessions=random.choice((1, 100))),
                "history_idle_timeout_s": random.choice((0.0, 0.3, 300.0)),
                "closed_ttl_s": random.choice((None, None, 0.0, 2.0)),
                "cache_policy": random.choice((FULL, FULL, Policy(2, 16))),
                "token_ttl_s": random.choice((600.0, 600.0, 10.0)),
                "block_tokens": 8,
            },
            checkpoint_every=random.choice((1, 2, 3, 64)),
            batch=random.choice((1, 2, 3, 256)),
            num_workers=num_workers,
            leases=num_workers == 1 or some() < 0.5,
            late_ack=random.choice((0.0, 0.0, 0.02, 0.1)),
            busy=random.choice((0.0, 0.0, 0.2)),
            lag_s=random.choice((0.0, 0.0, 0.05, 0.5)),
            skews=tuple(random.choice((0.0, 0.0, -3.0, 3.0)) for _ in range(2)),
            roundings=random.choice((1, 2)),
            meddling=random.choice((0.0, 0.2, 0.5)),
            sync_s=random.choice((0.0, 0.0, 0.0, 0.0, 0.0, 0.02, 0.2, 2.0)),
            known_sync_s=random.choice((0.0, 1.0, 10.0)),
            tight=some() < 0.2,
        )
        if plan.sync_s:
            plan.kinds += ("crash server",)
            plan.num_faults = max(plan.num_faults, 1)
        if some() < _LEANING:
            plan._lean(random)
        if some() < _VISITED and not plan.sync_s:
            plan.num_visitors, plan.num_gates = random.choice((1, 1, 2)), random.choice((1, 2))
        plan.seeing = random.choice((0.0, 0.0, 0.3))
        return plan

    def _lean(self, random: Random) -> None:
        """Skew the plan: some types of requests become frequent, and others never occur.

        After A. Groce et al., "Swarm Testing" (ISSTA 2012): runs that omit random features find more
        faults than runs that use a little of every feature.
        """
        weights = tuple(random.choice((0, 1, 1, 5)) * one for one in self.weights)
        self.weights = weights if any(weights) else self.weights
        self.num_sessions = random.choice((1, 2, 3, 5))
        self.repeating, self.patience = random.choice((0.0, 0.1, 0.4)), random.choice((0.0, 0.6, 1.0))
        if random.random() < 0.4:
            self.num_workers, self.leases = 2, False
        if random.random() < 0.4:
            self.lag_s = 0.5
        if random.random() < 0.4:
            self.settings["closed_ttl_s"] = 0.0


#: The fields of a plan that disturb a history, with the values that turn the disturbance off.
PLAIN: Final[dict[str, Any]] = {
    "num_workers": 1,
    "leases": True,
    "late_ack": 0.0,
    "busy": 0.0,
    "lag_s": 0.0,
    "skews": (0.0, 0.0),
    "roundings": 1,
    "sync_s": 0.0,
    "known_sync_s": 10.0,
    "tight": False,
}


class Asker:
    """A simulated client process. If it is killed, another process continues with its requests."""

    def __init__(self, history: History, number: int) -> None:
        self._history = history
        self._number = number
        self._tenant = "u" if history.plan.tight and number == 2 else TENANT
        self._asked: list[tuple[SessionKey, Request]] = []
        self._num_begun = 0
        self._positions: dict[SessionKey, int] = {}
        self._client: Client | None = None
        self.process = Process(history.loop, f"client {number}")
        self.connections: list[Connection] = []
        self.is_done = asyncio.Event()

    def start(self) -> None:
        self.process.start(self._live())

    def kill(self) -> None:
        """Kill the process, and start another one, which first repeats the last two requests."""
        if self.is_done.is_set():
            return
        self._history.note(self.process.name, "killed")
        self.process.kill()
        self.process = Process(self._history.loop, f"client {self._number}")
        self.start()

    async def _live(self) -> None:
        try:
            await self._run()
        except Exception as error:
            self._history.faults.append(f"a client ended by {error!r}")
        self.is_done.set()

    async def _run(self) -> None:
        self._client = client = await self._connect()
        async with client, asyncio.TaskGroup() as tasks:
            for key, request in self._asked[-2:]:
                tasks.create_task(self._ask(key, request))
            while self._num_begun < self._history.plan.num_requests:
                self._num_begun += 1
                act = f"client {self._number} request {self._num_begun}"
                if (random := self._history.begin(act)) is not None:
                    await self._begin(random, act, tasks)
        self._history.check_client(client)

    async def _begin(self, random: Random, act: str, tasks: asyncio.TaskGroup) -> None:
        key, request = self._next(random)
        self._asked.append((key, request))
        timeout_s = random.choice((None, None, None, 0.3, 5.0))
        leaving = self._history.begin(f"{act} leaving") if isinstance(request, Generate) else None
        num_chunks = leaving.choice((1, 2, 5, *[_ALL] * 17)) if leaving is not None else _ALL
        asking = tasks.create_task(self._ask(key, request, timeout_s, num_chunks))
        if random.random() < self._history.plan.meddling:
            meddling = self._history.begin(f"{act} meddling")
            if meddling is not None:
                tasks.create_task(self._meddle(key, request, meddling))
        if random.random() < self._history.plan.patience:
            await asking
        else:
            await asyncio.sleep(random.expovariate(20))

    async def _connect(self) -> Client:
        while True:
            with contextlib.suppress(TurnkeepError):
                return await connect(
                    "nats://world:4222", tenant=self._tenant, timeout_s=math.inf, control_timeout_s=1.0
                )
            await asyncio.sleep(0.2)

    def _next(self, random: Random) -> tuple[SessionKey, Request]:
        plan, chance = self._history.plan, random.random()
        if self._asked and chance < plan.repeating:
            return random.choice(self._asked)
        (kind,) = random.choices(_ASKED, plan.weights)
        key = SessionKey(self._tenant, random.choice(_SESSIONS[: random.randint(1, plan.num_sessions)]))
        if kind == "fork" and random.random() < 0.7:
            key = SessionKey(self._tenant, f"f{self._number}-{len(self._asked)}")
        elif self._asked and random.random() < 0.2:
            key = random.choice(self._asked)[0]
        named: dict[str, Any] = {"id": f"r{self._number}-{len(self._asked)}"}
        if self._asked and chance < plan.repeating + 0.03:
            named["id"] = random.choice(self._asked)[1].id
        position = self._positions.get(key, 0)
        if random.random() < 0.1:
            named["expect_position"] = position
        if kind in (Append, Generate):
            if random.random() < 0.1:
                named["deadline_s"] = random.choice((0.001, 0.02, 0.3, 5.0))
            if random.random() < 0.2:
                named["priority"] = random.randint(-2, 2)
        match kind:
            case "fork":
                others = [one.session for one in self._positions]
                other = random.choice(others or _SESSIONS)
                most = self._positions.get(SessionKey(self._tenant, other), 0)
                at = random.randint(0, most) if random.random() < 0.5 else None
                of: dict[str, Any] = {"session": other, "position": at}
                if random.random() < 0.3:
                    of["expect_position"] = most
                named |= {"type": "open", "from": of}
            case _ if kind is Append:
                named |= {"type": "append", **_input(random, key, plan.seeing)}
            case _ if kind is Generate:
                named |= {"type": "generate", "max_tokens": random.choice((1, 3, 8, 30))}
                named["temperature"] = random.choice((0.0, 1.0))
                if random.random() < 0.7:
                    named |= _input(random, key, plan.seeing)
                if random.random() < 0.1:
                    named["stop"] = [*"abdefghijklmnop", "cq"]
            case _ if kind is Rewind:
                named |= {"type": "rewind", "position": random.randint(0, position)}
            case _ if kind is Close:
                forget, cancel = random.choice(((None, None), (None, True), (True, None), (True, True)))
                named |= {"type": "close", "forget": forget, "cancel": cancel}
            case _:
                named |= {"type": "open"}
        if (poison := self._history.poison) and kind is Append:
            self._history.poison = ""
            named |= {"id": f"{poison}{self._number}-{len(self._asked)}", "expect_position": None}
            named |= {"deadline_s": None, "text": None, "messages": None, "tokens": [POISON]}
        given = {name: value for name, value in named.items() if value is not None}
        return key, decode_request(encode(given))

    async def _ask(
        self, key: SessionKey, request: Request, timeout_s: float | None = None, num_chunks: int = _ALL
    ) -> None:
        """Send a request, and record what the client receives. Cancel an answer after `num_chunks` chunks."""
        history, client = self._history, self._client
        assert client is not None
        told = Told(key, request)
        history.told.append(told)
        history.note(self.process.name, f"asks {key.session} {encode(request).decode()}")
        if history.plan.sync_s:  # a request that the log has lost is never answered
            timeout_s = timeout_s or 60.0
        call = Call(client._wire, client._feeds, key, request, timeout_s=timeout_s)
        try:
            if isinstance(request, Generate):
                session = client.session(key.session)
                async with Generation(call, client._wire, session.cancel) as answer:
                    async for chunk in answer:
                        told.chunks.append(chunk)
                        if len(told.chunks) == num_chunks:
                            break
                    else:
                        told.is_whole = True
            else:
                await call.wait()
        except (StreamBrokenError, InvalidMessageError) as error:
            told.broken = repr(error)
        except TurnkeepError as error:
            told.error = repr(error)
        finally:
            told.seq = call.seq
            if call.is_resolved():
                told.result = result = call.result
                self._positions[key] = result.position or 0
                history.note(self.process.name, f"got {encode(result).decode()[:160]} {told.broken}")
            else:
                history.note(self.process.name, f"{request.id} {told.error} {told.broken}")

    async def _meddle(self, key: SessionKey, request: Request, random: Random) -> None:
        """At random, cancel the request, send `info` or `count` for its session, or send an `ask`."""
        await asyncio.sleep(random.expovariate(50))
        assert self._client is not None
        session, chance = self._client.session(key.session), random.random()
        with contextlib.suppress(TurnkeepError):
            if chance < 0.5:
                self._history.note(self.process.name, f"cancels {request.id}")
                await session.cancel(request.id)
            elif chance < 0.7:
                await self._look(session)
            elif chance < 0.8:
                await session.count(text=random.choice(_WORDS))
            else:
                await self._client.ask(key.session, text=random.choice(_WORDS), max_tokens=3, timeout_s=1.0)

    async def _look(self, session: Session) -> None:
        key, position = session.key, None
        told = tuple(one for one in self._history.told if one.key == key and one.result is not None)
        try:
            position = (await session.info()).position
        except RequestFailedError as error:
            if error.code != "unknown_session":
                return
        self._history.note(self.process.name, f"sees {key.session} at {position}")
        self._history.looks.append(Look(key, told, position))


def _picture(width: int, shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, 1), (shade, 0, 0)).save(file, "PNG")
    return file.getvalue()


#: Two pictures of the same size, and a wider one.
PICTURES: Final = [(width, _picture(width, shade)) for width, shade in ((2, 10), (2, 20), (5, 30))]


def _input(random: Random, key: SessionKey, seeing: float) -> dict[str, Any]:
    text = random.choice(_WORDS)
    if seeing and random.random() < seeing:
        _, data = random.choice(PICTURES)
        parts = [{"type": "text", "text": text}, image(data)]
        return {"messages": [{"role": "user", "content": parts[:: random.choice((1, -1))]}]}
    if key.session != "chat" or random.random() < 0.1:
        return {"text": text}
    return {"messages": [{"role": random.choice(("user", "user", "system", "assistant")), "content": text}]}


class Supervisor:
    """Runs a worker, and starts another one in its directory whenever the worker ends."""

    def __init__(self, history: History, number: int) -> None:
        self._history = history
        self._number = number
        self.disk = Disk()
        self.is_ending = False
        self.process: Process | None = None
        self.worker: Worker | None = None
        self.num_lives = 0
        self._ended = asyncio.Event()

    @property
    def is_serving(self) -> bool:
        is_alive = self.process is not None and not self.process.is_dead
        return is_alive and self.worker is not None and self.worker.ready.is_set()

    async def run(self) -> None:
        loop = self._history.loop
        while not self.is_ending:
            worker = self.prepare()
            process = self.process
            assert process is not None
            self._history.lives.append((worker._settings.worker, loop.time()))
            self._ended.clear()
            process.on_death.append(self._ended.set)
            running = process.start(self._life(worker))
            running.add_done_callback(lambda _: self._ended.set())
            await self._ended.wait()
            self._history.note(process.name, "killed" if process.is_dead else "ended")
            self._history.deaths_s += [loop.time()] * process.is_dead
            self._history.server.counts["crashes of workers"] += process.is_dead
            await asyncio.sleep(loop.random.expovariate(2))

    def prepare(self, *, leases: bool = True) -> Worker:
        """Make the next simulated process and its worker, without starting them."""
        plan, loop, number = self._history.plan, self._history.loop, self._number
        skew_s = plan.skews[number % len(plan.skews)] if number < plan.num_workers else 0.0
        process = self.process = Process(loop, f"worker {number}.{self.num_lives}", skew_s=skew_s)
        self.num_lives += 1
        named = {"data_dir": Path("none"), "worker": process.name.replace(" ", "-").replace(".", "-")}
        named |= {"metrics_interval_s": 3600.0, "log_replicas": 3 if plan.lag_s else 1}
        named |= {"sync_interval": f"{max(plan.known_sync_s, plan.sync_s)}s"}
        settings, constants = split(named | plan.settings)
        rounding = self.num_lives % plan.roundings
        self.worker = Worker(
            settings,
            loop,
            process,
            directory=f"d{number}",
            disk=self.disk,
            constants=constants,
            leases=leases and plan.leases,
            rounding=rounding,
        )
        return self.worker

    async def _life(self, worker: Worker) -> None:
        try:
            await worker.run()
        except TurnkeepError as error:
            self._history.note(f"worker {self._number}", f"gives up: {error}")
        except Exception as error:
            self._history.faults.append(f"a worker ended by {error!r}")

    def kill(self) -> None:
        if self.process is not None and not self.process.is_dead:
            self.process.kill()


class History:
    """One simulated run: its actors, its faults, and the observations that `checks` compares with the log."""

    def __init__(
        self,
        loop: Loop,
        server: Server,
        plan: Plan,
        note: Callable[[str, str], None],
        *,
        seed: int = 0,
        without: frozenset[str] = frozenset(),
    ) -> None:
        """Make the actors of a plan. `without` names the acts to leave out."""
        self.loop = loop
        self.seed = seed
        self.without = without
        #: The acts that have begun, in order.
        self.acts: list[str] = []
        self.server = server
        self.plan = plan
        server.is_clustered = plan.lag_s > 0
        self.note = note
        self.told: list[Told] = []
        self.looks: list[Look] = []
        #: Sessions whose streamed text differed from the recorded text, each with a description.
        self.differing: list[tuple[str, str]] = []
        #: By session: the last answer that a gateway has shown by its id, and its text.
        self.shown: dict[SessionKey, tuple[dict[str, Any], str]] = {}
        self.faults: list[str] = []
        self.num_faults = 0
        #: The name of each worker process, and the time at which it started.
        self.lives: list[tuple[str, float]] = []
        #: When worker processes were killed.
        self.deaths_s: list[float] = []
        self.stalls_s: list[tuple[float, float]] = []  # when a worker began and ended to run no code
        #: If not empty, the next append kills the workers that run it; its id begins with this text.
        self.poison = ""
        #: The sessions as a fresh worker has read them at the end.
        self.read: dict[SessionKey, Read] = {}
        self.deeds: list[asyncio.Task[Any]] = []
        #: What is left to be done after the last fault, such as requests without a result.
        self.left: dict[str, int] = {}
        #: Imported requests: session and sequence now, mapped to session and sequence before the import.
        self.imported: dict[tuple[SessionKey, int], tuple[SessionKey, int]] = {}
        self.supervisors = [Supervisor(self, number) for number in range(plan.num_workers)]
        self.gates = [Gate(self, number) for number in range(plan.num_gates if plan.num_visitors else 0)]
        visitors = [Visitor(self, number) for number in range(plan.num_visitors)]
        self.clients = [*(Asker(self, number) for number in range(plan.num_clients)), *visitors]

    def begin(self, act: str) -> Random | None:
        """Begin an act; return its own random generator, seeded by its name. None if it is left out."""
        if act in self.without:
            return None
        self.acts.append(act)
        return random.Random(f"{self.seed} {act}")

    def check_client(self, client: Client) -> None:
        held = len(client._feeds._feeds) + len(client._wire.watchers)
        if held:
            self.faults.append(f"a client holds {held} feeds or watchers of calls that are over")

    @property
    def ready(self) -> bool:
        return any(one.is_serving for one in self.supervisors)

    async def break_things(self) -> None:
        """Inject the plan's faults one after another, at random times."""
        for number in range(1, self.plan.num_faults + 1):
            act = f"fault {number}"
            chance = random.Random(f"{self.seed} {act}")
            await asyncio.sleep(chance.expovariate(4))
            kind = chance.choice(self.plan.kinds)
            if self.begin(act) is not None:
                self.note("chance", f"{act}: {kind}")
                self.num_faults += 1
                self.server.counts[f"faults: {kind}"] += 1
                await FAULTS[kind](self, chance)


async def _crash(history: History, random: Random) -> None:
    """Kill a random worker just before one of the event loop's next 400 callbacks."""
    loop, victim = history.loop, random.choice(history.supervisors)
    loop.at_handle[loop.num_handles + random.randint(1, 400)] = victim.kill


async def _crash_at(history: History, random: Random) -> None:
    """Kill a random worker when the server stores the next message of a random kind, or a later one."""
    victim = random.choice(history.supervisors)
    kind = random.choice(("in", "commit", "commit", "closed", "attempt", "checkpoint", "chunk"))
    left = random.randint(1, 3)

    def stored(subject: str) -> None:
        nonlocal left
        if subject.split(".")[3:4] == [kind]:
            left -= 1
            if not left:
                victim.kill()

    history.server.on_stored = stored


async def _stall(history: History, random: Random) -> None:
    victim = random.choice(history.supervisors)
    if victim.process is not None:
        for_s, now_s = random.choice((0.2, 1.5, 4.0)), asyncio.get_running_loop().time()
        victim.process.stall(for_s)
        history.stalls_s.append((now_s, now_s + for_s))


async def _stop(history: History, random: Random) -> None:
    victim = random.choice(history.supervisors)
    if victim.worker is not None:
        victim.worker.stop()


async def _drain(history: History, random: Random) -> None:
    """Tell a random worker to hand its sessions to other workers, or to take sessions again."""
    victim, on = random.choice(history.supervisors), random.random() < 0.7
    if victim.worker is not None and victim.process is not None:
        victim.process.start(victim.worker.drain(on=on))


async def _cut(history: History, random: Random) -> None:
    """Cut a random connection, and make the server unreachable for that client for 0, 0.5 or 3 s."""
    links, away_s = history.server.links, random.choice((0.0, 0.5, 3.0))
    if links:
        link = random.choice(links)
        link.connection.unreachable_until_s = history.loop.time() + away_s
        history.server.cut(link)


async def _kill_client(history: History, random: Random) -> None:
    random.choice(history.clients).kill()


async def _crash_server(history: History, random: Random) -> None:
    server, away_s, left = history.server, random.choice((0.01, 0.5, 3.0)), random.randint(1, 3)
    if not history.plan.sync_s:
        server.crash()
        await asyncio.sleep(away_s)
        server.start()
        return

    def stored(subject: str) -> None:
        """Simulate a power failure after the server has stored one to three entries that it may lose."""
        nonlocal left
        left -= subject.split(".")[3:4] in (["in"], ["commit"], ["checkpoint"])
        if not left and server.is_up:
            server.crash()
            server.jetstream.lose(history.plan.sync_s)
            history.loop.call_later(away_s, server.start, context=contextvars.Context())

    server.on_stored = stored
    await asyncio.sleep(away_s)


async def _poison(history: History, _: Random) -> None:
    """Make the next append request kill every worker process that runs it."""
    history.poison = "poison"


def _waiting(stream: Stream, subject: str) -> list[Message]:
    """Return the requests on an `in` subject that have no result."""
    answered = {decode_result(one.data).seq for one in stream.matching(f"{subject[:-3]}.out")}
    return [one for one in stream.matching(subject) if one.seq not in answered]


async def _newer(history: History, random: Random) -> None:
    """Answer waiting requests as a newer version might, with a type of result unknown to this version."""
    stream = history.server.jetstream.streams[SUBJECTS.log_stream]
    for subject in stream.counts(SUBJECTS.every("in")):
        waiting, results = _waiting(stream, subject), stream.matching(f"{subject[:-3]}.out")
        request = decode_request(waiting[0].data) if waiting else None
        if isinstance(request, Append | Rewind) and random.random() < 0.7:
            asked = {"request": json.loads(waiting[0].data), "stored": waiting[0].stored}
            body = {"type": "pondered", "id": request.id, "seq": waiting[0].seq, "asked": asked}
            after = results[-1].seq if results else 0
            headers = {HISTORY_HEADER: "00", EXPECT_HEADER: str(after)}
            told = json.dumps(body | {"position": 1}).encode()
            history.server.handle(f"{subject[:-3]}.commit", "", told, headers)


async def _rot(history: History, _: Random) -> None:
    """Replace the content of each checkpoint by an earlier checkpoint's, perhaps of another session.

    Bases of forks, long inputs and long requests stay, because nothing else has them. Checkpoints of
    sessions with a waiting request stay too: one may be such a base, named only by a result yet to come.
    """
    stream = history.server.jetstream.streams[SUBJECTS.log_stream]
    links = [one.headers[PARTS_HEADER] for one in stream.all if PARTS_HEADER in one.headers]
    results = stream.matching(SUBJECTS.every("out"))
    links += [asked.link for one in results if (asked := decode_asked(one.data)) is not None]
    bases = {link.partition(" ")[0] for link in links}
    opening = {
        f"{subject[:-3]}.checkpoint"
        for subject in stream.counts(SUBJECTS.every("in"))
        if _waiting(stream, subject)
    }
    found = [
        one
        for one in stream.matching(SUBJECTS.every("checkpoint"))
        if str(one.seq) not in bases and one.subject not in opening
    ]
    for one, other in pairwise(reversed(found)):
        one.data = other.data


async def _tear(history: History, _: Random) -> None:
    """Let the next reader of several messages lose its connection in the middle."""
    history.server.faults.num_torn += 1


async def _fill(history: History, random: Random) -> None:
    """Let the log take requests up to its present size only, for a while."""
    stream = history.server.jetstream.streams[SUBJECTS.log_stream]
    stream.config["max_bytes"] = 1

    def empty() -> None:
        stream.config["max_bytes"] = open_bytes(int(stream.config["metadata"][LIMIT_NOTE]))

    history.loop.call_later(random.choice((0.2, 2.0, 6.0)), empty)


def _for_a_while(name: str, *most_s: float) -> Fault:
    async def begin(history: History, random: Random) -> None:
        setattr(history.server.faults, name, history.loop.time() + random.choice(most_s))

    return begin


FAULTS: Final[dict[str, Fault]] = {
    "operator": operate,
    "poison": _poison,
    "crash": _crash,
    "crash at": _crash_at,
    "stall": _stall,
    "stop": _stop,
    "drain": _drain,
    "cut": _cut,
    "kill client": _kill_client,
    "crash server": _crash_server,
    "silent": _for_a_while("silent_until_s", 0.2, 2.0, 6.0),
    "no leader": _for_a_while("refusing_until_s", 0.2, 2.0),
    "slow log": _for_a_while("stalled_until_s", 0.1, 1.0, 6.0),
    "newer worker": _newer,
    "rot": _rot,
    "full log": _for_a_while("full_until_s", 0.2, 2.0),
    "torn read": _tear,
    "no room": _fill,
}
