"""Keeps room in a full log for what workers write, which empties it.

Clients publish into the same stream, and a server cannot tell them apart. So the stream takes entries up to
the log's limit less a reserve. If it refuses an entry of a worker, the worker raises the stream's `max_bytes`
by the size of that entry: this leaves no room for requests, unless one arrives in between.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import structlog
from anyio import Lock
from nats.js.errors import APIError

from turnkeep_client.log import STREAM_FULL

from .consistent_reads import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nats.aio.client import Client
    from nats.js import JetStreamContext
    from nats.js.api import PubAck

log = structlog.get_logger()

#: Metadata of the log stream: the log's limit in bytes. Workers with other settings must not undo it.
LIMIT_NOTE: Final = "turnkeep-limit"

#: The reserve is the limit divided by this. The log must be nearly full (see `retention`) before it is used.
_RESERVE: Final = 16
#: Only entries up to this size may use the second half of the reserve: closes must always fit.
_SMALL_BYTES: Final = 4096
#: A message's size in the server's files beside its subject, headers and body.
_RECORD_BYTES: Final = 40
#: How often to raise the stream's limit for one entry: requests may take the room first.
_TRIES: Final = 4


def open_bytes(limit: int) -> int:
    """Return the size up to which a log with this limit takes requests."""
    return limit - limit // _RESERVE


def turns_bytes(limit: int) -> int:
    """Return the size up to which workers begin turns: their results need more of the reserve."""
    return open_bytes(limit) + limit // _RESERVE // 4


class LogRoom:
    """Publishes a worker's entries to the log, also if it is full. Event loop only."""

    def __init__(self, nc: Client, js: JetStreamContext, stream: str) -> None:
        self._nc = nc
        self._js = js
        self._stream = stream
        self._raising = Lock()  # the raises for entries that come at once would undo each other

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str] | None = None) -> PubAck:
        """Publish an entry; if the log is full, use its reserve. Raises nats-py's errors."""
        size = _RECORD_BYTES + len(subject) + len(body)
        size += sum(len(name) + len(value) + 4 for name, value in (headers or {}).items()) + 16
        sent = dict(headers) if headers else None
        try:
            return await self._js.publish(subject, body, timeout=TIMEOUT_S, headers=sent)
        except APIError as error:
            if error.err_code != STREAM_FULL:
                raise
        async with self._raising:
            for _ in range(_TRIES):
                try:
                    return await self._js.publish(subject, body, timeout=TIMEOUT_S, headers=sent)
                except APIError as error:
                    if error.err_code != STREAM_FULL or not await self._make_room(size):
                        raise
            return await self._js.publish(subject, body, timeout=TIMEOUT_S, headers=sent)

    async def lower(self) -> None:
        """Let the stream take requests up to its normal size only, after workers have raised that."""
        config, _ = await self._look()
        if config["max_bytes"] > (most := open_bytes(_limit(config))):
            await self._ask("UPDATE", {**config, "max_bytes": most})

    async def _make_room(self, size: int) -> bool:
        """Have the stream take an entry of this size; False if the log's limit does not permit that."""
        config, num_bytes = await self._look()
        limit = _limit(config)
        most = limit if size <= _SMALL_BYTES else (limit + open_bytes(limit)) // 2
        if num_bytes + size > most:
            return False
        if num_bytes + size > config["max_bytes"]:  # else there is room again
            log.info("using the reserve of the full log", bytes=num_bytes, limit=limit)
            await self._ask("UPDATE", {**config, "max_bytes": num_bytes + size})
        return True

    async def _look(self) -> tuple[dict[str, Any], int]:
        """Read the stream's configuration, also fields that nats-py does not know, and its size."""
        found = await self._ask("INFO")
        return found["config"], found["state"]["bytes"]

    async def _ask(self, what: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        request = json.dumps(body).encode() if body else b""
        subject = f"$JS.API.STREAM.{what}.{self._stream}"
        reply = await self._nc.request(subject, request, timeout=TIMEOUT_S)
        answer: dict[str, Any] = json.loads(reply.data)
        if "error" in answer:
            APIError.from_error(answer["error"])
        return answer


def _limit(config: Mapping[str, Any]) -> int:
    noted = config.get("metadata", {}).get(LIMIT_NOTE, "")
    return int(noted) if noted.isdecimal() else config["max_bytes"]
