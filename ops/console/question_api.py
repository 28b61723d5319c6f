"""Takes questions to sessions and actions on them, and streams answers as events."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ops.log.ending import end
from turnkeep_client.errors import NoWorkerError, ResultTimeoutError
from turnkeep_client.messages import Generate
from turnkeep_client.session import build
from turnkeep_client.session_log import find_request
from turnkeep_client.subjects import session_key

from .json_http import as_json, read_body
from .streams import events
from .variants import VARIANT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from turnkeep_client.client import Client
    from turnkeep_client.sampling import Sampling
    from turnkeep_client.session import Session

#: Most answers streamed at once, and how long sending one event to a reader may take.
MAX_STREAMS: Final = 16
_SLOW_S: Final = 20.0
#: The largest question: its images are base64.
_MOST_BYTES: Final = 64 * 2**20
#: The temperature for another answer to the same question, if the default is 0.
_VARIED: Final = 0.7


class _Draft(Struct, frozen=True, forbid_unknown_fields=True):
    text: str


class _Question(Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    text: str
    images: tuple[str, ...] = ()
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


class QuestionApi:
    """The part of the API that asks questions, acts on sessions and streams answers. Event loop only."""

    def __init__(
        self, client: Client, sampling: Callable[[Client, Sampling], Awaitable[dict[str, Any]]]
    ) -> None:
        """`sampling` adds default options to those of a question."""
        #: Whether the server is shutting down; then streams end.
        self.is_stopping: Callable[[], bool] = lambda: False
        self._client = client
        self._sampling = sampling
        self._num_streams = 0

    def routes(self, *, read_only: bool) -> list[Route]:
        """Return the routes, which all need NATS; `read_only` leaves out all but the stream of an answer."""
        one = "/api/sessions/{name}"
        acting = [
            Route(f"{one}/ask", self._ask, methods=["POST"]),
            Route(f"{one}/count", self._count, methods=["POST"]),
            Route(f"{one}/{{action}}", self._act, methods=["POST"]),
        ]
        return [Route(f"{one}/answers/{{seq:int}}", self._answer), *([] if read_only else acting)]

    async def _ask(self, request: Request) -> Response:
        """Store a question in the log; return its id and sequence, by which `_answer` streams the answer."""
        key = session_key(self._client.tenant, request.path_params["name"])
        question = await read_body(request, _Question, _MOST_BYTES)
        images = [{"type": "image", "data": one} for one in question.images]
        if not (question.text or images):
            raise HTTPException(400, "the question is empty; it needs a text or an image")
        asked = [*images, {"type": "text", "text": question.text}] if images else question.text
        messages = [("system", question.system), ("user", asked)]
        options = await self._sampling(self._client, question.options())
        if question.vary and question.temperature is None:  # at 0 the answer would be the same again
            options["temperature"] = options.get("temperature") or _VARIED
        generate = build(
            Generate,
            question.id,
            messages=[{"role": role, "content": content} for role, content in messages if content],
            **options,
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                call = await self._client.submit(key, generate)
        except TimeoutError:
            raise NoWorkerError(f"the log did not confirm the question within {PATIENCE_S:.0f} s") from None
        return as_json({"id": call.id, "seq": call.seq})

    async def _count(self, request: Request) -> Response:
        """Count the tokens of a message, and those of the session with it; `context` of them fit (0: all)."""
        wanted = await read_body(request, _Draft)
        session = self._client.session(request.path_params["name"])
        counted = await session.count(messages=[{"role": "user", "content": wanted.text}])
        context = (await self._client.worker_metrics()).context_tokens
        return as_json({"tokens": counted.tokens, "position": counted.position, "context": context})

    async def _act(self, request: Request) -> Response:
        name, action = request.path_params["name"], request.path_params["action"]
        if action not in ACTIONS:
            raise HTTPException(404, f"there is no action {action!r}; there are {', '.join(ACTIONS)}")
        act = Act(self._client, self._client.session(name), await read_body(request, Details))
        return as_json({"said": await ACTIONS[action](act)})

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


#: Time limit of an action, and of storing a question in the log.
PATIENCE_S: Final = 20.0


class Details(Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of an action, each needs some: a request's id, a fork's name, a position in tokens."""

    id: str = ""
    name: str = ""
    position: int | None = None
    is_variant: bool = False


class Act(NamedTuple):
    """The client and session that an action works on, and its arguments."""

    client: Client
    session: Session
    details: Details


async def _open(act: Act) -> str:
    await act.session.open(timeout_s=PATIENCE_S)
    return "opened again"


async def _cancel(act: Act) -> str:
    return f"cancelled an answer that was {(await act.session.cancel(act.details.id)).was}"


async def _close(act: Act) -> str:
    try:
        closed = await end(act.client, act.session.key.session, PATIENCE_S, forget=False)
    except ResultTimeoutError:  # the log has the close
        return "it closes as soon as the requests before are answered"
    return f"closed at position {closed.position}"


async def _forget(act: Act) -> str:
    # The answer that runs has no reader any more, and would be in the way until it ends.
    closed = await end(act.client, act.session.key.session, PATIENCE_S, forget=True, cancel=True)
    rest = "" if closed.settled else "; some of it may stay on a disk until a worker can erase it"
    return f"removed from the log and the worker's disk{rest}"


async def _fork(act: Act) -> str:
    tags = (VARIANT,) if act.details.is_variant else ()
    await act.session.fork(act.details.name, act.details.position, tags=tags, timeout_s=PATIENCE_S)
    return f"forked as {act.details.name}"


ACTIONS: Final[dict[str, Callable[[Act], Awaitable[str]]]] = {
    "open": _open,
    "cancel": _cancel,
    "close": _close,
    "forget": _forget,
    "fork": _fork,
}
