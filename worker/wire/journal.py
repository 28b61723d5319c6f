"""The session logs in JetStream: reads entries forward, and commits results.

Owns the fence: a result is stored only if no other result of the session was stored since this worker last
read the log. Does not know what entries mean for a session; see `sessions/record`.

All reads are consistent (`consistent_reads`). The chunks of answers are in a stream of their own (`chunks`).
"""

from __future__ import annotations

import contextlib
from datetime import datetime
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import nats.errors
import structlog
from nats.js.errors import APIError

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.images import assemble, entries
from turnkeep_client.log import EXPECT_HEADER
from turnkeep_client.messages import decode_result, encode, failure
from turnkeep_client.nats_client import server_id, write_refusal
from turnkeep_client.subjects import REFUSED, SessionKey, check_id
from turnkeep_client.writes import Writes
from worker.process.clock import monotonic

from .chunks import AnswerChunks
from .consistent_reads import (
    MAX_BACKOFF_S,
    ConsistentReads,
    StoredMessage,
    pause_after,
)
from .fence import WRONG_LAST_SEQUENCE, FencedError, check_server
from .log_room import LogRoom
from .overwriting import overwrite
from .written import answered_seq

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Mapping

    from nats.aio.client import Client

    from turnkeep_client.subjects import Subjects

log = structlog.get_logger()

#: JetStream's error code if a message is larger than the stream permits.
MESSAGE_TOO_LARGE: Final = 10054


class TooLargeError(Exception):
    """The result is larger than the stream permits."""


class Queue(NamedTuple):
    """What is left of a session on `in`: requests that have results, then perhaps one that has none."""

    key: SessionKey
    #: The sequences of requests that have results: these may leave the log.
    answered: list[int]
    #: Whether a request without a result follows.
    is_waiting: bool


class Journal:
    """Reads and writes session logs. Event loop only.

    Unless its docstring says otherwise, a method retries through lost connections and full disks until it has
    succeeded, as a worker can do nothing without its log.
    """

    def __init__(self, nc: Client, subjects: Subjects, *, model: str = "") -> None:
        """`model` identifies the model in the answers that this worker publishes."""
        self._nc = nc
        self._js = nc.jetstream()
        self._subjects = subjects
        self._reads = ConsistentReads(nc, subjects.log_stream)
        self.room = LogRoom(nc, subjects.log_stream)
        #: What waits until it is stored.
        self.writes = Writes()
        self.chunks = AnswerChunks(nc, subjects, self._reads, self.writes, model=model)
        self._time_s = 0.0  # the server's clock minus the monotonic one

    @property
    def server(self) -> str:
        """Name of the server process that this worker is connected with.

        A restarted server may have lost its last entries, and reuse their sequences: so the entries that were
        read from an earlier process must be read again.
        """
        return server_id(self._nc)

    async def page(
        self, key: SessionKey, kind: Literal["in", "out", "closed"], after: int
    ) -> tuple[list[StoredMessage], int]:
        """Read a session's next requests, results, or notes of closes, after the sequence `after`, in order.

        Returns a page of up to 256 entries or 2 MiB, and the number of entries that remain after it.
        """
        return await self._reads.page(self._subjects.of(key, kind), after)

    def every(self, key: SessionKey, kind: Literal["in", "out"], after: int) -> AsyncGenerator[StoredMessage]:
        """Iterate over a session's requests or results after the sequence `after`, in order."""
        return self._reads.entries(self._subjects.of(key, kind), after)

    async def entry(self, seq: int) -> StoredMessage | None:
        """Read an entry; None if it was removed from the log."""
        return await self._reads.get(seq)

    async def first(self, key: SessionKey, kind: Literal["in", "out"]) -> StoredMessage | None:
        """Read a session's first request or result that the log still has; None if there is none."""
        return await self._reads.get(1, self._subjects.of(key, kind))

    async def store_checkpoint(self, key: SessionKey, body: bytes) -> int | None:
        """Store a checkpoint message; return its sequence, None on failure. Does not retry."""
        subject = self._subjects.of(key, "checkpoint")
        try:
            return (await self.room.publish(subject, body)).seq
        except (nats.errors.Error, APIError, OSError) as error:
            log.warning("a checkpoint could not be stored", session=str(key), error=str(error))
            return None

    async def image(self, key: SessionKey, digest: str) -> bytes | None:
        """Read an image of a session by the SHA-256 of its file; None if the log lacks a part of it."""

        async def read(name: str) -> bytes | None:
            found = await self._reads.last(self._subjects.image(key, name))
            return found.body if found else None

        return await assemble(digest, read)

    async def store_image(self, key: SessionKey, data: bytes) -> None:
        """Store the file of an image for a session, unless its log has it.

        What the log has from before the session was closed leaves it later, so it is stored once more.
        """
        closed = await self.last_seq(key, "closed")
        for name, body in entries(data, self._nc.max_payload // 2):
            subject = self._subjects.image(key, name)
            seq = await self._reads.last_seq(subject)
            if seq <= closed:
                await self._append(subject, body, {EXPECT_HEADER: str(seq)})

    async def last_seq(self, key: SessionKey, kind: Literal["in", "out", "closed"]) -> int:
        """Read the sequence of a session's last request, result, or note of a close; 0 if there is none."""
        return await self._reads.last_seq(self._subjects.of(key, kind))

    async def last(self, key: SessionKey, kind: Literal["attempt", "in", "out"]) -> StoredMessage | None:
        """Read a session's last entry of a kind; None if there is none."""
        return await self._reads.last(self._subjects.of(key, kind))

    async def commit(
        self, key: SessionKey, body: bytes, after: int, headers: Mapping[str, str], *, server: str
    ) -> int:
        """Store a result's body directly after the session's result at sequence `after` (0: as the first).

        Returns its sequence. Raises `FencedError` if another result came first, if another worker has removed
        the session, or if the session was read from another `server` process than the current one,
        `TooLargeError` if the stream does not permit its size.
        """
        with self.writes.waiting():
            return await self._commit(key, body, after, headers, server)

    async def _commit(
        self, key: SessionKey, body: bytes, after: int, headers: Mapping[str, str], server: str
    ) -> int:
        subject = self._subjects.of(key, "commit")
        pause_s = 0.1
        while True:
            # Without a last result no fence notices that the session was removed: its request must be there.
            if not after and await self.entry(decode_result(body).seq or 0) is None:
                raise FencedError(subject)
            if await check_server(self._nc, server) and not after:
                continue  # the session may have been removed during the wait
            try:
                ack = await self.room.publish(subject, body, {**headers, EXPECT_HEADER: str(after)})
            except nats.errors.MaxPayloadError as error:
                raise TooLargeError(f"{len(body)} bytes") from error
            except APIError as error:
                if error.err_code == MESSAGE_TOO_LARGE:
                    raise TooLargeError(f"{len(body)} bytes") from error
                if error.err_code == WRONG_LAST_SEQUENCE:
                    return await self._own_commit(self._subjects.of(key, "out"), body, after)
                await self._pause_after("committing a result", error, pause_s)
            except (nats.errors.Error, OSError) as error:
                await self._pause_after("committing a result", error, pause_s)
            else:
                return ack.seq
            pause_s = min(pause_s * 2, MAX_BACKOFF_S)

    async def append(
        self,
        key: SessionKey,
        kind: Literal["attempt", "dead", "closed"],
        body: bytes,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Store another entry for a session: a note of attempts, a dead letter, or a note of a close."""
        await self._append(self._subjects.of(key, kind), body, headers)

    async def note_erasure(self, tenant: str, body: bytes) -> None:
        """Store in the log a note of erased tokens, for workers that do not run now."""
        await self._append(self._subjects.erased(tenant), body)

    async def _append(self, subject: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        with self.writes.waiting():
            await self._append_patiently(subject, body, headers)

    async def _append_patiently(self, subject: str, body: bytes, headers: dict[str, str] | None) -> None:
        pause_s = 0.1
        while True:
            try:
                await self.room.publish(subject, body, headers)
            except (nats.errors.Error, APIError, OSError) as error:
                if isinstance(error, APIError) and error.err_code == WRONG_LAST_SEQUENCE:
                    return  # it was stored meanwhile
                await self._pause_after("writing the log", error, pause_s)
                pause_s = min(pause_s * 2, MAX_BACKOFF_S)
            else:
                return

    async def _pause_after(self, doing: str, error: Exception, pause_s: float) -> None:
        self.writes.refusal = write_refusal(error)
        await pause_after(doing, error, pause_s)

    async def purge(self, key: SessionKey, kind: Literal["attempt"]) -> None:
        """Try once to remove a session's entries of a kind: remaining ones do no harm."""
        with contextlib.suppress(nats.errors.Error, APIError, OSError):
            await self._js.purge_stream(self._subjects.log_stream, subject=self._subjects.of(key, kind))

    async def count(self, key: SessionKey) -> int:
        """Return the number of a session's entries in the log; 0 if the server does not answer."""
        with contextlib.suppress(nats.errors.Error, APIError, OSError):
            info = await self._js.stream_info(
                self._subjects.log_stream, subjects_filter=self._subjects.whole(key)
            )
            return sum((info.state.subjects or {}).values())
        return 0

    async def end(self) -> tuple[int, int]:
        """Read the log's size in bytes, its last sequence, and the server's time. Raises nats-py's errors."""
        answer = await self.room.ask("INFO")  # nats-py's answer lacks the time
        self._time_s = datetime.fromisoformat(answer["ts"]).timestamp() - monotonic()
        return answer["state"]["bytes"], answer["state"]["last_seq"]

    def age_s(self, entry: StoredMessage) -> float:
        """Return how old an entry is by the server's clock, as this machine's may be wrong.

        `end` reads that clock; before its first call all ages are below 0.
        """
        return self._time_s + monotonic() - entry.stored.timestamp()

    async def queues(self, counts: Callable[[int], bool] = lambda _: True) -> list[Queue]:
        """Read the queues of all sessions, ignoring results for whose sequences `counts` is false.

        The server names the first 100,000 sessions only. Raises nats-py's errors.
        """
        info = await self._js.stream_info(
            self._subjects.log_stream, subjects_filter=self._subjects.every("in")
        )
        found: list[Queue] = []
        for subject in info.state.subjects or {}:
            with contextlib.suppress(InvalidMessageError):
                found.append(await self._queue(self._subjects.parse(subject)[0], counts))
        return found

    async def _queue(self, key: SessionKey, counts: Callable[[int], bool]) -> Queue:
        answered, results = list[int](), set[int]()
        after, more, after_out, more_results = 0, 1, 0, 1
        while more:
            requests, more = await self.page(key, "in", after)
            for entry in requests:
                if not after:  # the first request: no result is before it
                    after_out = entry.seq
                after = entry.seq
                while more_results and after not in results:
                    page, more_results = await self.page(key, "out", after_out)
                    results |= {answered_seq(one) for one in page if counts(one.seq)}
                    after_out = page[-1].seq if page else after_out
                if after not in results:
                    return Queue(key, answered, is_waiting=True)
                answered.append(after)
        return Queue(key, answered, is_waiting=False)

    async def unanswered(self) -> list[SessionKey]:
        """Find the sessions with requests that have no result. Raises nats-py's errors."""
        return [queue.key for queue in await self.queues() if queue.is_waiting]

    async def close_notes(self, after: int) -> tuple[list[StoredMessage], int]:
        """Read the next notes of closes, of all sessions, after the stream sequence `after`.

        Also returns the number of notes that remain.
        """
        return await self._reads.page(self._subjects.every("closed"), after)

    async def erasure_notes(self, after: int) -> tuple[list[StoredMessage], int]:
        """Read the next notes of erasures, of all tenants, after the sequence `after`, like `close_notes`."""
        return await self._reads.page(self._subjects.erased("*"), after)

    async def log_name(self) -> str:
        """Return a name of this log that no later log has. Raises nats-py's errors."""
        info = await self._js.stream_info(self._subjects.log_stream)
        return f"{self._subjects.log_stream} {info.created}"

    async def remove(
        self,
        key: SessionKey,
        before: int,
        kind: Literal["in", "checkpoint", "dead", "image.*"] | None = None,
        *,
        overwrites: bool = False,
        kept: Collection[int] = (),
    ) -> None:
        """Remove a session's entries below the sequence `before`: of one kind, or of all but images.

        Entries `kept` stay. With `overwrites`, or if some stay, removes them one by one, in order, and
        overwrites them in the server's files. Raises nats-py's errors.
        """
        stream = self._subjects.log_stream
        subject = self._subjects.log(key)[:-1] + (kind or "*")
        if not overwrites and not kept:
            await self._js.purge_stream(stream, seq=before, subject=subject)
            return
        async with contextlib.aclosing(self._reads.entries(subject)) as entries:
            async for entry in entries:
                if entry.seq >= before:
                    return
                if entry.seq not in kept:
                    await self.delete(entry.seq)

    async def delete(self, seq: int) -> None:
        """Remove and overwrite one entry, if it exists. Raises nats-py's errors."""
        await overwrite(self._js, self._subjects.log_stream, seq)

    async def refuse(self, subject: str, seq: int, message: str) -> None:
        """Refuse a request whose names cannot be used in subjects: store a failure in session `_refused`.

        Does not retry. Stores nothing if the tenant's name is invalid too. After a crash the failure may be
        stored twice.
        """
        tenant = subject.rsplit(".", 3)[1]
        with contextlib.suppress(InvalidMessageError):
            answer = self._subjects.of(SessionKey(check_id("tenant", tenant), REFUSED), "commit")
            try:
                await self.room.publish(answer, encode(failure(None, "invalid_request", message, seq=seq)))
            except (nats.errors.Error, APIError, OSError) as error:
                log.warning("a refusal could not be stored", seq=seq, error=str(error))

    async def _own_commit(self, subject: str, body: bytes, after: int) -> int:
        """Return the sequence of this commit if only its ack was lost; otherwise raise `FencedError`.

        A header of the stored message has the sequence that it was stored after. If that is not `after`, an
        equal message is not this commit: it follows a result that this worker has not read.
        """
        last = await self._reads.last(subject)
        if last is None or last.body != body or last.headers.get(EXPECT_HEADER) != str(after):
            raise FencedError(subject)
        return last.seq
