"""Runs the HTTP servers of gateway, console and exporter: their sockets, their limits, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import sys
from typing import TYPE_CHECKING, Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from turnkeep_client.errors import TurnkeepError

from .concurrency import until_one_ends

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from starlette.types import ASGIApp

_KEEP_ALIVE_S: Final = 75
#: A request's headers must have arrived within this time.
_HEAD_S: Final = 10.0


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address, with TCP_NODELAY. Raises `TurnkeepError`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        _check_alone(family, address[:2])
        listener = socket.create_server(address[:2], family=family, backlog=512)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
        raise TurnkeepError(f"cannot listen on {host}:{port} ({why}); choose another --listen") from None
    # asyncio sets it only for sockets that name their protocol. Without it a token can wait 40 ms for an ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _check_alone(family: int, address: tuple[Any, ...]) -> None:
    """On macOS, raise `OSError` if a program listens on this port of all addresses.

    The system would let this server listen beside it, and take its connections.
    """
    if sys.platform == "darwin":
        with socket.socket(family) as probe:
            if not probe.connect_ex(address):
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def url_of(listener: socket.socket) -> str:
    """Return the URL of a socket's address, without a path."""
    address, port = listener.getsockname()[:2]
    return f"http://{f'[{address}]' if ':' in address else address}:{port}"


class _Protocol(H11Protocol):
    """An HTTP/1.1 connection that closes if the head of a request does not arrive in time (`_HEAD_S`).

    The time runs from the start of the connection, and later from the first byte of each request.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._closing = self.loop.call_later(_HEAD_S, self._close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._closing = self._closing or self.loop.call_later(_HEAD_S, self._close)
        elif self._closing is not None:
            self._closing.cancel()
            self._closing = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._closing is not None:
            self._closing.cancel()

    def _close(self) -> None:
        self.transport.close()


class _Server(uvicorn.Server):
    """A server that leaves signals to the command.

    uvicorn's own raises a signal again once it has ended, which cancels what the command then closes.
    """

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def server(app: ASGIApp, drain_s: int) -> uvicorn.Server:
    """Return the server of an application; when it stops, running responses have `drain_s` to end."""
    errors = logging.getLogger("uvicorn.error")
    errors.setLevel(logging.ERROR)  # else clients that send nonsense fill the log
    errors.addFilter(_is_no_cancellation)
    return _Server(
        uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=drain_s,
        )
    )


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Drop tracebacks of answers that a stop cut off: uvicorn logs their number in one line before."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


async def serve(running: uvicorn.Server, listener: socket.socket, *parts: Coroutine[Any, Any, None]) -> None:
    """Serve until cancelled, or until one of `parts` ends; then wait for running responses."""
    serving = asyncio.create_task(running.serve(sockets=[listener]))
    try:
        await until_one_ends(*parts, _end_of(serving))
    finally:  # also if this is cancelled, as by SIGTERM: streams end first
        running.should_exit = True
        await serving


async def _end_of(task: asyncio.Task[None]) -> None:
    await asyncio.wait({task})


def end_at_eof(running: uvicorn.Server, hear: Callable[[bytes], object] = lambda _: None) -> None:
    """Pass standard input to `hear`; stop the server when the input ends: the parent closed it, or died."""

    def read() -> None:
        if said := os.read(sys.stdin.fileno(), 2**16):
            hear(said)
        else:
            running.should_exit = True
            asyncio.get_running_loop().remove_reader(sys.stdin)

    asyncio.get_running_loop().add_reader(sys.stdin, read)
