"""Refuses requests to the console without its token or with a foreign Host header. Knows no sessions."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response

from ops.hosts import REFUSAL, may_ask

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

PAGE: Final = Path(__file__).with_name("page")
#: Files of the page that asks for the token; they need no token.
_OPEN: Final = frozenset({"/style.css", "/icon.svg"})
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " form-action 'self'; base-uri 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class TokenCheck:
    """ASGI middleware: passes requests with the token on to `app`, and adds security headers to responses."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token
        self._locked = (PAGE / "locked.html").read_text()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on to the app."""

        async def strictly(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refusal = self._refusal(Request(scope))
        await (refusal or self._app)(scope, receive, strictly)

    def _refusal(self, request: Request) -> Response | None:
        """Return the response to a request that must not reach the app; None for a request that may."""
        host, path = request.headers.get("host", ""), request.url.path
        if not may_ask(request.client.host if request.client else "", host):
            return PlainTextResponse(f"{REFUSAL}\n", 421)
        if path in _OPEN:
            return None
        given = request.query_params.get("token")
        if path == "/" and given is not None and self._is_token(given):
            return self._let_in(request)
        if not self._is_token(request.cookies.get(_cookie(request), "")):
            is_wrong = " The token that was given is not the one of this console." if given else ""
            if path.endswith("/"):
                return HTMLResponse(self._locked.replace("<!-- wrong -->", is_wrong), 401)
            return JSONResponse({"error": "the console's token is missing, or of an earlier start"}, 401)
        if request.method == "POST" and not _is_of_the_page(request, host):
            return JSONResponse({"error": "only the console's own page may act"}, 403)
        return None

    def _let_in(self, request: Request) -> Response:
        """Set the token as a cookie, and redirect to an address without the token."""
        answer = RedirectResponse("/", 303)
        answer.set_cookie(_cookie(request), self._token, httponly=True, samesite="strict")
        return answer

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


def _is_of_the_page(request: Request, host: str) -> bool:
    """Whether a request's headers say that the console's own page sent it.

    Pages on other ports of this machine are the same site, so the browser adds the cookie to their requests.
    Behind a proxy the Host header differs from the browser's; `Sec-Fetch-Site` is right even then.
    """
    if (site := request.headers.get("sec-fetch-site")) is not None:
        return site == "same-origin"
    return request.headers.get("origin") == f"{request.url.scheme}://{host}"


def _cookie(request: Request) -> str:
    """Return the name of the token's cookie, with the port: browsers send cookies to all ports of a host."""
    return f"turnkeep-console-{request.scope['server'][1]}"
