"""Measures how long one tenant waits for each answer while another tenant floods the worker with requests.

    python tests/soak/floods.py --requests 5000 --sessions 2000 --probes 120
    python tests/soak/floods.py --packaged --flood many --sessions 500 --option max_batch=8

Prints p50 and p99 of the waits of the quiet tenant, which sends one request at a time: without a flood,
during a flood of 5,000 requests in one session, and during one of a request in each of 2,000 sessions. Also
prints the parts of a wait: the median of each, and the mean over the slowest tenth. The goal is a p99 of at
most 3 times the p99 without a flood. Then prints how long the second flood takes alone. Each tenant has a
connection of its own. An `--option` is a setting of the worker.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any

from harness import (
    PATIENCE_S,
    SUBJECTS,
    SessionKey,
    Target,
    arguments,
    folder,
    percentile,
    table,
    target,
    tiny_model,
)

from turnkeep_client.nats_client import Nats

PROBES_PER_SESSION = 20
FLOODED = {"type": "generate", "text": "Once upon a time there was", "max_tokens": 16}
PROBE = {"type": "generate", "text": "hello, how are you?", "max_tokens": 8}
#: The parts of a wait: publishing the request; reading it from the log, and delivering the result; queueing
#: for the device; from there to the first token; from there to the last token.
PARTS = ("stored", "read and told", "queued", "first token", "last token")
#: The most floods of a kind. One follows another until there are enough probes.
MAX_FLOODS = 4


@dataclass
class Tenant:
    """A tenant with a connection of its own, and the results that it has received, by request sequence."""

    name: str
    nc: Nats = field(default_factory=Nats)
    results: dict[int, bytes] = field(default_factory=dict)
    num_results: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    async def on(cls, name: str, url: str) -> Tenant:
        """Connect a tenant, and subscribe to its results."""
        tenant = cls(name)
        await tenant.nc.connect(url)
        await tenant.nc.subscribe(SUBJECTS.of(SessionKey(name, "*"), "out"), cb=tenant._result)
        await tenant.nc.flush()
        return tenant

    async def _result(self, message: Any) -> None:
        self.num_results += 1
        if self.name == "quiet":
            self.results[json.loads(message.data)["seq"]] = message.data
        self._news.set()

    async def probe(self, number: int) -> dict[str, float]:
        """Send a request, and wait for its result; return the wait and its `PARTS`, in seconds."""
        key = SessionKey(self.name, f"s{number // PROBES_PER_SESSION}")
        begun_s = monotonic()
        body = json.dumps({"id": f"r{number}"} | PROBE).encode()
        seq = (await self.nc.jetstream().publish(SUBJECTS.of(key, "in"), body, timeout=PATIENCE_S)).seq
        stored_s = monotonic() - begun_s
        async with asyncio.timeout(PATIENCE_S):
            while seq not in self.results:
                self._news.clear()
                await self._news.wait()
        wait_s = monotonic() - begun_s
        result = json.loads(self.results[seq])
        if result["type"] != "generated":
            raise RuntimeError(f"the quiet tenant was answered {result}")
        at = result["seconds"]
        parts_s = (
            stored_s,
            wait_s - stored_s - at["total"],
            at["queued"],
            at["first_token"] - at["queued"],
            at["total"] - at["first_token"],
        )
        return {"wait": wait_s} | dict(zip(PARTS, parts_s, strict=True))

    async def flood(self, num: int, sessions: int) -> None:
        """Publish `num` requests as fast as the server accepts them, spread over this many sessions."""
        for number in range(num):
            subject = SUBJECTS.of(SessionKey(self.name, f"s{number % sessions}"), "in")
            await self.nc.publish(subject, json.dumps({"id": f"r{number}"} | FLOODED).encode())
            if number % 100 == 99:
                await self.nc.flush()
        await self.nc.flush()

    async def answered(self, num: int) -> None:
        """Wait until the tenant has received `num` results."""
        while self.num_results < num:
            self._news.clear()
            await self._news.wait()


async def probes(quiet: Tenant, num: int, numbers: itertools.count[int]) -> list[dict[str, float]]:
    """Send `num` requests one at a time; return the wait of each, with its parts."""
    waits = []
    for number in itertools.islice(numbers, num):
        waits.append(await quiet.probe(number))
        await asyncio.sleep(0.02)
    return waits


async def beside(
    worker: Target, num: int, width: int, num_probes: int
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Return the waits of a quiet tenant before a flood, and during a flood of another tenant."""
    quiet, loud = await Tenant.on("quiet", worker.url), await Tenant.on("loud", worker.url)
    numbers = itertools.count()
    await probes(quiet, PROBES_PER_SESSION, numbers)  # to be warm
    before = await probes(quiet, num_probes, numbers)
    pouring = asyncio.create_task(loud.flood(num, width))
    await asyncio.sleep(0.2)
    waits: list[dict[str, float]] = []
    while len(waits) < num_probes and loud.num_results < num:
        waits += await probes(quiet, 1, numbers)
    await pouring
    await loud.nc.close()
    await quiet.nc.close()
    return before, waits


async def measure(
    where: Path,
    model: Path | None,
    options: Sequence[str],
    *,
    requests: int,
    sessions: int,
    num_probes: int,
    only: str | None = None,
) -> dict[str, list[dict[str, float]]]:
    """Return the quiet tenant's waits by situation: without a flood, and during each kind of flood."""
    waits: dict[str, list[dict[str, float]]] = {"quiet": []}
    for kind, name, num, width in (
        ("one", f"{requests} requests in one session", requests, 1),
        ("many", f"one in each of {sessions} sessions", sessions, sessions),
    ):
        if only not in (None, kind):
            continue
        waits[name] = []
        for number in range(MAX_FLOODS):
            if len(waits[name]) >= num_probes:
                break
            async with target(where / f"data-{kind}-{number}", model, *options) as worker:
                missing = num_probes - len(waits[name])
                quiet, loud = await asyncio.wait_for(beside(worker, num, width, missing), 10 * PATIENCE_S)
            waits["quiet"] += quiet
            waits[name] += loud
    return waits


async def alone(where: Path, model: Path | None, options: Sequence[str], sessions: int) -> float:
    """Return how many seconds one request in each of `sessions` sessions takes, without other requests."""
    async with target(where / "data-alone", model, *options) as worker:
        loud = await Tenant.on("loud", worker.url)
        begun_s = monotonic()
        await loud.flood(sessions, sessions)
        await asyncio.wait_for(loud.answered(sessions), 10 * PATIENCE_S)
        took_s = monotonic() - begun_s
        await loud.nc.close()
    return took_s


def laid_out(waits: dict[str, list[dict[str, float]]]) -> str:
    """Format a table of the waits: percentiles, the ratio of each p99 to the quiet one, and the parts."""
    quiet_s = percentile([wait["wait"] for wait in waits["quiet"]], 0.99)
    parts = ", ".join(PARTS)
    head = f"number   p50 ms   p99 ms   max ms   p99 / quiet p99   {parts}: p50, mean of the slowest tenth"
    rows: list[tuple[str, Any]] = [("the quiet tenant's wait", head)]
    for name, measured in waits.items():
        waits_s = sorted(wait["wait"] for wait in measured)
        p50, p99 = percentile(waits_s, 0.5), percentile(waits_s, 0.99)
        times = "   ".join(f"{1000 * time_s:6.0f}" for time_s in (p50, p99, waits_s[-1]))
        slowest = sorted(measured, key=lambda wait: wait["wait"])[-max(len(measured) // 10, 1) :]
        made_of = " | ".join(
            f"{1000 * percentile([wait[part] for wait in measured], 0.5):.0f}"
            f" {1000 * fmean(wait[part] for wait in slowest):.0f}"
            for part in PARTS
        )
        rows.append((name, f"{len(measured):6}   {times}   {p99 / quiet_s:15.1f}   {made_of}"))
    return table(*rows)


async def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--packaged", action="store_true", help="the packaged model instead of a tiny one")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--probes", type=int, default=120)
    parser.add_argument(
        "--flood", choices=("one", "many", "alone"), help="only this one: of one session, of many, or alone"
    )
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    options = [part for option in given.option for part in f"--{option}".replace("_", "-").split("=", 1)]
    settings = " ".join(given.option) or "as they are"
    print(table(("model", "packaged" if given.packaged else "tiny"), ("settings", settings)))
    async with folder() as where:
        model = None if given.packaged else tiny_model(where)
        if given.flood != "alone":
            waits = await measure(
                where,
                model,
                options,
                requests=given.requests,
                sessions=given.sessions,
                num_probes=given.probes,
                only=given.flood,
            )
            print(laid_out(waits), flush=True)
        if given.flood in (None, "alone"):
            took_s = await alone(where, model, options, given.sessions)
            print(f"{given.sessions} sessions alone: {took_s:.1f} s, {given.sessions / took_s:.0f} a second")


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
