"""The client's connection to NATS: connects, knows whether it is up, and says why an operation failed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any, Final, TypeVar

import nats.errors

from .cancelling import cancellable, to_its_end
from .errors import (
    ClientClosedError,
    FullServerError,
    MessageTooLargeError,
    NoAnswerError,
    NoServerError,
    NotPermittedError,
    NoWorkerError,
)
from .nats_client import is_clustered, is_full, refusal, unreachable
from .redact import redact, shown
from .writes import Writes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from .nats_client import Nats

_RECONNECT_PAUSE_S: Final = 0.25

#: Bytes of a header beside its name and value, with its share of the lines around all headers.
_HEADER_BYTES: Final = 16

#: nats-py does not wrap a connection reset.
NATS_ERRORS: Final = (nats.errors.Error, OSError)

#: The errors of nats-py that mean a lost connection.
_LOST_ERRORS: Final = (
    nats.errors.ConnectionClosedError,
    nats.errors.ConnectionDrainingError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.StaleConnectionError,
    ConnectionError,
)

_T = TypeVar("_T")


class _RefusedError(Exception):
    """The server refuses this user; the message says why."""


class _UnreachedError(Exception):
    """No server could be reached; the message says why."""


class Connection:
    """A connection to NATS. If it is lost, it reconnects without limit. Event loop only."""

    def __init__(self, connection: Nats) -> None:
        self._nats = connection
        #: Number of reconnections. Subscriptions miss messages published while disconnected.
        self.epoch = 0
        self.closed = False
        self._is_leaving = False
        self._may_be_refused = True  # until it is connected for the first time
        self._num_to_try = 1  # servers that were not tried yet
        #: What waits until the log has stored it.
        self.writes = Writes()
        #: Events that are set on every reconnection and on close.
        self.watchers: set[asyncio.Event] = set()
        self._attempts: set[asyncio.Timeout] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connected = asyncio.Event()
        self._last_error = ""
        #: The server's last permission errors, as text.
        self._denials = deque[str](maxlen=16)

    async def connect(self, url: str, timeout_s: float, **options: Any) -> None:
        """Connect to one of the URLs in `url`, which commas separate, within `timeout_s`.

        `options` are those of nats-py's `connect`. Raises `NoServerError` (`FullServerError` if it has no
        connection left), and `NotPermittedError` if a server refuses the credentials or TLS.
        """
        self._loop = asyncio.get_running_loop()
        urls = url.split(",")
        self._num_to_try = len(urls)
        try:
            async with asyncio.timeout(timeout_s):
                await self._nats.connect(
                    urls,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnected,
                    reconnected_cb=self._on_reconnected,
                    closed_cb=self._on_closed,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_RECONNECT_PAUSE_S,
                    **options,
                )
        except _RefusedError as error:
            await self._nats.abandon()
            raise NotPermittedError(f"the NATS server at {shown(url)} {error}") from None
        except (_UnreachedError, *NATS_ERRORS) as error:
            await self._nats.abandon()
            why = redact(self._last_error or str(error)) or f"no answer within {timeout_s} s"
            raise self._no_server(f"no NATS server at {shown(url)}: {why}") from None
        self._may_be_refused = False
        self._connected.set()

    async def close(self) -> None:
        """Close the connection."""
        self._is_leaving = True
        with contextlib.suppress(*NATS_ERRORS):  # the server may be gone
            await to_its_end(self._nats.close())

    @property
    def why_closed(self) -> str:
        """A sentence that says which side closed the connection, and why."""
        if self._is_leaving or self._nats.last_error is None:
            return "the client is closed"
        error = self._nats.last_error
        return f"the NATS server {refusal(error) or f'has closed the connection ({redact(str(error))})'}"

    @property
    def connected(self) -> bool:
        """Whether the connection is up."""
        return self._connected.is_set() and not self.closed

    @property
    def is_clustered(self) -> bool:
        """Whether the connection's server belongs to a cluster."""
        return is_clustered(self._nats)

    def _check(self, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        if self.closed:
            raise ClientClosedError(self.why_closed)
        if self._loop is not asyncio.get_running_loop():  # else both loops would wait for ever
            raise RuntimeError(
                "the client was connected in another event loop: connect in this one too, or keep one loop"
            )
        # The server counts headers too, and ends the connection of a client that sends too much.
        lines = (f"{name}{value}".encode() for name, value in (headers or {}).items())
        size_bytes = len(body) + sum(_HEADER_BYTES + len(line) for line in lines)
        if size_bytes > self._nats.max_payload:
            raise MessageTooLargeError(
                f"the request has {size_bytes} bytes, the NATS server accepts {self._nats.max_payload} at"
                " most: send it as several appends"
            )

    def _check_permission(self, subject: str, deed: str = "publish on") -> None:
        # The server reports a violation to the connection, not to the caller.
        for denial in self._denials:
            if f'"{subject.lower()}"' in denial:
                raise NotPermittedError(f"this user may not {deed} {subject}: {denial}")

    def _unreached(self, what: str, error: Exception) -> NoWorkerError:
        """Return the error to raise after `what` failed with an error of nats-py."""
        why = getattr(error, "description", None) or str(error) or type(error).__name__
        if self.closed:
            return ClientClosedError(f"{what}: {self.why_closed}")
        if isinstance(error, _LOST_ERRORS) or not self.connected:
            return self._no_server(f"{what}: the connection to the NATS server is lost ({why})")
        return NoAnswerError(f"{what}: {why}")

    def _no_server(self, message: str) -> NoServerError:
        """Return the error to raise while there is no connection; its class says if the server is full."""
        return (FullServerError if is_full(self._last_error) else NoServerError)(message)

    async def _on_one_connection(self, call: Awaitable[_T]) -> _T:
        """Await the answer to a call; raise `TimeoutError` upon reconnection, which no answer outlives."""
        async with asyncio.timeout(None) as attempt:
            self._attempts.add(attempt)
            try:
                return await cancellable(call)
            finally:
                self._attempts.discard(attempt)

    def _wake(self) -> None:
        for watcher in self.watchers:
            watcher.set()
        while self._attempts:
            self._attempts.pop().reschedule(0)  # which has passed

    async def _on_error(self, error: Exception) -> None:
        if self._may_be_refused and (why := refusal(error)):
            self._may_be_refused = False  # more errors may come while the connection closes
            raise _RefusedError(why)  # nats-py would try again until the timeout
        why = unreachable(error)
        self._last_error = why or str(error) or type(error).__name__
        if self._may_be_refused and why:
            self._num_to_try -= 1
            if self._num_to_try == 0:
                raise _UnreachedError(why)
        if "permissions violation" in self._last_error.lower():
            self._denials.append(self._last_error.lower())

    async def _on_disconnected(self) -> None:
        self._connected.clear()

    async def _on_reconnected(self) -> None:
        self.epoch += 1
        self._last_error = ""
        self.writes.restart()
        self._connected.set()
        self._wake()

    async def _on_closed(self) -> None:
        self.closed = True
        self._connected.set()  # a waiting publish must see that it is closed
        self._wake()
