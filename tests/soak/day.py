"""Plays a day of two workers in a few hours, and compares its last tenth with its first.

    python tests/soak/day.py --requests 1000000 --sessions 2000

Sessions of tiny models grow turn by turn, and are closed after some, half of them with `forget`. One worker
is killed after every 200 requests. At 20% and 60% both are restarted one after the other, at 40% and 80% they
get another model. Each tenth has a row: how long requests took, and what the worker that is not killed, the
NATS server and the disk have in use. A request without an answer is a fault, as is what the oracle finds.
"""

import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import psutil
from cluster import OPTIONS, Member, Nodes
from harness import Verdict, arguments, folder, judge, read_log, report, size_bytes, tiny_model

from turnkeep_client.client import Client, connect
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.retrying import retry

_KILL_EACH = 200
_SENDERS = 8
#: A session is closed at one of so many requests.
_TURNS = 12
_LIMITS = ("--log-max-bytes", "64MiB", "--other-model", "continue")
_HEADER = "   sent   p50 ms   p99 ms  worker MiB  files  server MiB  log MiB  snapshots MiB"


@dataclass
class Day:
    """A run: how far it is, how long the requests of this tenth took, and what went wrong."""

    members: Sequence[Member]
    models: Sequence[Path]
    server: int
    where: Path
    num_requests: int
    sent: int = 0
    times_s: list[float] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    async def send(self, client: Client, names: Sequence[str], chance: random.Random) -> None:
        """Let this sender's sessions have turns, one at a time."""
        closed = {*names}
        while self.sent < self.num_requests:
            self.sent += 1
            name, begun_s = chance.choice(names), time.monotonic()
            session = client.session(name)
            try:
                if name in closed:
                    await retry(session.open, attempts=10)
                    closed.discard(name)
                elif chance.randrange(_TURNS) == 0:
                    closed.add(name)
                    await retry(partial(session.close, forget=chance.random() < 0.5), attempts=10)
                else:
                    text = "a day is long " * chance.randint(1, 3)
                    await retry(partial(session.generate, text=text, max_tokens=8), attempts=10)
            except TurnkeepError as error:
                self.failed.append(f"{session.key}: {error!r}")
            self.times_s.append(time.monotonic() - begun_s)

    async def strike(self) -> None:
        """Kill, restart and exchange as the day goes on; note a row at the end of each tenth."""
        kept, killed = self.members
        plan = {2: self._restart, 6: self._restart, 4: self._exchange, 8: self._exchange}
        for tenth in range(1, 11):
            while self.sent < self.num_requests * tenth // 10:
                if self.sent >= _KILL_EACH * (self.struck["kill"] + 1) and killed.is_ready:
                    killed.kill_worker()
                    self.struck["kill"] += 1
                await asyncio.sleep(0.05)
            self._note(kept)
            if tenth in plan:
                await plan[tenth]()

    async def _restart(self) -> None:
        for one in self.members:
            await asyncio.to_thread(one.process.stop)
            one.start()
            await one.ready()
        self.struck["restart"] += 1

    async def _exchange(self) -> None:
        for one in self.members:
            await asyncio.to_thread(one.process.stop)
        self.struck["exchange"] += 1
        for one in self.members:
            at = one.process.command.index("--model") + 1
            one.process.command[at] = str(self.models[self.struck["exchange"] % 2])
            one.start()
        for one in self.members:
            await one.ready()

    def _note(self, kept: Member) -> None:
        worker, server = psutil.Process(kept.process.worker_pid), psutil.Process(self.server)
        times_s = sorted(self.times_s) or [0.0]
        self.times_s = []
        spans_ms = (1e3 * times_s[len(times_s) // 2], 1e3 * times_s[int(0.99 * len(times_s))])
        used = (worker.memory_info().rss, server.memory_info().rss, size_bytes(self.where / "n0"))
        snapshots = sum(size_bytes(one.process.data_dir / "snapshots") for one in self.members)
        mib = [size / 2**20 for size in (*used, snapshots)]
        self.rows.append(
            f"{self.sent:7} {spans_ms[0]:8.0f} {spans_ms[1]:8.0f} {mib[0]:11.0f} {worker.num_fds():6}"
            f" {mib[1]:11.0f} {mib[2]:8.1f} {mib[3]:14.1f}"
        )
        print(self.rows[-1], flush=True)


async def play(where: Path, *, requests: int, sessions: int, seed: int) -> tuple[Day, Verdict]:
    """Play the day; return its record, and the oracle's verdict."""
    models = [tiny_model(where / name, hidden_size=size) for name, size in (("one", 64), ("two", 128))]
    nodes = Nodes(where, 1, "127.0.0.1")
    nodes.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(nodes.stop)
        members = [Member(where, i, models[0], nodes.url, "", *OPTIONS, *_LIMITS) for i in range(2)]
        for one in members:
            stack.callback(one.stop)
            one.start()
        for one in members:
            await one.ready()
        day = Day(members, models, nodes._running[0].pid, where, requests)
        print(_HEADER, flush=True)
        striking = asyncio.create_task(day.strike())
        async with anyio.create_task_group() as senders:  # repeats a cancel that nats-py swallows
            for number in range(_SENDERS):
                client = await stack.enter_async_context(connect(nodes.url, connect_timeout_s=30))
                names = [f"s{i}" for i in range(number, sessions, _SENDERS)]
                senders.start_soon(day.send, client, names, random.Random(seed + number))
        await striking
        verdict = judge(await read_log(nodes.url))
    for fault in day.failed:
        verdict.blame("contradicting", fault)
    return day, verdict


async def main() -> bool:
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    async with folder() as where:
        day, verdict = await play(where, **vars(given))
        return report(verdict, ("requests sent", day.sent), ("struck", dict(day.struck)))


if __name__ == "__main__":
    sys.exit(not asyncio.run(main()))
