"""Answers exceptions as errors, in the form of the dialect that was asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.exceptions import HTTPException

from gateway.turn import Fault, fault_of
from turnkeep_client.errors import TurnkeepError

from .bodies import as_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from .handlers import Dialect


#: The exceptions that are answered; all others are the gateway's own faults.
KINDS: Final = (Fault, TurnkeepError, HTTPException)


class Errors:
    """The application's handler of the exceptions `KINDS`."""

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        self._dialects = dialects

    def _of(self, request: Request) -> Dialect:
        """Return the dialect whose header a request has, else that with the longest prefix of the path."""
        first, path = self._dialects[0], request.url.path
        named = next((one for one in self._dialects if one.header and one.header in request.headers), None)
        begin = [one for one in self._dialects if path.startswith(one.prefix)]
        return named or max(begin, key=lambda one: len(one.prefix), default=first)

    async def answer(self, request: Request, error: Exception) -> Response:
        """Answer a request with an exception of these kinds; others are raised."""
        match error:
            case Fault():
                fault = error
            case TurnkeepError():
                fault = fault_of(error)
            case HTTPException(status_code=404 | 405):
                path = request.url.path
                fault = Fault(
                    error.status_code, f"{request.method} {path} is not served{_instead(path, error)}"
                )
            case HTTPException():
                fault = Fault(error.status_code, error.detail)
            case _:
                raise error
        return as_json(self._of(request).error(fault), fault.status, fault.headers)


def _instead(path: str, error: HTTPException) -> str:
    """Return the end of a 404 or 405 message: the right method, or perhaps the right base URL."""
    if allowed := (error.headers or {}).get("Allow"):
        return f", only {allowed}"
    if path.startswith("/v1/v1/") or not path.startswith("/v1/"):
        return " here: the base URL ends with /v1 for OpenAI's clients, and is without /v1 for Anthropic's"
    return " here"
