"""Decides who may ask: by API key, and by origins, addresses and host names of this machine."""

from __future__ import annotations

import contextlib
import ipaddress
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from gateway.turn import Fault
from turnkeep_client.content_blocks import printable

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from starlette.requests import Request

    from gateway.keys import ApiKey, Keys

#: The schemes of origins of pages in desktop programs.
_PROGRAMS: Final = ("app://", "vscode-file://", "vscode-webview://", "tauri://")
#: Suffixes of host names that exist only in private networks.
_PRIVATE: Final = (".localhost", ".local", ".internal", ".home.arpa")


class Access:
    """The API keys, and the origins whose pages may send requests: of this machine, and those in `cors`."""

    def __init__(self, keys: Keys, cors: Collection[str], key_headers: Sequence[str]) -> None:
        """Keys come as `Authorization: Bearer KEY`, or in one of the `key_headers`."""
        self.keys = keys
        self._key_headers = key_headers
        self._cors = frozenset(cors)
        self._cors_names = {_name_in(one) for one in cors}

    def key(self, request: Request) -> ApiKey:
        """Return a request's API key. Raises `Fault` if key, origin or host is not allowed."""
        origin = request.headers.get("origin")
        if origin is not None and not self.may_ask(origin):
            raise Fault(
                403, "pages of other sites may not ask; --cors names those that may", code="forbidden_origin"
            )
        if self.keys.are_needed:
            return self.keys.of(request.headers, self._key_headers)
        # DNS rebinding: pages of a site whose name resolves to this machine send no Origin with a GET.
        name = _name_in(f"//{request.headers.get('host', '')}")
        server: tuple[str, int] | None = request.scope.get("server")
        if server and _is_loopback(server[0]) and _may_be_a_site(name) and name not in self._cors_names:
            why = f"this gateway was asked as {printable(name)}: ask localhost, or name the site by --cors"
            raise Fault(403, why, code="forbidden_host")
        return self.keys.of(request.headers, self._key_headers)

    def may_ask(self, origin: str) -> bool:
        """Whether an origin's pages may send requests: this machine, desktop programs and `--cors` may."""
        return origin in self._cors or origin.startswith(_PROGRAMS) or _is_local(origin)


def is_from_here(request: Request) -> bool:
    """Whether a request is from this machine, not through a proxy, and to a host name of this machine."""
    is_proxied = "x-forwarded-for" in request.headers or "forwarded" in request.headers
    with contextlib.suppress(ValueError):
        peer = ipaddress.ip_address(request.client.host if request.client else "")
        return peer.is_loopback and not is_proxied and _is_local(f"//{request.headers.get('host', '')}")
    return False


def _is_local(origin: str) -> bool:
    """Whether an origin's host name always means this machine, so that no website can have it."""
    name = _name_in(origin)
    return name == "localhost" or name.endswith(".localhost") or _is_loopback(name)


@lru_cache
def _name_in(origin: str) -> str:
    """Return the host name in an origin; empty if there is none."""
    with contextlib.suppress(ValueError):
        return urlsplit(origin).hostname or ""
    return ""


@lru_cache
def _is_loopback(address: str) -> bool:
    """Whether an address is a loopback address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback  # IPv4 on an IPv6 socket
    return False


@lru_cache
def _may_be_a_site(name: str) -> bool:
    """Whether a website can have this host name, so that its owner could resolve it to this machine."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return False
    return "." in name.strip(".") and not name.rstrip(".").endswith(_PRIVATE)
