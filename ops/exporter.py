"""`turnkeep exporter`: serves workers' metrics over HTTP, for Prometheus.

Receives the workers' messages and reads the state of the log's consumer; a scrape only formats values in
memory, so it never waits for NATS.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final, NoReturn

import click
from prometheus_client import CollectorRegistry, make_asgi_app
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from turnkeep_client.errors import NoWorkerError, TurnkeepError

from . import http_server
from .exposition import families
from .fleet import Fleet
from .hosts import REFUSAL, may_ask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector
    from starlette.types import ASGIApp, Receive, Scope, Send

    from turnkeep_client.client import Client
    from turnkeep_client.wire import Backlog

#: Seconds between two reads of the state of the log's consumer.
_LOOK_S: Final = 2.0
#: How long scrapes may take to end when the exporter stops.
_DRAIN_S: Final = 1


class ExporterError(TurnkeepError):
    """The exporter cannot run; the message says how to fix that."""


async def run(client: Client, host: str, port: int, *, keep_s: float) -> None:
    """Serve the metrics until SIGINT or SIGTERM. Print the address.

    A silent worker is forgotten after `keep_s`. Raises `TurnkeepError`, also if NATS closes the connection.
    """
    exporter = Exporter(client, keep_s)
    with http_server.listening(host, port) as listener:
        click.echo(f"serving metrics at {http_server.url_of(listener)}/metrics", err=True)
        running = http_server.server(metrics_app(exporter), _DRAIN_S)
        await http_server.serve(running, listener, exporter.listen(), exporter.look())
    if client.closed:
        raise ExporterError(client.why_closed)


class Exporter:
    """Collects the metrics for scrapes. Event loop only."""

    def __init__(self, client: Client, keep_s: float) -> None:
        self._client = client
        self._fleet = Fleet(keep_s)
        self._backlog: Backlog | None = None

    async def listen(self) -> None:
        """Receive the workers' metrics messages until the client is closed."""
        async for metrics in self._client.metrics():
            self._fleet.hear(metrics)

    async def look(self) -> NoReturn:
        """Read the state of the log's consumer every two seconds.

        Without an answer, such as for a NATS user without the right, the metrics of the state are left out.
        """
        while True:
            self._backlog = await self._looked()
            await asyncio.sleep(_LOOK_S)

    async def _looked(self) -> Backlog | None:
        with contextlib.suppress(NoWorkerError):
            return await self._client.backlog()
        return None

    def collect(self) -> Iterator[Metric]:
        """Yield the current metric families, for prometheus_client."""
        return families(self._fleet.sightings(), self._backlog, connected=self._client.connected)


def metrics_app(exporter: Collector) -> ASGIApp:
    """Return the ASGI application that serves the metrics.

    Answers 421 to a request from this machine whose Host header is neither `localhost` nor a loopback address
    (DNS rebinding).
    """
    registry = CollectorRegistry()
    registry.register(exporter)
    metrics: ASGIApp = make_asgi_app(registry)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        asked = Request(scope)
        may = may_ask(asked.client.host if asked.client else "", asked.headers.get("host", ""))
        await (metrics if may else PlainTextResponse(f"{REFUSAL}\n", 421))(scope, receive, send)

    return answer
