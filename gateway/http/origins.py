"""Decides which origins, addresses and host names belong to this machine."""

from __future__ import annotations

import contextlib
import ipaddress
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from starlette.requests import Request

#: The schemes of origins of pages in desktop programs.
PROGRAMS: Final = ("app://", "vscode-file://", "vscode-webview://", "tauri://")
#: Suffixes of host names that exist only in private networks.
_PRIVATE: Final = (".localhost", ".local", ".internal", ".home.arpa")


def is_from_here(request: Request) -> bool:
    """Whether a request is from this machine, not through a proxy, and to a host name of this machine."""
    is_proxied = "x-forwarded-for" in request.headers or "forwarded" in request.headers
    with contextlib.suppress(ValueError):
        peer = ipaddress.ip_address(request.client.host if request.client else "")
        return peer.is_loopback and not is_proxied and is_local(f"//{request.headers.get('host', '')}")
    return False


def is_local(origin: str) -> bool:
    """Whether an origin's host name always means this machine, so that no website can have it."""
    name = name_in(origin)
    return name == "localhost" or name.endswith(".localhost") or is_loopback(name)


@lru_cache
def name_in(origin: str) -> str:
    """Return the host name in an origin; empty if there is none."""
    with contextlib.suppress(ValueError):
        return urlsplit(origin).hostname or ""
    return ""


@lru_cache
def is_loopback(address: str) -> bool:
    """Whether an address is a loopback address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback  # IPv4 on an IPv6 socket
    return False


@lru_cache
def may_be_a_site(name: str) -> bool:
    """Whether a website can have this host name, so that its owner could resolve it to this machine."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return False
    return "." in name.strip(".") and not name.rstrip(".").endswith(_PRIVATE)
