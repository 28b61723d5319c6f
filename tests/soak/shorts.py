"""Measures how long short answers take while the same tenant streams many long answers.

    python tests/soak/shorts.py --streams 64 --long 256 --option max_batch=16

Runs the packaged model. While the streams run, requests answers of three tokens, one at a time, each in a new
session. Prints percentiles of the time until each answer is complete, and the duration and the tokens per
second of all streams. To compare two versions of the worker, alternate runs of two checkouts. An `--option`
is a setting of the worker.
"""

from __future__ import annotations

import asyncio
import sys
from time import monotonic

from harness import PATIENCE_S, arguments, connect, folder, percentile, table, target

from turnkeep_client.client import Client

STORY = "Write a long story about the sea."


async def answered(client: Client, name: str, text: str, max_tokens: int) -> float:
    """Request an answer of exactly `max_tokens` tokens in a new session; return how many seconds it took."""
    asked_s = monotonic()
    await client.session(name).generate(text=text, max_tokens=max_tokens, ignore_eos=True)
    return monotonic() - asked_s


async def measure(url: str, streams: int, long: int) -> tuple[list[float], float]:
    """Return the time of each short answer during the streams, and of all streams together, in seconds."""
    waits: list[float] = []
    async with connect(url, timeout_s=10 * PATIENCE_S) as client:
        await answered(client, "warm", STORY, 3)
        begun_s = monotonic()
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(answered(client, f"long{number}", f"{number}. {STORY}", long))
                for number in range(streams)
            ]
            await asyncio.sleep(2.0)
            while not all(task.done() for task in running):
                waits.append(await answered(client, f"short{len(waits)}", "Is water wet? Yes or no?", 3))
                await asyncio.sleep(0.5)
        return waits, monotonic() - begun_s


async def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--long", type=int, default=256, help="tokens of each stream")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    options = [part for option in given.option for part in f"--{option}".replace("_", "-").split("=", 1)]
    async with folder() as where, target(where / "data", None, *options) as worker:
        waits, took_s = await measure(worker.url, given.streams, given.long)
    print(
        table(
            ("short answers", len(waits)),
            (
                "wait, p50 / p99 / max",
                " / ".join(f"{percentile(waits, at):.2f} s" for at in (0.5, 0.99, 1.0)),
            ),
            ("all streams", f"{took_s:.1f} s, {given.streams * given.long / took_s:.0f} tokens/s"),
        )
    )


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
