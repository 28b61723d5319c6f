"""Puts the console together: its HTTP API, which is in parts by subject, its page, and who may ask.

The console reads sessions only through the client and `ops.log`. `token_check` checks each request first.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from turnkeep_client.errors import TurnkeepError

from .json_http import as_json, on_error, on_http
from .live import LiveFigures, Log
from .model_api import ModelApi
from .question_api import QuestionApi
from .session_api import SessionApi
from .token_check import PAGE, TokenCheck

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from turnkeep_client.client import Client
    from turnkeep_client.sampling import Sampling

    from .model_api import LocalModels, ServedPrefix

_AWAY: Final = "NATS does not answer; what is shown may be old, and goes on when it is back"


class Addresses(NamedTuple):
    """What the page Connect shows: the URLs of NATS server and gateway, and commands that use them.

    Without a running gateway its URL is a default.
    """

    nats: str
    gateway: str
    has_gateway: bool
    launch: str
    url: str


class Console:
    """The HTTP API for the sessions of one tenant and all workers of a subject prefix. Event loop only."""

    def __init__(
        self,
        client: Client,
        live: LiveFigures,
        sampling: Callable[[Client, Sampling], Awaitable[dict[str, Any]]],
        addresses: Callable[[], Addresses],
        local_models: LocalModels,
        *,
        clients: Mapping[ServedPrefix, Client],
        prefix: str,
        read_only: bool,
    ) -> None:
        """`sampling` adds default options to those of a question; `addresses` returns where programs connect.

        `clients` has all prefixes that have a console; the first console is at `/` (see `behind_token`).
        """
        self.prefix = prefix
        self.live = live
        #: The log of the worker that runs this console; empty without one.
        self.log = Log()
        self._client = client
        self._addresses = addresses
        self._questions = QuestionApi(client, sampling)
        models = ModelApi(client, live, local_models, clients=clients, prefix=prefix, read_only=read_only)
        of_sessions = [*SessionApi(client).routes(), *self._questions.routes(read_only=read_only)]
        self.app = Starlette(
            routes=[
                Route("/api/place", self._where),
                Route("/api/log", self._last_lines),
                *models.routes(read_only=read_only),
                *map(self._connected, of_sessions),
                Mount("/", StaticFiles(directory=PAGE, html=True)),
            ],
            exception_handlers={TurnkeepError: on_error, HTTPException: on_http},
        )

    def end_streams_when(self, is_stopping: Callable[[], bool]) -> None:
        """End the streams of answers once `is_stopping` returns true: the server is shutting down."""
        self._questions.is_stopping = is_stopping

    def _connected(self, route: Route) -> Route:
        """Wrap a route so that it refuses requests at once while NATS is disconnected."""
        answer: Callable[[Request], Awaitable[Response]] = route.endpoint

        async def refused(request: Request) -> Response:
            if not self._client.connected:
                raise HTTPException(503, _AWAY)
            return await answer(request)

        return Route(route.path, refused, methods=list(route.methods or ()))

    async def _where(self, _: Request) -> Response:
        return as_json((await asyncio.to_thread(self._addresses))._asdict())

    async def _last_lines(self, _: Request) -> Response:
        return as_json(self.log.shown())


def behind_token(consoles: Sequence[Console], token: str) -> Starlette:
    """Build one app of several consoles behind a `TokenCheck`: the first at `/`, others at `/of/PREFIX/`."""
    first, *others = consoles
    return Starlette(
        routes=[*(Mount(f"/of/{one.prefix}", one.app) for one in others), Mount("/", first.app)],
        middleware=[Middleware(TokenCheck, token=token)],
        exception_handlers={HTTPException: on_http},
    )
