"""Reads a stream consistently: a read finds all messages stored, and none removed, before it began.

Single messages come from the stream's leader. Pages come by direct gets, which any replica may answer. If
there are several replicas, a request to the leader shows whether the one that answered lags behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

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
    stored: datetime
    body: bytes
    headers: Mapping[str, str]


class ConsistentReads:
    """Reads one stream consistently. Each method retries until it has succeeded. Event loop only."""

    def __init__(self, nc: Client, stream: str) -> None:
        self._js = nc.jetstream()
        self._stream = stream
        self._gets = DirectGets(nc, timeout_s=TIMEOUT_S)
        self._replicas_known_s = 0.0  # until then `_has_replicas` is valid
        self._has_replicas = True

    async def page(self, subject: str, after: int) -> tuple[list[StoredMessage], int]:
        """Read a subject's next messages after the sequence `after`: up to 256, or 2 MiB.

        Returns these, and the number of those that remain.
        """
        pause_s = RACE_S
        while True:
            last_seq = await self.last_seq(subject) if await self._is_replicated() else None
            entries, num_more = await self._direct_batch(subject, after)
            is_behind = last_seq is not None and not num_more and last_seq > max(after, _end(entries))
            # A replica may also return removed entries: removals begin with the first entries.
            is_removed = last_seq is not None and entries and not await self.get(entries[0].seq)
            if not (is_behind or is_removed):
                return entries, num_more
            await sleep(pause_s)
            pause_s = min(pause_s * 2, MAX_BACKOFF_S)

    async def _is_replicated(self) -> bool:
        """Whether the stream has replicas; asks the server every 5 s, since an operator can add some."""
        while monotonic() >= self._replicas_known_s:
            try:
                config = (await self._js.stream_info(self._stream)).config
            except (nats.errors.Error, APIError, OSError) as error:
                await pause_after("looking at the log", error, 1.0)
                continue
            self._replicas_known_s = monotonic() + _KNOWN_S
            self._has_replicas = (config.num_replicas or 1) > 1
        return self._has_replicas

    async def get(self, seq: int, subject: str | None = None) -> StoredMessage | None:
        """Read the message at a sequence; None if it was removed.

        With `subject`, read the first message of the subject at this sequence or later.
        """
        while True:
            try:
                return _single(await self._js.get_msg(self._stream, seq, subject, next=subject is not None))
            except NotFoundError:
                return None
            except (nats.errors.Error, APIError, OSError) as error:
                await pause_after("reading the log", error, 1.0)

    async def last_seq(self, subject: str) -> int:
        """Read the sequence of a subject's last message; 0 if there is none."""
        found = await self.last(subject)
        return found.seq if found else 0

    async def last(self, subject: str) -> StoredMessage | None:
        """Read a subject's last message; None if there is none."""
        while True:
            try:
                # No direct get: nats-py would take a publisher's `Status` header for the server's.
                return _single(await self._js.get_last_msg(self._stream, subject))
            except NotFoundError:
                return None
            except (nats.errors.Error, APIError, OSError) as error:
                await pause_after("reading the log", error, 1.0)

    async def entries(self, subject: str, after: int = 0) -> AsyncGenerator[StoredMessage]:
        """Iterate over a subject's messages after the sequence `after`, in order."""
        num_more = 1
        while num_more:
            entries, num_more = await self.page(subject, after)
            for entry in entries:
                after = entry.seq
                yield entry

    async def _direct_batch(self, subject: str, after: int) -> tuple[list[StoredMessage], int]:
        """Read a page by a direct get, retrying until it succeeds. The answering replica may lag behind."""
        request = {"seq": after + 1, "batch": _BATCH, "max_bytes": _BATCH_BYTES, "next_by_subj": subject}
        while True:
            try:
                messages, num_more = await self._gets.read(self._stream, request)
                return [_entry(message) for message in messages], num_more
            except (nats.errors.Error, OSError) as error:
                await pause_after("reading the log", error, 1.0)


async def pause_after(doing: str, error: BaseException, pause_s: float) -> None:
    """Warn in the worker's log that the stream cannot be reached, and wait for `pause_s`."""
    log.warning(
        "the log is out of reach, trying again", doing=doing, error=str(error) or type(error).__name__
    )
    await sleep(pause_s)


def _single(message: RawStreamMsg) -> StoredMessage:
    """Convert a message that was read alone, not as part of a page."""
    stored = message.time or datetime.fromtimestamp(0, UTC)
    return StoredMessage(message.seq or 0, stored, message.data or b"", message.headers or {})


def _end(entries: list[StoredMessage]) -> int:
    return entries[-1].seq if entries else 0


def _entry(message: Msg) -> StoredMessage:
    headers = message.headers or {}
    stored = datetime.fromisoformat(headers["Nats-Time-Stamp"])  # truncated to microseconds
    return StoredMessage(int(headers["Nats-Sequence"]), stored, message.data, headers)
