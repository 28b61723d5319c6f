"""Sends requests of every kind while worker and NATS server are killed with `kill -9`, then checks the log.

    python tests/soak/attack.py --kills 300 --server-kills 60 --requests 4000 --seed 1

    python tests/soak/attack.py --kills 60 --requests 900 --other OTHER/.venv/bin/python

Half of the requests are published on a raw connection, half by `turnkeep_client`. The kills are spread over
the run. A quarter of them hit a worker that is still starting, and the share `--crash-loops` of them come in
rows of eight, each 0.2 to 2 s after the worker was ready. At the end a fresh worker must answer a request in
each session. All counts of faults should be 0. With `--other`, the Python interpreter of an environment with
another version, workers of both versions take turns on the log, as in upgrades and rollbacks.

A worker cannot tell whether a crash had an outside cause or was caused by a request. With this many kills,
several workers by chance die while they run the same request: a few requests in a thousand are given up, and
answered `internal`. That is no fault.
"""

import asyncio
import contextlib
import json
import random
import shutil
import sys
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from harness import (
    PATIENCE_S,
    SUBJECTS,
    Heard,
    Target,
    Verdict,
    arguments,
    folder,
    judge,
    read_log,
    report,
    tiny_model,
)
from parts import CAN_FORK

from turnkeep_client.client import Client, connect
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import decode_request, encode
from turnkeep_client.subjects import SessionKey

SETTLE_S = 30.0
TENANTS = ("a", "b", "c")
SESSIONS = 7
#: The number of kills in a crash loop, each shortly after the worker is ready.
LOOP = 8
#: Cache policies for opening sessions, chosen at random; the texts are longer than these windows.
CACHES: tuple[dict[str, Any], ...] = (
    {},
    {"policy": "sink_window", "sink": 2, "window": 32},
    {"policy": "paged", "resident": 260},
    {"policy": "paged", "resident": 260},
)
TEXT = "The quick brown fox jumps over the lazy dog. " * 4


class TwoVersions(Target):
    """A worker process whose version changes at each start; both versions use one log and one directory."""

    def __init__(self, data_dir: Path, model: Path, other: Path, *options: str) -> None:
        super().__init__(data_dir, model, *options)
        self._ours = self.process.command
        # -P: do not import the version in the current folder.
        self._others = [str(other), "-P", *self._ours[1:]]

    def start(self) -> None:
        """Start a worker of the version that was not running before."""
        is_ours = self.process.command is self._others
        self.process.command = self._ours if is_ours else self._others
        self.process.forks = is_ours and CAN_FORK
        super().start()


@dataclass
class Attack:
    """The state of one run. `acked` has the requests that the log has acknowledged, by sequence."""

    target: Target
    rng: random.Random
    num_requests: int
    num_kills: int
    num_server_kills: int
    crash_loops: float = 0.0
    acked: dict[int, tuple[SessionKey, bytes]] = field(default_factory=dict)
    sent: int = 0
    kills: int = 0
    server_kills: int = 0
    repeats: int = 0
    cancels: int = 0
    client_faults: list[str] = field(default_factory=list)
    _numbers: dict[SessionKey, int] = field(default_factory=lambda: defaultdict(int))
    _was_closed: dict[SessionKey, bool] = field(default_factory=lambda: defaultdict(bool))
    _recent: dict[SessionKey, deque[dict[str, Any]]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=6))
    )

    def request(self, key: SessionKey) -> dict[str, Any]:
        """Make a random request, or repeat a recent one. Ids are numbered, so sessions use equal ids."""
        rng, recent = self.rng, self._recent[key]
        if recent and rng.random() < 0.12:
            self.repeats += 1
            again = dict(rng.choice(recent))
            if rng.random() < 0.25 and again["type"] == "append":
                again["text"] = "something else"
            return again
        self._numbers[key] += 1
        made: dict[str, Any] = {"id": f"r{self._numbers[key]}"}
        text = TEXT[: rng.randint(1, 90)]
        kinds = {"append": 30, "generate": 30, "chat": 20, "rewind": 12, "close": 7, "open": 4, "fork": 4}
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        if (self._was_closed[key] or self._numbers[key] == 1) and rng.random() < 0.7:
            kind = rng.choice(("open", "fork"))
        self._was_closed[key] = kind == "close"
        match kind:
            case "append":
                made |= {"type": "append", "text": text}
            case "generate":
                made |= {"type": "generate", "text": text, "max_tokens": rng.randint(1, 60)}
                made |= rng.choice(({}, {"temperature": 0.8}, {"temperature": 0.9, "seed": 7}))
            case "chat":
                made |= {"type": "generate", "messages": [{"role": "user", "content": text}]}
                made |= {"max_tokens": rng.randint(1, 40)}
            case "rewind":
                made |= {"type": "rewind", "position": rng.randint(0, 300)}
            case "close":
                made |= {"type": "close"} | rng.choice(({}, {"forget": True}))
            case "open":
                made |= {"type": "open", "cache": rng.choice(CACHES)}
            case "fork":
                parents = [other.session for other in self._numbers if other.tenant == key.tenant]
                point: dict[str, Any] = {"session": rng.choice(parents)}
                point |= rng.choice(({}, {"position": rng.randint(0, 200)}))
                made |= {"type": "open", "from": point, "tags": ["fork"]}
        if made["type"] in ("append", "generate"):
            made |= rng.choice(({}, {}, {}, {"priority": rng.randint(-3, 3)}, {"deadline_s": 20.0}))
        if rng.random() < 0.05:
            made["expect_position"] = rng.randint(0, 100)
        recent.append(made)
        return made

    async def send(self, sender: int, heard: Heard, client: Any, names: list[str]) -> None:
        """Send requests one at a time until all are sent; wait if the kills are behind schedule."""
        is_raw = sender % 2 == 0
        while self.sent < self.num_requests:
            if self.sent > self.num_requests * (self.kills + 1) / (self.num_kills + 1):
                await asyncio.sleep(0.01)
                continue
            await self.ask(
                SessionKey(client.tenant, self.rng.choice(names)), heard, None if is_raw else client
            )

    async def ask(self, key: SessionKey, heard: Heard, client: Client | None) -> None:
        """Send a random request by `client`, or if None by `heard`; wait for the result up to a limit."""
        self.sent += 1
        body = json.dumps(self.request(key)).encode()
        if self.rng.random() < 0.06:
            asyncio.get_running_loop().create_task(self._cancel(heard, key)).add_done_callback(_seen)
        if client is None:
            seq = await heard.publish(key, body)
            self.acked[seq] = key, body
            if self.rng.random() < 0.5:
                # A result that comes while the connection is lost is missed; the log is checked at the end.
                with contextlib.suppress(TimeoutError):
                    await heard.result(key, seq, timeout_s=5)
            return
        try:
            pending = await client.submit(key, decode_request(body))
            self.acked[pending.seq] = key, encode(decode_request(body))
            # The session's queue comes first, and the worker may be restarted many times.
            result = await asyncio.wait_for(pending.wait(), 10 * PATIENCE_S)
            if result.seq not in self.acked:
                self.client_faults.append(f"{key}: a result for {result.seq}")
        except (TurnkeepError, TimeoutError) as error:
            self.client_faults.append(f"{key}: {error!r}")

    async def _cancel(self, heard: Heard, key: SessionKey) -> None:
        if self._recent[key]:
            self.cancels += 1
            body = {"type": "cancel", "id": self._recent[key][-1]["id"]}
            await asyncio.sleep(self.rng.random() / 5)
            await heard.nc.request(SUBJECTS.of(key, "ctl"), json.dumps(body).encode(), timeout=1)

    async def kill(self) -> None:
        """Kill worker and server repeatedly: during starts, during requests, and in crash loops."""
        rng, start_s = self.rng, 2.0
        left_in_loop = 0
        while self.kills < self.num_kills:
            begun_s = monotonic()
            if not left_in_loop and rng.random() < self.crash_loops / (
                self.crash_loops + LOOP * (1 - self.crash_loops)
            ):
                left_in_loop = LOOP
            if left_in_loop:
                left_in_loop -= 1
                await self.target.ready()
                await asyncio.sleep(rng.uniform(0.2, 2.0))
            elif rng.random() < 0.25:
                await asyncio.sleep(rng.uniform(0, start_s))
            else:
                await self.target.ready()
                start_s = monotonic() - begun_s
                while self.sent <= self.num_requests * self.kills / (self.num_kills + 1):  # noqa: ASYNC110 - twelve senders count it
                    await asyncio.sleep(0.005)
                await asyncio.sleep(rng.uniform(0, 0.4))
            if self.server_kills * self.num_kills < self.num_server_kills * (self.kills + 1):
                self.server_kills += self.target.kill_server()
                await asyncio.sleep(rng.choice((0, 0.1, 0.6)))
            is_whole = rng.random() < 0.5 or not self.target.is_ready  # `turnkeep serve`, or only its worker
            if is_whole:
                self.target.process.kill()
            else:
                self.target.kill_worker()
            self.kills += 1
            if self.kills % 20 == 0:
                print(f"{self.kills} kills, {self.server_kills} of the server, {self.sent} sent", flush=True)
            if is_whole:
                self.target.start()


def _seen(task: asyncio.Task[None]) -> None:
    """Ignore the exception of a cancel, whose worker was just killed. A task's `done` callback."""
    with contextlib.suppress(asyncio.CancelledError):
        task.exception()


async def attack(
    where: Path,
    *,
    requests: int,
    kills: int,
    server_kills: int,
    seed: int,
    crash_loops: float = 0.0,
    other: Path | None = None,
) -> tuple[Attack, Verdict]:
    """Run the whole attack; return its record and the oracle's verdict."""
    model = tiny_model(where, hidden_size=128)  # large enough for sketches of keys
    options = ("--min-free-disk", "0")
    data = where / "data"
    victim = TwoVersions(data, model, other, *options) if other else Target(data, model, *options)
    run = Attack(victim, random.Random(seed), requests, kills, server_kills, crash_loops)
    victim.start()
    try:
        await victim.ready()
        heard = await Heard.on(victim.url)
        async with contextlib.AsyncExitStack() as open_clients:
            names = [f"s{n}" for n in range(SESSIONS)]
            senders = []
            for number in range(4 * len(TENANTS)):
                client = await connect(
                    victim.url, tenant=TENANTS[number % len(TENANTS)], connect_timeout_s=30
                )
                await open_clients.enter_async_context(client)
                senders.append(run.send(number // len(TENANTS), heard, client, names))
            killing = asyncio.create_task(run.kill())
            await asyncio.gather(*senders)
            await killing
            await victim.ready()
            verdict = await settled(victim.url, run, heard, model)
            await ask_fresh(victim, heard, run, verdict)
        await heard.nc.close()
    finally:
        victim.stop()
    for fault in run.client_faults:
        verdict.blame("contradicting", fault)
    return run, verdict


async def ask_fresh(victim: Target, heard: Heard, run: Attack, verdict: Verdict) -> None:
    """After a restart without snapshots, send a request to each session; a failure is a contradiction."""
    victim.process.kill()
    shutil.rmtree(victim.process.data_dir / "snapshots", ignore_errors=True)
    victim.start()
    await victim.ready()
    for key in {key for key, _ in run.acked.values()}:
        opened = await heard.send(key, {"type": "open", "id": "fresh-open"})
        result = await heard.send(key, {"type": "generate", "id": "fresh", "text": "x", "max_tokens": 2})
        if result["type"] != "generated":
            verdict.blame("contradicting", f"{key}: a fresh worker answers {opened} and then {result}")


async def settled(url: str, run: Attack, heard: Heard, model: Path) -> Verdict:
    """Check the log repeatedly until it has no fault, or for `SETTLE_S` seconds; return the verdict."""
    deadline_s = monotonic() + SETTLE_S
    while True:
        verdict = judge(await read_log(url), run.acked, heard, model)
        if not verdict.faults.total() or monotonic() > deadline_s:
            return verdict
        await asyncio.sleep(1)


async def main() -> bool:
    parser = arguments(__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--server-kills", type=int, default=60)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--crash-loops", type=float, default=0.0, help="share of the kills")
    parser.add_argument("--other", type=Path, help="the interpreter of another version's environment")
    given = parser.parse_args()
    begun_s = monotonic()
    async with folder() as where:
        run, verdict = await attack(where, **vars(given))
        good = report(
            verdict,
            ("seed", given.seed),
            ("share of crash loops", given.crash_loops),
            ("minutes", f"{(monotonic() - begun_s) / 60:.1f}"),
            ("kills of the worker", run.kills),
            ("kills of the server", run.server_kills),
            ("requests sent", run.sent),
            ("repeats among them", run.repeats),
            ("cancels", run.cancels),
        )
        if not good:
            raise SystemExit(1)
    return good


if __name__ == "__main__":
    sys.exit(not asyncio.run(main()))
