"""Finds requests without a result that the server does not deliver any more.

A worker acknowledges a request once its result is stored. But a server that loses its last entries, by a
power cut or because its files come from a backup, may keep the ack without the result: then no delivery wakes
the session.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import nats.errors
import structlog
from anyio import sleep
from nats.js.errors import APIError

from .intake import Delivery

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from turnkeep_client.subjects import SessionKey

    from .consistent_reads import StoredMessage
    from .intake import Intake
    from .journal import Journal

log = structlog.get_logger()

#: Time for a delivery to arrive.
_SLACK_S: Final = 1.0


class UndeliveredRequests:
    """Wakes sessions whose requests are not delivered, after each start of this worker or the server."""

    def __init__(
        self,
        journal: Journal,
        intake: Intake,
        wake: Callable[[Delivery], Awaitable[None]],
        is_first: Callable[[], bool],
        *,
        ack_wait_s: float,
    ) -> None:
        """`wake` wakes a session for a request. A worker looks only while its `is_first()` is true.

        After `ack_wait_s` the server redelivers every request without an ack.
        """
        self._journal = journal
        self._intake = intake
        self._wake = wake
        self._is_first = is_first
        self._wait_s = ack_wait_s + _SLACK_S

    async def run(self) -> None:
        """Look for undelivered requests after each start of the server, until cancelled."""
        server = ""
        while True:
            await sleep(self._wait_s)
            if server != self._journal.server and self._is_first():
                with contextlib.suppress(nats.errors.Error, APIError, OSError):
                    server = await self._look(self._journal.server)

    async def _look(self, server: str) -> str:
        """Wait for all deliveries, then wake the sessions that still lack a result and a delivery.

        Returns `server`; or an empty string, if a returned delivery is still to come and the check must be
        repeated.
        """
        earlier = {key: entry.seq async for key, entry in self._found()}
        await sleep(self._wait_s)
        async for key, entry in self._found():
            if earlier.get(key) == entry.seq and self._intake.expects(key, entry.seq):
                server = ""  # unless another worker has got it meanwhile
            elif earlier.get(key) == entry.seq:
                log.warning("a request has lost its result or its delivery", session=str(key), seq=entry.seq)
                # In doubt: a worker may have crashed over it.
                await self._wake(Delivery(key, entry.seq, entry.stored, entry.body, again=True))
        return server

    async def _found(self) -> AsyncIterator[tuple[SessionKey, StoredMessage]]:
        for key in await self._journal.unanswered():
            if not self._intake.expects(key):
                entry = await self._journal.last(key, "in")
                if entry is not None:
                    yield key, entry
