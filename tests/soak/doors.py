"""Measures what a gateway costs: short streamed answers over HTTP, compared with the same ones over NATS.

    python tests/soak/doors.py --at-once 32 --requests 320 --rounds 5

Runs the tiny model. In each round `--requests` answers of `--tokens` tokens are requested in both ways, of
which `--at-once` run at the same time, each in a session of its own. Prints for both ways the answers per
second, the time to the first event and, for HTTP, the gateway's CPU time per request (least, median and most
of the rounds), which a busy machine changes least. `--profile FILE` stores a profile of the gateway.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import psutil
from harness import PATIENCE_S, ROOT, arguments, connect, folder, percentile, table, target, tiny_model
from parts import free_port

from turnkeep_client.client import Client

_Send = Callable[[int], Awaitable[float]]


@dataclass
class Way:
    """What the rounds of one way have measured, in seconds."""

    rounds_s: list[float] = field(default_factory=list)
    firsts_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def rate(self, requests: int) -> float:
        """Answers per second of the median round."""
        return requests / percentile(self.rounds_s, 0.5)


async def over_nats(client: Client, name: str, tokens: int) -> float:
    """Request an answer in a new session; return the time to its first chunk."""
    asked_s, first_s = monotonic(), 0.0
    async for _ in client.session(name).generate(messages=[_said(name)], max_tokens=tokens):
        first_s = first_s or monotonic() - asked_s
    return first_s


async def over_http(port: int, name: str, tokens: int) -> float:
    """Request an answer of a new conversation; return the time to its first text."""
    asked_s, first_s = monotonic(), 0.0
    body = json.dumps({"messages": [_said(name)], "max_tokens": tokens, "stream": True})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}connection: close\r\n\r\n{body}".encode())
    read = b""
    while part := await reader.read(2**16):
        read += part
        if not first_s and b'"content":"' in read.replace(b'"content":""', b""):
            first_s = monotonic() - asked_s
    writer.close()
    assert b"data: [DONE]" in read, read
    return first_s


def _said(name: str) -> dict[str, str]:
    return {"role": "user", "content": f"Hello, this is {name}."}


async def round_of(send: _Send, requests: int, at_once: int) -> tuple[float, list[float]]:
    """Send `requests` requests, `at_once` at a time; return the time of all, and each one's first event's."""
    places, begun_s = asyncio.Semaphore(at_once), monotonic()

    async def one(number: int) -> float:
        async with places:
            return await send(number)

    firsts = await asyncio.gather(*(one(number) for number in range(requests)))
    return monotonic() - begun_s, firsts


async def measure(
    url: str, *, requests: int, at_once: int, tokens: int, rounds: int, profile: str | None = None
) -> dict[str, Way]:
    """Return what both ways have measured, which take turns."""
    port, ways = free_port(), {"nats": Way(), "http": Way()}
    program = ["-m", "cProfile", "-o", profile, "-m"] if profile else ["-m"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *program, "commands", "gateway", "--listen", str(port)),
        cwd=ROOT,
        env={**os.environ, "TURNKEEP_NATS": url},
    )
    try:
        async with connect(url, timeout_s=PATIENCE_S) as client:
            while True:
                try:
                    await over_http(port, "warm", tokens)
                    break
                except OSError:
                    await asyncio.sleep(0.1)
            gateway = psutil.Process(process.pid)
            for number in range(rounds):
                before = gateway.cpu_times()
                sends: dict[str, _Send] = {
                    "http": lambda one: over_http(port, f"h{number}-{one}", tokens),  # noqa: B023
                    "nats": lambda one: over_nats(client, f"n{number}-{one}", tokens),  # noqa: B023
                }
                for name, send in sends.items():
                    took_s, firsts_s = await round_of(send, requests, at_once)
                    ways[name].rounds_s.append(took_s)
                    ways[name].firsts_s += firsts_s
                    after = gateway.cpu_times()
                    used_s = after.user + after.system - before.user - before.system
                    ways[name].cpu_s.append(used_s / requests)
                    before = after
    finally:
        process.terminate()
        await process.wait()
    return ways


async def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--requests", type=int, default=320, help="of a round")
    parser.add_argument("--tokens", type=int, default=8, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", metavar="FILE")
    given = parser.parse_args()
    async with folder() as where:
        model = tiny_model(where, endless=True)
        async with target(Path(where) / "data", model, "--max-batch", str(given.at_once)) as worker:
            ways = await measure(
                worker.url,
                requests=given.requests,
                at_once=given.at_once,
                tokens=given.tokens,
                rounds=given.rounds,
                profile=given.profile,
            )
    nats, http = ways["nats"], ways["http"]
    rates = nats.rate(given.requests), http.rate(given.requests)
    firsts = [percentile(way.firsts_s, 0.5) for way in (nats, http)]
    print(
        table(
            ("answers/s, NATS / HTTP", f"{rates[0]:.0f} / {rates[1]:.0f} ({rates[1] / rates[0]:.2f})"),
            (
                "first event, NATS / HTTP",
                f"{1000 * firsts[0]:.0f} / {1000 * firsts[1]:.0f} ms ({firsts[1] / firsts[0]:.2f})",
            ),
            (
                "gateway's CPU per request",
                " / ".join(f"{1000 * percentile(http.cpu_s, at):.2f}" for at in (0.01, 0.5, 1.0)) + " ms",
            ),
        )
    )


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
