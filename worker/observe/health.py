"""Answers health probes over HTTP: does the worker need a restart (`/livez`), is it ready (`/readyz`).

Owns the port; `app` supplies the reasons why the worker is not healthy or not ready. An answer is one line.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import structlog
from anyio import (
    BrokenResourceError,
    CancelScope,
    ClosedResourceError,
    DelimiterNotFound,
    IncompleteRead,
    create_tcp_listener,
    move_on_after,
    sleep,
)
from anyio.streams.buffered import BufferedByteReceiveStream

from turnkeep_client.errors import TurnkeepError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anyio.abc import SocketStream

    from worker.process.setting_kinds import Endpoint

log = structlog.get_logger()

_MAX_HEAD_BYTES: Final = 8192
_PATIENCE_S: Final = 5.0
#: Limit of open connections, beyond which the oldest is closed: idle ones can neither use up file handles nor
#: block a probe, which sends its request at once.
_MAX_OPEN: Final = 64
#: The pause after a connection could not be accepted.
_RETRY_S: Final = 0.5


class HealthError(TurnkeepError):
    """The server cannot listen on the port; the message is one line."""


class HealthServer:
    """Answers GET and HEAD requests for the health paths. Event loop only."""

    def __init__(self, endpoint: Endpoint, paths: Mapping[str, Callable[[], list[str]]]) -> None:
        """Take `paths`, which maps each path to a function that lists the reasons for a 503.

        Without reasons the answer is 200.
        """
        self._endpoint = endpoint
        self._paths = paths
        #: The open connections, the oldest first; a dict because sets have no order.
        self._open: dict[CancelScope, None] = {}

    async def open(self) -> None:
        """Start to listen on the port. Raises `HealthError`."""
        host, port = self._endpoint
        try:
            self._listener = await create_tcp_listener(local_host=host, local_port=port)
        except OSError as error:
            raise HealthError(
                f"health: cannot listen on {self._endpoint} ({error.strerror}); choose another --health"
            ) from None

    async def serve(self) -> None:
        """Answer until cancelled; call after `open`."""
        is_told = False
        async with self._listener:
            while True:
                try:
                    await self._listener.serve(self._handle)
                except* OSError as group:  # such as "too many open files"
                    error: BaseException = group
                    while isinstance(error, BaseExceptionGroup):
                        error = error.exceptions[0]
                    if not is_told:
                        log.warning("health probes cannot be accepted; trying again", reason=str(error))
                    is_told = True
                await sleep(_RETRY_S)

    async def _handle(self, stream: SocketStream) -> None:
        if len(self._open) >= _MAX_OPEN:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        patience = move_on_after(_PATIENCE_S)
        self._open[patience] = None
        try:
            async with stream:
                with patience:
                    await stream.send(await self._answer(stream))
        except (BrokenResourceError, ClosedResourceError, IncompleteRead):
            pass  # the client has hung up
        finally:
            self._open.pop(patience, None)

    async def _answer(self, stream: SocketStream) -> bytes:
        try:
            head = await BufferedByteReceiveStream(stream).receive_until(b"\r\n\r\n", _MAX_HEAD_BYTES)
        except DelimiterNotFound:
            return _reply(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        match head.partition(b"\r\n")[0].split(b" "):
            case [b"GET" | b"HEAD" as method, target, b"HTTP/1.0" | b"HTTP/1.1"]:
                probe = self._paths.get(target.partition(b"?")[0].decode("latin-1"))
                if probe is None:
                    return _reply(HTTPStatus.NOT_FOUND)
                reasons = probe()
                status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
                return _reply(status, "; ".join(reasons) or "ok", with_body=method == b"GET")
            case [_, _, b"HTTP/1.0" | b"HTTP/1.1"]:
                return _reply(HTTPStatus.METHOD_NOT_ALLOWED)
        return _reply(HTTPStatus.BAD_REQUEST)


def _reply(status: HTTPStatus, line: str = "", *, with_body: bool = True) -> bytes:
    body = f"{line or status.phrase}\n".encode()
    head = (
        f"HTTP/1.1 {status} {status.phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
