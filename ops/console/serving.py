"""`turnkeep console`: runs the HTTP server until a signal ends it, or NATS closes the connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import uvicorn

from ops.concurrency import until_one_ends
from turnkeep_client.errors import TurnkeepError

from .app import Console, behind_token
from .live import LiveFigures

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from turnkeep_client.client import Client
    from turnkeep_client.sampling import Sampling

    from .app import Addresses
    from .model_api import LocalModels, ServedPrefix

#: How long streams may take to end when the server stops; pages reopen them after a restart.
_DRAIN_S: Final = 3


class ConsoleError(TurnkeepError):
    """The console cannot run; the message says how to fix that."""


async def run(
    clients: Mapping[ServedPrefix, Client],
    host: str,
    port: int,
    *,
    keep_s: float,
    read_only: bool,
    opens: bool,
    until_eof: bool,
    token: str,
    sampling: Callable[[Client, Sampling], Awaitable[dict[str, Any]]],
    addresses: Callable[[], Addresses],
    local_models: LocalModels,
) -> None:
    """Serve until a signal or, with `until_eof`, the end of standard input; `opens` the page in a browser.

    Build a console for each prefix in `clients`. With `until_eof`, standard input is the worker's log, which
    the first console shows. Raises `ConsoleError`, also if NATS closes the connection.
    """
    lives = [LiveFigures(client, keep_s) for client in clients.values()]
    consoles = {
        prefix: Console(
            client,
            live,
            sampling,
            addresses,
            local_models,
            clients=clients,
            prefix=prefix,
            read_only=read_only,
        )
        for live, ((prefix, _), client) in zip(lives, clients.items(), strict=True)
    }
    with contextlib.closing(listening(host, port)) as listener, contextlib.ExitStack() as stack:
        running = server(consoles, token)
        if until_eof:
            asyncio.get_running_loop().add_reader(sys.stdin, _hear, next(iter(consoles.values())), running)
        url = _url(listener, token)
        click.echo(f"the console is at {url}", err=True)
        serving = asyncio.create_task(running.serve(sockets=[listener]))
        try:
            if opens:
                stack.enter_context(_opened(url))
            parts = [part for live in lives for part in (live.listen(), live.keep())]
            await until_one_ends(*parts, _end_of(serving))
        finally:  # also if a signal has cancelled this: streams end first
            running.should_exit = True
            await serving
    if not all(client.connected for client in clients.values()):
        raise ConsoleError("the NATS server has closed the connection; its log says why")


def _url(listener: socket.socket, token: str) -> str:
    address, at = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    return f"http://{shown}:{at}/?token={token}"


@contextlib.contextmanager
def _opened(url: str) -> Iterator[None]:
    """Open `url`, which has a token, in the browser; enter the block at once.

    The browser's arguments, which other users can see, name a file that redirects to the URL. The file lasts
    as long as the block. A browser in a terminal may run as long as the block too, so a daemon thread waits
    for its end.
    """
    made, name = tempfile.mkstemp(prefix="turnkeep-", suffix=".html")  # with mode 0600
    page = Path(name)

    def show() -> None:
        if sys.platform == "darwin":  # where `webbrowser` asks by AppleScript, which opens no files
            has_opened = subprocess.run(["open", page], check=False, capture_output=True).returncode == 0
        else:
            has_opened = webbrowser.open(page.as_uri())
        if not has_opened:
            click.echo("turnkeep: no browser was found; open this address in one", err=True)

    try:
        with os.fdopen(made, "w") as file:
            file.write(f'<meta http-equiv="refresh" content="0; url={url}">\n')
        threading.Thread(target=show, daemon=True).start()
        yield
    finally:
        page.unlink(missing_ok=True)


def _hear(console: Console, running: uvicorn.Server) -> None:
    """Read the worker's log from standard input; stop the server at its end, as the worker has ended."""
    if said := os.read(sys.stdin.fileno(), 2**16):
        console.log.add(said)
    else:
        running.should_exit = True
        asyncio.get_running_loop().remove_reader(sys.stdin)


async def _end_of(task: asyncio.Task[None]) -> None:
    await asyncio.wait({task})


def listening(host: str, port: int) -> socket.socket:
    """Return a listening socket with TCP_NODELAY, to send events without delay. Raises `ConsoleError`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
        raise ConsoleError(f"cannot listen on {host}:{port} ({why}); choose another --listen") from None
    # asyncio sets TCP_NODELAY only for sockets that name their protocol.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def server(consoles: Mapping[str, Console], token: str) -> uvicorn.Server:
    """Return an HTTP server for these consoles, which are given by subject prefix."""
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # else clients that send nonsense fill the log
    made = uvicorn.Server(
        uvicorn.Config(
            behind_token(consoles, token),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_DRAIN_S,
        )
    )
    for console in consoles.values():
        console.end_streams_when(lambda: made.should_exit)
    return made
