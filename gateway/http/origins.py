"""Says which pages, machines and names are those of this machine."""

from __future__ import annotations

import contextlib
import ipaddress
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from starlette.requests import Request

#: Pages of desktop programs have such origins.
PROGRAMS: Final = ("app://", "vscode-file://", "vscode-webview://", "tauri://")
#: Ends of names that are not on the internet.
_PRIVATE: Final = (".localhost", ".local", ".internal", ".home.arpa")


def is_from_here(request: Request) -> bool:
    """Whether a program of this machine asks, not a proxy, and under a name that no site can have."""
    is_proxied = "x-forwarded-for" in request.headers or "forwarded" in request.headers
    with contextlib.suppress(ValueError):
        peer = ipaddress.ip_address(request.client.host if request.client else "")
        return peer.is_loopback and not is_proxied and is_local(f"//{request.headers.get('host', '')}")
    return False


def is_local(origin: str) -> bool:
    """Whether the name in an origin is one of this machine, which no site can have."""
    name = name_in(origin)
    return name == "localhost" or name.endswith(".localhost") or is_loopback(name)


def name_in(origin: str) -> str:
    """Return the name in an origin; empty if there is none."""
    with contextlib.suppress(ValueError):
        return urlsplit(origin).hostname or ""
    return ""


def is_loopback(address: str) -> bool:
    """Whether this is an address of this machine."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback  # IPv4 on a socket of IPv6
    return False


def may_be_a_site(name: str) -> bool:
    """Whether a site can have this name, which its owner may let mean any address."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return False
    return "." in name.strip(".") and not name.rstrip(".").endswith(_PRIVATE)
