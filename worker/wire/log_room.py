"""Keeps room in a full log for what workers write, which empties it.

Clients publish into the same stream, and a server cannot tell them apart. So the stream takes entries up to
the log's limit less a reserve. If it refuses an entry of a worker, the worker raises the stream's `max_bytes`
by the size of that entry: this leaves no room for requests, unless one arrives in between.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final

import structlog
from anyio import Lock, current_time, sleep
from nats.js.errors import APIError

from turnkeep_client.log import STREAM_FULL

from .consistent_reads import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nats.aio.client import Client
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
#: How long to raise the stream's size for an entry, and the longest random pause in between: a request may
#: take the room, and another worker set back the size. (Raises that add up would leave room for requests.)
_TRIES_S: Final = 60.0
_PAUSE_S: Final = 0.016


def open_bytes(limit: int) -> int:
    """Return the size from which on a log with this limit is full: requests fill it up to this size."""
    return limit - limit // _RESERVE


class LogRoom:
    """Publishes a worker's entries to the log, also if it is full. Event loop only."""

    def __init__(self, nc: Client, stream: str) -> None:
        self._nc = nc
        self._js = nc.jetstream()
        self._stream = stream
        self._raising = Lock()  # the raises for entries that come at once would undo each other

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str] | None = None) -> PubAck:
        """Publish an entry; if the log is full, use its reserve. Raises nats-py's errors."""
        sent = dict(headers or {})
        size = _RECORD_BYTES + len(subject) + len(body)
        size += sum(len(name) + len(value) + 4 for name, value in sent.items()) + 16
        try:
            return await self._js.publish(subject, body, timeout=TIMEOUT_S, headers=sent or None)
        except APIError as error:
            if error.err_code != STREAM_FULL:
                raise
            refusal = error
        until_s = current_time() + _TRIES_S
        while current_time() < until_s:
            async with self._raising:
                if not await self._make_room(size):
                    break
                try:
                    return await self._js.publish(subject, body, timeout=TIMEOUT_S, headers=sent or None)
                except APIError as error:
                    if error.err_code != STREAM_FULL:
                        raise
            await sleep(os.urandom(1)[0] / 256 * _PAUSE_S)
        raise refusal

    async def restore(self, *, lowers: bool) -> int:
        """Return the log's limit; with `lowers`, undo raises of the stream's size, also an operator's.

        The setting is the only limit: one raised by hand would be lost at the next start of a worker, which
        does not start if the log has more than its setting.
        """
        config = (await self.ask("INFO"))["config"]
        limit, found = _limit(config), config["max_bytes"]
        usual = open_bytes(limit)
        if lowers and not 0 <= found <= usual:
            if not 0 <= found <= limit:  # no worker raises it so far
                told = (
                    "max_bytes of the log was raised by hand, and is set back; to raise it, start a worker"
                    " with a larger log_max_bytes"
                )
                log.warning(told, found=found, max_bytes=usual, log_max_bytes=limit)
            await self.ask("UPDATE", {**config, "max_bytes": usual})
        return limit

    async def _make_room(self, size: int) -> bool:
        """Have the stream take an entry of this size; False if the log's limit does not permit that."""
        info = await self.ask("INFO")
        config, num_bytes = info["config"], info["state"]["bytes"]
        limit = _limit(config)
        if num_bytes + size > (limit if size <= _SMALL_BYTES else (limit + open_bytes(limit)) // 2):
            return False
        if num_bytes + size > config["max_bytes"]:  # else there is room again
            log.info("using the reserve of the full log", bytes=num_bytes, limit=limit)
            await self.ask("UPDATE", {**config, "max_bytes": num_bytes + size})
        return True

    async def ask(self, what: str, config: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask JetStream about the stream; return its answer, also fields that nats-py does not know."""
        subject, request = f"$JS.API.STREAM.{what}.{self._stream}", json.dumps(config).encode()
        reply = await self._nc.request(subject, request if config else b"", timeout=TIMEOUT_S)
        answer: dict[str, Any] = json.loads(reply.data)
        if "error" in answer:
            APIError.from_error(answer["error"])
        return answer


def _limit(config: Mapping[str, Any]) -> int:
    noted = config.get("metadata", {}).get(LIMIT_NOTE, "")
    return int(noted) if noted.isdecimal() else config["max_bytes"]
