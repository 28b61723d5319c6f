"""The HTTP application: paths, keys, limits of bodies, and answers whole or as events.

Knows a dialect only by its functions, and conversations only by `Conversations`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import Chunk, Generated
from turnkeep_client.subjects import DEFAULT_TENANT

from . import answers, anthropic, chat, completions, messages, openai, recorded, responses
from .conversations import Conversations, Found
from .turn import Fault, fault_of, refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from turnkeep_client.client import Client
    from turnkeep_client.messages import Metrics

    from .conversations import Answering
    from .keys import Keys
    from .recorded import Recorded
    from .turn import Turn

MAX_BODY_BYTES: Final = 32 * 2**20
#: A request's body must be there within this time.
_BODY_S: Final = 60.0
#: How long a stream waits for its first part, or for a refusal, before it says that it is one.
_PATIENCE_S: Final = 1.0
#: Between two signs of life.
_HEARTBEAT_S: Final = 5.0


class _Events(Protocol):
    """Writes the events of one stream."""

    @property
    def heartbeat(self) -> bytes: ...
    def start(self, index: int) -> bytes: ...
    def chunk(self, index: int, chunk: Chunk) -> bytes: ...
    def finish(self, index: int, result: Generated) -> bytes: ...
    def end(self, results: Sequence[Generated]) -> bytes: ...
    def error(self, fault: Fault) -> bytes: ...


class _Dialect(NamedTuple):
    """An API: how its requests are read, and its answers and errors written."""

    read: Callable[[bytes], Turn]
    whole: Callable[[Turn, str, int, Sequence[Generated]], dict[str, Any]]
    events: Callable[[Turn, str, int], _Events]
    error: Callable[[Fault], dict[str, Any]]


_CHAT: Final = _Dialect(chat.read, chat.whole, chat.Events, openai.error)
_COMPLETIONS: Final = _Dialect(completions.read, completions.whole, completions.Events, openai.error)
_MESSAGES: Final = _Dialect(messages.read, messages.whole, messages.Events, anthropic.error)
_RESPONSES: Final = _Dialect(responses.read, answers.whole, answers.Events, openai.error)
_MESSAGES_PATH: Final = "/v1/messages"
_RESPONSES_PATH: Final = "/v1/responses"


class Gateway:
    """Serves HTTP for all tenants of one NATS connection. Event loop only."""

    def __init__(
        self,
        connect: Callable[[str], Awaitable[Client]],
        keys: Keys,
        *,
        idle_s: float,
        max_body_bytes: int = MAX_BODY_BYTES,
        patience_s: float = 15.0,
    ) -> None:
        """`connect` returns a client of a tenant; conversations that are idle for `idle_s` are removed.

        A request waits up to `patience_s` for a worker that starts again.
        """
        #: Whether the server ends; answers whose clients are gone go on then.
        self.is_stopping: Callable[[], bool] = lambda: False
        self._connect = connect
        self._keys = keys
        self._idle_s = idle_s
        self._max_body_bytes = max_body_bytes
        self._patience_s = patience_s
        self._tenants: dict[str, Conversations] = {}
        self._connecting = asyncio.Lock()
        self.app = Starlette(
            routes=[
                Route("/", self._root, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{model:path}", self._one_model, methods=["GET"]),
                Route("/v1/chat/completions", self._answering(_CHAT), methods=["POST"]),
                Route("/v1/completions", self._answering(_COMPLETIONS), methods=["POST"]),
                Route("/v1/embeddings", self._embeddings, methods=["POST"]),
                Route(_MESSAGES_PATH, self._answering(_MESSAGES), methods=["POST"]),
                Route(f"{_MESSAGES_PATH}/count_tokens", self._count_tokens, methods=["POST"]),
                Route(_RESPONSES_PATH, self._answering(_RESPONSES), methods=["POST"]),
                Route(f"{_RESPONSES_PATH}/{{id}}", self._response, methods=["GET", "DELETE"]),
                Route(f"{_RESPONSES_PATH}/{{id}}/cancel", self._cancelled, methods=["POST"]),
            ],
            exception_handlers={Fault: _on_fault, TurnkeepError: _on_error, HTTPException: _on_http},
        )

    async def close(self) -> None:
        """Close all connections. Answers that run go on in the worker."""
        for conversations in self._tenants.values():
            await conversations.close()

    def _stops(self) -> bool:
        return self.is_stopping()

    async def _root(self, _: Request) -> Response:
        return _json({"service": "turnkeep"})

    async def _health(self, _: Request) -> Response:
        worker = await (await self._of(DEFAULT_TENANT)).worker()
        return _json({"status": "ok", "model": worker.model})

    async def _models(self, request: Request) -> Response:
        worker = await (await self._of(self._tenant(request))).worker()
        return _json(_page([_model(worker)]))

    async def _one_model(self, request: Request) -> Response:
        worker, wanted = await (await self._of(self._tenant(request))).worker(), request.path_params["model"]
        if wanted != worker.model:
            message = f"there is no model {wanted!r}: this worker has {worker.model!r}"
            raise Fault(404, message, param="model", code="model_not_found")
        return _json(_model(worker))

    async def _embeddings(self, request: Request) -> Response:
        self._tenant(request)
        raise Fault(
            400,
            "the worker's model makes no embeddings: ask a server of an embedding model. Served here are"
            " /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages",
            code="unsupported_endpoint",
        )

    async def _count_tokens(self, request: Request) -> Response:
        conversations = await self._of(self._tenant(request))
        turn = messages.read(await self._body(request))
        return _json({"input_tokens": await conversations.count(turn)})

    def _answering(self, dialect: _Dialect) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            conversations = await self._of(self._tenant(request))
            body = await self._body(request)
            known = await self._items(conversations, body) if dialect is _RESPONSES else {}
            turn = responses.read(body, known) if known else dialect.read(body)
            worker = await conversations.worker(patience_s=self._patience_s)
            turn = turn if turn.model else msgspec.structs.replace(turn, model=worker.model)
            if turn.previous:
                turn = recorded.continued(turn, await _recorded(conversations, turn.previous))
            await conversations.start()
            return _Answer(dialect, turn, conversations)

        return answer

    async def _response(self, request: Request) -> Response:
        """Return an answer that is in the log, or remove its session."""
        conversations, wanted = await self._of(self._tenant(request)), request.path_params["id"]
        if request.query_params.get("stream") == "true":
            raise refused("only an answer that is asked for is streamed", "stream")
        found = _known(wanted, await _recorded(conversations, wanted))
        if request.method != "DELETE":
            return _json(answers.recorded(found, _own_id(wanted)))
        await conversations.forget(found.session)
        return _json({"id": wanted, "object": "response", "deleted": True})

    async def _items(self, conversations: Conversations, body: bytes) -> dict[str, dict[str, Any]]:
        """Return the items of earlier answers that a request refers to."""
        found = await conversations.recorded(responses.referred(body))
        bodies = (answers.recorded(one, answer_id) for answer_id, one in found.items())
        return {item["id"]: item for answer in bodies for item in answer["output"]}

    async def _cancelled(self, request: Request) -> Response:
        conversations, wanted = await self._of(self._tenant(request)), request.path_params["id"]
        found = _known(wanted, await conversations.cancel(_own_id(wanted)))
        return _json(answers.recorded(found, _own_id(wanted)))

    def _tenant(self, request: Request) -> str:
        """Return a request's tenant. Raises `Fault`."""
        if not _is_local(request.headers.get("origin")):
            raise Fault(403, "pages of other sites may not ask", code="forbidden_origin")
        return self._keys.tenant_of(request.headers)

    async def _of(self, tenant: str) -> Conversations:
        async with self._connecting:
            if tenant not in self._tenants:
                client = await self._connect(tenant)
                self._tenants[tenant] = Conversations(client, idle_s=self._idle_s, is_stopping=self._stops)
            return self._tenants[tenant]

    async def _body(self, request: Request) -> bytes:
        """Read a request's body. Raises `Fault`."""
        most, body = self._max_body_bytes, bytearray()
        too_large = Fault(413, f"the body is larger than {most} bytes", code="request_too_large")
        if int(request.headers.get("content-length") or 0) > most:
            raise too_large
        try:
            async with asyncio.timeout(_BODY_S):
                async for piece in request.stream():
                    body += piece
                    if len(body) > most:
                        raise too_large
        except TimeoutError:
            raise Fault(408, f"the body did not arrive within {_BODY_S:.0f} s") from None
        except ClientDisconnect:
            raise Fault(400, "the client went away") from None
        return bytes(body)


class _Answer(Response):
    """Sends the answers to one turn. If the client goes away, they are cancelled."""

    def __init__(self, dialect: _Dialect, turn: Turn, conversations: Conversations) -> None:
        super().__init__()
        self._dialect = dialect
        self._turn = turn
        self._conversations = conversations
        self._own_id = uuid4().hex
        self._created = int(time.time())
        self._note = recorded.new_note(self._own_id, self._created, turn)
        self._found: dict[int, Found] = {}
        self._results: dict[int, Generated] = {}

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answers, while the client is there."""
        answering = self._conversations.answer(self._turn, self._note)
        writing = asyncio.create_task(self._write(answering, send))
        leaving = asyncio.create_task(_departure(receive))
        try:
            await asyncio.wait([writing, leaving], return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            for task in (writing, leaving):
                task.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)
            self._conversations.abandon(answering)  # without effect on answers that have ended

    async def _write(self, answering: Answering, send: Send) -> None:
        try:
            if self._turn.stream:
                await self._write_events(answering, send)
                return
            while len(self._results) < self._turn.n:
                self._take(*await answering.events.get())
        except TurnkeepError as error:
            fault = fault_of(error)
            await self._write_json(send, fault.status, self._dialect.error(fault))
            return
        whole = self._dialect.whole(self._turn, self._id, self._created, self._in_order())
        await self._write_json(send, 200, whole)

    async def _write_events(self, answering: Answering, send: Send) -> None:
        """Send a stream of events. Raises `TurnkeepError` before the stream has begun."""
        self._take(*await answering.events.get())  # the session, which is known at once
        events, first = self._dialect.events(self._turn, self._id, self._created), b""
        start = b"".join(events.start(index) for index in range(self._turn.n))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                while not first:
                    first = self._take_events(events, *await answering.events.get())
        await send(_head(200, self._own_headers() | {"content-type": "text/event-stream; charset=utf-8"}))
        await send(_part(start + first))
        try:
            while len(self._results) < self._turn.n:
                written = b""
                try:
                    async with asyncio.timeout(_HEARTBEAT_S):
                        written += self._take_events(events, *await answering.events.get())
                except TimeoutError:
                    written = events.heartbeat
                while not answering.events.empty():  # what came while a slow client was reading
                    written += self._take_events(events, *answering.events.get_nowait())
                if written:
                    await send(_part(written))
            last = events.end(self._in_order())
        except TurnkeepError as error:
            last = events.error(fault_of(error))
        await send(_part(last, more=False))

    @property
    def _id(self) -> str:
        """The answer's id: if it is kept, it says where."""
        return self._own_id if self._note is None else recorded.answer_id(self._found[0].session, self._note)

    def _take_events(self, events: _Events, index: int, event: Any) -> bytes:
        self._take(index, event)
        match event:
            case Chunk():
                return events.chunk(index, event)
            case Generated():
                return events.finish(index, event)
        return b""

    def _take(self, index: int, event: Any) -> None:
        match event:
            case TurnkeepError():
                raise event
            case Found():
                self._found[index] = event
            case Generated():
                self._results[index] = event

    def _in_order(self) -> list[Generated]:
        return [self._results[index] for index in range(self._turn.n)]

    def _own_headers(self) -> dict[str, str]:
        found = self._found.get(0)
        headers = {"cache-control": "no-store"}
        return headers | ({"x-turnkeep-session": f"{found.session} {found.how}"} if found else {})

    async def _write_json(self, send: Send, status: int, body: dict[str, Any]) -> None:
        written = msgspec.json.encode(body)
        headers = {"content-type": "application/json", "content-length": str(len(written))}
        await send(_head(status, self._own_headers() | headers))
        await send(_part(written, more=False))


def _model(worker: Metrics) -> dict[str, Any]:
    """Describe a worker's model as both APIs do. The context has the names that other servers gave it."""
    name, context = worker.model, worker.context_tokens
    return {"id": name, "object": "model", "created": 0, "owned_by": "turnkeep"} | {
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
        "context_window": context,
        "max_model_len": context,
        "max_input_tokens": context,
    }


def _page(models: list[dict[str, Any]]) -> dict[str, Any]:
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]}
    return {"object": "list", "data": models, "has_more": False, **ends}


def _own_id(response_id: str) -> str:
    return response_id.removeprefix("resp_")


async def _recorded(conversations: Conversations, response_id: str) -> Recorded | None:
    wanted = _own_id(response_id)
    return (await conversations.recorded({wanted})).get(wanted)


def _known(wanted: str, found: Recorded | None) -> Recorded:
    if found is None:
        raise Fault(404, f"Response with id '{wanted}' not found.")
    return found


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _head(status: int, headers: Mapping[str, str]) -> dict[str, Any]:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


def _part(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _json(body: dict[str, Any], status: int = 200) -> Response:
    # After an error the rest of a body is not waited for.
    headers = {"connection": "close"} if status >= 400 else {}
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


async def _on_fault(request: Request, fault: Exception) -> Response:
    if not isinstance(fault, Fault):
        raise fault
    of_messages = request.url.path.startswith(_MESSAGES_PATH)
    return _json((anthropic if of_messages else openai).error(fault), fault.status)


async def _on_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, TurnkeepError):
        raise error
    return await _on_fault(request, fault_of(error))


async def _on_http(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    message = error.detail
    if error.status_code in {404, 405}:
        message = f"{request.method} {request.url.path} is not served{_instead(request.url.path, error)}"
    return await _on_fault(request, Fault(error.status_code, message))


def _instead(path: str, error: HTTPException) -> str:
    """Say what a wrong method or base URL should have been."""
    if allowed := (error.headers or {}).get("Allow"):
        return f", only {allowed}"
    if path.startswith("/v1/v1/") or not path.startswith("/v1/"):
        return ": the base URL ends with /v1 for OpenAI's clients, and is without /v1 for Anthropic's"
    return ""


def _is_local(origin: str | None) -> bool:
    """Whether a request comes from no browser, or from a page of this machine."""
    if origin is None:
        return True
    with contextlib.suppress(ValueError):
        name = urlsplit(origin).hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    return False
