"""Runs a worker at full load for some minutes: many short sessions, a few long ones, closes, idle sessions.

    python tests/soak/soak.py --minutes 60

Prints each minute the number of requests, resident memory, the size of the data directory and the minute's
latencies. At the end prints the slope of each per hour, by least squares over the second half of the run.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import psutil
from harness import Heard, SessionKey, Target, arguments, folder, percentile, table, target, tiny_model

MIB = 2**20
SHORT_CLIENTS = 6
LONG_CLIENTS = 2
#: A long session is rewound before the tiny model's context of 2,048 tokens is full.
LONG_POSITION = 1700


class Reading(NamedTuple):
    """Measurements after one interval: the time since the start, totals, sizes and the interval's waits."""

    hours: float
    requests: int
    memory_bytes: int
    server_bytes: int
    disk_bytes: int
    p50_s: float
    p99_s: float


@dataclass
class Load:
    """Clients that each send one request after another, without pauses."""

    heard: Heard
    rng: random.Random
    requests: int = 0
    failed: list[str] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    _names: itertools.count[int] = field(default_factory=itertools.count)

    async def _send(self, key: SessionKey, number: int, request: dict[str, Any]) -> dict[str, Any]:
        result, wait_s, _ = await self.heard.send(key, {"id": f"r{number}"} | request)
        del self.heard.results[key, result["seq"]]  # the harness must not grow itself
        self.requests += 1
        self.waits_s.append(wait_s)
        if result["type"] == "failed":
            self.failed.append(f"{key} {request}: {result}")
        return result

    def _turn(self) -> dict[str, Any]:
        text = "Once upon a time there was a worker. "[: self.rng.randint(5, 37)]
        if self.rng.random() < 0.3:
            return {"type": "append", "text": text}
        return {"type": "generate", "text": text, "max_tokens": self.rng.randint(1, 24)}

    async def short(self) -> None:
        """Send a few requests in a new session, then close it or leave it idle; repeat until cancelled."""
        while True:
            key, numbers = SessionKey("short", f"s{next(self._names)}"), itertools.count()
            for _ in range(self.rng.randint(1, 6)):
                await self._send(key, next(numbers), self._turn())
            if self.rng.random() < 0.8:
                closing = {"type": "close"} | self.rng.choice(({}, {"forget": True}))
                await self._send(key, next(numbers), closing)

    async def long(self, name: str) -> None:
        """Send requests in one session until cancelled; rewind it before its context is full."""
        key = SessionKey("long", name)
        for number in itertools.count():
            result = await self._send(key, number, self._turn())
            if result.get("position", 0) > LONG_POSITION:
                await self._send(key, -number - 1, {"type": "rewind", "position": 100, "id": f"back{number}"})


def disk_bytes(path: Path) -> int:
    """Return the total size of the files below a folder, in bytes."""
    found = 0
    for where, _, names in os.walk(path):
        for name in names:
            try:
                found += (Path(where) / name).stat().st_size
            except FileNotFoundError:  # it was just removed
                continue
    return found


def slope(readings: Sequence[Reading], name: str) -> float:
    """Fit a line through the second half of a field's readings; return its slope per hour."""
    half = readings[len(readings) // 2 :]
    if len(half) < 2:
        return float("nan")
    values = [getattr(reading, name) for reading in half]
    return float(np.polyfit([reading.hours for reading in half], values, 1)[0])


def read(worker: Target, load: Load, begun_s: float) -> Reading:
    """Return the measurements of this interval, and start the next interval."""
    waits_s, load.waits_s = load.waits_s, []
    server = worker.server()
    return Reading(
        (monotonic() - begun_s) / 3600,
        load.requests,
        psutil.Process(worker.process.worker_pid).memory_info().rss,
        server.memory_info().rss if server else 0,
        disk_bytes(worker.process.data_dir),
        percentile(waits_s, 0.5),
        percentile(waits_s, 0.99),
    )


async def soak(
    where: Path, *, minutes: float, interval_s: float, seed: int, options: Sequence[str] = ()
) -> tuple[list[Reading], Load]:
    """Run a worker under load for some minutes; return a reading for each interval, and the load's record."""
    options = ("--min-free-disk", "0", "--max-disk", "256MiB", *options)
    async with target(where / "data", tiny_model(where, endless=True), *options) as worker:
        load = Load(await Heard.on(worker.url, chunks=False), random.Random(seed))
        clients = [asyncio.create_task(load.short()) for _ in range(SHORT_CLIENTS)]
        clients += [asyncio.create_task(load.long(f"l{number}")) for number in range(LONG_CLIENTS)]
        begun_s, readings = monotonic(), []
        print("minute  requests  worker MiB  server MiB  disk MiB  p50 ms  p99 ms", flush=True)
        while monotonic() - begun_s < 60 * minutes:
            done, _ = await asyncio.wait(clients, timeout=interval_s, return_when=asyncio.FIRST_COMPLETED)
            for client in done:
                client.result()
            readings.append(one := read(worker, load, begun_s))
            sizes = "  ".join(f"{size / MIB:9.1f}" for size in one[2:5])
            times = "  ".join(f"{1000 * time_s:6.0f}" for time_s in one[5:])
            print(f"{60 * one.hours:6.1f}  {one.requests:8}  {sizes}  {times}", flush=True)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await load.heard.nc.close()
    return readings, load


def slopes(readings: Sequence[Reading], load: Load) -> str:
    """Format a table of how fast memory, disk and latencies grew in the second half of the run."""
    return table(
        ("requests", load.requests),
        ("failed", len(load.failed)),
        ("worker memory", f"{slope(readings, 'memory_bytes') / MIB:+.1f} MiB/h"),
        ("server memory", f"{slope(readings, 'server_bytes') / MIB:+.1f} MiB/h"),
        ("disk", f"{slope(readings, 'disk_bytes') / MIB:+.1f} MiB/h"),
        ("p50", f"{1000 * slope(readings, 'p50_s'):+.1f} ms/h"),
        ("p99", f"{1000 * slope(readings, 'p99_s'):+.1f} ms/h"),
    )


async def main() -> bool:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--interval", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    options = [part for option in given.option for part in f"--{option}".replace("_", "-").split("=", 1)]
    async with folder() as where:
        readings, load = await soak(
            where, minutes=given.minutes, interval_s=given.interval, seed=given.seed, options=options
        )
    print(slopes(readings, load))
    for line in load.failed[:5]:
        print(line)
    return not load.failed


if __name__ == "__main__":
    sys.exit(not asyncio.run(main()))
