"""One tenant's flood, and how long another tenant waits beside it for one answer at a time.

    python tests/soak/floods.py --requests 5000 --sessions 2000 --probes 60
    python tests/soak/floods.py --packaged --probes 30 --option max_waiting_per_tenant=64

Prints the other tenant's p50 and p99: quiet, beside 5,000 requests in one session, and beside one request in
each of 2,000 sessions. The goal is a p99 of at most 3 times the quiet one. An
`--option` is a setting of the worker.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from typing import TYPE_CHECKING, Any

from harness import (
    PATIENCE_S,
    SUBJECTS,
    Heard,
    SessionKey,
    arguments,
    folder,
    percentile,
    table,
    target,
    tiny_model,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PROBES_PER_SESSION = 20
FLOODED = {"type": "generate", "text": "Once upon a time there was", "max_tokens": 16}
PROBE = {"type": "generate", "text": "hello, how are you?", "max_tokens": 8}


async def probe(
    heard: Heard, num: int, numbers: itertools.count[int], num_loud: int | None = None
) -> list[tuple[float, float]]:
    """Send one request at a time as the quiet tenant; returns how long each took, and to be stored.

    It ends early where all of the loud tenant's requests are answered.
    """
    waits_s = []
    for number in itertools.islice(numbers, num):
        if num_loud is not None and len(heard.results) >= num_loud + number:
            break
        key = SessionKey("quiet", f"s{number // PROBES_PER_SESSION}")
        result, *waits = await heard.send(key, {"id": f"r{number}"} | PROBE)
        if result["type"] != "generated":
            raise RuntimeError(f"the quiet tenant was answered {result}")
        waits_s.append((waits[0], waits[1]))
        await asyncio.sleep(0.02)
    return waits_s


async def flood(heard: Heard, num: int, sessions: int) -> None:
    """Publish as the loud tenant, as fast as the server takes it."""
    for number in range(num):
        subject = SUBJECTS.of(SessionKey("loud", f"s{number % sessions}"), "in")
        await heard.nc.publish(subject, json.dumps({"id": f"r{number}"} | FLOODED).encode())
        if number % 100 == 99:
            await heard.nc.flush()
    await heard.nc.flush()


async def measure(
    where: Path,
    model: Path | None,
    options: Sequence[str],
    *,
    requests: int,
    sessions: int,
    probes: int,
    only: str | None = None,
) -> dict[str, list[tuple[float, float]]]:
    """Return the quiet tenant's waits: without a flood, and beside each of the two."""
    waits: dict[str, list[tuple[float, float]]] = {}
    for name, num, width in (
        (f"{requests} requests in one session", requests, 1),
        (f"one in each of {sessions} sessions", sessions, sessions),
    ):
        if only == ("many" if width == 1 else "one"):
            continue
        async with target(where / f"data-{width}", model, *options) as worker:
            heard, numbers = await Heard.on(worker.url, chunks=False), itertools.count()
            await probe(heard, PROBES_PER_SESSION, numbers)  # to be warm
            waits.setdefault("quiet", []).extend(await probe(heard, probes, numbers))
            pouring = asyncio.create_task(flood(heard, num, width))
            await asyncio.sleep(0.2)
            waits[name] = await asyncio.wait_for(probe(heard, probes, numbers, num), 10 * PATIENCE_S)
            await pouring
            await heard.nc.close()
    return waits


def laid_out(waits: dict[str, list[tuple[float, float]]]) -> str:
    """Lay the waits out, with the ratio of each p99 to the quiet one; and the log's part of it."""
    quiet_s = percentile([wait_s for wait_s, _ in waits["quiet"]], 0.99)
    head = "number   p50 ms   p99 ms   max ms   p99 / quiet p99   p50, p99, max until stored"
    rows: list[tuple[str, Any]] = [("the quiet tenant's wait", head)]
    for name, measured in waits.items():
        waits_s, stored_s = [wait_s for wait_s, _ in measured], [stored_s for _, stored_s in measured]
        p50, p99 = percentile(waits_s, 0.5), percentile(waits_s, 0.99)
        stored = ", ".join(f"{1000 * percentile(stored_s, share):.0f}" for share in (0.5, 0.99, 1))
        times = "   ".join(f"{1000 * time_s:6.0f}" for time_s in (p50, p99, max(waits_s)))
        rows.append((name, f"{len(measured):6}   {times}   {p99 / quiet_s:15.1f}   {stored}"))
    return table(*rows)


async def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--packaged", action="store_true", help="the packaged model instead of a tiny one")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--probes", type=int, default=60)
    parser.add_argument("--flood", choices=("one", "many"), help="only this one, of one session or of many")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    options = [part for option in given.option for part in f"--{option}".replace("_", "-").split("=", 1)]
    async with folder() as where:
        model = None if given.packaged else tiny_model(where)
        waits = await measure(
            where,
            model,
            options,
            requests=given.requests,
            sessions=given.sessions,
            probes=given.probes,
            only=given.flood,
        )
    settings = " ".join(given.option) or "as they are"
    print(table(("model", "packaged" if given.packaged else "tiny"), ("settings", settings)))
    print(laid_out(waits))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
