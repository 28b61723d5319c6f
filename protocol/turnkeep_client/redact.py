"""Keeps the user, password or token of a NATS URL out of logs and messages. Pure."""

from __future__ import annotations

import re
from typing import Final

_SCHEMES: Final = frozenset({"nats", "tls", "ws", "wss"})
_PLACE: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:@\[\]]+)(?::\d{0,5})?")
_CREDENTIALS: Final = re.compile(r"(?<=://)[^\s/]*@")


def shown(urls: str) -> str:
    """Reduce comma-separated NATS URLs to scheme, host and port; hide a URL that cannot be parsed."""
    return ",".join(_shown(url.strip()) for url in urls.split(","))


def redact(text: str) -> str:
    """Remove the credentials from URLs in a text that another program wrote."""
    return _CREDENTIALS.sub("", text)


def _shown(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        scheme, rest = "nats", url
    place = re.split(r"[/?#]", rest.rpartition("@")[2])[0]
    return f"{scheme}://{place}" if _PLACE.fullmatch(place) else f"{scheme}://(not a host and port)"
