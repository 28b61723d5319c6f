"""Reads the bodies of requests, which may be compressed, within limits of size and time; writes JSON."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import zlib
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from gateway.turn import Fault, refused
from turnkeep_client.content_blocks import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: A request's body must have arrived within this time.
_BODY_S: Final = 60.0

#: How long the rest of a body is discarded that is not needed: before the response, so that the connection
#: may stay open, and behind it. And how many bytes of a body are received.
_SOON_S: Final = 0.1
_REST_S: Final = 2.0
_MOST_RECEIVED: Final = 48 * 2**20

#: A request with both could be the end of another one, for a proxy that reads the other length.
_LENGTHS: Final = {"content-length", "transfer-encoding"}

_CODINGS: Final = ("identity", "gzip", "x-gzip", "deflate")
#: zlib finds out by itself whether a body has the header of gzip or of zlib.
_ANY_HEADER: Final = zlib.MAX_WBITS | 32
#: zlib copies the rest of a body after each of its members, so many members take time.
_MOST_MEMBERS: Final = 64


def read_to_its_end(app: ASGIApp) -> ASGIApp:
    """Wrap an application so that it discards the rest of a request's body behind its response.

    Else the connection would be closed while the client still sends, and many a client loses the response.
    If all of the body arrives before the response or soon, the connection stays open for the next request.
    """

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes, is_whole = 0, False
        names = {name.decode("latin-1") for name, _ in scope["headers"]}
        # Who expects a 100 sends no body without it.
        may_stay = "expect" not in names and not _LENGTHS.issubset(names)

        async def reading() -> Message:
            nonlocal num_bytes, is_whole
            message = await receive()
            num_bytes += len(message.get("body", b""))
            is_whole = not message.get("more_body")
            return message

        async def discard(within_s: float) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    while not is_whole and num_bytes < _MOST_RECEIVED:
                        await reading()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                if may_stay:
                    await discard(_SOON_S)
                if not is_whole:
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            elif not message.get("more_body") and not is_whole:
                await send({**message, "more_body": True})
                await discard(_REST_S)
                message = {"type": "http.response.body"}
            await send(message)

        await app(scope, reading, sending)

    return answered


async def read(request: Request, most: int) -> bytes:
    """Read and decompress a request's body, without a byte order mark.

    Raises `Fault` if it is invalid, slow, or above `most` bytes.
    """
    body = bytearray()
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in _CODINGS:
        message = f"a body may have the content-encoding gzip or deflate, not {printable(coding)}"
        raise Fault(415, message, code="unsupported_encoding")
    if _LENGTHS.issubset(request.headers):
        raise refused("a body has a content-length or a transfer-encoding, not both")
    too_large = Fault(413, f"the body is larger than {most} bytes", code="request_too_large")
    if int(request.headers.get("content-length") or 0) > most:
        raise too_large
    try:
        async with asyncio.timeout(_BODY_S):
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise Fault(408, f"the body did not arrive within {_BODY_S:.0f} s") from None
    except ClientDisconnect:
        raise Fault(400, "the client went away") from None
    whole = bytes(body) if coding == "identity" else _inflated(bytes(body), most, too_large)
    return whole.removeprefix(codecs.BOM_UTF8)


def _inflated(body: bytes, most: int, too_large: Fault) -> bytes:
    """Decompress a body to at most `most` bytes. Raises `Fault`."""
    found = b""
    try:
        for _ in range(_MOST_MEMBERS):
            inflating = zlib.decompressobj(_ANY_HEADER)
            found += inflating.decompress(body, most + 1 - len(found))
            if len(found) > most:
                raise too_large
            if not inflating.eof:
                raise refused("the compressed body is cut short")
            if not (body := inflating.unused_data):
                return found
    except zlib.error as error:
        raise refused(f"the body is not compressed as its content-encoding says: {error}") from None
    raise refused(f"the compressed body has more than {_MOST_MEMBERS} parts; compress it as one")


def as_json(body: dict[str, Any], status: int = 200, more: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response with the headers `more`."""
    return Response(msgspec.json.encode(body), status, more, media_type="application/json")
