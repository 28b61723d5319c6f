"""A real nats-server that can be killed, and a scripted worker that speaks the protocol with raw nats-py."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any
from uuid import uuid4

import nats
from nats.js.api import StreamConfig

from turnkeep_client.messages import (
    Append,
    Appended,
    Chunk,
    Close,
    Closed,
    Failed,
    Generate,
    Generated,
    Histogram,
    Metrics,
    Open,
    Opened,
    Progress,
    Request,
    Result,
    Rewound,
    Seconds,
    SessionInfo,
    SnapshotCounters,
    Usage,
    decode_request,
    encode,
)
from turnkeep_client.subjects import SessionKey, Subjects

SUBJECTS = Subjects()
KEY = SessionKey("default", "s1")


async def heard(nc: nats.NATS) -> None:
    """Wait until the server has a new subscription: nats-py sends the first flush's ping before it."""
    await nc.flush()
    await nc.flush()


Script = Callable[["FakeWorker", int, Request], Coroutine[Any, Any, None]]


class FakeWorker:
    """A worker for tests: creates the streams, and runs `script` for every request in the log."""

    def __init__(self, connection: nats.NATS) -> None:
        self.nats = connection
        self.js = connection.jetstream(timeout=0.5)
        self.script: Script = answer
        self.requests: list[tuple[int, Request]] = []
        self._scripts: list[asyncio.Task[None]] = []
        self._stopping = False

    async def start(self) -> None:
        await self.js.add_stream(
            StreamConfig(
                name=SUBJECTS.log_stream,
                subjects=[*map(SUBJECTS.every, ("in", "out", "closed")), SUBJECTS.every_image],
                allow_direct=True,
            )
        )
        await self.js.add_stream(
            StreamConfig(
                name=SUBJECTS.token_stream, subjects=[SUBJECTS.every_token()], allow_direct=True, max_age=600
            )
        )
        self._polling = asyncio.create_task(self._poll())

    async def stop(self) -> None:
        """Stop reading the log and cancel the scripts; raise the exception of a script that failed."""
        self._stopping = True  # and no cancellation, which nats-py can lose
        await self._polling
        for script in self._scripts:
            script.cancel()
        ended = await asyncio.gather(*self._scripts, return_exceptions=True)
        await self.nats.close()
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _poll(self) -> None:
        """Read the log by sequence, which unlike a consumer continues after every restart of the server."""
        next_seq = 1
        while not self._stopping:
            try:
                found = await self.js.get_msg(
                    SUBJECTS.log_stream, next_seq, SUBJECTS.every("in"), direct=True, next=True
                )
            except nats.errors.Error:
                await asyncio.sleep(0.01)
                continue
            next_seq = found.seq + 1
            request = decode_request(found.data)
            self.requests.append((found.seq, request))
            self._scripts.append(asyncio.create_task(self.script(self, found.seq, request)))

    async def result(self, result: Result) -> None:
        await self._publish(SUBJECTS.of(KEY, "out"), encode(result))

    async def chunk(
        self, request: Request, i: int, tokens: list[int], text: str, seq: int | None = None
    ) -> None:
        seq = seq or next(seq for seq, one in self.requests if one is request)
        body = encode(Chunk(i=i, tokens=tuple(tokens), text=text, seq=seq))
        await self._publish(SUBJECTS.tokens(KEY, request.id), body)

    async def end(self, request: Request) -> None:
        await self._publish(SUBJECTS.tokens(KEY, request.id), b"")

    async def _publish(self, subject: str, body: bytes) -> None:
        """Publish until the server acknowledges, stored once: a restart may lose the message or the ack."""
        headers = {"Nats-Msg-Id": uuid4().hex}
        for _ in range(20):
            with contextlib.suppress(nats.errors.Error):
                await self.js.publish(subject, body, headers=headers)
                return
            await asyncio.sleep(0.05)
        raise TimeoutError(f"nothing took {body!r} on {subject}")


#: The answer that every scripted generate gives.
TOKENS = (11, 12, 13, 14, 15, 16)
TEXTS = ("He", "llo", ", ", "wör", "ld", "!")


def generated(seq: int, request: Request, **changes: object) -> Generated:
    fields: dict[str, object] = {
        "text": "".join(TEXTS),
        "tokens": TOKENS,
        "finish_reason": "stop",
        "usage": Usage(prompt_tokens=3, cached_tokens=1, prefilled_tokens=2, completion_tokens=6),
        "seconds": Seconds(queued=0.0, prefill=0.1, first_token=0.2, total=0.5),
        "kv_live_bytes": 1024,
        "position": 9,
    }
    return Generated(id=request.id, seq=seq, **(fields | changes))  # type: ignore[arg-type]


def plain_result(seq: int, request: Request) -> Result:
    match request:
        case Append():
            return Appended(
                id=request.id,
                seq=seq,
                position=3,
                tokens=3,
                cached_tokens=1,
                prefilled_tokens=2,
                kv_live_bytes=512,
                seconds=0.1,
            )
        case Generate():
            return generated(seq, request)
        case Open():
            return Opened(id=request.id, seq=seq, position=0)
        case Close():
            return Closed(id=request.id, seq=seq, position=9)
        case _:
            return Rewound(id=request.id, seq=seq, position=request.position)


async def answer(worker: FakeWorker, seq: int, request: Request) -> None:
    """Answer as a worker does: publish a chunk for each token, then the result, then the stream's end."""
    if isinstance(request, Generate):
        for i, (token, text) in enumerate(zip(TOKENS, TEXTS, strict=True)):
            await worker.chunk(request, i, [token], text, seq)
    await worker.result(plain_result(seq, request))
    if isinstance(request, Generate):
        await worker.end(request)


async def silent(worker: FakeWorker, seq: int, request: Request) -> None:
    """Never answer."""


async def refuse(worker: FakeWorker, seq: int, request: Request) -> None:
    await worker.result(
        Failed(id=request.id, seq=seq, code="overloaded", message="4 requests wait", retryable=True)
    )


def metrics(worker: str, uptime_s: float = 1.5) -> Metrics:
    histogram = Histogram(bounds=(0.1, 1.0), counts=(1, 2, 0), sum=1.5, count=3)
    return Metrics(
        worker=worker,
        version="0.1.0",
        model="tiny",
        device="cpu",
        uptime_s=uptime_s,
        requests={"default": {"appended": 2}},
        waiting=1,
        waiting_for_memory=0,
        running=2,
        sessions=3,
        resident_sessions=2,
        prefilled_tokens=10,
        cached_tokens=20,
        generated_tokens=30,
        time_to_first_token=histogram,
        time_per_output_token=histogram,
        batch_size=histogram,
        event_loop_lag=histogram,
        resident_kv_bytes=1024,
        kv_limit_bytes=2048,
        mlx_active_bytes=512,
        mlx_peak_bytes=1024,
        process_bytes=4096,
        snapshots=SnapshotCounters(accepted=3, durable=2, dropped={"queue_full": 1}),
    )


def session_info(**changes: object) -> SessionInfo:
    fields: dict[str, object] = {
        "tenant": "default",
        "session": "s1",
        "position": 9,
        "state": "running",
        "active": "g1",
        "waiting": ("g2",),
        "requests": 4,
        "progress": Progress(cached_tokens=4, context_tokens=9, generated_tokens=2),
        "resident": True,
        "kv_live_bytes": 1024,
        "policy": "full",
        "model": "tiny",
        "worker": metrics("w1"),
    }
    return SessionInfo(**(fields | changes))  # type: ignore[arg-type]
