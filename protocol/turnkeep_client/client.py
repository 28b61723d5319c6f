"""The async Python client: one NATS connection of one tenant.

Only this module, `nats_client` and `direct` import nats. It publishes, reads and subscribes for `calls` and
`generation`, which do the waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import nats.errors
from nats.js.errors import APIError, NoStreamResponseError

from .calls import Call, ResultFeeds, Stored, expect
from .direct import DirectGets, TooManyError
from .errors import (
    ClientClosedError,
    InvalidMessageError,
    MessageTooLargeError,
    NoAnswerError,
    NoServerError,
    NotPermittedError,
    NoWorkerError,
    RequestFailedError,
    TurnkeepError,
)
from .listing import Listed, listed
from .log import Entry, entry
from .messages import (
    Embedded,
    EmbedRequest,
    GatewayMetrics,
    Generate,
    Generated,
    Metrics,
    MetricsRequest,
    Request,
    decode_control_reply,
    decode_gateway_metrics,
    decode_metrics,
    decode_request,
    decode_result,
    encode,
)
from .nats_client import Nats, refusal, unreachable
from .redact import redact, shown
from .session import Cache, Messages, Sampling, Session, build
from .stream import TOO_MANY, LogStream, StreamError
from .subjects import CONSUMER, DEFAULT_PREFIX, DEFAULT_TENANT, SessionKey, Subjects, check_id, session_key

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
        Generator,
        Iterator,
        Mapping,
        Sequence,
    )
    from typing import Self, Unpack

    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

DEFAULT_URL: Final = "nats://127.0.0.1:4222"
#: The timeout of requests, as in the SDKs of OpenAI and Anthropic.
TIMEOUT_S: Final = 600.0

#: Timeout for the log's acknowledgement before publishing again; doubles up to the second value.
FIRST_ACK_S: Final = 2.0
LAST_ACK_S: Final = 30.0
#: Attempts before a missing log means that no worker has ever run: a cluster may be electing a leader.
NUM_TRIES: Final = 4
TRY_PAUSE_S: Final = 0.2
RECONNECT_PAUSE_S: Final = 0.25
#: Limits of one batch when reading a stream, and the timeout for its next message.
READ_BATCH: Final = 256
READ_BATCH_BYTES: Final = 4 * 2**20
READ_S: Final = 2.0
#: Timeout of a request to JetStream's API: a large stream takes a while to count its subjects.
API_S: Final = 10.0

#: Longest timeout of a question about the worker alone, which it answers at once.
METRICS_S: Final = 5.0

#: What a header takes beside its name and value, with its part of the lines around all headers.
_HEADER_BYTES: Final = 16

_MESSAGE_TOO_LARGE: Final = 10054  # JetStream's code: larger than the stream's max_msg_size

#: nats-py does not wrap a connection reset.
_NATS_ERRORS: Final = (nats.errors.Error, OSError)

#: Those of them that say that there is no connection.
_LOST: Final = (
    nats.errors.ConnectionClosedError,
    nats.errors.ConnectionDrainingError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.StaleConnectionError,
    ConnectionError,
)

#: The most inputs of a request for embeddings, and their length in characters and token ids.
_EMBED_INPUTS: Final = 16
_EMBED_LENGTH: Final = 2**17

_T = TypeVar("_T")


def connect(
    url: str = DEFAULT_URL,
    *,
    tenant: str = DEFAULT_TENANT,
    prefix: str = DEFAULT_PREFIX,
    name: str = "turnkeep-client",
    timeout_s: float = TIMEOUT_S,
    connect_timeout_s: float = 2.0,
    control_timeout_s: float = 5.0,
    **nats_options: Any,
) -> Connecting:
    """Return a connection, which is made when it is entered (`async with`, which closes it too) or awaited.

    `timeout_s` is that of all requests that name none (`math.inf`: no limit); `control_timeout_s` that of
    control requests such as `info`. `nats_options` are passed to nats-py's `connect` (credentials, TLS). An
    open client that loses its connection reconnects without limit, and waiting calls continue. Connecting
    raises `NoServerError` once every server has refused the connection, or after `connect_timeout_s`;
    `NotPermittedError` if one refuses the credentials or TLS. A bad tenant or prefix raises
    `InvalidMessageError`.
    """
    check_id("tenant", tenant)
    wire = _NatsWire(Subjects(prefix))
    client = Client(wire, tenant, timeout_s, control_timeout_s)
    return Connecting(client, lambda: wire.connect(url, connect_timeout_s, name=name, **nats_options))


class Connecting:
    """A connection that is not made yet: await it for the client, or enter it, and the block closes it."""

    def __init__(self, client: Client, connect: Callable[[], Awaitable[None]]) -> None:
        self._client = client
        self._connect = connect

    def __await__(self) -> Generator[Any, None, Client]:
        return self._made().__await__()

    async def __aenter__(self) -> Client:
        return await self._made()

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def _made(self) -> Client:
        await self._connect()
        return self._client


@dataclass(frozen=True, slots=True)
class Backlog:
    """Counts of requests: undelivered; delivered but not acknowledged; and, among the latter, redelivered."""

    num_pending: int
    num_ack_pending: int
    num_redelivered: int


class Client:
    """A connection of one tenant. Create it with `connect`."""

    def __init__(self, wire: _NatsWire, tenant: str, timeout_s: float, control_timeout_s: float) -> None:
        self.tenant = tenant
        self._wire = wire
        self._feeds = ResultFeeds(wire, timeout_s)
        self._control_timeout_s = control_timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Calls that wait raise `ClientClosedError`, but their requests continue."""
        await self._wire.close()

    def session(self, name: str, *, cache: Cache | None = None, tenant: str | None = None) -> Session:
        """Return a session by name; sends nothing. Raises `InvalidMessageError` for a bad name or `cache`.

        It is of this client's tenant unless another `tenant` is named.
        With `cache` (a `CachePolicy`, or the same as a dict) the session is opened under this policy before
        its first append or generate, unless it is open under this policy already. If it is open under another
        policy, the call is refused.
        """
        key = session_key(tenant or self.tenant, name)
        return Session(self._wire, self._feeds, key, self._control_timeout_s, cache)

    async def submit(self, key: SessionKey, request: Request, *, timeout_s: float | None = None) -> Call:
        """Publish a request and return it once the log has stored it; await it for the result or `Failed`.

        `timeout_s` runs from this call to the result. Raises what `Session`'s methods raise.
        """
        decode_request(encode(request))  # msgspec validates on decoding, not on construction
        call = Call(self._wire, self._feeds, key, request, timeout_s=timeout_s)
        async with call.listening():
            return call

    async def ask(
        self,
        session: str,
        *,
        messages: Messages | None = None,
        text: str | None = None,
        tokens: Sequence[int] | None = None,
        request_id: str | None = None,
        timeout_s: float = 60.0,
        **sampling: Unpack[Sampling],
    ) -> Generated:
        """Generate by core NATS request and reply: no streamed chunks, no retries, no rights on the log.

        Raises `RequestFailedError`, and `NoWorkerError` if no worker serves or `timeout_s` passes.
        """
        request = build(Generate, request_id, messages=messages, text=text, tokens=tokens, **sampling)
        subject = self._wire.subjects.of(session_key(self.tenant, session), "ask")
        return expect(Generated, decode_result(await self._wire.ask(subject, encode(request), timeout_s)))

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        timeout_s: float = 60.0,
    ) -> Embedded:
        """Return the vectors of texts or token ids, cut to `dimensions` numbers, by an embedding model.

        A long list takes several requests, each of which may take `timeout_s`. Raises `RequestFailedError`,
        and `NoWorkerError` if no worker serves or the time is over.
        """
        subject = self._wire.subjects.of(SessionKey(self.tenant, "any"), "ctl")
        parts: list[Embedded] = []
        for some in _divided(inputs):
            body = encode(EmbedRequest(inputs=some, dimensions=dimensions))
            reply = await self._wire.ask(subject, body, timeout_s)
            parts.append(expect(Embedded, decode_control_reply(reply)))
        return Embedded(
            vectors=tuple(vector for part in parts for vector in part.vectors),
            tokens=tuple(num for part in parts for num in part.tokens),
            model=parts[0].model if parts else "",
        )

    async def sessions(self) -> list[Listed]:
        """List the tenant's sessions in the log, the last used one first. Needs no worker.

        Of more than 1,024 sessions it needs the right on `$JS.API.STREAM.INFO` of the log. Raises
        `NoWorkerError`, `NotPermittedError`.
        """
        requests = await self.stored.latest(self.tenant, "in")
        return listed(requests, await self.stored.latest(self.tenant, "out"))

    async def log(self, session: str | None = None) -> list[Entry]:
        """Read the log's entries of a session, or of every session of the tenant, in order.

        Empty if there is no log. Raises `NoWorkerError` if the log cannot be read.
        """
        key = SessionKey(self.tenant, "*") if session is None else session_key(self.tenant, session)
        subjects = self._wire.subjects
        stored = await self._wire.read_all(subjects.log_stream, subjects.log(key))
        found = (entry(subjects, one.seq, one.body, one.headers) for one in stored)
        return [one for one in found if one is not None]

    async def log_backwards(self, session: str, end: int | None = None) -> AsyncIterator[list[Entry]]:
        """Yield a session's log in pieces, the newest piece first; each piece is in log order.

        The first piece ends before the sequence `end` (None: with the last result). Raises `NoWorkerError` if
        the log cannot be read.
        """
        key, subjects = session_key(self.tenant, session), self._wire.subjects
        if end is None:
            end = 1 + await self._wire.last_seq(subjects.log_stream, subjects.of(key, "out"))
        num_entries = READ_BATCH
        while end > 1:
            start = max(1, end - num_entries)
            stored = await self._wire.read_all(subjects.log_stream, subjects.log(key), start, end)
            found = (entry(subjects, one.seq, one.body, one.headers) for one in stored)
            yield [one for one in found if one is not None]
            end, num_entries = start, 4 * num_entries

    @property
    def subjects(self) -> Subjects:
        """The subjects under this client's prefix."""
        return self._wire.subjects

    @property
    def stored(self) -> LogStream:
        """The log's stream, for operators: most of its methods need rights on JetStream's API."""
        return LogStream(self._wire, self._wire.subjects)

    @property
    def connected(self) -> bool:
        """Whether the client is connected now; if not, it is reconnecting, or closed."""
        return self._wire.connected

    async def backlog(self) -> Backlog:
        """Return the backlog of the log's consumer, for all tenants. Needs the right to read consumer info.

        Raises `NoWorkerError` if there is no consumer, or no answer.
        """
        return await self._wire.backlog()

    async def worker_metrics(self) -> Metrics:
        """Ask the worker for its current metrics. Raises `NoWorkerError`."""
        subject = self._wire.subjects.of(SessionKey(self.tenant, "any"), "ctl")
        timeout_s = min(self._control_timeout_s, METRICS_S)
        reply = await self._wire.ask(subject, encode(MetricsRequest()), timeout_s)
        return expect(Metrics, decode_control_reply(reply))

    async def metrics(self, worker: str = "*") -> AsyncIterator[Metrics]:
        """Yield the metrics that a worker (`*`: every worker) publishes, until the client is closed.

        Raises `NotPermittedError` if the user may not subscribe to them.
        """
        subject = self._wire.subjects.metrics(worker if worker == "*" else check_id("worker", worker))
        async with contextlib.aclosing(self._wire.bodies(subject)) as bodies:
            async for body in bodies:
                # Metrics of another version must not end the iteration.
                with contextlib.suppress(InvalidMessageError):
                    yield decode_metrics(body)

    async def gateways(self) -> AsyncIterator[GatewayMetrics]:
        """Yield the metrics that every gateway publishes, until the client is closed.

        Raises `NotPermittedError` if the user may not subscribe to them.
        """
        async with contextlib.aclosing(self._wire.bodies(self._wire.subjects.gateway("*"))) as bodies:
            async for body in bodies:
                with contextlib.suppress(InvalidMessageError):
                    yield decode_gateway_metrics(body)

    async def publish_gateway(self, metrics: GatewayMetrics) -> None:
        """Publish a gateway's metrics. Raises `NoWorkerError` if the client is closed."""
        subject = self._wire.subjects.gateway(check_id("gateway", metrics.gateway))
        await self._wire.send(subject, encode(metrics), {})


class _RefusedError(Exception):
    """The server refuses this user; the message says why."""


class _UnreachedError(Exception):
    """No server could be reached; the message says why."""


class _NatsWire:
    """`calls.Wire` over nats-py."""

    def __init__(self, subjects: Subjects) -> None:
        self.subjects = subjects
        self.epoch = 0
        self.closed = False
        self._is_leaving = False
        self._may_be_refused = True  # until it is connected for the first time
        self._num_to_try = 1  # servers that were not tried yet
        self.watchers: set[asyncio.Event] = set()
        self._nats = Nats()
        self._gets = DirectGets(self._nats, timeout_s=READ_S)
        self._jetstream = self._nats.jetstream()
        self._connected = asyncio.Event()
        self._last_error = ""
        #: The last refusals of subjects, each as the server says it.
        self._denials = deque[str](maxlen=16)

    async def connect(self, url: str, timeout_s: float, **options: Any) -> None:
        urls = url.split(",")
        self._num_to_try = len(urls)
        try:
            async with asyncio.timeout(timeout_s):
                await self._nats.connect(
                    urls,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnected,
                    reconnected_cb=self._on_reconnected,
                    closed_cb=self._on_closed,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=RECONNECT_PAUSE_S,  # type: ignore[arg-type]  # nats-py only sleeps for it
                    **options,
                )
        except _RefusedError as error:
            await self._nats.abandon()
            raise NotPermittedError(f"the NATS server at {shown(url)} {error}") from None
        except (_UnreachedError, *_NATS_ERRORS) as error:
            await self._nats.abandon()
            why = redact(self._last_error or str(error)) or f"no answer within {timeout_s} s"
            raise NoServerError(f"no NATS server at {shown(url)}: {why}") from None
        self._may_be_refused = False
        self._connected.set()

    async def close(self) -> None:
        self._is_leaving = True
        with contextlib.suppress(*_NATS_ERRORS):  # the server may be gone
            await self._nats.close()

    async def publish(self, subject: str, body: bytes, headers: dict[str, str] | None = None) -> int:
        patience_s, num_refusals = FIRST_ACK_S, 0
        while True:
            await self._connected.wait()
            self._check(body, headers)
            try:
                ack = await _cancellable(
                    self._jetstream.publish(subject, body, timeout=patience_s, headers=headers)
                )
            except NoStreamResponseError:
                num_refusals += 1
                if num_refusals == NUM_TRIES:
                    raise NoAnswerError(
                        f"no stream stores {subject}: no worker was ever started on this NATS server"
                        f" with the prefix {self.subjects.prefix!r}"
                    ) from None
                await asyncio.sleep(TRY_PAUSE_S)
            except APIError as error:
                raise _refusal(error) from None
            except nats.errors.TimeoutError:
                # The log may have stored the request. A second entry under the same id does no harm.
                self._check_permission(subject)
                patience_s = min(2 * patience_s, LAST_ACK_S)
            except _NATS_ERRORS:  # between two connections
                await asyncio.sleep(TRY_PAUSE_S)
            else:
                if ack.stream != self.subjects.log_stream:
                    raise NoAnswerError(
                        f"{subject} is stored by the stream {ack.stream!r}, which is not a worker's:"
                        f" it should be {self.subjects.log_stream!r}"
                    )
                return ack.seq

    async def ask(self, subject: str, body: bytes, timeout_s: float) -> bytes:
        self._check(body)
        try:
            return (await _cancellable(self._nats.request(subject, body, timeout=timeout_s))).data
        except nats.errors.NoRespondersError:
            raise NoAnswerError(f"no worker serves {subject}") from None
        except nats.errors.TimeoutError:
            self._check_permission(subject)
            raise NoAnswerError(f"no worker answered on {subject} within {timeout_s} s") from None
        except _NATS_ERRORS as error:
            raise _unreached(f"{subject} could not be asked", error) from None

    async def read(self, stream: str, subject: str, seq: int) -> list[Stored]:
        found: list[Stored] = []
        # The caller reads again after any error. A missing stream is an empty one.
        with contextlib.suppress(*_NATS_ERRORS):
            await self._read_on(stream, subject, seq, found)
        return found

    async def read_all(
        self, stream: str, subject: str, start: int = 1, end: float = math.inf
    ) -> list[Stored]:
        """Return all messages of `subject` in `stream` from `start` to before `end`.

        Raises `NoWorkerError` if the stream cannot be read.
        """
        found: list[Stored] = []
        self._check()
        try:
            await self._read_on(stream, subject, start, found, end)
        except _NATS_ERRORS as error:
            raise _unreached(f"{stream} could not be read", error) from None
        return [one for one in found if one.seq < end]

    async def batches(self, stream: str, request: dict[str, Any]) -> AsyncGenerator[list[Stored], None]:
        self._check()
        try:
            async with contextlib.aclosing(self._batches(stream, request)) as batches:
                async for batch in batches:
                    yield batch
        except TooManyError as error:
            raise StreamError(str(error), TOO_MANY) from None
        except _NATS_ERRORS as error:
            self._check_permission(f"$JS.API.DIRECT.GET.{stream}")
            raise _unreached(f"{stream} could not be read", error) from None

    async def send(self, subject: str, body: bytes, headers: dict[str, str]) -> None:
        self._check(body, headers)
        try:
            await self._nats.publish(subject, body, headers=headers)
        except _NATS_ERRORS as error:
            raise _unreached(f"{subject} could not be published", error) from None

    async def api(self, subject: str, body: bytes, headers: dict[str, str] | None = None) -> dict[str, Any]:
        self._check(body, headers)
        try:
            reply = await _cancellable(self._nats.request(subject, body, timeout=API_S, headers=headers))
        except _NATS_ERRORS as error:
            self._check_permission(subject)
            raise _unreached(f"JetStream does not answer on {subject}", error) from None
        answer: dict[str, Any] = msgspec.json.decode(reply.data or b"{}")
        if (refused := answer.get("error")) is not None:
            raise StreamError(
                f"{self.subjects.log_stream}: {refused.get('description')}", refused.get("err_code", 0)
            )
        return answer

    async def last_seq(self, stream: str, subject: str) -> int:
        """Return the sequence of the last message of `subject`, 0 if there is none.

        Raises `NoWorkerError` if the stream cannot be read.
        """
        body = msgspec.json.encode({"last_by_subj": subject})
        call = self._nats.request(f"$JS.API.DIRECT.GET.{stream}", body, timeout=READ_S)
        try:
            reply = await _cancellable(call)
        except _NATS_ERRORS as error:
            raise _unreached(f"{stream} could not be read", error) from None
        return int((reply.headers or {}).get("Nats-Sequence", "0"))

    @property
    def why_closed(self) -> str:
        if self._is_leaving or self._nats.last_error is None:
            return "the client is closed"
        return f"the NATS server has closed the connection ({redact(str(self._nats.last_error))})"

    @property
    def connected(self) -> bool:
        return self._connected.is_set() and not self.closed

    async def backlog(self) -> Backlog:
        call = self._jetstream.consumer_info(self.subjects.log_stream, CONSUMER, timeout=READ_S)
        try:
            found = await _cancellable(call)
        except _NATS_ERRORS as error:
            raise _unreached(f"the consumer of {self.subjects.log_stream} cannot be read", error) from None
        return Backlog(found.num_pending or 0, found.num_ack_pending or 0, found.num_redelivered or 0)

    async def lacks(self, stream: str, subject: str, seq: int, *, is_old: bool) -> bool:
        with contextlib.suppress(NoWorkerError):
            if not await self.read_all(stream, subject, seq, seq + 1):
                # A replica that lags has neither this message nor a later one.
                return is_old or await self.last_seq(stream, f"{self.subjects.prefix}.>") > seq
        return False

    async def _read_on(
        self, stream: str, subject: str, seq: int, found: list[Stored], end: float = math.inf
    ) -> None:
        request = {"seq": seq, "next_by_subj": subject}
        async with contextlib.aclosing(self._batches(stream, request)) as batches:
            async for batch in batches:
                found += batch
                if batch[-1].seq + 1 >= end:
                    return

    async def _batches(self, stream: str, request: dict[str, Any]) -> AsyncGenerator[list[Stored], None]:
        """Yield the messages that a batched direct get finds, batch by batch. Raises nats-py's errors."""
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
        async def deliver(message: Msg) -> None:
            on_body(message.data)

        subscription = await self._subscribe(subject, cb=deliver)

        async def stop() -> None:
            with contextlib.suppress(*_NATS_ERRORS):  # a closed connection has no subscriptions
                await subscription.unsubscribe()

        return stop

    async def bodies(self, subject: str) -> AsyncGenerator[bytes, None]:
        """Yield every message of a subject until the connection is closed."""
        subscription = await self._subscribe(subject)
        try:
            with contextlib.suppress(*_NATS_ERRORS):  # nats-py sends the first ping before the subscription
                await _cancellable(self._nats.flush())
                await _cancellable(self._nats.flush())
            self._check_permission(subject, "subscribe to")
            async for message in subscription.messages:
                yield message.data
        finally:
            with contextlib.suppress(*_NATS_ERRORS):
                await subscription.unsubscribe()

    async def _subscribe(self, subject: str, **options: Any) -> Subscription:
        self._check()
        try:
            return await self._nats.subscribe(subject, **options)
        except _NATS_ERRORS as error:
            raise _unreached(f"cannot subscribe to {subject}", error) from None

    def _check(self, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        if self.closed:
            raise ClientClosedError(self.why_closed)
        # The server counts headers too, and ends the connection of a client that sends too much.
        lines = (f"{name}{value}".encode() for name, value in (headers or {}).items())
        size_bytes = len(body) + sum(_HEADER_BYTES + len(line) for line in lines)
        if size_bytes > self._nats.max_payload:
            raise MessageTooLargeError(
                f"the request has {size_bytes} bytes, the NATS server accepts {self._nats.max_payload} at"
                " most: send it as several appends"
            )

    def _check_permission(self, subject: str, deed: str = "publish on") -> None:
        # The server reports a violation to the connection, not to the caller.
        for denial in self._denials:
            if f'"{subject.lower()}"' in denial:
                raise NotPermittedError(f"this user may not {deed} {subject}: {denial}")

    def _wake(self) -> None:
        for watcher in self.watchers:
            watcher.set()

    async def _on_error(self, error: Exception) -> None:
        if self._may_be_refused and (why := refusal(error)):
            self._may_be_refused = False  # more errors may come while the connection closes
            raise _RefusedError(why)  # nats-py would try again until the timeout
        why = unreachable(error)
        self._last_error = why or str(error) or type(error).__name__
        if self._may_be_refused and why:
            self._num_to_try -= 1
            if self._num_to_try == 0:
                raise _UnreachedError(why)
        if "permissions violation" in self._last_error.lower():
            self._denials.append(self._last_error.lower())

    async def _on_disconnected(self) -> None:
        self._connected.clear()

    async def _on_reconnected(self) -> None:
        self.epoch += 1
        self._connected.set()
        self._wake()

    async def _on_closed(self) -> None:
        self.closed = True
        self._connected.set()  # a waiting publish must see that it is closed
        self._wake()


def _stored(message: Msg) -> Stored:
    headers = message.headers or {}
    return Stored(int(headers["Nats-Sequence"]), message.data, headers)


def _divided(inputs: Sequence[str | Sequence[int]]) -> Iterator[tuple[str | tuple[int, ...], ...]]:
    """Divide the inputs of an `embed`, so that neither a request nor its reply is too large."""
    part: list[str | tuple[int, ...]] = []
    room = _EMBED_LENGTH
    for one in inputs:
        if part and (len(one) > room or len(part) == _EMBED_INPUTS):
            yield tuple(part)
            part, room = [], _EMBED_LENGTH
        part.append(one if isinstance(one, str) else tuple(one))
        room -= len(one)
    if part:
        yield tuple(part)


async def _cancellable(call: Awaitable[_T]) -> _T:
    """Await a call of nats-py without losing a cancellation.

    nats-py uses `asyncio.wait_for`, which before Python 3.12 loses a cancellation that arrives together with
    the reply or an error: the caller would wait forever.
    """
    task = asyncio.current_task()
    num_before = task.cancelling() if task else 0
    try:
        return await call
    finally:
        if task and task.cancelling() > num_before:
            raise asyncio.CancelledError


def _unreached(what: str, error: Exception) -> NoWorkerError:
    """Say that something failed because of an error of nats-py."""
    why = getattr(error, "description", None) or str(error) or type(error).__name__
    kind = NoServerError if isinstance(error, _LOST) else NoAnswerError
    return kind(f"{what}: {why}")


def _refusal(error: APIError) -> TurnkeepError:
    if error.err_code == _MESSAGE_TOO_LARGE:
        return MessageTooLargeError("the request is larger than the log accepts: send it as several appends")
    return RequestFailedError(
        "overloaded", f"the log refused the request: {error.description}", retryable=True
    )
