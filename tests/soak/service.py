"""Runs the service as in production, with exporter and Prometheus, under kills, then checks the log.

    python tests/soak/service.py --minutes 60

Each session repeatedly sends a request, waits for the result and pauses, as an agent does. The worker is
killed with `kill -9` again and again, every third time with the NATS server, while Prometheus scrapes the
exporter. Prints a line each minute. All counts of faults should be 0, and exporter and Prometheus must run to
the end. Needs Debian's package prometheus.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import psutil
from attack import Attack, settled
from harness import Heard, SessionKey, Target, Verdict, arguments, folder, percentile, report, tiny_model
from parts import free_port
from soak import MIB, disk_bytes

from tests.ops.test_panels import Prometheus
from turnkeep_client.client import Client, connect

TENANTS = ("a", "b", "c")
SCRAPE_S = 5.0
OPTIONS = ("--min-free-disk", "0", "--max-disk", "256MiB")


class Reading(NamedTuple):
    """Measurements after one interval: totals since the start, sizes now, and the interval's waits."""

    minutes: float
    requests: int
    kills: int
    server_kills: int
    worker_bytes: int
    server_bytes: int
    exporter_bytes: int
    prometheus_bytes: int
    disk_bytes: int
    p50_s: float
    p99_s: float

    def line(self) -> str:
        """Format the measurements as a line under `HEADER`."""
        sizes = "  ".join(f"{size / MIB:8.1f}" for size in self[4:9])
        waits = "  ".join(f"{1000 * wait_s:7.0f}" for wait_s in self[9:])
        return (
            f"{self.minutes:6.1f}  {self.requests:8}  {self.kills:5}  {self.server_kills:6}  {sizes}  {waits}"
        )


HEADER = "minute  requests  kills  server  worker MiB  server  exporter  prometh.  disk MiB  p50 ms   p99 ms"


@dataclass
class Service:
    """The state of one run: its processes, its requests and its measurements."""

    victim: Target
    attack: Attack
    exporter: psutil.Popen
    prometheus: Prometheus
    rng: random.Random
    waits_s: list[float] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    ending: asyncio.Event = field(default_factory=asyncio.Event)

    async def talk(self, key: SessionKey, heard: Heard, client: Client | None, pause_s: float) -> None:
        """Send random requests in one session, with pauses of `pause_s` on average, until the run ends."""
        while not self.ending.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ending.wait(), self.rng.uniform(0, 2 * pause_s))
                return
            begun_s = monotonic()
            await self.attack.ask(key, heard, client)
            self.waits_s.append(monotonic() - begun_s)

    async def kill(self, every_s: float) -> None:
        """Kill the worker every `every_s` seconds on average, every third time the server too."""
        while True:
            await asyncio.sleep(self.rng.uniform(0, 2 * every_s))
            await self.victim.ready()
            if self.attack.kills % 3 == 2:
                self.attack.server_kills += self.victim.kill_server()
                await asyncio.sleep(self.rng.choice((0, 0.5, 3)))
            self.victim.process.kill()
            self.attack.kills += 1
            self.victim.start()

    def read(self, begun_s: float) -> Reading:
        """Return the measurements of this interval, and start the next interval."""
        waits_s, self.waits_s = self.waits_s, []
        return Reading(
            (monotonic() - begun_s) / 60,
            self.attack.sent,
            self.attack.kills,
            self.attack.server_kills,
            _rss(self.victim.process.worker_pid),
            _rss(getattr(self.victim.server(), "pid", None)),
            _rss(self.exporter.pid),
            _rss(self.prometheus.pid),
            disk_bytes(self.victim.process.data_dir),
            percentile(waits_s, 0.5),
            percentile(waits_s, 0.99),
        )

    def scraped(self) -> dict[str, Any]:
        """Query Prometheus for its data of the whole run: scrapes, requests, alerts that fired."""
        span = f"[{int(60 * self.readings[-1].minutes) + 60}s]"
        told = {
            "scrapes": f'sum(count_over_time(up{{job="turnkeep"}}{span}))',
            "scrapes answered": f'sum(sum_over_time(up{{job="turnkeep"}}{span}))',
            "of the time with a worker": f"max(avg_over_time(max(turnkeep_up){span[:-1]}:5s]))",
            "requests counted": f"sum(increase(turnkeep_requests_total{span}))",
        }
        figures = {name: self._number(query) for name, query in told.items()}
        fired = self.prometheus.ask(
            "query", query=f'count by (alertname) (count_over_time(ALERTS{{alertstate="firing"}}{span}))'
        )
        names = sorted(one["metric"]["alertname"] for one in fired["result"])
        return figures | {"alerts that fired": ", ".join(names) or "none"}

    def _number(self, query: str) -> float:
        data = self.prometheus.ask("query", query=query)
        return round(float(data["result"][0]["value"][1]), 3) if data and data["result"] else 0.0


def _rss(pid: int | None) -> int:
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss) if pid else 0
    return 0


@asynccontextmanager
async def exporter_of(url: str, where: Path) -> AsyncIterator[tuple[psutil.Popen, str]]:
    """Run `turnkeep exporter` as a process during the block; yield the process and its URL."""
    port = free_port()
    with (where / "exporter.log").open("wb") as log:
        process = psutil.Popen(
            [sys.executable, "-m", "commands", "exporter", "--nats", url, "--listen", f"127.0.0.1:{port}"],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process, f"http://127.0.0.1:{port}/metrics"
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 30)


async def serve(
    where: Path, *, minutes: float, sessions: int, pause_s: float, kill_s: float, interval_s: float, seed: int
) -> tuple[Service, Verdict, dict[str, Any]]:
    """Run the service for some minutes; return its record, the oracle's verdict and Prometheus's data."""
    model, rng = tiny_model(where, endless=True), random.Random(seed)
    async with contextlib.AsyncExitStack() as open_things:
        victim = Target(where / "data", model, *OPTIONS)
        victim.start()
        open_things.callback(victim.stop)
        await victim.ready()
        exporter, url = await open_things.enter_async_context(exporter_of(victim.url, where))
        prometheus = Prometheus(where, url, f"{SCRAPE_S:.0f}s")
        open_things.callback(prometheus.stop)
        heard = await Heard.on(victim.url)
        open_things.push_async_callback(heard.nc.close)
        run = Service(victim, Attack(victim, rng, 0, 0, 0), exporter, prometheus, rng)
        clients = [await connect(victim.url, tenant=name, connect_timeout_s=30) for name in TENANTS]
        for client in clients:
            await open_things.enter_async_context(client)
        begun_s, senders = monotonic(), []
        for number in range(sessions):
            client = clients[number % len(clients)]
            key = SessionKey(client.tenant, f"s{number}")
            senders.append(asyncio.create_task(run.talk(key, heard, client if number % 2 else None, pause_s)))
        killing = asyncio.create_task(run.kill(kill_s))
        print(HEADER, flush=True)
        while monotonic() - begun_s < 60 * minutes:
            ended, _ = await asyncio.wait(
                [*senders, killing], timeout=interval_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in ended:
                task.result()
            run.readings.append(reading := run.read(begun_s))
            print(reading.line(), flush=True)
        killing.cancel()
        run.ending.set()
        await asyncio.gather(*senders)
        if not victim.process.running:  # the last kill was cancelled before its start
            victim.start()
        await victim.ready()
        verdict = await settled(victim.url, run.attack, heard, model)
        seen = await asyncio.to_thread(run.scraped)
        assert exporter.is_running()
    for fault in run.attack.client_faults:
        verdict.blame("contradicting", fault)
    return run, verdict, seen


async def main() -> bool:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--pause", type=float, default=10.0, metavar="SECONDS", dest="pause_s")
    parser.add_argument("--kill-every", type=float, default=60.0, metavar="SECONDS", dest="kill_s")
    parser.add_argument("--interval", type=float, default=60.0, metavar="SECONDS", dest="interval_s")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    async with folder() as where:
        run, verdict, seen = await serve(where, **vars(given))
        attack = run.attack
        good = report(
            verdict,
            ("seed", given.seed),
            ("kills of the worker", attack.kills),
            ("kills of the server", attack.server_kills),
            ("requests sent", attack.sent),
            ("repeats among them", attack.repeats),
            ("cancels", attack.cancels),
            *seen.items(),
        )
        if not good:
            raise SystemExit(1)
    return good


if __name__ == "__main__":
    sys.exit(not asyncio.run(main()))
