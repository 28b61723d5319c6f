"""`turnkeep dashboard`: the workers of a prefix on a web page, with history, from their metrics messages.

The event loop receives the messages and adds a point to the history every few seconds; threads answer
requests from memory. Serves one page and one JSON document, and takes no input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import parse_qs

import click

from turnkeep_client.errors import TurnkeepError

from .concurrency import until_one_ends
from .fleet import Fleet
from .history import History
from .hosts import REFUSAL, may_ask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from turnkeep_client.client import Client

PAGE: Final = Path(__file__).with_name("dashboard.html")
#: Rates and percentiles are of so long.
_WINDOW_S: Final = 60.0
#: A client that sends nothing for so long is hung up on.
_PATIENCE_S: Final = 10.0
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class DashboardError(TurnkeepError):
    """The dashboard cannot run; the message gives the remedy."""


async def run(client: Client, host: str, port: int, *, keep_s: float, prefix: str) -> NoReturn:
    """Serve the page until cancelled. Raises `DashboardError`, also if NATS closes the connection."""
    dashboard = Dashboard(client, keep_s, prefix)
    with serving(dashboard, host, port) as url:
        click.echo(f"the dashboard is at {url}", err=True)
        await until_one_ends(dashboard.listen(), dashboard.keep())
    raise DashboardError("the NATS server has closed the connection; its log says why")


class Dashboard:
    """The data of the page. `document` may be called on any thread."""

    def __init__(self, client: Client, keep_s: float, prefix: str) -> None:
        self._client = client
        self._prefix = prefix
        self._fleet = Fleet(keep_s, window_s=_WINDOW_S)
        self._history = History(keep_s)
        self._is_new = asyncio.Event()

    async def listen(self) -> None:
        """Receive the workers' metrics messages until the client is closed."""
        async for metrics in self._client.metrics():
            if self._fleet.hear(metrics):
                self._is_new.set()  # so that a page shows it at once

    async def keep(self) -> NoReturn:
        """Add points to the history for ever."""
        while True:
            self._is_new.clear()
            self._history.take(self._fleet.sightings(), time.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._history.step_s):
                    await self._is_new.wait()

    def document(self, worker: str | None) -> dict[str, Any]:
        """Return the page's data: all workers now, and the history of `worker` (None: of one that is up)."""
        shown = self._history.shown(worker)
        return {"prefix": self._prefix, "connected": self._client.connected, **shown}


@contextlib.contextmanager
def serving(dashboard: Dashboard, host: str, port: int) -> Iterator[str]:
    """Serve HTTP on threads while the block runs; yields the address. Raises `DashboardError`."""
    page = PAGE.read_bytes()

    class Handler(_Handler):
        def content(self, path: str, query: dict[str, list[str]]) -> tuple[str, bytes] | None:
            if path == "/":
                return "text/html; charset=utf-8", page
            if path == "/history.json":
                found = dashboard.document(query.get("worker", [None])[0])
                return "application/json", json.dumps(found).encode()
            return None

    try:
        server = _Server((host, port), Handler)
    except OSError as error:
        raise DashboardError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --listen"
        ) from None
    thread = threading.Thread(target=server.serve_forever, name="dashboard", daemon=True)
    thread.start()
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # The base class's asks DNS for this machine's name, which may take seconds, and is not needed.
        TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that hangs up is no fault
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD, and nothing else."""

    timeout = _PATIENCE_S
    server_version = "turnkeep"
    sys_version = ""

    def content(self, path: str, query: dict[str, list[str]]) -> tuple[str, bytes] | None:
        """Return the content type and the content of a path; None for an unknown path."""
        raise NotImplementedError

    def do_GET(self) -> None:
        """Answer a GET with the content of the requested path."""
        if not may_ask(self.client_address[0], self.headers.get("Host", "")):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, explain=REFUSAL)
            return
        path, _, query = self.path.partition("?")
        found = self.content(path, parse_qs(query))
        if found is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        kind, body = found
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815  # the base class's name

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class's name
        """Log nothing, since each open page sends a request every few seconds."""
