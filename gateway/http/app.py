"""The HTTP application: routes, API keys, allowed origins and body limits.

It uses dialects only through `Dialect`, and sessions only through `Conversations`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from gateway import following, models, recorded
from gateway.anthropic import common as anthropic
from gateway.anthropic import messages
from gateway.conversations import Conversations
from gateway.dialect import EVENT_STREAM, Dialect
from gateway.lookups import Lookups, after, own_id
from gateway.metrics import Counters
from gateway.models import Models
from gateway.ollama import answers as ollama
from gateway.ollama import requests as ollama_requests
from gateway.openai import chat, completions, embeddings
from gateway.openai import common as openai
from gateway.reranking import rerank
from gateway.responses import answers, compacting, items
from gateway.responses import requests as responses
from gateway.turn import WARNINGS, Fault, Turn, refused, told
from turnkeep_client import __version__
from turnkeep_client.content_blocks import printed
from turnkeep_client.errors import NoWorkerError, TurnkeepError

from . import bodies, guide
from .durable import HEADERS, Reading
from .origins import PROGRAMS, is_from_here, is_local, is_loopback, may_be_a_site, name_in
from .replies import MESSAGES_PATH, as_json, on_error, on_fault, on_http
from .sending import SHOWN, Answer, Asker, unless_left

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from gateway.keys import Key, Keys
    from gateway.lookups import Kept
    from turnkeep_client.client import Client

    from .places import Place

    _Handler = Callable[[Request], Awaitable[Response]]
    _Asking = Callable[[Client, bytes], Coroutine[Any, Any, tuple[dict[str, Any], int]]]

MAX_BODY_BYTES: Final = 32 * 2**20
_PUBLISH_S: Final = 5.0

_CHAT: Final = Dialect("chat.completion", chat.read, chat.whole, chat.Events, openai.error)
_COMPLETIONS: Final = Dialect(
    *("text_completion", completions.read, completions.whole, completions.Events, openai.error),
    completions.NAMES,
)
_MESSAGES: Final = Dialect("message", messages.read, messages.whole, messages.Events, anthropic.error)
_COUNTED: Final = _MESSAGES._replace(read=partial(messages.read, is_counted=True))
_RESPONSES: Final = Dialect(
    responses.NAME,
    responses.read,
    answers.whole,
    answers.Events,
    openai.error,
    responses.NAMES,
    answers.begun,
)
_COMPACTING: Final = _RESPONSES._replace(
    name=compacting.NAME, read=compacting.read, whole=compacting.whole, begun=None
)
_OLLAMA: Final = {
    f"/api/{name}": Dialect(
        f"ollama.{name}",
        read,
        words.whole,
        words.events,
        ollama.error,
        ollama_requests.NAMES,
        None,
        ollama.NDJSON,
        ollama_requests.at_once,
    )
    for name, read, words in (
        ("chat", ollama_requests.chat, ollama.CHAT),
        ("generate", ollama_requests.generate, ollama.GENERATE),
    )
}

#: The page has no scripts, and loads nothing.
_PAGE_HEADERS: Final = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
_RESPONSES_PATH: Final = "/v1/responses"
_PATHS: Final = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": _COMPLETIONS,
    MESSAGES_PATH: _MESSAGES,
    _RESPONSES_PATH: _RESPONSES,
}
#: The handlers of requests for which a model generates no answer: embeddings and reranking.
_ASKED: Final[Mapping[str, _Asking]] = {
    "/v1/embeddings": embeddings.embeddings,
    "/api/embed": embeddings.embed,
    "/rerank": rerank,
    "/v1/rerank": rerank,
    "/v2/rerank": rerank,
}


class Gateway:
    """Serves HTTP for all tenants, with one model or several. Event loop only."""

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
        explain: bool = False,
        name: str = "gateway",
    ) -> None:
        """`connect` returns the client of a tenant and a model; `models` is empty if there is only one model.

        Metrics are published under the id `name`. Conversations idle for `idle_s` are removed. Requests wait
        up to `patience_s` for a worker that restarts. Web pages of this machine and of origins in `cors` may
        send requests. With `explain`, a header says how much of a conversation was found.
        """
        #: Whether the server is shutting down; answers whose clients have disconnected go on then.
        self.is_stopping: Callable[[], bool] = lambda: False
        self._connect = connect
        self._keys = keys
        self._idle_s = idle_s
        self._max_body_bytes = max_body_bytes
        self._patience_s = patience_s
        self._cors = frozenset(cors)
        self._cors_names = {name_in(one) for one in cors}
        self._explain = explain
        self.counters = Counters()
        self._name = name
        self._conversations: dict[tuple[str, str], Conversations] = {}  # by tenant and model
        self._connecting = asyncio.Lock()
        self._listing = Models(self._of, models or ("",))
        self._lookups = Lookups(self._of, self._listing.names)
        app = Starlette(
            routes=[
                Route("/", self._root, methods=["GET"]),
                Route("/openapi.json", self._openapi, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{model:path}", self._one_model, methods=["GET"]),
                *(Route(path, self._asking(ask), methods=["POST"]) for path, ask in _ASKED.items()),
                Route(f"{MESSAGES_PATH}/count_tokens", self._count_tokens(_COUNTED), methods=["POST"]),
                Route(f"{MESSAGES_PATH}/batches", _not_served, methods=["GET", "POST"]),  # no answer's id
                Route(f"{_RESPONSES_PATH}/input_tokens", self._count_tokens(_RESPONSES), methods=["POST"]),
                Route(f"{_RESPONSES_PATH}/compact", self._answering(_COMPACTING), methods=["POST"]),
                Route(f"{_RESPONSES_PATH}/{{id}}/input_items", self._input_items, methods=["GET"]),
                Route(f"{_RESPONSES_PATH}/{{id}}/stream", self._durable, methods=["GET"]),
                *(one for path, dialect in _PATHS.items() for one in self._of_answers(path, dialect)),
                Route("/api/v0/models", self._models_v0, methods=["GET"]),
                Route("/api/version", self._version, methods=["GET"]),
                Route("/api/tags", self._tags, methods=["GET"]),
                Route("/api/ps", self._tags, methods=["GET"]),
                Route("/api/show", self._shown, methods=["POST"]),
                *(
                    Route(path, self._answering(dialect), methods=["POST"])
                    for path, dialect in _OLLAMA.items()
                ),
                Route("/api/{name}", self._not_here, methods=["POST", "DELETE"]),
            ],
            exception_handlers={Fault: on_fault, TurnkeepError: on_error, HTTPException: on_http},
            middleware=[Middleware(_Cors, may_ask=self._may_ask)],
        )
        self.routes = [one for one in app.routes if isinstance(one, Route)]
        self.app = _without_slash(self.counters.counting(app, [one.path for one in self.routes]))

    async def publish(self) -> None:
        """Publish metrics now and every few seconds, until cancelled."""
        while True:
            message = self.counters.message(self._name, self._num_known(), _PUBLISH_S)
            for model in self._listing.names:
                with contextlib.suppress(TurnkeepError):  # the next ones follow soon
                    await (await self._of(self._keys.tenant, model)).client.publish_gateway(message)
            await asyncio.sleep(_PUBLISH_S)

    def _num_known(self) -> int:
        return sum(len(one.index.sessions) for one in self._conversations.values())

    async def close(self) -> None:
        """Close all connections. Answers that run go on in the worker."""
        for conversations in self._conversations.values():
            await conversations.close()

    def _stops(self) -> bool:
        return self.is_stopping()

    async def _root(self, request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(guide.page(str(request.base_url)), headers=_PAGE_HEADERS)
        return PlainTextResponse("Ollama is running")  # what Ollama's clients look for

    async def _openapi(self, _: Request) -> Response:
        return as_json(guide.openapi())

    async def _health(self, _: Request) -> Response:
        ids = [one.name for one in await self._listing.all(self._keys.tenant, now=True)]
        return as_json(
            {"status": "ok"} | ({"models": ids} if self._listing.are_several else {"model": ids[0]})
        )

    async def _metrics(self, request: Request) -> Response:
        if not is_from_here(request):
            raise Fault(403, "only programs of this machine, asking for localhost, may read the metrics")
        page = self.counters.page(self._num_known())
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, request: Request) -> Response:
        return as_json(models.page(await self._listing.all(self._key(request).tenant)))

    async def _one_model(self, request: Request) -> Response:
        found = await self._listing.one(self._key(request).tenant, request.path_params["model"])
        return as_json(models.described(found))

    async def _version(self, request: Request) -> Response:
        self._key(request)
        return as_json({"version": __version__})

    async def _tags(self, request: Request) -> Response:
        found = await self._listing.all(self._key(request).tenant)
        return as_json((ollama.running if request.url.path.endswith("/ps") else ollama.tags)(found))

    async def _shown(self, request: Request) -> Response:
        key = self._key(request)
        body = await bodies.read(request, self._max_body_bytes)
        return as_json(ollama.shown(await self._listing.one(key.tenant, models.wanted(body))))

    async def _not_here(self, request: Request) -> Response:
        self._key(request)
        raise ollama_requests.no_such(request.path_params["name"])

    async def _models_v0(self, request: Request) -> Response:
        return as_json(models.page_v0(await self._listing.all(self._key(request).tenant)))

    def _asking(self, ask: _Asking) -> _Handler:
        async def answer(request: Request) -> Response:
            key = self._key(request)
            with key.one_request():
                body = await bodies.read(request, self._max_body_bytes)
                conversations = await self._of(key.tenant, self._listing.chosen(body))
                await conversations.presence.worker(patience_s=self._patience_s)
                reply, num_tokens = await unless_left(request, ask(conversations.client, body))
                key.spend(num_tokens)
                return as_json(reply)

        return answer

    def _count_tokens(self, dialect: Dialect) -> _Handler:
        async def count(request: Request) -> Response:
            key = self._key(request)
            with key.one_request():
                body = await bodies.read(request, self._max_body_bytes)
                conversations = await self._of(key.tenant, self._listing.chosen(body))
                turn = await self._turn(key.tenant, dialect, body)
                named = {"object": "response.input_tokens"} if dialect is _RESPONSES else {}
                counted = {**named, "input_tokens": await conversations.count(turn)}
                return as_json(counted, more=told(turn.warnings))

        return count

    async def _turn(self, tenant: str, dialect: Dialect, body: bytes) -> Turn:
        """Parse a request into a `Turn`, preceded by the conversation that it continues. Raises `Fault`."""
        known = await self._lookups.items(tenant, body) if dialect is _RESPONSES else {}
        turn = responses.read(body, known) if known else dialect.read(body)
        if not turn.previous:
            return turn
        found = await self._lookups.find(tenant, turn.previous)
        return recorded.continued(turn, found and found.answer)

    def _of_answers(self, path: str, dialect: Dialect) -> list[Route]:
        """Return a dialect's routes that create an answer, read or delete a stored one, and cancel one."""
        named = f"{path}/{{id}}"
        return [
            Route(path, self._answering(dialect), methods=["POST"]),
            Route(named, self._recorded(dialect), methods=["GET", "DELETE"]),
            Route(f"{named}/cancel", self._cancelled(dialect), methods=["POST"]),
        ]

    async def _load(self, key: Key, model: str, *, unloads: bool) -> None:
        """Load or unload a model; with API keys do neither, as the model is not one tenant's."""
        if self._keys.are_needed:
            return
        client = (await self._of(key.tenant, model)).client
        if unloads:
            await client.unload()
        else:
            with contextlib.suppress(NoWorkerError):  # the first request with a prompt says so
                await client.load()

    def _answering(self, dialect: Dialect) -> _Handler:
        async def answer(request: Request) -> Response:
            key = self._key(request)
            with contextlib.ExitStack() as running:
                running.enter_context(key.one_request())
                body = await bodies.read(request, self._max_body_bytes)
                model, digest = self._listing.chosen(body), recorded.digest(dialect.name, body)
                if (told_at_once := dialect.at_once(body)) is not None:
                    await self._load(key, model, unloads=told_at_once["done_reason"] == "unload")
                    return as_json(told_at_once)
                if cut := await self._lookups.cut(key.tenant, request.headers, digest):
                    turn = dialect.read(body)
                    return self._followed(dialect, *cut, key, running, stream=turn.stream)
                key_id = await self._lookups.key_id(key.tenant, request.headers, model)
                turn = await self._turn(key.tenant, dialect, body)
                if key_id and turn.n > 1:
                    raise refused("n must be 1 with an Idempotency-Key", "n")
                conversations = await self._of(key.tenant, model)
                worker = await conversations.presence.worker(patience_s=self._patience_s)
                turn = turn if turn.model else msgspec.structs.replace(turn, model=worker.model)
                await conversations.start()
                note = recorded.new_note(key_id or uuid4().hex, int(time.time()), turn, dialect.name, digest)
                asker = Asker(key, self.counters, self._explain, running.pop_all())
                stays = bool(turn.asked.get("background"))
                begin = partial(conversations.answer, turn, asker.note, note, key_id, stays=stays)
                return Answer(dialect, turn, conversations, asker, begin)

        return answer

    def _followed(
        self,
        dialect: Dialect,
        found: Kept,
        after: Place | None,
        key: Key,
        running: contextlib.ExitStack,
        *,
        stream: bool,
    ) -> Response:
        conversations, answer = found
        turn = msgspec.structs.replace(answer.turn, stream=stream)
        asker = Asker(key, self.counters, self._explain, running.pop_all())
        return Answer(dialect, turn, conversations, asker, partial(conversations.follow, answer), after)

    def _recorded(self, dialect: Dialect) -> _Handler:
        async def show(request: Request) -> Response:
            """Return an answer that is in the log, whole or as a stream; for DELETE, remove its session."""
            key, wanted = self._key(request), request.path_params["id"]
            found = await self._lookups.kept(key.tenant, wanted, dialect.name)
            if request.method == "DELETE":
                await found.conversations.forget(found.answer.session)
                kind = dialect.name if dialect is _RESPONSES else f"{dialect.name}.deleted"
                return as_json({"id": wanted, "object": kind, "deleted": True})
            place = after(found.answer, request.headers, request.query_params)
            is_stream = EVENT_STREAM in request.headers.get("accept", "") or place is not None
            is_stream = is_stream or request.query_params.get("stream") == "true"
            if dialect is _RESPONSES and not is_stream:
                return as_json(answers.recorded(found.answer, own_id(wanted)))
            return self._followed(dialect, found, place, key, contextlib.ExitStack(), stream=is_stream)

        return show

    def _cancelled(self, dialect: Dialect) -> _Handler:
        async def cancel(request: Request) -> Response:
            tenant, wanted = self._key(request).tenant, request.path_params["id"]
            conversations, answer = await self._lookups.kept(tenant, wanted, dialect.name)
            answer = await following.cancel(conversations.client, answer.id) or answer
            if dialect is _RESPONSES:
                return as_json(answers.recorded(answer, own_id(wanted)))
            return as_json({"id": wanted, "object": dialect.name, "is_running": answer.result is None})

        return cancel

    async def _durable(self, request: Request) -> Response:
        tenant, wanted = self._key(request).tenant, request.path_params["id"]
        return Reading(await self._lookups.kept(tenant, wanted, _RESPONSES.name), request.query_params)

    async def _input_items(self, request: Request) -> Response:
        tenant, wanted = self._key(request).tenant, request.path_params["id"]
        _, answer = await self._lookups.kept(tenant, wanted, _RESPONSES.name)
        return as_json(items.page(answer, request.query_params))

    def _key(self, request: Request) -> Key:
        """Return a request's API key. Raises `Fault` if key, origin or host is not allowed."""
        origin = request.headers.get("origin")
        if origin is not None and not self._may_ask(origin):
            raise Fault(
                403, "pages of other sites may not ask; --cors names those that may", code="forbidden_origin"
            )
        if self._keys.are_needed:
            return self._keys.of(request.headers)
        # DNS rebinding: pages of a site whose name resolves to this machine send no Origin with a GET.
        name = name_in(f"//{request.headers.get('host', '')}")
        server: tuple[str, int] | None = request.scope.get("server")
        if server and is_loopback(server[0]) and may_be_a_site(name) and name not in self._cors_names:
            message = f"this gateway was asked as {printed(name)}: ask localhost, or name the site by --cors"
            raise Fault(403, message, code="forbidden_host")
        return self._keys.of(request.headers)

    def _may_ask(self, origin: str) -> bool:
        """Whether an origin's pages may send requests: this machine, desktop programs and `--cors` may."""
        return origin in self._cors or origin.startswith(PROGRAMS) or is_local(origin)

    async def _of(self, tenant: str, model: str) -> Conversations:
        async with self._connecting:
            made = self._conversations.get((tenant, model))
            if made is None or made.client.closed:  # credentials expire; a message may exceed a limit
                client = await self._connect(tenant, model)
                if made is not None:
                    await made.close()
                made = Conversations(client, idle_s=self._idle_s, is_stopping=self._stops)
                self._conversations[tenant, model] = made
            return made


async def _not_served(_: Request) -> Response:
    raise HTTPException(404)


def _without_slash(app: ASGIApp) -> ASGIApp:
    """Wrap an application so that it ignores a slash at the end of a path."""

    async def stripped(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.endswith("/") and path.strip("/"):
            scope = {**scope, "path": path.rstrip("/")}
        await app(scope, receive, send)

    return stripped


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
