"""Keeps the credentials of a URL out of logs and messages: user, password, token, signature. Pure."""

from __future__ import annotations

import re
from typing import Final

_SCHEMES: Final = frozenset({"nats", "tls", "ws", "wss"})
_PLACE: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:@\[\]]+)(?::\d{0,5})?")
_CREDENTIALS: Final = re.compile(r"(?<=://)[^\s/]*@")
#: The query of a URL, which may have a signature, without punctuation that ends a part of a sentence.
_QUERY: Final = re.compile(r"(://[^\s\"'?]*\?)[^\s\"'\\]*[^\s\"'\\;:,.)]")


def shown(urls: str) -> str:
    """Reduce comma-separated NATS URLs to scheme, host and port; hide a URL that cannot be parsed."""
    return ",".join(_shown(url.strip()) for url in urls.split(","))


def redact(text: str) -> str:
    """Remove the credentials, and the queries, from URLs in a text that another program may have written."""
    return _QUERY.sub(r"\1...", _CREDENTIALS.sub("", text))


def _shown(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        scheme, rest = "nats", url
    place = re.split(r"[/?#]", rest.rpartition("@")[2])[0]
    return f"{scheme}://{place}" if _PLACE.fullmatch(place) else f"{scheme}://(not a host and port)"
