"""`turnkeep exporter`: serves workers' metrics over HTTP, for Prometheus.

The event loop receives the workers' messages and reads the state of the log's consumer. Each scrape runs on
its own thread, and only formats values in memory, so it never waits for NATS.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final, NoReturn

import click

from turnkeep_client.errors import NoWorkerError, TurnkeepError

from .concurrency import until_one_ends
from .fleet import Fleet
from .hosts import REFUSAL, may_ask

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from prometheus_client.metrics_core import Metric

    from turnkeep_client.client import Client
    from turnkeep_client.wire import Backlog

#: Seconds between two reads of the state of the log's consumer.
_LOOK_S: Final = 2.0


class ExporterError(TurnkeepError):
    """The exporter cannot run; the message says how to fix that."""


async def run(client: Client, host: str, port: int, *, keep_s: float) -> NoReturn:
    """Serve the metrics until cancelled. Raises `ExporterError`, also if NATS closes the connection."""
    exporter = Exporter(client, keep_s)
    with serving(exporter, host, port) as url:
        click.echo(f"serving metrics at {url}", err=True)
        await until_one_ends(exporter.listen(), exporter.look())
    raise ExporterError("the NATS server has closed the connection; its log says why")


class Exporter:
    """Collects the metrics for scrapes. `collect` may be called on any thread."""

    def __init__(self, client: Client, keep_s: float) -> None:
        self._client = client
        self._fleet = Fleet(keep_s)
        self._backlog: Backlog | None = None

    async def listen(self) -> None:
        """Receive the workers' metrics messages until the client is closed."""
        async for metrics in self._client.metrics():
            self._fleet.hear(metrics)

    async def look(self) -> NoReturn:
        """Read the state of the log's consumer every `_LOOK_S` seconds.

        The state is unknown (None) if there is no consumer, or if this NATS user may not read it.
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
        from .exposition import families

        return families(self._fleet.sightings(), self._backlog, connected=self._client.connected)


@contextlib.contextmanager
def serving(exporter: Exporter, host: str, port: int) -> Iterator[str]:
    """Answer scrapes on threads while the block runs; yields the address. Raises `ExporterError`."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise ExporterError("prometheus_client is missing; pip install 'turnkeep[ops]' brings it") from None
    registry = CollectorRegistry()
    registry.register(exporter)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ExporterError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --listen"
        ) from None
    server.set_app(_guarded(server.get_app()))  # type: ignore[arg-type]  # its stub has None for no app
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _guarded(app: WSGIApplication) -> WSGIApplication:
    """Wrap an app so that it refuses requests whose Host header names another machine."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if may_ask(environ["REMOTE_ADDR"], environ.get("HTTP_HOST", "")):
            return app(environ, start_response)
        start_response("421 Misdirected Request", [("Content-Type", "text/plain")])
        return [f"{REFUSAL}\n".encode()]

    return answer
