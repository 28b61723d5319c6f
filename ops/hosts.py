"""Which name a request over HTTP may ask for. Pure; the exporter and the dashboard refuse others."""

from __future__ import annotations

import contextlib
import ipaddress
from typing import Final
from urllib.parse import urlsplit

#: What somebody who asked for another name gets to read.
REFUSAL: Final = "ask for localhost or 127.0.0.1, not for another name"


def may_ask(client: str, host: str) -> bool:
    """Say whether a request from the address `client` may ask for `host`, as its header says.

    Requests from this machine must name this machine: a foreign page in a browser could otherwise let its own
    name point to 127.0.0.1, and read what is served.
    """
    if not ipaddress.ip_address(client).is_loopback:
        return True
    with contextlib.suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    return False
