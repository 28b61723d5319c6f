"""Answers exceptions as errors, in the form of the dialect that was asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from gateway.turn import Fault, fault_of
from turnkeep_client.errors import TurnkeepError

from .replies import as_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from .handlers import Dialect


class Errors:
    """The exception handlers of the application."""

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        self._dialects = dialects

    def _of(self, request: Request) -> Dialect:
        """Return the dialect whose header a request has, else that with the longest prefix of the path."""
        first, path = self._dialects[0], request.url.path
        named = next((one for one in self._dialects if one.header and one.header in request.headers), None)
        begin = [one for one in self._dialects if path.startswith(one.prefix)]
        return named or max(begin, key=lambda one: len(one.prefix), default=first)

    async def on_fault(self, request: Request, fault: Exception) -> Response:
        """Answer a request with a `Fault`; other exceptions are raised."""
        if not isinstance(fault, Fault):
            raise fault
        return as_json(self._of(request).error(fault), fault.status, fault.headers)

    async def on_error(self, request: Request, error: Exception) -> Response:
        """Answer a request with a `TurnkeepError`; other exceptions are raised."""
        if not isinstance(error, TurnkeepError):
            raise error
        return await self.on_fault(request, fault_of(error))

    async def on_http(self, request: Request, error: Exception) -> Response:
        """Answer a request with an `HTTPException`, as of an unknown path; other exceptions are raised."""
        if not isinstance(error, HTTPException):
            raise error
        message = error.detail
        if error.status_code in {404, 405}:
            message = f"{request.method} {request.url.path} is not served{_instead(request.url.path, error)}"
        return await self.on_fault(request, Fault(error.status_code, message))


def _instead(path: str, error: HTTPException) -> str:
    """Return the end of a 404 or 405 message: the right method, or perhaps the right base URL."""
    if allowed := (error.headers or {}).get("Allow"):
        return f", only {allowed}"
    if path.startswith("/v1/v1/") or not path.startswith("/v1/"):
        return " here: the base URL ends with /v1 for OpenAI's clients, and is without /v1 for Anthropic's"
    return " here"
