"""JSON responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import Mapping


def as_json(body: dict[str, Any], status: int = 200, more: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response; `more` are headers."""
    # After an error the connection is closed, without waiting for the rest of the request's body.
    headers = {**(more or {}), **({"connection": "close"} if status >= 400 else {})}
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
