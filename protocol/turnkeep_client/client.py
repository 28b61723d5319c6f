"""The async Python client: one NATS connection of one tenant.

`wire` has the NATS operations; `calls` and `generation` wait for results.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sized
from typing import TYPE_CHECKING, Any, Final, TypeGuard, TypeVar

from .calls import Call, ResultFeeds, expect
from .errors import InvalidMessageError, RequestFailedError, TurnkeepError
from .images import files_of
from .log import Entry, entry
from .messages import (
    UNLOADED,
    Embedded,
    EmbedRequest,
    Failed,
    GatewayMetrics,
    Generate,
    Generated,
    LoadRequest,
    Metrics,
    MetricsRequest,
    Request,
    Reranked,
    RerankRequest,
    UnloadRequest,
    decode_control_reply,
    decode_gateway_metrics,
    decode_metrics,
    decode_request,
    decode_result,
    decode_serving,
    encode,
)
from .options import check_options
from .session import Cache, Messages, Session, build
from .session_log import Listed, ends_of_all, listed
from .stream import LogStream
from .subjects import DEFAULT_PREFIX, DEFAULT_TENANT, SessionKey, Subjects, check_id, session_key
from .wire import Backlog, NatsWire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Sequence
    from typing import Self, Unpack

    from .sampling import Sampling


_T = TypeVar("_T")
_Input = TypeVar("_Input", str, str | tuple[int, ...])

DEFAULT_URL: Final = "nats://127.0.0.1:4222"
#: The timeout of requests, as in the SDKs of OpenAI and Anthropic.
TIMEOUT_S: Final = 600.0

#: Longest timeout of a request for the worker's metrics, which it answers at once.
METRICS_S: Final = 5.0
#: How often a call that waits for a reply looks whether the worker was started again: then no reply comes.
LOOK_S: Final = 2.0

#: Longest time until the answer to `load`, as the model may have to be downloaded first.
_LOAD_S: Final = 6 * 3600.0

#: Limits of one embed or rerank request: its inputs, and their total length in characters or token ids.
_EMBED_INPUTS: Final = 16
_EMBED_LENGTH: Final = 2**17


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
    """Return a connection that opens when awaited or used in `async with`, which also closes it.

    `timeout_s` is the default timeout of requests (`math.inf`: no limit); `control_timeout_s` is that of
    control requests such as `info`. `nats_options` are passed to nats-py's `connect` (credentials, TLS). An
    open client that loses its connection reconnects without limit, and waiting calls continue. Use it only in
    the event loop that connected it. Connecting raises `NoServerError` once every server has refused the
    connection, or after `connect_timeout_s`;
    `NotPermittedError` if one refuses the credentials or TLS. A bad tenant or prefix raises
    `InvalidMessageError`, and so do a URL that is no text, and a timeout that is no number.
    """
    if not isinstance(url, str):
        raise InvalidMessageError(f"the URL of the NATS servers must be text, not {type(url).__name__}")
    check_options(
        timeout_s=timeout_s, connect_timeout_s=connect_timeout_s, control_timeout_s=control_timeout_s
    )
    check_id("tenant", tenant)
    subjects = Subjects(prefix)

    async def opened() -> Client:
        nats = NatsWire(subjects)  # each time another: one that was closed, or never opened, stays so
        await nats.connect(url, connect_timeout_s, name=name, **nats_options)
        return Client(nats, tenant, timeout_s, control_timeout_s)

    return Connecting(opened)


class Connecting:
    """A connection that is not open yet: await it for the client, or use `async with`, which also closes."""

    def __init__(self, opened: Callable[[], Coroutine[Any, Any, Client]]) -> None:
        self._opened = opened
        self._clients: list[Client] = []

    def __await__(self) -> Generator[Any, None, Client]:
        return self._opened().__await__()

    async def __aenter__(self) -> Client:
        self._clients.append(await self)
        return self._clients[-1]

    async def __aexit__(self, *_: object) -> None:
        await self._clients.pop().close()


class Client:
    """A connection of one tenant. Create it with `connect`."""

    def __init__(self, wire: NatsWire, tenant: str, timeout_s: float, control_timeout_s: float) -> None:
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

        The session belongs to this client's tenant unless another `tenant` is given.
        With `cache` (a `CachePolicy`, or the same as a dict) the session is opened under this policy before
        its first append or generate, unless it is open under this policy already. If it is open under another
        policy, the append or generate raises `RequestFailedError`.
        """
        key = session_key(self.tenant if tenant is None else tenant, name)
        return Session(self._wire, self._feeds, key, self._control_timeout_s, cache)

    async def submit(self, key: SessionKey, request: Request, *, timeout_s: float | None = None) -> Call:
        """Publish a request; return its `Call` once the log has stored it. Await the `Call` for the result.

        `timeout_s` runs from now to the result; if the `Call` is awaited again, it restarts. Raises the same
        errors as `Session`'s methods.
        """
        decode_request(encode(request))  # msgspec validates on decoding, not on construction
        call = Call(self._wire, self._feeds, key, request, timeout_s=timeout_s)
        async with call.listening():
            call.keeps_deadline = True
            return call

    async def ask(
        self,
        session: str,
        *,
        messages: Messages | None = None,
        text: str | None = None,
        tokens: Sequence[int] | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generated:
        """Generate by core NATS request and reply, without streaming.

        Needs rights on the log only for images, which are stored there first.

        Raises `RequestFailedError`, and `NoWorkerError` if no worker answers within `timeout_s`.
        """
        timeout_s = self._limit(timeout_s)
        request = build(Generate, request_id, messages=messages, text=text, tokens=tokens, **sampling)
        key = session_key(self.tenant, session)
        await self._wire.store_images(key, files_of(request), timeout_s)
        subject = self._wire.subjects.of(key, "ask")
        return expect(Generated, decode_result(await self._reply(subject, encode(request), timeout_s)))

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        input_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> Embedded:
        """Embed texts or lists of token ids as vectors, truncated to `dimensions`, with an embedding model.

        For `input_tokens` see `EmbedRequest`. A long list is sent as several requests, each with the timeout
        `timeout_s`. Raises `RequestFailedError`, and `NoWorkerError` if no worker answers in time.
        """
        given: list[Any] = [tuple(one) if _is_list(one) else one for one in _listed("inputs", inputs)]
        asked = [(start, EmbedRequest(some, dimensions, input_tokens)) for start, some in _divided(given)]
        parts = [await self._part(Embedded, *one, timeout_s) for one in asked]
        return Embedded(
            vectors=tuple(vector for part in parts for vector in part.vectors),
            tokens=tuple(num for part in parts for num in part.tokens),
            model=parts[0].model if parts else "",
        )

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        document_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> Reranked:
        """Score from 0 to 1 how well each document answers a query, with a reranking model.

        For the options see `RerankRequest`. A long list is sent as several requests, each with the timeout
        `timeout_s`. Raises `RequestFailedError`, and `NoWorkerError` if no worker answers in time.
        """
        asked = [
            (start, RerankRequest(query, some, instruction, document_tokens))
            for start, some in _divided(_listed("documents", documents))
        ]
        parts = [await self._part(Reranked, *one, timeout_s) for one in asked]
        return Reranked(
            scores=tuple(score for part in parts for score in part.scores),
            tokens=tuple(num for part in parts for num in part.tokens),
            model=parts[0].model if parts else "",
        )

    def _limit(self, timeout_s: float | None) -> float:
        """Return the timeout of a request, in seconds: the given one, or that of the connection."""
        limit_s = self._feeds.timeout_s if timeout_s is None else timeout_s
        check_options(timeout_s=limit_s)
        return limit_s

    async def sessions(self) -> list[Listed]:
        """List the tenant's sessions in the log, most recently used first. Needs no worker.

        With more than 1,024 sessions this needs the right on `$JS.API.STREAM.INFO` of the log. Raises
        `NoWorkerError`, `NotPermittedError`.
        """
        return listed(await ends_of_all(self.stored, self.tenant))

    async def log(self, session: str | None = None) -> list[Entry]:
        """Read the log's entries of a session, or of every session of the tenant, in order.

        An answered request may have left the log; the field `asked` of its result still has it. Raises
        `NoWorkerError` if the log cannot be read, or no worker has ever created it.
        """
        key = SessionKey(self.tenant, "*") if session is None else session_key(self.tenant, session)
        request = {"seq": 1, "next_by_subj": self.subjects.log(key)}
        batches = self._wire.batches(self.subjects.log_stream, request)
        found = [entry(self.subjects, one) async for batch in batches for one in batch]
        return [one for one in found if one is not None]

    @property
    def subjects(self) -> Subjects:
        """The subjects under this client's prefix."""
        return self._wire.subjects

    @property
    def stored(self) -> LogStream:
        """The log's stream, for operators: most of its methods need rights on JetStream's API."""
        return LogStream(self._wire)

    @property
    def connected(self) -> bool:
        """Whether the client is connected now; if not, it is reconnecting, or closed."""
        return self._wire.connected

    @property
    def stores(self) -> bool:
        """Whether the log stores what this client sends; also true if nothing waits, or disconnected."""
        return self._wire.writes.are_stored or not self.connected

    @property
    def closed(self) -> bool:
        """Whether the connection was closed for good: by `close`, or by the NATS server."""
        return self._wire.closed

    @property
    def why_closed(self) -> str:
        """A sentence that says which side closed the connection, and why."""
        return self._wire.why_closed

    async def backlog(self) -> Backlog:
        """Return how many requests of all tenants the workers have not acknowledged.

        Needs the right to read the consumer's info. Raises `NoWorkerError` if there is no consumer, or no
        answer.
        """
        return await self._wire.backlog()

    async def worker_metrics(self) -> Metrics:
        """Return the current metrics of the prefix's worker; if there are several, of any one.

        Raises `NoWorkerError`.
        """
        timeout_s = min(self._control_timeout_s, METRICS_S)
        return expect(
            Metrics,
            decode_control_reply(await self._wire.ask(self._ctl, encode(MetricsRequest()), timeout_s)),
        )

    @property
    def _ctl(self) -> str:
        """The subject of control requests that are about no session."""
        return self._wire.subjects.of(SessionKey(self.tenant, "any"), "ctl")

    async def _reply(self, subject: str, body: bytes, timeout_s: float) -> bytes:
        """Return the reply to a request, which is sent again if its worker ends and another one starts."""
        clock, waited_s = asyncio.get_running_loop().time, 0.0
        while True:
            begun_s = clock()
            asking = asyncio.create_task(self._wire.ask(subject, body, timeout_s - waited_s))
            try:
                while not (await asyncio.wait([asking], timeout=LOOK_S))[0]:
                    with contextlib.suppress(TurnkeepError):
                        metrics = await self.worker_metrics()
                        # While a model is loaded, the request is kept for it.
                        if metrics.device != UNLOADED and metrics.uptime_s < clock() - begun_s:
                            break
                else:
                    return asking.result()
            finally:
                asking.cancel()
            waited_s += clock() - begun_s

    async def _part(
        self, kind: type[_T], start: int, request: EmbedRequest | RerankRequest, timeout_s: float | None
    ) -> _T:
        """Ask about a part of a list that begins at `start`."""
        try:
            reply = await self._reply(self._ctl, encode(request), self._limit(timeout_s))
            return expect(kind, decode_control_reply(reply))
        except RequestFailedError as error:
            name = "inputs" if isinstance(request, EmbedRequest) else "documents"
            raise error.behind(start, name) from None

    async def load(self, model: str | None = None) -> str:
        """Load the prefix's model, or put `model`, another one on the worker's machine, in its place.

        Return a sentence that says what happens now. Raises `NoWorkerError` if no `turnkeep serve` runs, and
        `TurnkeepError` if it refuses.
        """
        return await self._serve(LoadRequest(model), _LOAD_S)

    async def unload(self) -> str:
        """Unload the prefix's model; its next request loads it again. Returns and raises as `load`."""
        return await self._serve(UnloadRequest(), self._control_timeout_s)

    async def _serve(self, request: LoadRequest | UnloadRequest, timeout_s: float) -> str:
        reply = await self._wire.ask(self._wire.subjects.serve, encode(request), timeout_s)
        answer = decode_serving(reply)
        if isinstance(answer, Failed):
            raise TurnkeepError(answer.message)
        return answer.said

    async def metrics(self, worker: str = "*") -> AsyncIterator[Metrics]:
        """Yield the metrics that a worker (`*`: every worker) publishes, until the client is closed.

        Skips messages that this client cannot decode. Raises `NotPermittedError` if the user may not
        subscribe to them.
        """
        subject = self._wire.subjects.metrics(worker if worker == "*" else check_id("worker", worker))
        async with contextlib.aclosing(self._wire.bodies(subject)) as bodies:
            async for body in bodies:
                # Metrics of another version must not end the iteration.
                with contextlib.suppress(InvalidMessageError):
                    yield decode_metrics(body)

    async def gateways(self) -> AsyncIterator[GatewayMetrics]:
        """Yield the metrics that every gateway publishes, until the client is closed.

        Skips and raises as `metrics`.
        """
        async with contextlib.aclosing(self._wire.bodies(self._wire.subjects.gateway("*"))) as bodies:
            async for body in bodies:
                with contextlib.suppress(InvalidMessageError):
                    yield decode_gateway_metrics(body)

    async def publish_gateway(self, metrics: GatewayMetrics) -> None:
        """Publish a gateway's metrics. Raises `NoWorkerError` if the client is closed."""
        subject = self._wire.subjects.gateway(check_id("gateway", metrics.gateway))
        await self._wire.send(subject, encode(metrics), {})


def _listed(name: str, inputs: Iterable[_T]) -> list[_T]:
    """Return the inputs of a request as a list. Raises `InvalidMessageError` for a text and for no list."""
    if not _is_list(inputs):
        raise InvalidMessageError(f"{name} must be a list, not {type(inputs).__name__}")
    return [*inputs]


def _is_list(given: object) -> TypeGuard[Iterable[Any]]:
    return isinstance(given, Iterable) and not isinstance(given, str)


def _divided(inputs: Sequence[_Input]) -> Iterator[tuple[int, tuple[_Input, ...]]]:
    """Divide the inputs of an `embed` or a `rerank` into lists small enough for one request and its reply.

    Yields each list with the number of its first input.
    """
    start = 0
    room = _EMBED_LENGTH
    for number, one in enumerate(inputs):
        size = len(one) if isinstance(one, Sized) else 1  # which the worker refuses
        if number > start and (size > room or number - start == _EMBED_INPUTS):
            yield start, tuple(inputs[start:number])
            start, room = number, _EMBED_LENGTH
        room -= size
    if start < len(inputs):
        yield start, tuple(inputs[start:])
