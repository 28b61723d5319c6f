"""Reads streams consistently: a read finds all messages stored, and none removed, before it began.

Single messages come from the stream's leader. Pages come by direct gets, which any replica may answer. If
there are several replicas, a request to the leader shows whether the one that answered lags behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Literal

import nats.errors
import structlog
from anyio import sleep
from nats.js.errors import APIError, NotFoundError

from turnkeep_client.direct import DirectGets
from worker.process.clock import monotonic

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext
    from nats.js.api import RawStreamMsg


log = structlog.get_logger()

_BATCH: Final = 256
_BATCH_BYTES: Final = 2 * 2**20
TIMEOUT_S: Final = 5.0
MAX_BACKOFF_S: Final = 5.0
#: How long a look-up of whether a stream has replicas stays valid.
_KNOWN_S: Final = 5.0
#: Pause after a write that was refused while another one to the same subject was in progress.
RACE_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message of a stream; `stored` is the time at which the server stored it."""

    seq: int
    kind: Literal["in", "out"]
    stored: datetime
    body: bytes
    headers: Mapping[str, str]


class ConsistentReads:
    """Reads streams consistently. Each method retries until it has succeeded. Event loop only."""

    def __init__(self, nc: Client, js: JetStreamContext) -> None:
        self._js = js
        self._gets = DirectGets(nc, timeout_s=TIMEOUT_S)
        self._replicated: dict[str, tuple[float, bool]] = {}  # by stream: (valid until, has replicas)

    async def page(self, stream: str, subject: str, after: int) -> tuple[list[StoredMessage], int]:
        """Read a subject's next messages after the sequence `after`, and count the remaining ones."""
        pause_s = RACE_S
        while True:
            last_seq = await self.last_seq(stream, subject) if await self._is_replicated(stream) else None
            entries, num_more = await self._direct_batch(stream, subject, after)
            is_behind = last_seq is not None and not num_more and last_seq > max(after, _end(entries))
            # A replica may also return removed entries: removals begin with the first entries.
            is_removed = last_seq is not None and entries and not await self.get(stream, entries[0].seq)
            if not (is_behind or is_removed):
                return entries, num_more
            await sleep(pause_s)
            pause_s = min(pause_s * 2, MAX_BACKOFF_S)

    async def _is_replicated(self, stream: str) -> bool:
        """Whether a stream has replicas; asks the server every 5 s, since an operator can add some."""
        until_s, is_replicated = self._replicated.get(stream, (0.0, True))
        while monotonic() >= until_s:
            try:
                config = (await self._js.stream_info(stream)).config
            except (nats.errors.Error, APIError, OSError) as error:
                await pause_after("looking at the log", error, 1.0)
                continue
            until_s, is_replicated = monotonic() + _KNOWN_S, (config.num_replicas or 1) > 1
            self._replicated[stream] = until_s, is_replicated
        return is_replicated

    async def get(self, stream: str, seq: int, subject: str | None = None) -> RawStreamMsg | None:
        """Read a stream's message at a sequence; None if it was removed.

        With `subject`, read the first message of the subject at this sequence or later.
        """
        while True:
            try:
                return await self._js.get_msg(stream, seq, subject, next=subject is not None)
            except NotFoundError:
                return None
            except (nats.errors.Error, APIError, OSError) as error:
                await pause_after("reading the log", error, 1.0)

    async def last_seq(self, stream: str, subject: str) -> int:
        """Read the sequence of a subject's last message; 0 if there is none."""
        found = await self.last(stream, subject)
        return (found.seq or 0) if found else 0

    async def last(self, stream: str, subject: str) -> RawStreamMsg | None:
        """Read a subject's last message; None if there is none."""
        while True:
            try:
                # No direct get: nats-py would take a publisher's `Status` header for the server's.
                return await self._js.get_last_msg(stream, subject)
            except NotFoundError:
                return None
            except (nats.errors.Error, APIError, OSError) as error:
                await pause_after("reading the log", error, 1.0)

    async def entries(self, stream: str, subject: str) -> AsyncGenerator[StoredMessage]:
        """Iterate over a subject's messages."""
        after, num_more = 0, 1
        while num_more:
            entries, num_more = await self.page(stream, subject, after)
            for entry in entries:
                after = entry.seq
                yield entry

    async def _direct_batch(self, stream: str, subject: str, after: int) -> tuple[list[StoredMessage], int]:
        """Read a page by a direct get, retrying until it succeeds. The answering replica may lag behind."""
        request = {"seq": after + 1, "batch": _BATCH, "max_bytes": _BATCH_BYTES, "next_by_subj": subject}
        while True:
            try:
                messages, num_more = await self._gets.read(stream, request)
                return [_entry(message) for message in messages], num_more
            except (nats.errors.Error, OSError) as error:
                await pause_after("reading the log", error, 1.0)


async def pause_after(doing: str, error: BaseException, pause_s: float) -> None:
    """Warn in the worker's own log that the stream cannot be reached, and wait for `pause_s`."""
    log.warning(
        "the log is out of reach, trying again", doing=doing, error=str(error) or type(error).__name__
    )
    await sleep(pause_s)


def single(message: RawStreamMsg, kind: Literal["in", "out"]) -> StoredMessage:
    """Build the entry of a message that was read alone, not as part of a page."""
    stored = message.time or datetime.fromtimestamp(0, UTC)
    return StoredMessage(message.seq or 0, kind, stored, message.data or b"", message.headers or {})


def _end(entries: list[StoredMessage]) -> int:
    return entries[-1].seq if entries else 0


def _entry(message: Msg) -> StoredMessage:
    headers = message.headers or {}
    kind: Literal["in", "out"] = "in" if headers["Nats-Subject"].endswith(".in") else "out"
    stored = datetime.fromisoformat(headers["Nats-Time-Stamp"])  # truncated to microseconds
    return StoredMessage(int(headers["Nats-Sequence"]), kind, stored, message.data, headers)
