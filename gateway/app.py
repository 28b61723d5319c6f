"""The HTTP application: all dialects' routes, the gateway's own, and errors in the dialect's form."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from starlette import routing
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from turnkeep_client.errors import ClientClosedError, TurnkeepError

from .connections import Connections
from .dialects.anthropic.routes import DIALECT as ANTHROPIC
from .dialects.cohere.routes import DIALECT as COHERE
from .dialects.ollama.routes import DIALECT as OLLAMA
from .dialects.openai.routes import DIALECT as OPENAI
from .dialects.responses.routes import DIALECT as RESPONSES
from .http import guide
from .http.access import Access, is_from_here
from .http.answer_response import SHOWN
from .http.bodies import as_json, read_to_its_end
from .http.durable import HEADERS
from .http.handlers import Handlers, Route
from .image_fetcher import ImageFetcher
from .metrics import Counters
from .turn import WARNINGS, Fault, fault_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from turnkeep_client.client import Client

    from .http.handlers import Dialect
    from .keys import Keys

#: All dialects. The first one's errors answer requests that are no other's.
DIALECTS: Final = (OPENAI, ANTHROPIC, RESPONSES, OLLAMA, COHERE)
MAX_BODY_BYTES: Final = 32 * 2**20
_PUBLISH_S: Final = 5.0

#: The page has no scripts, and loads nothing.
_PAGE_HEADERS: Final = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


class Gateway:
    """The HTTP gateway as an ASGI application (`app`), for all tenants, with one model or several.

    Run `app` inside `open()`. Event loop only.
    """

    def __init__(
        self,
        connect: Callable[[str, str], Awaitable[Client]],
        keys: Keys,
        *,
        models: Sequence[str] = (),
        idle_s: float,
        max_body_bytes: int = MAX_BODY_BYTES,
        patience_s: float = 15.0,
        cors: Collection[str] = (),
        image_hosts: Collection[str] = (),
        explain: bool = False,
        name: str = "gateway",
        dialects: Sequence[Dialect] = DIALECTS,
    ) -> None:
        """`connect`, `models` and `idle_s` are those of `Connections`.

        Metrics are published under the id `name`. Web pages of this machine and of origins in `cors` may send
        requests. Images are fetched from `image_hosts` alone. `Handlers` describes the others.
        """
        self.connections = Connections(connect, models, idle_s=idle_s)
        self.access = Access(keys, cors, [one.key_header for one in dialects if one.key_header])
        self.counters = Counters()
        self._name = name
        handlers = Handlers(
            self.access,
            self.connections,
            self.counters,
            explain=explain,
            max_body_bytes=max_body_bytes,
            patience_s=patience_s,
            fetcher=ImageFetcher(image_hosts),
        )
        self._listing = handlers.listing
        self.routes = [*(route for one in dialects for route in one.routes), *self._own_routes()]
        self.app = self._application(handlers, Errors(dialects))

    def _own_routes(self) -> list[Route]:
        counts = "Counts for Prometheus, for programs of this machine"
        return [
            Route("/health", ["GET"], _own, self._health, "Whether a worker answers"),
            Route("/metrics", ["GET"], _own, self._metrics, counts),
            Route("/openapi.json", ["GET"], _own, self._openapi, "This document"),
            Route("/", ["GET"], _own, self._root, "Where to go"),
        ]

    def _application(self, handlers: Handlers, errors: Errors) -> ASGIApp:
        app = Starlette(
            routes=[
                routing.Route(one.path, partial(one.handler, handlers, one.of), methods=[*one.methods])
                for one in self.routes
            ],
            exception_handlers=dict.fromkeys(KINDS, errors.answer),
        )
        # Around the application: Starlette answers its faults outside of its middleware.
        cors = _Cors(_until_stopped(app, errors), self.access.may_ask)
        counted = self.counters.counting(cors, [one.path for one in self.routes])
        return read_to_its_end(_without_slash(counted))

    @contextlib.asynccontextmanager
    async def open(self, is_stopping: Callable[[], bool]) -> AsyncIterator[None]:
        """Serve `app` inside the block; then close all connections. Workers complete running answers.

        `is_stopping()` says whether the server is shutting down: answers are not cancelled then.
        """
        self.connections.is_stopping = is_stopping
        try:
            yield
        finally:
            await self.connections.close()

    async def publish(self) -> None:
        """Publish metrics now and every few seconds, until cancelled."""
        while True:
            message = self.counters.message(self._name, self.connections.num_sessions, _PUBLISH_S)
            for model in self.connections.models:
                with contextlib.suppress(TurnkeepError):  # the next ones follow soon
                    conversations = await self.connections.of(self.access.keys.tenant, model)
                    await conversations.client.publish_gateway(message)
            await asyncio.sleep(_PUBLISH_S)

    async def _root(self, request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(guide.page(str(request.base_url), self.routes), headers=_PAGE_HEADERS)
        return PlainTextResponse(guide.GREETING)

    async def _openapi(self, _: Request) -> Response:
        return as_json(guide.openapi(self.routes))

    async def _health(self, _: Request) -> Response:
        tenant = self.access.keys.tenant
        found = await self._listing.all(tenant, now=True)
        for name, one in zip(self._listing.names, found, strict=True):
            latest = (await self.connections.of(tenant, name)).latest
            # Each model counts: one that is not loaded knows of no write that waits.
            if one.worker and (error := await latest.not_stored()):
                raise error
        ids = [one.name for one in found]
        return as_json(
            {"status": "ok"} | ({"models": ids} if self._listing.are_several else {"model": ids[0]})
        )

    async def _metrics(self, request: Request) -> Response:
        if not is_from_here(request):
            raise Fault(403, "only programs of this machine, asking for localhost, may read the metrics")
        page = self.counters.page(self.connections.num_sessions)
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _own(
    _: Handlers, answer: Callable[[Request], Coroutine[Any, Any, Response]], request: Request
) -> Response:
    """Serve a path that is no dialect's."""
    return await answer(request)


def _without_slash(app: ASGIApp) -> ASGIApp:
    """Wrap an application so that it ignores a slash at the end of a path."""

    async def stripped(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.endswith("/") and path.strip("/"):
            scope = {**scope, "path": path.rstrip("/")}
        await app(scope, receive, send)

    return stripped


def _until_stopped(app: ASGIApp, errors: Errors) -> ASGIApp:
    """Wrap an application so that requests without a response get an error when the server stops.

    The server then cancels what still runs, and would answer in no dialect's form.
    """

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def sending(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await app(scope, receive, sending)
        except asyncio.CancelledError:
            if not has_begun:
                response = await errors.answer(Request(scope), ClientClosedError())
                await response(scope, receive, send)
            raise

    return answered


class _Cors(CORSMiddleware):
    """Lets web pages of allowed origins send requests and read the headers of answers."""

    def __init__(self, app: ASGIApp, may_ask: Callable[[str], bool]) -> None:
        super().__init__(
            app,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=[*SHOWN, WARNINGS, "retry-after", *HEADERS],
        )
        self._may_ask = may_ask

    def is_allowed_origin(self, origin: str) -> bool:
        return self._may_ask(origin)


#: What the handler `Errors` answers. The last are the gateway's own faults, which the server then logs.
KINDS: Final = (Fault, TurnkeepError, HTTPException, Exception)


class Errors:
    """Answers a request that has raised an exception, in the form of the request's dialect."""

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        self._dialects = dialects

    def _of(self, request: Request) -> Dialect:
        """Return the dialect whose header a request has, else that with the longest prefix of the path."""
        first, path = self._dialects[0], request.url.path
        named = next((one for one in self._dialects if one.header and one.header in request.headers), None)
        begin = [one for one in self._dialects if path.startswith(one.prefix)]
        return named or max(begin, key=lambda one: len(one.prefix), default=first)

    async def answer(self, request: Request, error: Exception) -> Response:
        """Return the error response for an exception that a request has raised."""
        match error:
            case Fault():
                fault = error
            case TurnkeepError():
                fault = fault_of(error)
            case HTTPException(status_code=404 | 405):
                path = request.url.path
                fault = Fault(
                    error.status_code, f"{request.method} {path} is not served{_instead(path, error)}"
                )
            case HTTPException():
                fault = Fault(error.status_code, error.detail)
            case _:
                fault = fault_of(TurnkeepError(f"the gateway failed: {type(error).__name__}"))
        return as_json(self._of(request).error(fault), fault.status, fault.headers)


def _instead(path: str, error: HTTPException) -> str:
    """Return the end of a 404 or 405 message: the right method, or perhaps the right base URL."""
    if allowed := (error.headers or {}).get("Allow"):
        return f", only {allowed}"
    if path.startswith("/v1/v1/") or not path.startswith("/v1/"):
        return " here: the base URL ends with /v1 for OpenAI's clients, and is without /v1 for Anthropic's"
    return " here"
