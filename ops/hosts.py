"""Decides which Host headers the exporter and the console accept in HTTP requests. Pure."""

from __future__ import annotations

import contextlib
import ipaddress
from typing import Final
from urllib.parse import urlsplit

#: The answer to a refused request, which named another host.
REFUSAL: Final = "ask for localhost or 127.0.0.1, not for another name"


def may_ask(client: str, host: str) -> bool:
    """Whether a request from the address `client` may have `host` in its Host header.

    Requests from this machine must name this machine. Otherwise a malicious web page could let its own
    host name resolve to 127.0.0.1, and read the served data (DNS rebinding).
    """
    if not ipaddress.ip_address(client).is_loopback:
        return True
    with contextlib.suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    return False
