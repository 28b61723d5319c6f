"""The session logs in JetStream: reads entries forward, commits results, publishes and reads chunks.

Owns the fence: a result is stored only if no other result of the session was stored since this worker last
read the log. Does not know what entries mean for a session; see `sessions/history`.

All reads are consistent (`consistent_reads`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Final, Literal, NamedTuple
from uuid import uuid4

import nats.errors
import structlog
from anyio import sleep
from nats.js.errors import APIError, NotFoundError

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.log import (
    ENDED_HEADER,
    EXPECT_HEADER,
    HISTORY_HEADER,
    MODEL_HEADER,
    SEALED_HEADER,
)
from turnkeep_client.messages import Chunk, decode_chunk, decode_result, encode, failure
from turnkeep_client.nats_client import server_id
from turnkeep_client.subjects import REFUSED, SessionKey, check_id

from .consistent_reads import MAX_BACKOFF_S, RACE_S, TIMEOUT_S, ConsistentReads, Entry, pause_after, single

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from nats.aio.client import Client
    from nats.js import JetStreamContext
    from nats.js.api import RawStreamMsg

    from turnkeep_client.subjects import Subjects

log = structlog.get_logger()

_WRONG_LAST_SEQUENCE: Final = 10071
_OVERTAKEN: Final = (_WRONG_LAST_SEQUENCE, 10164)  # with several copies, a write that is still in process
#: The message is larger than the stream permits.
MESSAGE_TOO_LARGE: Final = 10054
#: The message to be deleted is not there; reading it gives a `NotFoundError`, of another code.
_NO_MESSAGE: Final = 10057


class FencedError(Exception):
    """Another worker stored a result for this session first: the state in memory is stale."""


class TooLargeError(Exception):
    """The result is larger than the stream permits."""


def answers(entry: Entry) -> int:
    """Return the sequence of the request that an `out` entry answers; 0 if the entry is not a result."""
    try:
        return decode_result(entry.body).seq or 0
    except InvalidMessageError:
        return 0


class Published(NamedTuple):
    """The chunks of an answer that clients may have seen, and the sequence of its subject's last message.

    `has_ended` says that a worker has closed the token stream, so the answer has a result; `is_sealed` that
    one is about to end it as cancelled or expired, or has died over it. The first chunk says the `model`, and
    the digest of the session before it (`base`).
    """

    chunks: list[Chunk]
    last_seq: int = 0
    has_ended: bool = False
    is_sealed: bool = False
    model: str = ""
    base: str = ""

    @property
    def num_tokens(self) -> int:
        """Number of the chunks' tokens."""
        return sum(len(chunk.tokens) for chunk in self.chunks)


class Journal:
    """Reads and writes session logs. Event loop only.

    Unless its docstring says otherwise, a method retries through lost connections and full disks until it has
    succeeded, as a worker can do nothing without its log.
    """

    def __init__(
        self,
        nc: Client,
        js: JetStreamContext,
        subjects: Subjects,
        *,
        is_alone: Callable[[], bool] = lambda: False,
        model: str = "",
    ) -> None:
        """`is_alone` says whether no other worker can have served the prefix since this one began.

        `model` identifies the model in the answers that this worker publishes.
        """
        self._nc = nc
        self._js = js
        self._is_alone = is_alone
        self._model = model
        self._subjects = subjects
        self._reads = ConsistentReads(nc, js)
        self._name = uuid4().hex  # in seals, as a worker's own seals do not stop it

    @property
    def server(self) -> str:
        """Name of the server process that this worker is connected with.

        A server that starts may have lost its last entries, and stores others under their sequences: what was
        read from an earlier process is to be read again.
        """
        return server_id(self._nc)

    async def page(self, key: SessionKey, kind: Literal["in", "out"], after: int) -> tuple[list[Entry], int]:
        """Read a session's next requests, or results, after the stream sequence `after`, in order.

        Returns some hundred entries or some MiB, and the number of those that remain.
        """
        return await self._reads.page(self._subjects.log_stream, self._subjects.of(key, kind), after)

    async def published(self, key: SessionKey, request_id: str, seq: int, stored: datetime) -> Published:
        """Read the published chunks of the request at `seq`, from index 0, which may come again, up to a gap.

        Ignores chunks that do not name the request's sequence or are older than the request (`stored`): a
        client may have published them to forge the beginning of the answer.
        """
        chunks: list[Chunk] = []
        num_tokens = num_foreign = last_seq = 0
        has_gap = has_ended = is_sealed = False
        model = base = ""
        async for entry in self._reads.entries(
            self._subjects.token_stream, self._subjects.tokens(key, request_id)
        ):
            last_seq = entry.seq
            if not entry.body:
                has_ended = has_ended or entry.headers.get(ENDED_HEADER) == str(seq)
                is_sealed = is_sealed or _sealed(entry.headers)[0] == str(seq)
                continue
            try:
                chunk = decode_chunk(entry.body)
            except InvalidMessageError:
                chunk = None
            if chunk is None or chunk.seq != seq or entry.stored < stored:
                # Not those of an earlier request, which this one repeats.
                num_foreign += chunk is None or chunk.seq is None or chunk.seq >= seq
                continue
            is_sealed = False  # whoever sealed it has seen that it goes on
            if has_gap and chunk.i == 0:  # the first ones have expired, and were published again
                chunks, num_tokens, has_gap = [], 0, False
            has_gap = has_gap or chunk.i > num_tokens
            if chunk.i == num_tokens and not has_gap:
                model = model or entry.headers.get(MODEL_HEADER, "")
                base = base or entry.headers.get(HISTORY_HEADER, "")
                chunks.append(chunk)
                num_tokens += len(chunk.tokens)
        if num_foreign:
            log.warning("ignoring chunks that are not of this request", request=request_id, num=num_foreign)
        return Published(chunks, last_seq, has_ended, is_sealed, model, base)

    async def publish_chunk(
        self, key: SessionKey, request_id: str, chunk: Chunk, after: int, *, server: str, base: str = ""
    ) -> int:
        """Publish the next chunk of an answer; return when it is stored, which is when clients receive it.

        `after` is the sequence of the last message of the answer's subject; returns the chunk's own. Returns
        0 if the token stream refuses the chunk. Then publish no later chunks of the answer: the stored chunks
        must have no gap, so that a worker that resumes the answer finds all that clients saw. Raises
        `FencedError` if another worker has published a chunk of the answer since, or if the session was read
        from another `server` process than the current one. `base` is the digest of the session before.
        """
        return await self._publish(
            key, request_id, encode(chunk), after, chunk.seq or 0, server, base=base, is_first=chunk.i == 0
        )

    async def seal(self, key: SessionKey, request_id: str, seq: int, after: int, *, server: str) -> None:
        """Let nobody publish a chunk of the request at `seq` behind the message at `after`.

        For a result that ends the answer before its end: a worker that does not know it yet may go on. Stores
        an empty message. Raises `FencedError` if there is a later chunk, or as `publish_chunk` for `server`.
        """
        await self._publish(key, request_id, b"", after, seq, server)

    async def _publish(
        self,
        key: SessionKey,
        request_id: str,
        body: bytes,
        after: int,
        seq: int,
        server: str,
        *,
        base: str = "",
        is_first: bool = False,
    ) -> int:
        subject, pause_s = self._subjects.tokens(key, request_id, "chunk"), 0.1
        headers = {} if body else {SEALED_HEADER: f"{seq} {self._name}"}
        if is_first:
            said = {MODEL_HEADER: self._model, HISTORY_HEADER: base}
            headers |= {name: value for name, value in said.items() if value}
        while True:
            await self._check_server(server)
            is_first = is_first or not after
            try:
                ack = await self._js.publish(
                    subject, body, timeout=TIMEOUT_S, headers={**headers, EXPECT_HEADER: str(after)}
                )
                stored = ack.seq
            except (APIError, nats.errors.MaxPayloadError) as error:
                if isinstance(error, APIError) and error.err_code in _OVERTAKEN:
                    after, is_own = await self._last_chunk(key, request_id, body, after, seq)
                    if not is_own:
                        # A forget may have made room for others, before this look or behind it.
                        if await self.get(seq) is None:
                            raise FencedError("the session was forgotten") from None
                        is_first = True
                        continue
                    stored = after
                else:
                    log.warning("an answer is not streamed any further", error=str(error))
                    return 0
            except (nats.errors.Error, OSError) as error:
                await pause_after("publishing tokens", error, pause_s)
                pause_s = min(pause_s * 2, MAX_BACKOFF_S)
                continue
            if is_first:
                await self._check_not_forgotten(stored, seq)
            return stored

    @property
    def is_alone(self) -> bool:
        """Whether no other worker can have served the prefix since this one began."""
        return self._is_alone()

    async def _check_not_forgotten(self, chunk_seq: int, seq: int) -> None:
        """Take back an answer's first message, and raise `FencedError`, if its session was forgotten.

        Another worker may forget a session while this one begins to answer it. It removes requests before
        chunks: so it removes each chunk whose request is still there.
        """
        if self._is_alone() or await self.get(seq) is not None:
            return
        with contextlib.suppress(nats.errors.Error, APIError, OSError):  # it expires
            await self._js.delete_msg(self._subjects.token_stream, chunk_seq)
        raise FencedError("the session was forgotten")

    async def _last_chunk(
        self, key: SessionKey, request_id: str, body: bytes, after: int, seq: int
    ) -> tuple[int, bool]:
        """Return the sequence of an answer's last message (0: all have expired), and whether `body` is there.

        Looks at each message behind `after`: behind a chunk there may be ends of requests that repeat it.
        Raises `FencedError` if one is another chunk, the end or the seal of the request at `seq`.
        """
        subject, is_own = self._subjects.tokens(key, request_id), 0
        last = await self._token(subject)
        if last is None:
            return 0, False
        if (last.seq or 0) <= after:
            await sleep(RACE_S)  # the other write is still in process, or what came last has expired
            return last.seq or 0, False
        while (found := await self._token(subject, after)) is not None:
            after, data = found.seq or 0, found.data or b""
            if data == body and data and not is_own:
                is_own = after
            elif self._stops(data, found.headers or {}, seq):
                raise FencedError(subject)  # else of a client, or of another request under this id
        return is_own or after, is_own > 0

    async def _token(self, subject: str, after: int | None = None) -> RawStreamMsg | None:
        """Read the first message of an answer behind `after`, or its last; None if there is none."""
        stream, seq = self._subjects.token_stream, None if after is None else after + 1
        while True:
            try:
                return await self._js.get_msg(stream, seq, subject, next=seq is not None)
            except NotFoundError:
                return None
            except (nats.errors.Error, APIError, OSError) as error:
                await pause_after("reading tokens", error, 1.0)

    def _stops(self, data: bytes, headers: Mapping[str, str], seq: int) -> bool:
        """Say whether a message is a chunk, the end or another worker's seal of the request at `seq`."""
        if not data:
            sealed, name = _sealed(headers)
            return headers.get(ENDED_HEADER) == str(seq) or (sealed == str(seq) and name != self._name)
        with contextlib.suppress(InvalidMessageError):
            return decode_chunk(data).seq == seq
        return False

    async def get(self, seq: int) -> bytes | None:
        """Read the body of an entry; None if it was removed from the log."""
        message = await self._reads.get(self._subjects.log_stream, seq)
        return (message.data or b"") if message else None

    async def entry(self, seq: int) -> Entry | None:
        """Read a request; None if it was removed from the log."""
        message = await self._reads.get(self._subjects.log_stream, seq)
        return single(message, "in") if message else None

    async def store_checkpoint(self, key: SessionKey, body: bytes) -> int | None:
        """Store a checkpoint message; return its sequence, None on failure. Does not retry."""
        subject = self._subjects.of(key, "checkpoint")
        try:
            return (await self._js.publish(subject, body, timeout=TIMEOUT_S)).seq
        except (nats.errors.Error, APIError, OSError) as error:
            log.warning("a checkpoint could not be stored", session=str(key), error=str(error))
            return None

    async def last_seq(self, key: SessionKey, kind: Literal["in", "out"]) -> int:
        """Read the sequence of a session's last request, or result; 0 if there is none."""
        return await self._reads.last_seq(self._subjects.log_stream, self._subjects.of(key, kind))

    async def last(self, key: SessionKey, kind: Literal["attempt", "in", "out"]) -> Entry | None:
        """Read a session's last entry of a kind; None if there is none."""
        found = await self._reads.last(self._subjects.log_stream, self._subjects.of(key, kind))
        return single(found, "in" if kind == "in" else "out") if found else None

    async def commit(
        self, key: SessionKey, body: bytes, after: int, headers: Mapping[str, str], *, server: str
    ) -> int:
        """Store a result's body directly after the session's result at sequence `after` (0: as the first).

        Returns its sequence. Raises `FencedError` if another result came first, if another worker has removed
        the session, or if the session was read from another `server` process than the current one,
        `TooLargeError` if the stream does not permit its size.
        """
        subject = self._subjects.of(key, "commit")
        pause_s = 0.1
        while True:
            # What was removed is no fence.
            if not after and not self._is_alone() and await self.get(decode_result(body).seq or 0) is None:
                raise FencedError(subject)
            await self._check_server(server)
            try:
                ack = await self._js.publish(
                    subject, body, timeout=TIMEOUT_S, headers={**headers, EXPECT_HEADER: str(after)}
                )
            except nats.errors.MaxPayloadError as error:
                raise TooLargeError(f"{len(body)} bytes") from error
            except APIError as error:
                if error.err_code == MESSAGE_TOO_LARGE:
                    raise TooLargeError(f"{len(body)} bytes") from error
                if error.err_code == _WRONG_LAST_SEQUENCE:
                    return await self._own_commit(self._subjects.of(key, "out"), body, after)
                await pause_after("committing a result", error, pause_s)
            except (nats.errors.Error, OSError) as error:
                await pause_after("committing a result", error, pause_s)
            else:
                return ack.seq
            pause_s = min(pause_s * 2, MAX_BACKOFF_S)

    async def _check_server(self, server: str) -> None:
        """Wait for a connection: else nats-py would keep a message for whatever server comes next.

        Raises `FencedError` if it is with another server process than `server`.
        """
        while not self._nc.is_connected:  # noqa: ASYNC110  # no event
            await sleep(RACE_S)
        if self.server != server:
            raise FencedError("the server has restarted")

    async def append(self, key: SessionKey, kind: Literal["attempt", "dead", "closed"], body: bytes) -> None:
        """Store an entry of another kind for a session: a note of attempts, a dead letter, or a close."""
        await self._append(self._subjects.of(key, kind), body)

    async def note_erasure(self, tenant: str, body: bytes) -> None:
        """Store a note of what a tenant has forgotten."""
        await self._append(self._subjects.erased(tenant), body)

    async def _append(self, subject: str, body: bytes) -> None:
        pause_s = 0.1
        while True:
            try:
                await self._js.publish(subject, body, timeout=TIMEOUT_S)
            except (nats.errors.Error, APIError, OSError) as error:
                await pause_after("writing the log", error, pause_s)
                pause_s = min(pause_s * 2, MAX_BACKOFF_S)
            else:
                return

    async def purge(self, key: SessionKey, kind: Literal["attempt"]) -> None:
        """Remove a session's entries of a kind. Does not retry, since remaining entries do no harm."""
        with contextlib.suppress(nats.errors.Error, APIError, OSError):
            await self._js.purge_stream(self._subjects.log_stream, subject=self._subjects.of(key, kind))

    async def count(self, key: SessionKey) -> int:
        """Return the number of a session's entries in the log; 0 if the server does not answer."""
        with contextlib.suppress(nats.errors.Error, APIError, OSError):
            info = await self._js.stream_info(
                self._subjects.log_stream, subjects_filter=self._subjects.log(key)
            )
            return sum((info.state.subjects or {}).values())
        return 0

    async def log_bytes(self) -> int:
        """Return the size of the log. Raises nats-py's errors."""
        return (await self._js.stream_info(self._subjects.log_stream)).state.bytes

    async def unanswered(self) -> list[SessionKey]:
        """Find the sessions with more requests than results.

        The server counts for the first 100,000 sessions only. Raises nats-py's errors.
        """
        num_lacking: Counter[SessionKey] = Counter()
        weights: Mapping[Literal["in", "out"], int] = {"in": 1, "out": -1}
        for kind, weight in weights.items():
            info = await self._js.stream_info(
                self._subjects.log_stream, subjects_filter=self._subjects.every(kind)
            )
            for subject, number in (info.state.subjects or {}).items():
                with contextlib.suppress(InvalidMessageError):
                    num_lacking[self._subjects.parse(subject)[0]] += weight * number
        return [key for key, number in num_lacking.items() if number > 0]

    async def closed(self, after: int) -> tuple[list[Entry], int]:
        """Read the next notes of closes, of all sessions, after the stream sequence `after`.

        Also returns the number of those that remain.
        """
        return await self._reads.page(self._subjects.log_stream, self._subjects.every("closed"), after)

    async def erasures(self, after: int) -> tuple[list[Entry], int]:
        """Read the next notes of what was forgotten, of all tenants, as `closed` does."""
        return await self._reads.page(self._subjects.log_stream, self._subjects.erased("*"), after)

    async def log_name(self) -> str:
        """Return a name of the log that no other one has. Raises nats-py's errors."""
        info = await self._js.stream_info(self._subjects.log_stream)
        return f"{self._subjects.log_stream} {info.created}"

    async def is_there(self, seq: int) -> bool:
        """Whether an entry that was read is still in the log, if another worker may remove sessions."""
        return self._is_alone() or await self._reads.get(self._subjects.log_stream, seq) is not None

    async def remove(
        self, key: SessionKey, before: int, kind: Literal["checkpoint", "dead"] | None = None
    ) -> None:
        """Remove a session's entries below the sequence `before`: of one kind, or of all.

        Raises nats-py's errors.
        """
        subject = self._subjects.of(key, kind) if kind else self._subjects.log(key)
        await self._js.purge_stream(self._subjects.log_stream, seq=before, subject=subject)

    async def streamed(self, key: SessionKey) -> set[str]:
        """Return the ids of the requests whose answers have chunks. Raises nats-py's errors."""
        pattern = self._subjects.tokens(key, "*")
        info = await self._js.stream_info(self._subjects.token_stream, subjects_filter=pattern)
        return {subject.rsplit(".", 1)[1] for subject in info.state.subjects or {}}

    async def remove_tokens(self, key: SessionKey, request_id: str = "*") -> None:
        """Remove the chunks of a session's answers, or of one of them. Raises nats-py's errors."""
        subject = self._subjects.tokens(key, request_id)
        await self._js.purge_stream(self._subjects.token_stream, subject=subject)

    async def delete(self, seq: int) -> None:
        """Remove one entry, if it exists. Raises nats-py's errors."""
        try:
            await self._js.delete_msg(self._subjects.log_stream, seq)
        except APIError as error:
            if error.err_code != _NO_MESSAGE:
                raise

    async def refuse(self, subject: str, seq: int, message: str) -> None:
        """Refuse a request whose names cannot be used in subjects, on its tenant's subject `_refused`.

        Does not retry. There is no answer if the tenant's name is invalid too; after a crash there may be
        two.
        """
        tenant = subject.rsplit(".", 3)[1]
        with contextlib.suppress(InvalidMessageError):
            answer = self._subjects.of(SessionKey(check_id("tenant", tenant), REFUSED), "commit")
            try:
                await self._js.publish(
                    answer, encode(failure(None, "invalid_request", message, seq=seq)), timeout=TIMEOUT_S
                )
            except (nats.errors.Error, APIError, OSError) as error:
                log.warning("a refusal could not be stored", seq=seq, error=str(error))

    async def _own_commit(self, subject: str, body: bytes, after: int) -> int:
        """Return the sequence of this commit if only its ack was lost; otherwise raise `FencedError`.

        The stored message names the fence that it passed. An equal result that was stored behind another one
        is not this commit: this worker does not know that other one.
        """
        last = await self._reads.last(self._subjects.log_stream, subject)
        fence = (last.headers or {}).get(EXPECT_HEADER) if last else None
        if last is None or last.data != body or fence != str(after) or last.seq is None:
            raise FencedError(subject)
        return last.seq


def _sealed(headers: Mapping[str, str]) -> tuple[str, str]:
    """Return the sequence of the request that a message seals, and which worker did; empty if none."""
    seq, _, name = headers.get(SEALED_HEADER, "").partition(" ")
    return seq, name
