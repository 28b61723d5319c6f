"""Reads and writes the JSON of the console's HTTP API, and turns errors into responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from turnkeep_client.errors import InvalidMessageError, NoWorkerError, ResultTimeoutError

if TYPE_CHECKING:
    from starlette.requests import Request

T = TypeVar("T")

_MAX_BODY_BYTES: Final = 2**20


async def read_body(request: Request, kind: type[T], most: int = _MAX_BODY_BYTES) -> T:
    """Read and decode a request's JSON body of at most `most` bytes. Raises `HTTPException`."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise HTTPException(413, f"the body is larger than {most} bytes")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPException(400, f"the body is not valid: {error}") from None


def read_number(text: str | None) -> int | None:
    """Parse a number in a query string; return None for None. Raises `HTTPException`."""
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 15:
        raise HTTPException(400, f"{text!r} is no number")
    return int(text)


def as_json(content: Any, status: int = 200) -> Response:
    """Return a response with this JSON."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def on_error(_: Request, error: Exception) -> Response:
    """Answer a `TurnkeepError` as JSON, by a status for its kind."""
    match error:
        case InvalidMessageError():
            status = 400
        case NoWorkerError() | ResultTimeoutError():
            status = 503
        case _:
            status = 409
    return as_json({"error": str(error)}, status)


async def on_http(request: Request, error: Exception) -> Response:
    """Answer an `HTTPException`: as JSON, or as text if a page is missing."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404 and "/api/" not in request.url.path:
        return PlainTextResponse(
            f"There is no page {request.url.path}; the console is at {request.base_url}\n", 404
        )
    return as_json({"error": getattr(error, "detail", str(error))}, status)
