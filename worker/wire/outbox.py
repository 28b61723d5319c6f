"""Publishes messages that may be lost: ends of answers, replies and metrics.

`journal` stores the messages that must not be lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import nats.errors
import structlog
from msgspec import Raw

from turnkeep_client.log import ENDED_HEADER
from turnkeep_client.messages import Chunk, encode, failure

if TYPE_CHECKING:
    from msgspec import Struct
    from nats.aio.client import Client

    from turnkeep_client.messages import Metrics
    from turnkeep_client.subjects import SessionKey, Subjects

log = structlog.get_logger()


class Outbox:
    """Publishes on core NATS: a message that cannot be sent is lost, without an error. Event loop only."""

    def __init__(self, nc: Client, subjects: Subjects) -> None:
        self._nc = nc
        self._subjects = subjects

    async def end(self, key: SessionKey, request_id: str, seq: int, rest: Chunk | None) -> None:
        """Publish an answer's last chunk `rest`, if any, and the empty message that ends its token stream.

        The result of the request at sequence `seq` must be committed already.
        """
        subject = self._subjects.tokens(key, request_id, "chunk")
        if rest is not None:
            await self._publish(subject, encode(rest))
        await self._publish(subject, b"", {ENDED_HEADER: str(seq)})

    async def metrics(self, metrics: Metrics) -> None:
        """Publish the worker's metrics."""
        await self._publish(self._subjects.metrics(metrics.worker), encode(metrics))

    async def reply(self, inbox: str, message: Struct | Raw | dict[str, Any]) -> None:
        """Reply to a request. A reply that is too large for the server is replaced by a `failed`."""
        body, limit = bytes(message) if isinstance(message, Raw) else encode(message), self._nc.max_payload
        if len(body) > limit:
            text = f"the answer takes {len(body)} bytes, the server carries {limit}; ask for less of it"
            body = encode(failure(getattr(message, "id", None), "invalid_request", text))
        await self._publish(inbox, body)

    async def _publish(self, subject: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        # While the connection is down nats-py buffers up to a limit; beyond it messages are lost, and clients
        # that see a gap read the result instead.
        try:
            await self._nc.publish(subject, body, headers=headers)
        except nats.errors.MaxPayloadError:
            log.error("a message is larger than the server carries", subject=subject, size_bytes=len(body))  # noqa: TRY400
        except (nats.errors.Error, OSError):
            pass
