"""Serves the console's HTTP API: workers and sessions as JSON, answers as events, and actions on sessions.

Reads sessions only through the client and `ops.log`. `door` has checked each request's token.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ops.log import conversation, copies, searching, written
from ops.log.costs import Costs
from ops.log.sessions import begun, find_session, list_sessions, order, running
from ops.log.tree import trees
from turnkeep_client.errors import (
    InvalidMessageError,
    NoAnswerError,
    NoWorkerError,
    ResultTimeoutError,
    TurnkeepError,
)
from turnkeep_client.messages import UNLOADED, Generate, Opened
from turnkeep_client.session import build
from turnkeep_client.session_log import find_request, read
from turnkeep_client.subjects import session_key

from .actions import ACTIONS, PATIENCE_S, Act, Details
from .door import PAGE, Door
from .live import Live, Log
from .streams import events, pieces
from .turns import inherited, shown
from .variants import VARIANT, joined, may_vary, stem, variants

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from ops.log.conversation import Turn
    from turnkeep_client.client import Client
    from turnkeep_client.history import Turn as Past
    from turnkeep_client.messages import Metrics
    from turnkeep_client.sampling import Sampling

T = TypeVar("T")

#: Sessions on one page of the list, and turns on one page of a conversation.
_SESSIONS: Final = 50
_TURNS: Final = 30
#: Most turns of the parent's conversation that are shown with a fork.
_INHERITED: Final = 30
#: First words and parents are read of at most this many sessions, the most recently active ones.
_READ: Final = 1000
#: Most answers streamed at once, and how long sending one event to a reader may take.
MAX_STREAMS: Final = 16
_SLOW_S: Final = 20.0
_MAX_BODY_BYTES: Final = 2**20
#: The temperature for another answer to the same question, if the default is 0.
_VARIED: Final = 0.7
#: How long to wait for a worker's metrics; a worker that needs longer counts as busy.
_PING_S: Final = 0.5
_AWAY: Final = "NATS does not answer; what is shown may be old, and goes on when it is back"


class Place(NamedTuple):
    """What the page Connect shows: the URLs of NATS server and gateway, and commands that use them.

    Without a running gateway its URL is a default.
    """

    nats: str
    gateway: str
    has_gateway: bool
    launch: str
    url: str


class Shelf(Protocol):
    """The models on this machine."""

    def listed(self) -> dict[str, Any]:
        """Return models on this machine, recommended models, and the running downloads. Blocks."""

    def pull(self, name: str) -> str:
        """Start the download of a model; return a message. Raises `TurnkeepError`."""


class Served(NamedTuple):
    """A subject prefix, and the model's name in the settings; `""` if the settings have only one model."""

    prefix: str
    model: str = ""


class _Wanted(Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class _Draft(Struct, frozen=True, forbid_unknown_fields=True):
    text: str


class _Question(Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    text: Annotated[str, Meta(min_length=1)]
    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    schema: dict[str, Any] | None = None
    vary: bool = False

    def options(self) -> Any:
        """Return the sampling options that the user has set, as arguments of a generate request."""
        names = ("max_tokens", "temperature", "top_p", "seed")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.schema is not None:
            given["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.schema}}
        return given


class Console:
    """The HTTP API for the sessions of one tenant and all workers of a subject prefix. Event loop only."""

    def __init__(
        self,
        client: Client,
        live: Live,
        sampling: Callable[[Client, Sampling], Awaitable[dict[str, Any]]],
        place: Callable[[], Place],
        shelf: Shelf,
        *,
        clients: Mapping[Served, Client],
        prefix: str,
        read_only: bool,
    ) -> None:
        """`sampling` adds default options to those of a question; `place` returns where programs connect.

        `clients` has all prefixes that have a console; the first console is at `/` (see `behind_one_door`).
        """
        #: Whether the server is shutting down; then streams end.
        self.is_stopping: Callable[[], bool] = lambda: False
        #: The log of the worker that runs this console; empty without one.
        self.log = Log()
        self._client = client
        self._clients = clients
        self._live = live
        self._sampling = sampling
        self._place = place
        self._shelf = shelf
        places = ["/", *(f"/of/{one.prefix}/" for one in [*clients][1:])]
        models = [
            {"name": one.model, "at": at, "is_this": one.prefix == prefix}
            for one, at in zip(clients, places, strict=True)
        ]
        self._about = {"prefix": prefix, "tenant": client.tenant, "read_only": read_only, "models": models}
        self._costs = Costs(client)
        self._num_streams = 0
        self.app = Starlette(
            routes=self._routes(read_only=read_only),
            exception_handlers={TurnkeepError: _on_error, HTTPException: _on_http},
        )

    def _routes(self, *, read_only: bool) -> list[Route | Mount]:
        one = "/api/sessions/{name}"
        acting = [
            Route(f"{one}/ask", self._ask, methods=["POST"]),
            Route(f"{one}/count", self._count, methods=["POST"]),
            Route(f"{one}/{{action}}", self._act, methods=["POST"]),
        ]
        of_models = [
            Route("/api/models", self._pull, methods=["POST"]),
            Route("/api/models/serve", self._serve, methods=["POST"]),
            Route("/api/models/unload", self._unload, methods=["POST"]),
        ]
        of_sessions = [
            Route("/api/sessions", self._sessions),
            Route(one, self._session),
            Route(f"{one}/tree", self._tree),
            Route(f"{one}/variants", self._variants),
            Route(f"{one}/export", self._export),
            Route(f"{one}/answers/{{seq:int}}", self._answer),
        ]
        return [
            Route("/api/workers", self._workers),
            Route("/api/place", self._where),
            Route("/api/log", self._last_lines),
            Route("/api/models", self._models),
            *([] if read_only else of_models),
            *map(self._connected, of_sessions if read_only else of_sessions + acting),
            Mount("/", StaticFiles(directory=PAGE, html=True)),
        ]

    def _connected(self, route: Route) -> Route:
        """Wrap a route so that it refuses requests at once while NATS is disconnected."""
        answer: Callable[[Request], Awaitable[Response]] = route.endpoint

        async def refused(request: Request) -> Response:
            if not self._client.connected:
                raise HTTPException(503, _AWAY)
            return await answer(request)

        return Route(route.path, refused, methods=list(route.methods or ()))

    async def _workers(self, request: Request) -> Response:
        figures = self._live.shown(request.query_params.get("worker"))
        is_served = await self._is_served() if figures["connected"] else False
        if is_served is False:  # NATS knows it at once; `up` turns false only after missed messages
            figures["workers"] = {name: one | {"up": False} for name, one in figures["workers"].items()}
        return _json(self._about | figures | {"is_served": is_served})

    async def _where(self, _: Request) -> Response:
        return _json((await asyncio.to_thread(self._place))._asdict())

    async def _models(self, _: Request) -> Response:
        listed = await asyncio.to_thread(self._shelf.listed)
        if listed["can_serve"]:
            served = await self._served()
            listed["can_serve"] = served is not None
            if served is not None:
                listed["served"] = [{"name": served.model, "is_loaded": served.device != UNLOADED}]
        return _json(listed)

    async def _pull(self, request: Request) -> Response:
        wanted = await _body(request, _Wanted)
        return _json({"said": self._shelf.pull(wanted.name)})

    async def _serve(self, request: Request) -> Response:
        wanted = await _body(request, _Wanted)
        return _json({"said": await self._client.load(wanted.name)})

    async def _unload(self, request: Request) -> Response:
        wanted = await _body(request, _Wanted)
        named = [client for one, client in self._clients.items() if one.model == wanted.name]
        if not named and (served := await self._served()) and served.model != wanted.name:
            raise TurnkeepError(f"{wanted.name} is not served here; {served.model} is")
        return _json({"said": await (named or [self._client])[0].unload()})

    async def _served(self) -> Metrics | None:
        """Return a worker's metrics; None if no worker serves the prefix, or if it is too busy to answer."""
        with contextlib.suppress(TimeoutError, NoAnswerError):
            async with asyncio.timeout(_PING_S):
                return await self._client.worker_metrics()
        return None

    async def _last_lines(self, _: Request) -> Response:
        return _json(self.log.shown())

    async def _is_served(self) -> bool | None:
        """Whether a worker serves the prefix; None if it is too busy, or NATS forbids this user to ask."""
        with contextlib.suppress(TimeoutError, TurnkeepError):
            async with asyncio.timeout(_PING_S):
                try:
                    await self._client.worker_metrics()
                except NoAnswerError:
                    return False
                return True
        return None

    async def _sessions(self, request: Request) -> Response:
        """Return a page of the list of sessions; the query's `words` and `state` filter the list.

        `words` must be in a session's name or first words or, with `whole`, in any of its texts. With `brief`
        a conversation's variants are one row, of the most recently active one, and costs are left out.
        """
        asked = request.query_params
        words, state = asked.get("words", "").strip().casefold(), asked.get("state", "")
        listed = await running(self._client, await list_sessions(self._client, self._client.tenant))
        rows = [row for row in listed if (row.state == state if state else row.state != "forgotten")]
        rows = order(rows, "name" if asked.get("sort") == "name" else "last")
        found: dict[str, str] = {}
        is_whole = True
        if words:
            if asked.get("whole"):
                found, is_whole = await searching.said(self._client, words, PATIENCE_S / 4)
            rows = [*await begun(self._client, rows[:_READ]), *rows[_READ:]]
            rows = [
                row
                for row in rows
                if row.session in found or words in f"{row.session} {row.begins or ''}".casefold()
            ]
        if asked.get("brief"):
            stems = {stem(row.session) for row in rows if may_vary(row.session)}
            varied = await begun(self._client, [row for row in listed if stem(row.session) in stems])
            rows = joined(rows, varied)
        skip = _number(asked.get("skip")) or 0
        page = rows[skip : skip + _SESSIONS]
        new = await begun(self._client, [row for row in page if row.begins is None])
        read = {row.session: row for row in new}
        page = [read.get(row.session, row) for row in page]
        costs = [] if asked.get("brief") else await self._costs.of(page)
        part = {"total": len(rows), "rows": page, "costs": costs, "each": _SESSIONS}
        return _json(part | {"found": found, "is_whole": is_whole})

    async def _session(self, request: Request) -> Response:
        name, asked = request.path_params["name"], request.query_params
        found = await find_session(self._client, session_key(self._client.tenant, name))
        row = (await running(self._client, [found]))[0] if found else None
        before, ends = _number(asked.get("before")), _number(asked.get("end"))
        mark = None if before is None or ends is None else conversation.Mark(before, ends)
        turns, more = await conversation.part(self._client, name, _TURNS, mark)
        cost = (await self._costs.of([row]))[0] if row else None
        past = await self._inherited(name, turns)
        there = await asyncio.to_thread(  # Markdown takes time
            lambda: [*map(inherited, past), *(shown(turn) for turn in turns if not _varies(turn))]
        )
        return _json({"row": row, "cost": cost, "turns": there, "more": more})

    async def _inherited(self, name: str, turns: Sequence[Turn]) -> tuple[Past, ...]:
        """Return the last turns that a fork has from its parent, if its `open` is among `turns`."""
        opens = [turn for turn in turns if isinstance(turn.result, Opened) and turn.result.parent]
        if not opens:
            return ()
        then = min((turn.seq for turn in turns if turn.seq > opens[-1].seq), default=math.inf)
        history = await self._client.session(name).history(before=then)
        return history.turns[-_INHERITED:]

    async def _variants(self, request: Request) -> Response:
        """Return the variants of a session's conversation."""
        name = request.path_params["name"]
        rows = await list_sessions(self._client, self._client.tenant, [f"{stem(name)}*"])
        rows = [row for row in rows if row.state != "forgotten"]
        return _json(variants(name, await begun(self._client, order(rows, "last")[:_READ])))

    async def _tree(self, request: Request) -> Response:
        """Return a session's tree of forks among the most recently active sessions; null if there is none."""
        name = request.path_params["name"]
        rows = order(await list_sessions(self._client, self._client.tenant), "last")[:_READ]
        try:
            found = trees(await begun(self._client, rows))
        except RecursionError:
            raise TurnkeepError("forks of forks are too many levels deep to be shown") from None
        return _json(next((tree for tree in found if any(one.session == name for one in tree)), None))

    async def _export(self, request: Request) -> Response:
        name = request.path_params["name"]
        if form := request.query_params.get("form"):
            return await self._written(name, form)
        key = session_key(self._client.tenant, name)
        log = await read(self._client.stored, key)
        file = await asyncio.to_thread(copies.exported, log, await copies.read_parts(self._client, log))
        attached = {"Content-Disposition": f'attachment; filename="{name}.turnkeep"'}
        return StreamingResponse(pieces(file), 200, attached, "application/octet-stream")

    async def _written(self, name: str, form: str) -> Response:
        history = await self._client.session(name).history()
        if not history.turns:
            raise HTTPException(404, f"the log has no conversation of {name}")
        match form:
            case "md":
                body, kind = written.as_markdown(name, history).encode(), "text/markdown"
            case "json":
                body, kind = written.as_json(history), "application/json"
            case _:
                raise HTTPException(404, f"there is no form {form!r}; there are md and json")
        attached = {"Content-Disposition": f'attachment; filename="{name}.{form}"'}
        return Response(body, 200, attached, kind)

    async def _ask(self, request: Request) -> Response:
        """Store a question in the log; return its id and sequence, by which `_answer` streams the answer."""
        key = session_key(self._client.tenant, request.path_params["name"])
        question = await _body(request, _Question)
        messages = [("system", question.system), ("user", question.text)]
        options = await self._sampling(self._client, question.options())
        if question.vary and question.temperature is None:  # at 0 the answer would be the same again
            options["temperature"] = options.get("temperature") or _VARIED
        generate = build(
            Generate,
            question.id,
            messages=[{"role": role, "content": text} for role, text in messages if text],
            **options,
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                call = await self._client.submit(key, generate)
        except TimeoutError:
            raise NoWorkerError(f"the log did not confirm the question within {PATIENCE_S:.0f} s") from None
        return _json({"id": call.id, "seq": call.seq})

    async def _count(self, request: Request) -> Response:
        """Count the tokens of a message, and those of the session with it; `context` of them fit (0: all)."""
        wanted = await _body(request, _Draft)
        session = self._client.session(request.path_params["name"])
        counted = await session.count(messages=[{"role": "user", "content": wanted.text}])
        context = (await self._client.worker_metrics()).context_tokens
        return _json({"tokens": counted.tokens, "position": counted.position, "context": context})

    async def _act(self, request: Request) -> Response:
        name, action = request.path_params["name"], request.path_params["action"]
        if action not in ACTIONS:
            raise HTTPException(404, f"there is no action {action!r}; there are {', '.join(ACTIONS)}")
        act = Act(self._client, self._client.session(name), await _body(request, Details))
        return _json({"said": await ACTIONS[action](act)})

    async def _answer(self, request: Request) -> Response:
        """Stream the answer to a question in the log, from the first token on, whichever client asked it."""
        name, seq = request.path_params["name"], request.path_params["seq"]
        stored = await find_request(self._client.stored, session_key(self._client.tenant, name), seq)
        asked = stored and stored.request
        if not isinstance(asked, Generate):
            raise HTTPException(404, f"the log has no question at {seq} in {name}")
        if self._num_streams >= MAX_STREAMS:
            raise HTTPException(503, f"{MAX_STREAMS} answers are being streamed already")
        self._num_streams += 1
        sent = events(self._client.session(name), asked, seq, self.is_stopping)
        return _Events(sent, self._close_stream)

    def _close_stream(self) -> None:
        self._num_streams -= 1


class _Events(StreamingResponse):
    """A response of server-sent events, which ends if sending one event takes too long (`_SLOW_S`)."""

    def __init__(self, sent: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(sent, media_type="text/event-stream")
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end, the client disconnects, or a send takes too long."""

        async def in_time(message: Any) -> None:
            async with asyncio.timeout(_SLOW_S):
                await send(message)

        try:
            with contextlib.suppress(TimeoutError):
                await super().__call__(scope, receive, in_time)
        finally:
            self._on_end()


def _varies(turn: Turn) -> bool:
    """Whether a turn only began a variant of a conversation, which is no event to show."""
    return isinstance(turn.result, Opened) and VARIANT in turn.result.tags


async def _body(request: Request, kind: type[T]) -> T:
    """Read and decode a request's JSON body. Raises `HTTPException`."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {_MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPException(400, f"the body is not valid: {error}") from None


def _number(text: str | None) -> int | None:
    """Parse a number in a query string; return None for None. Raises `HTTPException`."""
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 15:
        raise HTTPException(400, f"{text!r} is no number")
    return int(text)


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def _on_error(_: Request, error: Exception) -> Response:
    match error:
        case InvalidMessageError():
            status = 400
        case NoWorkerError() | ResultTimeoutError():
            status = 503
        case _:
            status = 409
    return _json({"error": str(error)}, status)


async def _on_http(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404 and "/api/" not in request.url.path:
        return PlainTextResponse(
            f"There is no page {request.url.path}; the console is at {request.base_url}\n", 404
        )
    return _json({"error": getattr(error, "detail", str(error))}, status)


def behind_one_door(consoles: Mapping[str, Console], token: str) -> Starlette:
    """Build one app of several consoles, which `Door` protects: the first at `/`, others at `/of/PREFIX/`."""
    (_, first), *others = consoles.items()
    return Starlette(
        routes=[*(Mount(f"/of/{prefix}", one.app) for prefix, one in others), Mount("/", first.app)],
        middleware=[Middleware(Door, token=token)],
        exception_handlers={HTTPException: _on_http},
    )
