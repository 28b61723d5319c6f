"""Lets one session have very many turns, and compares what the last ones cost with what the first ones did.

    python tests/soak/one_session.py --turns 100000

The session's KV is limited to sinks and a window, so that it has no last turn. Each tenth has a row: the
median and the 99th percentile of the turns' times, the worker's CPU time for a turn, and what it has in use.
After the first and the last tenth the worker is killed (`kill -9`); the next turn then waits for its restart.
"""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import psutil
from harness import Target, arguments, folder, size_bytes, tiny_model

from turnkeep_client.client import connect
from turnkeep_client.messages import CachePolicy
from turnkeep_client.session import Session

_POLICY = CachePolicy(policy="sink_window", sink=4, window=256)
_LIMITS = ("--log-max-bytes", "8GiB", "--max-disk", "256MiB")
_HEADER = "  turns  position   p50 ms   p99 ms  CPU ms  worker MiB  disk MiB"


async def turn(session: Session) -> tuple[float, int]:
    """Send one turn; return how long it took in ms, and the session's position."""
    begun_s = time.monotonic()
    result = await session.generate(text="a day is long", max_tokens=2, timeout_s=60)
    return 1e3 * (time.monotonic() - begun_s), result.position


async def converse(where: Path, turns: int) -> list[str]:
    """Send the turns to a worker of its own in a folder; return the rows."""
    target, rows = Target(where / "data", tiny_model(where), *_LIMITS), []
    target.start()
    try:
        await target.ready()
        print(_HEADER, flush=True)
        async with connect(target.url) as client:
            session = client.session("long")
            await session.open(cache=_POLICY)
            for tenth in range(1, 11):
                worker = psutil.Process(target.process.worker_pid)
                before_s, times_ms, position = sum(worker.cpu_times()[:2]), [], 0
                for _ in range(turns // 10):
                    time_ms, position = await turn(session)
                    times_ms.append(time_ms)
                cpu_ms = 1e3 * (sum(worker.cpu_times()[:2]) - before_s) / len(times_ms)
                memory_mib, disk_mib = worker.memory_info().rss / 2**20, size_bytes(where) / 2**20
                times_ms.sort()
                rows.append(
                    f"{tenth * turns // 10:7} {position:9} {times_ms[len(times_ms) // 2]:8.1f}"
                    f" {times_ms[int(0.99 * len(times_ms))]:8.1f} {cpu_ms:7.1f} {memory_mib:11.0f}"
                    f" {disk_mib:9.1f}"
                )
                print(rows[-1], flush=True)
                if tenth in {1, 10}:
                    os.kill(worker.pid, signal.SIGKILL)
                    rows.append(f"  a turn after `kill -9` took {(await turn(session))[0]:.0f} ms")
                    print(rows[-1], flush=True)
    finally:
        await asyncio.to_thread(target.process.stop)
    return rows


async def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--turns", type=int, default=100_000)
    given = parser.parse_args()
    async with folder() as where:
        await converse(where, given.turns)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
