"""JSON responses, and errors in the form of the API whose path was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from gateway.anthropic import common as anthropic
from gateway.ollama import answers as ollama
from gateway.openai import common as openai
from gateway.turn import Fault, fault_of
from turnkeep_client.errors import TurnkeepError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

MESSAGES_PATH: Final = "/v1/messages"


def as_json(body: dict[str, Any], status: int = 200, more: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response; `more` are headers."""
    # After an error the connection is closed, without waiting for the rest of the request's body.
    headers = {**(more or {}), **({"connection": "close"} if status >= 400 else {})}
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


async def on_fault(request: Request, fault: Exception) -> Response:
    """Answer a request with a `Fault`; other exceptions are raised."""
    if not isinstance(fault, Fault):
        raise fault
    path, write = request.url.path, openai.error
    if path.startswith(MESSAGES_PATH) or "anthropic-version" in request.headers:
        write = anthropic.error
    elif path.startswith("/api/"):
        write = ollama.error
    return as_json(write(fault), fault.status, fault.headers)


async def on_error(request: Request, error: Exception) -> Response:
    """Answer a request with a `TurnkeepError`; other exceptions are raised."""
    if not isinstance(error, TurnkeepError):
        raise error
    return await on_fault(request, fault_of(error))


async def on_http(request: Request, error: Exception) -> Response:
    """Answer a request with an `HTTPException`, as of an unknown path; other exceptions are raised."""
    if not isinstance(error, HTTPException):
        raise error
    message = error.detail
    if error.status_code in {404, 405}:
        message = f"{request.method} {request.url.path} is not served{_instead(request.url.path, error)}"
    return await on_fault(request, Fault(error.status_code, message))


def _instead(path: str, error: HTTPException) -> str:
    """Return the end of a 404 or 405 message: the right method, or perhaps the right base URL."""
    if allowed := (error.headers or {}).get("Allow"):
        return f", only {allowed}"
    if path.startswith("/v1/v1/") or not path.startswith("/v1/"):
        return " here: the base URL ends with /v1 for OpenAI's clients, and is without /v1 for Anthropic's"
    return " here"
