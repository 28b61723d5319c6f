"""The chunks of answers in JetStream: publishes them, in order, and reads them back."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

import nats.errors
import structlog
from anyio import sleep
from nats.js.errors import APIError

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.log import ENDED_HEADER, EXPECT_HEADER, HISTORY_HEADER, MODEL_HEADER, SEALED_HEADER
from turnkeep_client.messages import Chunk, decode_chunk, encode
from turnkeep_client.nats_client import write_refusal

from .consistent_reads import MAX_BACKOFF_S, RACE_S, TIMEOUT_S, ConsistentReads, pause_after
from .fence import OVERTAKEN, FencedError, check_server
from .overwriting import overwrite
from .written import answered_seq

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from nats.aio.client import Client

    from turnkeep_client.subjects import SessionKey, Subjects
    from turnkeep_client.writes import Writes

    from .consistent_reads import StoredMessage

log = structlog.get_logger()


class PublishedChunks(NamedTuple):
    """The chunks of an answer that clients may have seen."""

    chunks: list[Chunk]
    #: The sequence of the last message on the answer's subject, or 0.
    last_seq: int = 0
    #: Whether a worker has closed the token stream, so the answer has a result.
    has_ended: bool = False
    #: Whether a worker is about to end the answer as cancelled or expired, or died doing so.
    is_sealed: bool = False
    #: The model, and the digest of the session before the answer, by the headers of the first chunk.
    model: str = ""
    base: str = ""
    #: The sequence of the first chunk, or 0.
    first_seq: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all chunks."""
        return sum(len(chunk.tokens) for chunk in self.chunks)


class AnswerChunks:
    """Publishes and reads the chunks in the token stream, retrying as `Journal` does. Event loop only."""

    def __init__(
        self,
        nc: Client,
        subjects: Subjects,
        log_reads: ConsistentReads,
        writes: Writes,
        *,
        model: str,
    ) -> None:
        """`model` goes into the header of each first chunk; `writes` counts what is not stored yet."""
        self._writes = writes
        self._nc = nc
        self._js = nc.jetstream()
        self._subjects = subjects
        self._log = log_reads
        self._tokens = ConsistentReads(nc, subjects.token_stream)
        self._model = model
        self._name = uuid4().hex  # written into seals: a worker ignores its own seals

    async def read(self, key: SessionKey, request_id: str, seq: int, stored: datetime) -> PublishedChunks:
        """Read the chunks of the request at `seq`, from index 0 to the first gap.

        Ignores chunks that do not name the request's sequence or are older than the request (`stored`): a
        client may have published them to forge the beginning of the answer.
        """
        chunks: list[Chunk] = []
        num_tokens = num_foreign = first_seq = last_seq = 0
        has_gap = has_ended = is_sealed = False
        model = base = ""
        async for entry in self._tokens.entries(self._subjects.tokens(key, request_id)):
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
                # Chunks of an earlier request that this one repeats do not count.
                num_foreign += chunk is None or chunk.seq is None or chunk.seq >= seq
                continue
            if chunk.tokens:  # a chunk without tokens only has the last text
                is_sealed = False  # the worker that sealed the answer has seen that it continues
            if has_gap and chunk.i == 0:  # the first ones have expired, and were published again
                chunks, num_tokens, has_gap = [], 0, False
            has_gap = has_gap or chunk.i > num_tokens
            if chunk.i == num_tokens and not has_gap:
                model = model or entry.headers.get(MODEL_HEADER, "")
                base = base or entry.headers.get(HISTORY_HEADER, "")
                first_seq = first_seq if chunks else entry.seq
                chunks.append(chunk)
                num_tokens += len(chunk.tokens)
        if num_foreign:
            log.warning("ignoring chunks that are not of this request", request=request_id, num=num_foreign)
        return PublishedChunks(chunks, last_seq, has_ended, is_sealed, model, base, first_seq)

    async def publish(
        self,
        key: SessionKey,
        request_id: str,
        chunk: Chunk,
        after: int,
        *,
        server: str,
        base: str = "",
        resumes: bool = False,
    ) -> int:
        """Publish the next chunk of an answer; return once it is stored, when the server sends it to clients.

        `after` is the sequence of the last message of the answer's subject; `base` is the digest of the
        session before the answer. `resumes` says that this is the worker's first chunk, behind those of an
        earlier worker. Returns the chunk's sequence, or 0 if the token stream refuses the chunk.
        Then publish no later chunks of the answer: the stored chunks must have no gap, so that a worker that
        resumes the answer finds all that clients saw. Raises `FencedError` if another worker has published a
        chunk of the answer after `after`, if all chunks are gone, or if the NATS server process is not
        `server` any more.
        """
        is_first = chunk.i == 0
        said = {MODEL_HEADER: self._model, HISTORY_HEADER: base} if is_first else {}
        headers = {name: value for name, value in said.items() if value}
        checks = is_first or resumes
        with self._writes.waiting():
            return await self._publish(
                key, request_id, encode(chunk), after, chunk.seq or 0, server, headers, checks=checks
            )

    async def seal(self, key: SessionKey, request_id: str, seq: int, after: int, *, server: str) -> None:
        """Prevent all workers from publishing a chunk of the request at `seq` after the message at `after`.

        Call this before storing a result that ends the answer early: a worker that has not read the result
        might continue the answer. Stores an empty message. Raises `FencedError` if there is a later chunk,
        or if the NATS server process is not `server` any more.
        """
        headers = {SEALED_HEADER: f"{seq} {self._name}"}
        with self._writes.waiting():
            await self._publish(key, request_id, b"", after, seq, server, headers)

    async def _publish(
        self,
        key: SessionKey,
        request_id: str,
        body: bytes,
        after: int,
        seq: int,
        server: str,
        headers: Mapping[str, str],
        *,
        checks: bool = False,
    ) -> int:
        """Store a message of an answer; with `checks`, look then whether its session was forgotten."""
        subject, pause_s = self._subjects.tokens(key, request_id, "chunk"), 0.1
        while True:
            await check_server(self._nc, server)
            checks = checks or not after
            try:
                ack = await self._js.publish(
                    subject, body, timeout=TIMEOUT_S, headers={**headers, EXPECT_HEADER: str(after)}
                )
                stored = ack.seq
            except (APIError, nats.errors.MaxPayloadError) as error:
                if isinstance(error, APIError) and error.err_code in OVERTAKEN:
                    after, is_own = await self._last_chunk(key, request_id, body, after, seq)
                    if not is_own:
                        # A forget may have removed the answer's messages, before this check or after it.
                        if await self._is_gone(seq):
                            raise FencedError("the request was answered, or its session forgotten") from None
                        checks = True
                        continue
                    stored = after
                else:
                    log.warning("an answer is not streamed any further", error=str(error))
                    return 0
            except (nats.errors.Error, OSError) as error:
                self._writes.refusal = write_refusal(error)
                await pause_after("publishing tokens", error, pause_s)
                pause_s = min(pause_s * 2, MAX_BACKOFF_S)
                continue
            if checks:
                await self._check_not_forgotten(key, stored, seq)
            return stored

    async def _check_not_forgotten(self, key: SessionKey, chunk_seq: int, seq: int) -> None:
        """If the request has left the log, raise `FencedError`; if it was forgotten, also delete the chunk.

        Another worker may forget a session while this one begins to answer it. That worker removes requests
        first, then results, then chunks: so it will remove every chunk that is stored while the request or
        its result is still in the log. With a result, another worker has continued the answer.
        """
        if not await self._is_gone(seq):
            return
        if not await self._is_answered(key, seq):
            with contextlib.suppress(nats.errors.Error, APIError, OSError):  # it expires
                await overwrite(self._js, self._subjects.token_stream, chunk_seq)
        raise FencedError("the request was answered, or its session forgotten")

    async def _last_chunk(
        self, key: SessionKey, request_id: str, body: bytes, after: int, seq: int
    ) -> tuple[int, bool]:
        """Find the chunk `body` among the messages behind `after` on the answer's subject.

        Returns the chunk's sequence and True; else the sequence of the subject's last message, or 0 if it
        has none, and False. Reads on behind the chunk, as ends of other requests with this id may follow.
        Raises `FencedError` if one of them is another chunk, the end or the seal of the request at `seq`, or
        if the subject has no messages any more, although it had the one at `after`.
        """
        subject, is_own = self._subjects.tokens(key, request_id), 0
        last = await self._tokens.last(subject)
        if last is None:
            if after:  # all have expired or were removed, maybe also the message that ended the answer
                raise FencedError(subject)
            return 0, False
        if last.seq <= after:
            await sleep(RACE_S)  # the other write is still in progress, or the last messages have expired
            return last.seq, False
        while (found := await self._tokens.get(after + 1, subject)) is not None:
            after = found.seq
            if found.body == body and body and not is_own:
                is_own = after
            elif self._stops(found.body, found.headers, seq):
                raise FencedError(subject)  # else a client wrote it, or it is of another request with this id
        return is_own or after, is_own > 0

    def _stops(self, data: bytes, headers: Mapping[str, str], seq: int) -> bool:
        """Return whether a message is a chunk, the end or another worker's seal of the request at `seq`."""
        if not data:
            sealed, name = _sealed(headers)
            return headers.get(ENDED_HEADER) == str(seq) or (sealed == str(seq) and name != self._name)
        with contextlib.suppress(InvalidMessageError):
            return decode_chunk(data).seq == seq
        return False

    async def is_there(self, seq: int) -> bool:
        """Return whether the token stream still has the message at this sequence."""
        return await self._tokens.get(seq) is not None

    async def _is_gone(self, seq: int) -> bool:
        """Return whether a request was removed from the log."""
        return await self._log.get(seq) is None

    async def _is_answered(self, key: SessionKey, seq: int) -> bool:
        """Return whether the log has the result of a request."""
        async for entry in self._log.entries(self._subjects.of(key, "out"), seq):
            if answered_seq(entry) == seq:
                return True
        return False

    async def remove(self, key: SessionKey, before: int) -> None:
        """Remove and overwrite the messages of answers to the requests below the sequence `before`.

        Removes also those that name no request: no worker has written them. The requests must have left the
        log: then a worker that still answers one cannot publish a chunk in place of a removed one. Raises
        nats-py's errors.
        """
        stream, subject = self._subjects.token_stream, self._subjects.tokens(key, "*")
        while gone := [
            entry.seq async for entry in self._tokens.entries(subject) if _request(entry) < before
        ]:  # again, since a worker may have published more behind a chunk that was still there
            for seq in reversed(gone):
                await overwrite(self._js, stream, seq)


def _request(entry: StoredMessage) -> int:
    """Return the sequence of the request whose chunk, end or seal a message is; 0 if it is none."""
    with contextlib.suppress(InvalidMessageError, ValueError):
        if entry.body:
            return decode_chunk(entry.body).seq or 0
        return int(entry.headers.get(ENDED_HEADER) or _sealed(entry.headers)[0])
    return 0


def _sealed(headers: Mapping[str, str]) -> tuple[str, str]:
    """Return which request a message seals (its sequence) and which worker did; empty if it is no seal."""
    seq, _, name = headers.get(SEALED_HEADER, "").partition(" ")
    return seq, name
