"""nats-py's client, made to read whatever a server passes on from others, and never to go deaf in silence.

A server lets anybody publish a header block without a line end, and subjects of almost any bytes. nats-py
2.16 stops reading at some of them, tells nobody and does not connect again; what is stored in a stream comes
back after every restart. Held by tests with raw sockets, as it overrides what nats-py does not document.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

import nats.errors
from nats.aio.client import Client

if TYPE_CHECKING:
    from nats.aio.msg import Msg

_LINE_END: Final = b"\r\n"


class Nats(Client):
    """A client whose messages have the subject as far as it can be read, U+FFFD for the rest of it.

    A reply subject that is not UTF-8 is left out, since nobody can be answered there, and so are headers that
    cannot be read.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ps = _Parser(self)  # type: ignore[assignment]

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            return await super()._process_headers(headers)
        except (LookupError, ValueError):  # nothing behind the version; a status that is not UTF-8
            return self._parse_header_lines(headers)

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
        # nats-py breaks its loop at any exception that it does not know, and then finds out from its pings,
        # minutes later. Where the loop ended for a reason, this is not the connection's task any more, or the
        # status says so.
        if self._reading_task is asyncio.current_task():
            await self._process_op_err(nats.errors.Error("reading from the NATS server has ended"))


class _Parser:
    """Cuts a server's bytes into its operations, for nats-py's client.

    A space alone ends a word: to nats-py's own parser a vertical tab does too, which a subject may have.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._unread = bytearray()

    def reset(self) -> None:
        """Forget what is not a whole operation: another connection follows."""
        self._unread.clear()

    async def parse(self, data: bytes = b"") -> None:
        """Take bytes and carry out what is whole. Raises `ProtocolError` for what no server says."""
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
    """Take a message's line apart: subject, subscription, reply, size of the headers and of all."""
    words = line.split(b" ")
    size = int(words.pop())
    head_bytes = int(words.pop()) if has_head else 0
    subject, sid, *reply = words
    return subject, int(sid), reply[0] if reply else b"", head_bytes, size
