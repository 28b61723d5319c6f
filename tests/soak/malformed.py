"""Sends malformed requests and frames of every kind, while a well-behaved client uses the same worker.

    python tests/soak/malformed.py --requests 50000 --seed 1

The frames go over raw sockets to all subjects to which a worker or a client subscribes. Each request that the
log stores under a valid name must get exactly one result, the well-behaved client must be answered, and the
worker must not end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from harness import (
    PATIENCE_S,
    Heard,
    SessionKey,
    Verdict,
    arguments,
    folder,
    judge,
    percentile,
    read_log,
    report,
    target,
    tiny_model,
)

KINDS = {
    b"in": 45,
    b"ctl": 12,
    b"ask": 8,
    b"commit": 7,
    b"out": 4,
    b"tok.r1": 6,
    b"checkpoint": 6,
    b"attempt": 5,
    b"dead": 4,
    b"tok": 1,
    b"in.in": 1,
    b"no-such-kind": 1,
}
NAMES = [b"*", b">", b"_x", b"-", b"\xff\xfe", b"\x0b", b"a\x00b", "a\u00a0b".encode(), b"\xc3\xa9"]
HEADERS = [
    b"NATS/1.0",
    b"NATS/1.0\r\n\r\n",
    b"NATS/1.0{}\r\n\r\n",
    b"NATS/1.0 503\r\n\r\n",
    b"NATS/1.0\r\n\xff: \xff\r\n\r\n",
    b"NATS/1.0\r\nStatus: 409\r\nNats-Sequence: 1\r\n\r\n",
    b"NATS/1.0\r\nNats-Subject: turnkeep.a.b.in\r\n\r\n",
    b"garbage\xff",
    b"",
]
#: Frames after which the server closes the sender's connection.
FATAL = [
    b"HPUB a 9 3\r\nabc\r\n",
    b"PUB\r\n",
    b"PUB a b c d\r\n",
    b"PUB %s 2\r\n{}\r\n" % (b"n" * 4090),
    b"PUB a -1\r\n\r\n",
    b"\x00\xff\r\n",
]
#: Values that replace a field's value, or a whole request.
JUNK: list[Any] = [
    *(None, True, -1, 0, 2**31, 2**63, 2**70, 1e308, float("nan"), float("inf")),
    *("", "x" * 1000, "\ud800", "\x00", "a.b", "*", ">", "a\n", "_x"),
    *([], [[]], [-1], [2**40], ["1"], {}, {"type": "text"}),
    *([{"role": "user"}], [{"role": "root", "content": "x"}]),
]
REQUESTS: list[dict[str, Any]] = [
    {"type": "append", "id": "r", "text": "hello"},
    {"type": "append", "id": "r", "messages": [{"role": "user", "content": "hello"}]},
    {"type": "generate", "id": "r", "text": "hello", "max_tokens": 2, "temperature": 0.5, "stop": ["x"]},
    {"type": "rewind", "id": "r", "position": 3},
    {"type": "open", "id": "r", "cache": {"kv_bits": 8}},
    {"type": "open", "id": "r", "cache": {"policy": "sink_window", "sink": 4, "window": 64}},
    {"type": "close", "id": "r", "forget": True},
    {"type": "info", "skip": 0, "limit": 10},
    {"type": "cancel", "id": "r"},
    {
        "type": "generated",
        "id": "r",
        "seq": 1,
        "position": 9,
        "text": "x",
        "tokens": [1],
        "finish_reason": "stop",
    },
    {"type": "failed", "id": "r", "seq": 1, "code": "internal", "message": "x", "retryable": True},
    {"i": 0, "tokens": [1], "text": "x", "seq": 1},
    {"seq": 1, "attempts": 99, "tokens": 1},
]


def body(rng: random.Random) -> bytes:
    """Make a random body, in most cases a malformed request."""
    request = dict(rng.choice(REQUESTS))
    if "id" in request:
        request["id"] = f"m{rng.randint(0, 10**6)}"
    if request.get("seq"):
        request["seq"] = rng.choice((1, -1, 0, 2**53, 2**64, rng.randint(1, 50_000)))
    whole = json.dumps(request).encode()
    match rng.randint(0, 9):
        case 0:
            return rng.randbytes(rng.randint(0, 200))
        case 1:
            return whole[: rng.randint(0, len(whole) - 1)]
        case 2:
            depth, opening = (
                rng.randint(2, 3000),
                rng.choice((b"[", b'{"a":', b'{"messages":[', b'[{"content":')),
            )
            return opening * depth + rng.choice((b"", {b"[": b"]"}.get(opening, b"}") * depth))
        case 3:
            deep = b"[" * 200 + b"]" * 200
            return whole[:-1] + b', "messages": [{"role": "user", "content": ' + deep + b"}]}"
        case 4:
            at = rng.randint(0, len(whole) - 1)
            return whole[:at] + rng.randbytes(rng.randint(1, 4)) + whole[at + 1 :]
        case 5:
            return json.dumps(rng.choice(JUNK)).encode()
        case 6:
            return (
                whole[:-1] + b', "' + rng.choice((b"id", b"type", b"nosuch", b"\xff", b"\\ud800")) + b'": 1}'
            )
        case 7:
            return b"\xef\xbb\xbf" + whole
        case 8:
            return json.dumps(request | {"id": "x" * rng.choice((0, 65, 5000, 100_000))}).encode()
        case _:
            return json.dumps(request | {rng.choice(list(request)): rng.choice(JUNK)}).encode()


def name(rng: random.Random, letter: str) -> bytes:
    """Make a random name for a tenant or a session, valid in four of five cases."""
    if rng.random() < 0.8:
        return f"{letter}{rng.randint(0, 12)}".encode()
    return rng.choice([*NAMES, b"n" * rng.choice((65, 256, 257, 1400))])


def frame(rng: random.Random) -> bytes:
    """Make a random raw frame that publishes a body; about one in a thousand breaks the NATS protocol."""
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    subject = b"turnkeep.%s.%s.%s" % (name(rng, "t"), name(rng, "s"), kind)
    to = subject + rng.choice((b"", b"", b" _INBOX.x.y", b" \xff", b" turnkeep.t1.s1.in", b" " + b"r" * 1000))
    text = body(rng)
    if rng.random() < 0.0005:
        return b"PUB %s %d\r\n%s" % (to, len(text) + 1000, text)  # includes the next frames
    if rng.random() < 0.0005:
        return rng.choice(FATAL)
    if rng.random() < 0.3:
        header = rng.choice(HEADERS)
        return b"HPUB %s %d %d\r\n%s%s\r\n" % (to, len(header), len(header) + len(text), header, text)
    return b"PUB %s %d\r\n%s\r\n" % (to, len(text), text)


@dataclass
class Run:
    """The record of one run: the frames sent, and the waits and errors of the well-behaved client."""

    sent: int = 0
    dropped: int = 0
    waits_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    is_over: bool = False

    async def send(self, url: str, rng: random.Random, num: int, batch: int = 50) -> None:
        """Send `num` frames in batches over a socket; open another one when the server closes it."""
        while num > 0:
            reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
            hello = {
                "verbose": False,
                "pedantic": False,
                "headers": True,
                "auth_token": urlsplit(url).username,
            }
            writer.write(f"CONNECT {json.dumps(hello)}\r\n".encode())
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                while num > 0:
                    writer.write(b"".join(frame(rng) for _ in range(batch)) + b"PING\r\n")
                    async with asyncio.timeout(20):
                        while await reader.readuntil(b"\r\n") != b"PONG\r\n":
                            pass
                    num -= batch
                    self.sent += batch
            self.dropped += num > 0
            writer.close()

    async def behave(self, heard: Heard) -> None:
        """Send valid requests one at a time, in sessions of their own, and record waits and failures."""
        for number in range(1_000_000):
            if self.is_over:
                return
            key = SessionKey("good", f"s{number // 40}")
            kind = {"type": "append"} if number % 2 else {"type": "generate", "max_tokens": 4}
            try:
                result, wait_s, _ = await heard.send(key, {"id": f"r{number}", "text": "hello there"} | kind)
            except TimeoutError:
                self.wrong.append(f"request {number} of the client beside was not answered")
                return
            self.waits_s.append(wait_s)
            if result["type"] not in ("appended", "generated"):
                self.wrong.append(f"request {number} of the client beside: {result}")
            await asyncio.sleep(0.02)


async def malformed(where: Path, *, requests: int, seed: int) -> tuple[Run, Verdict, list[tuple[str, Any]]]:
    """Run everything; return the record, the oracle's verdict, and further rows for the report."""
    run = Run()
    options = ("--sync-interval", "1s", "--min-free-disk", "0")
    async with target(where / "data", tiny_model(where), *options) as victim:
        pid = victim.process.worker_pid
        heard = await Heard.on(victim.url, chunks=False)
        beside = asyncio.create_task(run.behave(heard))
        share = requests // 4
        await asyncio.gather(*(run.send(victim.url, random.Random(f"{seed} {n}"), share) for n in range(4)))
        deadline_s = monotonic() + PATIENCE_S
        while True:
            verdict = judge(await read_log(victim.url))
            if not verdict.faults["unanswered"] or monotonic() > deadline_s:
                break
            await asyncio.sleep(1)
        run.is_over = True
        await beside
        process = victim.process
        lives = process.running and process.worker_pid == pid and "stopping" not in process.log
        for wrong in (*run.wrong, *(() if lives else ("the worker died",))):
            verdict.blame("contradicting", wrong)
        lines = [line for line in victim.process.log.splitlines() if '"level": "error"' in line]
        await heard.nc.close()
    rows: list[tuple[str, Any]] = [
        ("seed", seed),
        ("frames sent", run.sent),
        ("connections that the server ended", run.dropped),
        ("the worker's process", f"{pid}, {'the same at the end' if lives else 'gone'}"),
        ("errors in its log", len(lines)),
        ("requests of the client beside", len(run.waits_s)),
        ("p50 of its answers", f"{1000 * percentile(run.waits_s, 0.5):.0f} ms"),
        ("p99", f"{1000 * percentile(run.waits_s, 0.99):.0f} ms"),
    ]
    for line in lines[:5]:
        print(line[:1500])
    return run, verdict, rows


async def main() -> bool:
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    async with folder() as where:
        _, verdict, rows = await malformed(where, **vars(given))
        good = report(verdict, *rows)
        if not good:
            raise SystemExit(1)
    return good


if __name__ == "__main__":
    sys.exit(not asyncio.run(main()))
