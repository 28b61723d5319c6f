"""Serves the workers of a prefix as JSON, and the models on this machine, which it loads and unloads."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from msgspec import Struct
from starlette.routing import Route

from turnkeep_client.errors import NoAnswerError, TurnkeepError
from turnkeep_client.messages import UNLOADED

from .json_http import as_json, read_body

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from turnkeep_client.client import Client
    from turnkeep_client.messages import Metrics

    from .live import LiveFigures

#: How long to wait for a worker's metrics; a worker that needs longer counts as busy.
_PING_S: Final = 0.5


class LocalModels(Protocol):
    """The models on this machine."""

    def listed(self) -> dict[str, Any]:
        """Return models on this machine, recommended models, and the running downloads. Blocks."""

    def pull(self, name: str) -> str:
        """Start the download of a model; return a message. Raises `TurnkeepError`."""


class ServedPrefix(NamedTuple):
    """A subject prefix, and the model's name in the settings; `""` if the settings have only one model."""

    prefix: str
    model: str = ""


class _Wanted(Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class ModelApi:
    """The part of the API that shows workers and models. Event loop only."""

    def __init__(
        self,
        client: Client,
        live: LiveFigures,
        local_models: LocalModels,
        *,
        clients: Mapping[ServedPrefix, Client],
        prefix: str,
        read_only: bool,
    ) -> None:
        """`clients` has all prefixes that have a console, of which `client` has this one."""
        self._client = client
        self._clients = clients
        self._live = live
        self._local_models = local_models
        places = ["/", *(f"/of/{one.prefix}/" for one in [*clients][1:])]
        models = [
            {"name": one.model, "at": at, "is_this": one.prefix == prefix}
            for one, at in zip(clients, places, strict=True)
        ]
        self._about = {"prefix": prefix, "tenant": client.tenant, "read_only": read_only, "models": models}

    def routes(self, *, read_only: bool) -> list[Route]:
        """Return the routes; `read_only` leaves out those that change something."""
        acting = [
            Route("/api/models", self._pull, methods=["POST"]),
            Route("/api/models/serve", self._serve, methods=["POST"]),
            Route("/api/models/unload", self._unload, methods=["POST"]),
        ]
        return [
            Route("/api/workers", self._workers),
            Route("/api/models", self._models),
            *([] if read_only else acting),
        ]

    async def _workers(self, request: Request) -> Response:
        figures = self._live.shown(request.query_params.get("worker"))
        is_served = await self._is_served() if figures["connected"] else False
        if is_served is False:  # NATS knows it at once; `up` turns false only after missed messages
            figures["workers"] = {name: one | {"up": False} for name, one in figures["workers"].items()}
        return as_json(self._about | figures | {"is_served": is_served})

    async def _models(self, _: Request) -> Response:
        listed = await asyncio.to_thread(self._local_models.listed)
        if listed["can_serve"]:
            served = await self._served()
            listed["can_serve"] = served is not None
            if served is not None:
                listed["served"] = [{"name": served.model, "is_loaded": served.device != UNLOADED}]
        return as_json(listed)

    async def _pull(self, request: Request) -> Response:
        wanted = await read_body(request, _Wanted)
        return as_json({"said": self._local_models.pull(wanted.name)})

    async def _serve(self, request: Request) -> Response:
        wanted = await read_body(request, _Wanted)
        return as_json({"said": await self._client.load(wanted.name)})

    async def _unload(self, request: Request) -> Response:
        wanted = await read_body(request, _Wanted)
        named = [client for one, client in self._clients.items() if one.model == wanted.name]
        if not named and (served := await self._served()) and served.model != wanted.name:
            raise TurnkeepError(f"{wanted.name} is not served here; {served.model} is")
        return as_json({"said": await (named or [self._client])[0].unload()})

    async def _served(self) -> Metrics | None:
        """Return a worker's metrics; None if no worker serves the prefix, or if it is too busy to answer."""
        with contextlib.suppress(TimeoutError, NoAnswerError):
            async with asyncio.timeout(_PING_S):
                return await self._client.worker_metrics()
        return None

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
