"""Runs the gateway's HTTP server until a signal ends it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final

import uvicorn

from turnkeep_client.errors import TurnkeepError

if TYPE_CHECKING:
    from .app import Gateway

#: How long answers may take to end when the server does. Their clients ask again, and get the rest.
_DRAIN_S: Final = 10
_KEEP_ALIVE_S: Final = 75


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens there. Raises `TurnkeepError`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=512)
    except OSError as error:
        raise TurnkeepError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


def server(gateway: Gateway) -> uvicorn.Server:
    """Return a server of the gateway's application."""
    made = uvicorn.Server(
        uvicorn.Config(
            gateway.app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_DRAIN_S,
        )
    )
    gateway.is_stopping = lambda: made.should_exit
    return made


async def serve(gateway: Gateway, server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, then let answers end."""
    try:
        await server.serve(sockets=[listener])
    finally:
        await gateway.close()
