"""The client's side of NATS: publishes, sends requests, reads the log, subscribes; error texts name a remedy.

Only this module, `connection`, `nats_client` and `direct` import nats.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import nats.errors
from msgspec import UNSET
from nats.js.errors import APIError, NoStreamResponseError

from .cancelling import cancellable
from .connection import NATS_ERRORS, Connection
from .direct import DirectGets, TooManyError
from .errors import (
    TOO_MANY,
    LastSequenceError,
    MessageTooLargeError,
    NoAnswerError,
    NotPermittedError,
    RequestFailedError,
    StreamError,
    TurnkeepError,
)
from .images import entries
from .log import EXPECT_HEADER, Stored, why_refused
from .messages import decode_asked, decode_result
from .nats_client import Nats
from .options import check_options
from .subjects import CONSUMER, Subjects

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        Awaitable,
        Callable,
        Collection,
        Coroutine,
        Mapping,
    )

    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from .subjects import SessionKey

#: Timeout for the log's acknowledgement before publishing again; doubles up to the second value.
FIRST_ACK_S: Final = 2.0
LAST_ACK_S: Final = 30.0
#: After this many attempts, a missing log means that no worker has ever run. Several servers get more: they
#: may first have to elect a leader, for half a minute.
NUM_TRIES: Final = 4
NUM_TRIES_OF_SEVERAL: Final = 150
TRY_PAUSE_S: Final = 0.2
#: Limits of one batch when reading a stream, and the timeout for its next message.
READ_BATCH: Final = 256
READ_BATCH_BYTES: Final = 4 * 2**20
READ_S: Final = 2.0
#: Timeout of a request to JetStream's API: a large stream takes a while to count its subjects.
API_S: Final = 10.0

#: A request to a worker fails if the connection stays away for this time; servers restart in less.
_LOST_S: Final = 5.0

_MESSAGE_TOO_LARGE: Final = 10054  # JetStream's code: larger than the stream's max_msg_size
_WRONG_LAST_SEQUENCE: Final = 10071
_IN_PROGRESS: Final = 10164  # another write to the subject, in a cluster

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Backlog:
    """Counts of requests without an acknowledgement by a worker."""

    #: Requests that were not delivered yet.
    num_pending: int
    #: Requests that were delivered; of these the ones that were delivered again.
    num_ack_pending: int
    num_redelivered: int


class NatsWire(Connection):
    """The client's NATS operations. If closed, all but `read` raise `ClientClosedError`."""

    def __init__(self, subjects: Subjects) -> None:
        super().__init__(Nats())
        self.subjects = subjects
        self._gets = DirectGets(self._nats, timeout_s=READ_S)
        self._jetstream = self._nats.jetstream()

    async def publish(self, subject: str, body: bytes, headers: dict[str, str] | None = None) -> int:
        """Publish `body`, again if needed, until the log has stored it; return its stream sequence.

        Waits for a lost server without limit. Raises `NoAnswerError` if there is no log, `RequestFailedError`
        if the log refuses the message, `MessageTooLargeError`, `NotPermittedError` and `ClientClosedError`.
        """
        with self.writes.waiting():
            return await self._publish(subject, body, headers)

    async def _publish(self, subject: str, body: bytes, headers: dict[str, str] | None) -> int:
        patience_s, num_refusals, is_doubtful = FIRST_ACK_S, 0, False
        while True:
            await self._connected.wait()
            self._check(body, headers)
            try:
                ack = await self._on_one_connection(
                    self._jetstream.publish(subject, body, timeout=patience_s, headers=headers)
                )
            except NoStreamResponseError:
                num_refusals += 1
                if num_refusals >= self._most_refusals and not is_doubtful:  # else the caller's limit ends it
                    raise self._no_log(subject) from None
                await asyncio.sleep(TRY_PAUSE_S)
            except APIError as error:
                if error.err_code == _IN_PROGRESS:
                    await asyncio.sleep(TRY_PAUSE_S)
                    continue
                if is_doubtful and (seq := await self._find(subject, body)):
                    return seq
                raise _refusal(error, is_doubtful=is_doubtful) from None
            except nats.errors.TimeoutError:
                # The log may have stored the request. A second entry under the same id does no harm.
                is_doubtful = True
                self._check_permission(subject)
                patience_s = min(2 * patience_s, LAST_ACK_S)
            except NATS_ERRORS:  # between two connections
                is_doubtful = True
                await asyncio.sleep(TRY_PAUSE_S)
            else:
                if ack.stream != self.subjects.log_stream:
                    raise self._misplaced(subject, ack.stream)
                return ack.seq

    def _misplaced(self, subject: str, stream: str) -> NoAnswerError:
        wanted = self.subjects.log_stream
        return NoAnswerError(
            f"{subject} is stored by the stream {stream!r}, which is not a worker's: it should be {wanted!r}"
        )

    def _no_log(self, subject: str) -> NoAnswerError:
        why = "no worker was ever started on this NATS server"
        if self.is_clustered:
            why = "too few servers of the NATS cluster run, or no worker was ever started there"
        return NoAnswerError(f"no stream stores {subject}: {why} with the prefix {self.subjects.prefix!r}")

    async def _find(self, subject: str, body: bytes) -> int:
        """Return the log's sequence of the last message of `subject` with this body; 0 if there is none.

        A request may have left the log: then its result has it.
        """
        log = self.subjects.log_stream
        seqs = [one.seq for one in await self.read(log, subject, 1) if one.body == body]
        if not seqs and subject.endswith(".in"):
            for one in await self.read(log, f"{subject.removesuffix('in')}out", 1):
                asked = decode_asked(one.body)
                if asked is not None and asked.request is not UNSET and bytes(asked.request) == body:
                    seqs.append(decode_result(one.body).seq or 0)
        return max(seqs, default=0)

    async def ask(self, subject: str, body: bytes, timeout_s: float) -> bytes:
        """Send one core NATS request and return the reply.

        Raises `NoAnswerError` if none comes in time, and `NoServerError` some time after NATS was lost.
        """
        check_options(timeout_s=timeout_s)
        self._check(body)
        try:
            return (await self._while_reached(self._nats.request(subject, body, timeout=timeout_s))).data
        except nats.errors.NoRespondersError:
            raise NoAnswerError(f"no worker serves {subject}") from None
        except nats.errors.TimeoutError as error:
            self._check_permission(subject)
            if not self.connected:
                raise self._unreached(f"{subject} could not be asked", error) from None
            raise NoAnswerError(f"no worker answered on {subject} within {timeout_s} s") from None
        except NATS_ERRORS as error:
            raise self._unreached(f"{subject} could not be asked", error) from None

    async def _while_reached(self, call: Coroutine[Any, Any, _T]) -> _T:
        """Await a call; raise `ConnectionError` if the connection is lost for `_LOST_S` before it ends."""
        task, epoch = asyncio.create_task(cancellable(call)), -1
        try:
            while not task.done():
                if not self.connected and self.epoch == epoch:
                    raise ConnectionError(f"no reconnection in {_LOST_S:.0f} s")
                epoch = -1 if self.connected else self.epoch
                await asyncio.wait([task], timeout=_LOST_S)
            return task.result()
        finally:
            task.cancel()

    async def read(self, stream: str, subject: str, seq: int) -> list[Stored]:
        """Return the messages of `subject` in `stream` from the sequence `seq` on, in order.

        Raises nothing: after an error, returns the messages that were read before it.
        """
        found: list[Stored] = []
        with contextlib.suppress(TurnkeepError):  # the caller reads again
            request = {"seq": seq, "next_by_subj": subject}
            async with contextlib.aclosing(self.batches(stream, request)) as batches:
                async for batch in batches:
                    found += batch
        return found

    async def batches(self, stream: str, request: dict[str, Any]) -> AsyncGenerator[list[Stored], None]:
        """Yield the messages that match a batched direct get, one list per batch.

        Raises `StreamError` if more subjects match than the server answers for, `NotPermittedError`, and
        `NoWorkerError` if the stream cannot be read.
        """
        self._check()
        try:
            async with contextlib.aclosing(self._batches(stream, request)) as batches:
                async for batch in batches:
                    yield batch
        except TooManyError as error:
            raise StreamError(str(error), TOO_MANY) from None
        except NATS_ERRORS as error:
            self._check_permission(f"$JS.API.DIRECT.GET.{stream}")
            raise self._unreached(f"{stream} could not be read", error) from None

    async def send(self, subject: str, body: bytes, headers: dict[str, str]) -> None:
        """Publish without waiting for an acknowledgement. Raises `NoWorkerError` if that fails here."""
        self._check(body, headers)
        try:
            await self._nats.publish(subject, body, headers=headers)
        except NATS_ERRORS as error:
            raise self._unreached(f"{subject} could not be published", error) from None

    async def api(self, subject: str, body: bytes, headers: dict[str, str] | None = None) -> dict[str, Any]:
        """Call JetStream's API, or publish to a stream, and return the answer.

        Raises `StreamError` if JetStream refuses, `NoWorkerError` if it does not answer, `NotPermittedError`.
        """
        self._check(body, headers)
        try:
            reply = await cancellable(self._nats.request(subject, body, timeout=API_S, headers=headers))
        except NATS_ERRORS as error:
            self._check_permission(subject)
            raise self._unreached(f"JetStream does not answer on {subject}", error) from None
        answer: dict[str, Any] = msgspec.json.decode(reply.data or b"{}")
        if (refused := answer.get("error")) is not None:
            raise StreamError(
                f"{self.subjects.log_stream}: {refused.get('description')}", refused.get("err_code", 0)
            )
        return answer

    async def store_images(
        self, key: SessionKey, files: Mapping[str, bytes], timeout_s: float | None = None
    ) -> None:
        """Store the files of images, by digest, for a session, unless its log has them. Raises as `publish`.

        Images from before the session's last close will be removed, so they are stored again. Waits for a
        lost server like `publish`; raises `NoWorkerError` after `timeout_s`.
        """
        subjects = self.subjects
        try:
            async with asyncio.timeout(timeout_s):
                closed = await self._log_seq(subjects.of(key, "closed")) if files else 0
                for digest, data in files.items():
                    if await self._log_seq(subjects.image(key, digest)) > closed:
                        continue
                    for name, body in entries(data, self._nats.max_payload // 2):
                        subject = subjects.image(key, name)
                        seq = await self._log_seq(subject)
                        if seq <= closed:
                            with contextlib.suppress(LastSequenceError):  # it was stored meanwhile
                                await self.publish(subject, body, {EXPECT_HEADER: str(seq)})
        except TimeoutError as error:
            raise self._unreached(f"images were not stored within {timeout_s} s", error) from None

    async def _log_seq(self, subject: str) -> int:
        """Return the sequence of the log's last message of `subject`, 0 if there is none.

        Asks until the log answers, as `publish` does, and raises the same errors.
        """
        stream, num_refusals = self.subjects.log_stream, 0
        while True:
            await self._connected.wait()
            self._check()
            try:
                found = await self._last(stream, subject)
            except nats.errors.NoRespondersError as error:
                num_refusals += 1
                if num_refusals >= self._most_refusals:
                    raise self._unreached(f"{stream} could not be read", error) from None
            except NATS_ERRORS:
                self._check_permission(f"$JS.API.DIRECT.GET.{stream}")
            else:
                return found.seq if found else 0
            await asyncio.sleep(TRY_PAUSE_S)

    async def last(self, stream: str, subject: str) -> Stored | None:
        """Return the last message of `subject`, None if there is none.

        Raises `NoWorkerError` if the stream cannot be read.
        """
        try:
            return await self._last(stream, subject)
        except NATS_ERRORS as error:
            raise self._unreached(f"{stream} could not be read", error) from None

    async def _last(self, stream: str, subject: str) -> Stored | None:
        body = msgspec.json.encode({"last_by_subj": subject})
        call = self._nats.request(f"$JS.API.DIRECT.GET.{stream}", body, timeout=READ_S)
        reply = await cancellable(call)
        return _stored(reply) if "Nats-Sequence" in (reply.headers or {}) else None

    async def leader_seq(self, stream: str, subject: str) -> int:
        """Ask the cluster's leader for the sequence of the last message of `subject`; 0 if there is none.

        Also 0 if there is no cluster, as nothing lags behind then, or if this client may not ask. Raises
        `NoWorkerError` if the leader does not answer.
        """
        if not self.is_clustered:
            return 0
        asked, body = f"$JS.API.STREAM.MSG.GET.{stream}", msgspec.json.encode({"last_by_subj": subject})
        try:
            reply = await cancellable(self._nats.request(asked, body, timeout=READ_S))
            return int(msgspec.json.decode(reply.data).get("message", {}).get("seq", 0))
        except nats.errors.NoRespondersError:  # the client's account does not import the subject
            return 0
        except NATS_ERRORS as error:
            with contextlib.suppress(NotPermittedError):
                self._check_permission(asked)
                raise self._unreached(f"the leader of {stream} could not be asked", error) from None
            return 0

    @property
    def _most_refusals(self) -> int:
        return NUM_TRIES_OF_SEVERAL if self.is_clustered else NUM_TRIES

    async def backlog(self) -> Backlog:
        """Return the counts of the log's consumer. Raises `NoWorkerError`."""
        call = self._jetstream.consumer_info(self.subjects.log_stream, CONSUMER, timeout=READ_S)
        try:
            found = await cancellable(call)
        except NATS_ERRORS as error:
            raise self._unreached(
                f"the consumer of {self.subjects.log_stream} cannot be read", error
            ) from None
        return Backlog(found.num_pending or 0, found.num_ack_pending or 0, found.num_redelivered or 0)

    async def bodies_at(self, stream: str, subject: str, seqs: Collection[int]) -> dict[int, bytes]:
        """Return the bodies of the messages of `subject` at these sequences. Raises as `batches`."""
        found: dict[int, bytes] = {}
        start, end = min(seqs), max(seqs)
        request = {"seq": start, "next_by_subj": subject, "batch": min(READ_BATCH, end - start + 1)}
        async with contextlib.aclosing(self.batches(stream, request)) as batches:
            async for batch in batches:
                found |= {one.seq: one.body for one in batch if one.seq in seqs}
                if batch[-1].seq >= end:
                    break
        return found

    async def _batches(self, stream: str, request: dict[str, Any]) -> AsyncGenerator[list[Stored], None]:
        """Yield the messages that match a batched direct get, by batch. Raises nats-py's errors."""
        num_more = 1
        while num_more:
            if not self._connected.is_set():
                raise nats.errors.ConnectionClosedError
            limits = {"batch": READ_BATCH, "max_bytes": READ_BATCH_BYTES}
            messages, num_more = await self._gets.read(stream, limits | request)
            if messages:
                found = [_stored(message) for message in messages]
                yield found
                request = request | {"seq": found[-1].seq + 1}

    async def listen(self, subject: str, on_body: Callable[[bytes], None]) -> Callable[[], Awaitable[None]]:
        """Subscribe: call `on_body` with every message's body. Await the returned function to unsubscribe."""

        async def deliver(message: Msg) -> None:
            on_body(message.data)

        subscription = await self._subscribe(subject, cb=deliver)

        async def stop() -> None:
            with contextlib.suppress(*NATS_ERRORS):  # a closed connection has no subscriptions
                await subscription.unsubscribe()

        return stop

    async def bodies(self, subject: str) -> AsyncGenerator[bytes, None]:
        """Yield the bodies of a subject's messages until the connection ends. Raises `NotPermittedError`."""
        subscription = await self._subscribe(subject)
        try:
            with contextlib.suppress(*NATS_ERRORS):  # nats-py sends the first ping before the subscription
                await cancellable(self._nats.flush())
                await cancellable(self._nats.flush())
            self._check_permission(subject, "subscribe to")
            async for message in subscription.messages:
                yield message.data
        finally:
            with contextlib.suppress(*NATS_ERRORS):
                await subscription.unsubscribe()

    async def _subscribe(self, subject: str, **options: Any) -> Subscription:
        self._check()
        try:
            return await self._nats.subscribe(subject, **options)
        except NATS_ERRORS as error:
            raise self._unreached(f"cannot subscribe to {subject}", error) from None


def _stored(message: Msg) -> Stored:
    headers = message.headers or {}
    return Stored(int(headers["Nats-Sequence"]), message.data, headers)


def _refusal(error: APIError, *, is_doubtful: bool) -> TurnkeepError:
    if error.err_code == _MESSAGE_TOO_LARGE:
        return MessageTooLargeError("the request is larger than the log accepts: send it as several appends")
    if error.err_code == _WRONG_LAST_SEQUENCE:
        return LastSequenceError(str(error.description), _WRONG_LAST_SEQUENCE)
    why = why_refused(error.err_code, error.description)
    if is_doubtful:  # a request under another id could be executed as well
        why += "; an earlier attempt may have stored it: send it again under the same id"
    return RequestFailedError("overloaded", why, retryable=not is_doubtful)
