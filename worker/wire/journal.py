"""The session log in JetStream: read it forward, commit a result to it, read back published tokens.

It owns the wire side of the log and the fence: a result is stored only if nobody stored another one since
this worker last read. What entries mean is `history`'s business.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Literal

import nats.errors
import structlog
from anyio import Lock, create_memory_object_stream, fail_after, sleep
from nats.js.errors import APIError, NotFoundError

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.messages import Chunk, Result, decode_chunk, decode_result, encode, failure
from turnkeep_client.subjects import REFUSED, SessionKey, check_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from anyio.streams.memory import MemoryObjectSendStream
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription
    from nats.js import JetStreamContext
    from nats.js.api import RawStreamMsg

    from turnkeep_client.subjects import Subjects

log = structlog.get_logger()

_EXPECT_HEADER: Final = "Nats-Expected-Last-Subject-Sequence"
_WRONG_LAST_SEQUENCE: Final = 10071
#: The stream refuses the message for its size, now and always.
MESSAGE_TOO_LARGE: Final = 10054
_BATCH: Final = 256
_BATCH_BYTES: Final = 2 * 2**20
_TIMEOUT_S: Final = 5.0
_MAX_BACKOFF_S: Final = 5.0


class FencedError(Exception):
    """Another committer stored a result for this session first: what is in memory is stale."""


class TooLargeError(Exception):
    """The result is larger than the stream takes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored message; `stored` is when the server took it."""

    seq: int
    kind: Literal["in", "out"]
    stored: datetime
    body: bytes
    headers: Mapping[str, str]


def answers(entry: Entry) -> int:
    """Return the sequence of the request that an entry of `out` answers; 0 where it is no result."""
    try:
        return decode_result(entry.body).seq or 0
    except InvalidMessageError:
        return 0


class Journal:
    """Reads and writes session logs; event loop only.

    Every method retries through lost connections and full disks, and returns when it is done: a worker
    that cannot reach its log has nothing better to do than wait for it.
    """

    def __init__(self, nc: Client, js: JetStreamContext, subjects: Subjects) -> None:
        self._nc = nc
        self._js = js
        self._subjects = subjects
        self._replies = _Replies(nc)

    async def page(
        self, key: SessionKey, kind: Literal["in", "out"], after: int, *, until: int = 0
    ) -> tuple[list[Entry], bool]:
        """Read a session's next requests, or results, above the stream sequence `after`, in order.

        At most `_BATCH` entries or some MiB come at a time; the flag says whether there are more. `until` is
        the sequence of an entry that was delivered: a replica that ends before it lags, and is asked again,
        unless the stream's leader says that the entry was removed.
        """
        stream, subject = self._subjects.log_stream, self._subjects.of(key, kind)
        pause_s = 0.01
        while True:
            entries, num_more = await self._direct_batch(stream, subject, after)
            last = entries[-1].seq if entries else after
            if num_more or last >= until or await self.get(until) is None:
                return entries, num_more > 0
            await sleep(pause_s)
            pause_s = min(pause_s * 2, _MAX_BACKOFF_S)

    async def backlog(self, key: SessionKey, after: int) -> tuple[list[Entry], int]:
        """Read a session's next requests above the stream sequence `after`, and count those behind them."""
        return await self._direct_batch(self._subjects.log_stream, self._subjects.of(key, "in"), after)

    async def published(self, key: SessionKey, request_id: str, seq: int, stored: datetime) -> list[Chunk]:
        """Read back the token chunks of the request at `seq`: those from index 0 on, without a gap.

        Whoever may publish there may have done so before the request, to have the answer begin with it: only
        what names the request's sequence and came after it (`stored`) is the worker's.
        """
        chunks: list[Chunk] = []
        num_tokens = num_foreign = 0
        async for entry in self._direct(
            self._subjects.token_stream, self._subjects.tokens(key, request_id), 0
        ):
            if not entry.body:
                continue
            try:
                chunk = decode_chunk(entry.body)
            except InvalidMessageError:
                chunk = None
            if chunk is None or chunk.seq != seq or entry.stored < stored:
                num_foreign += 1
                continue
            if chunk.i > num_tokens:
                break
            if chunk.i == num_tokens:
                chunks.append(chunk)
                num_tokens += len(chunk.tokens)
        if num_foreign:
            log.warning("ignoring chunks that are not of this request", request=request_id, num=num_foreign)
        return chunks

    async def publish_chunk(self, key: SessionKey, request_id: str, chunk: Chunk) -> bool:
        """Publish the next chunk of an answer; returns once it is stored, which is when it is heard.

        False where the token stream refuses it. Then nothing may follow it: what is heard is the beginning
        of what is stored, so whoever resumes the answer finds all of it.
        """
        subject, body = self._subjects.tokens(key, request_id, "chunk"), encode(chunk)
        pause_s = 0.1
        while True:
            try:
                await self._js.publish(subject, body, timeout=_TIMEOUT_S)
            except (APIError, nats.errors.MaxPayloadError) as error:
                log.warning("an answer is not streamed any further", error=str(error))
                return False
            except (nats.errors.Error, OSError) as error:
                await self._pause_after("publishing tokens", error, pause_s)
                pause_s = min(pause_s * 2, _MAX_BACKOFF_S)
            else:
                return True

    async def get(self, seq: int) -> bytes | None:
        """Read the body of an entry; None where it was removed from the log."""
        while True:
            try:
                message = await self._js.get_msg(self._subjects.log_stream, seq)
            except NotFoundError:
                return None
            except (nats.errors.Error, APIError, OSError) as error:
                await self._pause_after("reading the log", error, 1.0)
                continue
            return message.data or b""

    async def last_result(self, key: SessionKey) -> Entry | None:
        """Read a session's last result; from a replica that lags it may be an earlier one."""
        subject = self._subjects.of(key, "out")
        while True:
            try:
                found = await self._js.get_last_msg(self._subjects.log_stream, subject, direct=True)
            except NotFoundError:
                return None
            except (nats.errors.Error, APIError, OSError) as error:
                await self._pause_after("reading the log", error, 1.0)
                continue
            headers = found.headers or {}
            stored = found.time or datetime.fromtimestamp(0, UTC)
            return Entry(found.seq or 0, "out", stored, found.data or b"", headers)

    async def checkpoint(self, seq: int) -> bytes | None:
        """Read the body of a message beside the log; None where it cannot be had."""
        for direct in (True, False):  # a replica may lag
            with contextlib.suppress(nats.errors.Error, APIError, OSError):
                return (await self._js.get_msg(self._subjects.log_stream, seq, direct=direct)).data or b""
        return None

    async def store_checkpoint(self, key: SessionKey, body: bytes) -> int | None:
        """Store a message beside a session's log; returns its sequence, None where that fails."""
        subject = self._subjects.of(key, "checkpoint")
        try:
            return (await self._js.publish(subject, body, timeout=_TIMEOUT_S)).seq
        except (nats.errors.Error, APIError, OSError) as error:
            log.warning("a checkpoint could not be stored", session=str(key), error=str(error))
            return None

    async def last_seq(self, key: SessionKey, kind: Literal["in", "out"]) -> int:
        """Ask the stream's leader for the sequence of a session's last request, or result; 0 without one."""
        found = await self._last(key, kind)
        return (found.seq or 0) if found else 0

    async def _last(self, key: SessionKey, kind: Literal["attempt", "in", "out"]) -> RawStreamMsg | None:
        while True:
            try:
                return await self._js.get_last_msg(self._subjects.log_stream, self._subjects.of(key, kind))
            except NotFoundError:
                return None
            except (nats.errors.Error, APIError, OSError) as error:
                await self._pause_after("reading the log", error, 1.0)

    async def commit(self, key: SessionKey, result: Result, after: int, headers: Mapping[str, str]) -> int:
        """Store a result as the successor of the session's result at sequence `after` (0: the first).

        Returns its sequence. Raises `FencedError` where another result came first, `TooLargeError` where
        the stream will never take it.
        """
        subject = self._subjects.of(key, "commit")
        body = encode(result)
        pause_s = 0.1
        while True:
            try:
                ack = await self._js.publish(
                    subject, body, timeout=_TIMEOUT_S, headers={**headers, _EXPECT_HEADER: str(after)}
                )
            except nats.errors.MaxPayloadError as error:
                raise TooLargeError(f"{len(body)} bytes") from error
            except APIError as error:
                if error.err_code == MESSAGE_TOO_LARGE:
                    raise TooLargeError(f"{len(body)} bytes") from error
                if error.err_code == _WRONG_LAST_SEQUENCE:
                    return await self._own_commit(self._subjects.of(key, "out"), body, after)
                await self._pause_after("committing a result", error, pause_s)
            except (nats.errors.Error, OSError) as error:
                await self._pause_after("committing a result", error, pause_s)
            else:
                return ack.seq
            pause_s = min(pause_s * 2, _MAX_BACKOFF_S)

    async def append(self, key: SessionKey, kind: Literal["attempt", "dead", "closed"], body: bytes) -> None:
        """Store what is neither a request nor a result beside a session's log."""
        pause_s = 0.1
        while True:
            try:
                await self._js.publish(self._subjects.of(key, kind), body, timeout=_TIMEOUT_S)
            except (nats.errors.Error, APIError, OSError) as error:
                await self._pause_after("writing the log", error, pause_s)
                pause_s = min(pause_s * 2, _MAX_BACKOFF_S)
            else:
                return

    async def last(self, key: SessionKey, kind: Literal["attempt", "in", "out"]) -> bytes | None:
        """Read the body of a session's last entry of a kind; None without one."""
        found = await self._last(key, kind)
        return (found.data or b"") if found else None

    async def purge(self, key: SessionKey, kind: Literal["attempt"]) -> None:
        """Remove what was stored of a kind. Where that fails it stays, which does no harm."""
        with contextlib.suppress(nats.errors.Error, APIError, OSError):
            await self._js.purge_stream(self._subjects.log_stream, subject=self._subjects.of(key, kind))

    async def count(self, key: SessionKey) -> int:
        """Count what the log holds of a session; 0 where it does not say."""
        with contextlib.suppress(nats.errors.Error, APIError, OSError):
            info = await self._js.stream_info(
                self._subjects.log_stream, subjects_filter=self._subjects.log(key)
            )
            return sum((info.state.subjects or {}).values())
        return 0

    async def log_bytes(self) -> int:
        """Ask for the size of the log. Raises what nats-py does where it does not answer."""
        return (await self._js.stream_info(self._subjects.log_stream)).state.bytes

    async def closed(self, after: int) -> tuple[list[Entry], bool]:
        """Read the next notes of sessions that were about to be closed, above the stream sequence `after`."""
        entries, num_more = await self._direct_batch(
            self._subjects.log_stream, self._subjects.every("closed"), after
        )
        return entries, num_more > 0

    async def remove(
        self, key: SessionKey, before: int, kind: Literal["checkpoint", "dead"] | None = None
    ) -> None:
        """Remove what the log holds of a session, or that of a kind, below the stream sequence `before`."""
        subject = self._subjects.of(key, kind) if kind else self._subjects.log(key)
        await self._js.purge_stream(self._subjects.log_stream, seq=before, subject=subject)

    async def remove_tokens(self, key: SessionKey) -> None:
        """Remove what can still be read back of a session's answers."""
        await self._js.purge_stream(self._subjects.token_stream, subject=self._subjects.tokens(key, "*"))

    async def delete(self, seq: int) -> None:
        """Remove one entry, if it is there."""
        with contextlib.suppress(NotFoundError):
            await self._js.delete_msg(self._subjects.log_stream, seq)

    async def refuse(self, subject: str, seq: int, message: str) -> None:
        """Answer the request at `seq` under names that no log can be kept for: at its tenant's `_refused`.

        Nothing can be said where the tenant's name is none either. After a crash it may be there twice.
        """
        tenant = subject.rsplit(".", 3)[1]
        with contextlib.suppress(InvalidMessageError):
            answer = self._subjects.of(SessionKey(check_id("tenant", tenant), REFUSED), "commit")
            try:
                await self._js.publish(
                    answer, encode(failure(None, "invalid_request", message, seq=seq)), timeout=_TIMEOUT_S
                )
            except (nats.errors.Error, APIError, OSError) as error:
                log.warning("a refusal could not be stored", seq=seq, error=str(error))

    async def _own_commit(self, subject: str, body: bytes, after: int) -> int:
        """Tell a commit whose ack was lost from one that another worker won."""
        while True:
            try:
                # No direct get: its answer has the publisher's headers, and nats-py believes a `Status`.
                last = await self._js.get_last_msg(self._subjects.log_stream, subject)
            except NotFoundError:
                break
            except (nats.errors.Error, APIError, OSError) as error:
                await self._pause_after("reading the log", error, 1.0)
                continue
            if last.data == body and last.seq is not None and last.seq > after:
                return last.seq
            break
        raise FencedError(subject)

    async def _pause_after(self, doing: str, error: BaseException, pause_s: float) -> None:
        log.warning(
            "the log is out of reach, trying again", doing=doing, error=str(error) or type(error).__name__
        )
        await sleep(pause_s)

    async def _direct(self, stream: str, subject: str, after: int) -> AsyncIterator[Entry]:
        """Iterate over a subject's messages with sequences above `after`, some hundred per request."""
        num_more = 1
        while num_more:
            entries, num_more = await self._direct_batch(stream, subject, after)
            for entry in entries:
                after = entry.seq
                yield entry

    async def _direct_batch(self, stream: str, subject: str, after: int) -> tuple[list[Entry], int]:
        """Read the next messages above `after`, and count those behind them."""
        while True:
            try:
                return await self._try_direct_batch(stream, subject, after)
            except (nats.errors.Error, OSError) as error:
                await self._pause_after("reading the log", error, 1.0)

    async def _try_direct_batch(self, stream: str, subject: str, after: int) -> tuple[list[Entry], int]:
        # nats-py has no batched direct get, so this is the raw request of ADR-31.
        request = {"seq": after + 1, "batch": _BATCH, "max_bytes": _BATCH_BYTES, "next_by_subj": subject}
        entries: list[Entry] = []
        async with self._replies.to(f"$JS.API.DIRECT.GET.{stream}", json.dumps(request).encode()) as replies:
            while True:
                message = await replies()
                headers = message.headers or {}
                status = headers.get("Status")
                # An entry brings its publisher's headers along, among which there may be a `Status`.
                if "Nats-Sequence" in headers:
                    entries.append(_entry(message, headers))
                elif status in ("204", "404"):
                    return entries, int(headers.get("Nats-Num-Pending", "0"))
                else:
                    raise nats.errors.Error(f"direct get: {status} {headers.get('Description', '')}")


class _Replies:
    """Requests with several replies, over one subscription: one for each request takes a third longer."""

    def __init__(self, nc: Client) -> None:
        self._nc = nc
        self._inbox = nc.new_inbox()
        self._opening = Lock(fast_acquire=True)
        self._subscription: Subscription | None = None
        self._waiting: dict[str, MemoryObjectSendStream[Msg]] = {}
        self._numbers = itertools.count()

    @asynccontextmanager
    async def to(self, subject: str, body: bytes) -> AsyncIterator[Callable[[], Awaitable[Msg]]]:
        """Send a request; gives what waits for its next reply, and raises `TimeoutError` if none comes.

        What is on its way while the connection is lost never comes.
        """
        async with self._opening:
            if self._subscription is None:
                self._subscription = await self._nc.subscribe(f"{self._inbox}.*", cb=self._arrived)
        inbox = f"{self._inbox}.{next(self._numbers)}"
        arrived: MemoryObjectSendStream[Msg]
        arrived, replies = create_memory_object_stream(math.inf)
        self._waiting[inbox] = arrived

        async def reply() -> Msg:
            with fail_after(_TIMEOUT_S):
                return await replies.receive()

        with arrived, replies:
            try:
                await self._nc.publish(subject, body, reply=inbox)
                yield reply
            finally:
                del self._waiting[inbox]

    async def _arrived(self, message: Msg) -> None:
        waiting = self._waiting.get(message.subject)
        if waiting is not None:  # else nobody waits for it any more
            waiting.send_nowait(message)


def _entry(message: Msg, headers: Mapping[str, str]) -> Entry:
    kind: Literal["in", "out"] = "in" if headers["Nats-Subject"].endswith(".in") else "out"
    stored = datetime.fromisoformat(headers["Nats-Time-Stamp"])  # nanoseconds, of which microseconds are kept
    return Entry(int(headers["Nats-Sequence"]), kind, stored, message.data, headers)
