"""A subclass of nats-py's client that keeps reading whatever message a server sends.

A NATS server lets any client publish a header block without a line end, and subjects of almost any bytes. At
some of these nats-py 2.16 stops reading, reports no error and does not reconnect; if a stream stores such a
message, it comes back after every restart. This module overrides private methods of nats-py, so tests with
raw sockets check its behaviour.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import socket
import ssl
import sys
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import nats.errors
from nats.aio.client import Client
from nats.js.errors import APIError, NoStreamResponseError

from .log import with_remedy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nats.aio.msg import Msg

_LINE_END: Final = b"\r\n"
_ABANDON_S: Final = 0.5
#: How long the last bytes to a server may take when the connection is closed.
_CLOSE_S: Final = 2.0
#: A server counts as lost if nothing has come from it while this many pings, `PING_S` apart, were sent.
PING_S: Final = 5.0
NUM_PINGS: Final = 3
#: Why a server closes a connection that it has just accepted.
_FULL: Final = "the server closed the connection at once, as one does that has none left (max_connections)"
#: What such a server says, if the client can still read it.
_FULL_SAID: Final = "maximum connections exceeded"
#: asyncio's warning at the end of every TLS connection of nats-py, which begins without TLS.
_NO_NEWS: Final = "returning true from eof_received() has no effect when using ssl"

logging.getLogger("asyncio").addFilter(lambda record: record.msg != _NO_NEWS)


NatsError = nats.errors.Error


class NoTlsError(NatsError):
    """The URL requires TLS, but the server does not offer it."""


def refusal(error: Exception) -> str | None:
    """Return why the server refuses this connection until something is changed, and the remedy.

    The words follow the server's name: `does not speak TLS; ...`. None for any other error, after which a
    retry may succeed.
    """
    text = str(error).lower()
    if isinstance(error, NoTlsError):
        return "does not speak TLS; enable it there, or use nats:// and no CA or certificate"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"has a certificate that is not trusted ({error.verify_message}); give its CA and its name"
    if isinstance(error, ssl.SSLError):
        reason = str(error.reason or "TLS error").lower().replace("_", " ")
        return f"refuses the TLS connection ({reason}); give the certificate and the key that it wants"
    if "maximum account active connections" in text:
        return "has no connection left for this account; close some, or have its limit raised"
    if "authorization" in text or "authentication" in text:
        return "refuses the credentials, or wants some; check the file, the user and password, or the token"
    return None


def unreachable(error: Exception) -> str | None:
    """Return why this error means that no server can be reached; None if the error has another cause."""
    if isinstance(error, socket.gaierror):
        return "the host name is not known"
    # asyncio raises a bare OSError without a number if all addresses of a name refuse.
    if isinstance(error, ConnectionRefusedError) or (type(error) is OSError and error.errno is None):
        return "connection refused"
    if type(error) is not OSError or not error.errno:
        return None
    why = os.strerror(error.errno).lower()
    # What macOS answers to a program that may not use the local network.
    if sys.platform == "darwin" and error.errno == errno.EHOSTUNREACH:
        why += "; allow the program in System Settings, Privacy & Security, Local Network"
    return why


def write_refusal(error: Exception) -> str:
    """Return why JetStream refuses a write; empty if it has said nothing, as on a full disk."""
    if isinstance(error, NoStreamResponseError):
        return "no server leads the stream, as in a cluster of which too few servers run"
    return with_remedy(error.err_code, error.description) if isinstance(error, APIError) else ""


def is_full(why: str) -> bool:
    """Whether the text of an error says that a server has no connection left for anybody."""
    return _FULL in why or _FULL_SAID in why.lower()


def server_id(connection: Client) -> str:
    """Return the id of the connection's current or last server process; each server start has a new id."""
    return str(connection._server_info.get("server_id", ""))


def is_clustered(connection: Client) -> bool:
    """Whether the connection's server belongs to a cluster."""
    return bool(connection._server_info.get("cluster"))


class Nats(Client):
    """nats-py's client, which here accepts messages that are not UTF-8.

    Undecodable bytes of a subject become U+FFFD. A reply subject that is not UTF-8 and headers that cannot be
    parsed are ignored.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ps = _Parser(self)  # type: ignore[assignment]
        #: The subjects of requests that wait for a reply, by the future of the reply.
        self._asked: dict[asyncio.Future[Any], str] = {}

    async def connect(self, *args: Any, **options: Any) -> None:
        """Connect as nats-py does; but notice a server whose machine or network has failed within seconds.

        nats-py's own defaults take four to six minutes for that.
        """
        pings = {"ping_interval": PING_S, "max_outstanding_pings": NUM_PINGS - 1}
        await super().connect(*args, **(pings | options))

    def _connect_command(self) -> bytes:
        # nats-py sends user, password and token of a URL as they are written there, percent-encoded.
        operation, _, sent = super()._connect_command().partition(b" ")
        server, login = self._current_server, json.loads(sent)
        for name in ("user", "pass", "auth_token"):
            if server and name in login and login[name] in {server.uri.username, server.uri.password}:
                login[name] = unquote(login[name])
        return b"%b %b\r\n" % (operation, json.dumps(login).encode())

    async def abandon(self) -> None:
        """Close a failed connection within a time limit: after a failed TLS handshake `close` may hang."""
        with contextlib.suppress(TimeoutError, AssertionError):  # nats-py asserts that it was ever connected
            async with asyncio.timeout(_ABANDON_S):
                await self.close()

    async def _connect_to_server(self, s: Any) -> None:
        # If a connection is refused at the moment of a cancel, `wait_for` of Python 3.11 raises the refusal
        # alone, and nats-py would try again for ever, closed or not.
        task = asyncio.current_task()
        if task is not None and task is self._reconnection_task and task.cancelling():
            raise asyncio.CancelledError
        self._abort()  # nats-py forgets the connection of the last attempt, open if the server said nothing
        await super()._connect_to_server(s)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # nats-py starts TLS only if the server's INFO requires it. An attacker in between could remove
        # `tls_required` and read the credentials, which are sent next.
        if initial_connection and self._current_server and self._current_server.uri.scheme == "tls":
            if not (info.get("tls_required") or info.get("tls_available")):
                raise NoTlsError
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    async def _process_connect_init(self) -> None:
        # nats-py takes the line that follows its PING for the PONG. If that line is an INFO, or the server's
        # own PING, which comes a second after it accepted the connection, nats-py never sends anything again.
        transport: Any = self._transport
        readline, num_read = transport.readline, 0

        async def answer() -> bytes:
            nonlocal num_read
            while True:
                line: bytes = await readline()
                num_read += 1
                if num_read > 1 and line.startswith(b"PING"):
                    transport.write(b"PONG\r\n")
                elif num_read == 1 or not line.startswith(b"INFO"):
                    return line

        # With Python 3.12 and 3.13 asyncio's own raises a TypeError once the connection is lost.
        transport.writelines = lambda parts: transport.write(b"".join(parts))
        transport.readline = answer
        try:
            await super()._process_connect_init()
        except (BrokenPipeError, ConnectionResetError):
            # It has written why behind its INFO, which cannot be read any more once a write has failed.
            raise NatsError(_FULL) from None
        finally:
            transport.readline = readline

    async def _attempt_reconnect(self) -> None:
        # nats-py waits until the lost connection is closed, and asyncio closes it only once its last bytes
        # are written: to a silent server, that is after a quarter of an hour.
        self._abort()
        await super()._attempt_reconnect()

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        # Else a silent server would keep a connection with bytes to write open, and its program from ending.
        transport: Any = self._transport

        def quiet(call: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
            async def called() -> None:
                with contextlib.suppress(OSError):  # it is lost; nats-py would report that instead
                    await call()

            return called

        if transport is not None:
            transport.drain, transport.wait_closed = quiet(transport.drain), quiet(transport.wait_closed)
        ending = asyncio.get_running_loop().call_later(_CLOSE_S, self._abort)
        try:
            await super()._close(status, do_cbs)
        finally:
            ending.cancel()
            while self._flush_queue and not self._flush_queue.empty():  # publishers that nobody flushes for
                flushed = self._flush_queue.get_nowait()
                if not flushed.done():
                    flushed.set_result(None)

    def _abort(self) -> None:
        if (writer := getattr(self._transport, "_io_writer", None)) is not None:
            writer.transport.abort()

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, Any] | None = None
    ) -> None:
        """Publish as nats-py does; a request that the server then denies times out at once."""
        if (asked := self._resp_map.get(reply.rpartition(".")[2])) is not None:
            self._asked[asked] = subject
            asked.add_done_callback(self._asked.pop)
        await super().publish(subject, payload, reply, headers)

    async def _process_err(self, err_msg: str) -> None:
        await super()._process_err(err_msg)
        denied = [one for one, subject in self._asked.items() if f'publish to "{subject}"'.lower() in err_msg]
        for asked in denied:
            if not asked.done():
                asked.set_exception(nats.errors.TimeoutError())

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        super()._remove_sub(sid, max_msgs)
        if self.is_reconnecting:  # nats-py sends no UNSUB then, although the SUB may still wait to be sent
            self._pending.append(b"UNSUB %d\r\n" % sid)

    async def _process_pong(self) -> None:
        # nats-py stops reading at the PONG of a flush that was cancelled or timed out.
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            return await super()._process_headers(headers)
        except (LookupError, ValueError):  # nothing after the version; a status that is not UTF-8
            return self._parse_header_lines(headers)

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        # nats-py looks at each character of each name, which took a tenth of a gateway's processor time.
        found = {}
        for line in raw.split(_LINE_END):
            name, colon, value = line.partition(b":")
            key = name.strip().decode("ascii", "replace")
            if colon and key.isascii() and "".join(key.split()) == key:
                found[key] = value.strip().decode("utf-8", "replace")
        return found

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        try:
            subject.decode()
            reply.decode()
        except UnicodeDecodeError:
            subject = subject.decode(errors="replace").encode()
            reply = reply if reply.isascii() else b""
        message: Msg = super()._build_message(sid, subject, reply, data, headers)
        return message

    async def _read_loop(self) -> None:
        await super()._read_loop()
        # nats-py leaves its loop at any exception that it does not expect, and notices only minutes later, by
        # missing pongs. After an intended end, `_reading_task` is another task, or `_process_op_err` does
        # nothing because of the connection's status; and as `asyncio.run` ends, it is cancelled.
        task = asyncio.current_task()
        if task is not None and self._reading_task is task and not task.cancelling():
            await self._process_op_err(nats.errors.Error("reading from the NATS server has ended"))


class _Parser:
    """Parses the bytes from a server into protocol operations, in place of nats-py's parser.

    Only a space separates words. nats-py's parser also splits at a vertical tab, which a subject may contain.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._unread = bytearray()

    def reset(self) -> None:
        """Discard an incomplete operation. nats-py calls this before each new connection."""
        self._unread.clear()

    async def parse(self, data: bytes = b"") -> None:
        """Add bytes and carry out all complete operations. Raises `ProtocolError` for an invalid one."""
        self._client._pings_outstanding = 0  # the server is there, even if large messages delay its PONG
        self._unread += data
        while (end := self._unread.find(_LINE_END)) >= 0:
            operation, _, rest = bytes(self._unread[:end]).strip().partition(b" ")
            begin = end + len(_LINE_END)
            if operation in (b"MSG", b"HMSG"):
                try:
                    subject, sid, reply, head_bytes, size = _words(rest, has_head=operation == b"HMSG")
                except ValueError:
                    raise nats.errors.ProtocolError from None
                if len(self._unread) < begin + size + len(_LINE_END):
                    return
                head = bytes(self._unread[begin : begin + head_bytes])
                body = bytes(self._unread[begin + head_bytes : begin + size])
                del self._unread[: begin + size + len(_LINE_END)]
                await self._client._process_msg(sid, subject, reply, body, head)
            else:
                del self._unread[:begin]
                await self._carry_out(operation, rest)

    async def _carry_out(self, operation: bytes, rest: bytes) -> None:
        match operation:
            case b"PING":
                await self._client._process_ping()
            case b"PONG":
                await self._client._process_pong()
            case b"+OK":
                pass
            case b"-ERR":
                await self._client._process_err(rest.decode(errors="replace").lower())
            case b"INFO":
                await self._client._process_info(json.loads(rest))
            case _:
                raise nats.errors.ProtocolError


def _words(line: bytes, *, has_head: bool) -> tuple[bytes, int, bytes, int, int]:
    """Split a message's first line into subject, subscription id, reply subject, header bytes, total bytes.

    `has_head` is true for HMSG, a message with headers.
    """
    words = line.split(b" ")
    size = int(words.pop())
    head_bytes = int(words.pop()) if has_head else 0
    subject, sid, *reply = words
    return subject, int(sid), reply[0] if reply else b"", head_bytes, size
