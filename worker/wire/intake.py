"""Requests in: pull from the stream's consumer, keep each delivery alive, ack it when it is settled.

A delivery is a doorbell, no more: the session reads its log in order, whatever the order of deliveries. So
a redelivery after a crash, or a message that overtakes another one, cannot change a session's order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from typing import TYPE_CHECKING

import nats.errors
import structlog

from turnkeep_client.subjects import SessionKey

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from worker.telemetry import Telemetry

    from .streams import Streams

    Ring = Callable[[SessionKey, int, bytes], None]

log = structlog.get_logger()

_FETCH = 64
_EXPIRES_S = 5.0
_RETRY_S = 0.5

#: Ends of a pull that are no fault: nothing was there, or its time is over.
_EMPTY = frozenset({"404", "408"})

#: A longer name makes no subject: a server ends the connection of whoever sends a line of more than 4 KiB.
_MAX_NAME_BYTES = 256


def session_of(subject: str) -> SessionKey | None:
    """Name the session of a stored request; None where no subject can be built from its names.

    A name may break the rule for ids and still be one that can be answered: it is refused on its own `out`.
    Ask here before anything, a subject or a filter, is built from names that came from outside.
    """
    _, tenant, session, _ = subject.rsplit(".", 3)
    if _makes_a_subject(tenant) and _makes_a_subject(session):
        return SessionKey(tenant, session)
    return None


def _makes_a_subject(name: str) -> bool:
    # U+FFFD stands for bytes that are not UTF-8; what is not printable nats-py may refuse to publish.
    return name.isprintable() and "\ufffd" not in name and len(name.encode()) <= _MAX_NAME_BYTES


class Intake:
    """Deliveries that this worker holds, by stream sequence. Event loop only."""

    def __init__(
        self,
        nc: Client,
        names: Streams,
        telemetry: Telemetry,
        *,
        ack_wait_s: float,
        max_held: int,
    ) -> None:
        """Without a sign of life for `ack_wait_s`, the server gives a delivery to another worker."""
        self._nc = nc
        self._names = names
        self._telemetry = telemetry
        self._ack_wait_s = ack_wait_s
        self._max_held = max_held
        self._held: dict[int, Msg] = {}
        self._freed = asyncio.Event()
        self._num_to_come = 0
        self._fault = ""
        self._inbox = ""  # of the pull that is out; older ones may still be answered
        self._pull_over = asyncio.Event()

    @property
    def num_held(self) -> int:
        """Requests that wait or run here."""
        return len(self._held)

    async def pull(self, ring: Ring) -> None:
        """Pull until cancelled. At `max_held` it pauses: what is not pulled waits in the stream.

        `ring(session, sequence, body)` is called for each delivery that is not held yet; it must not block.
        """
        while True:
            try:
                inbox = self._nc.new_inbox()
                subscription = await self._nc.subscribe(f"{inbox}.*", cb=self._arrival(ring))
                try:
                    for number in itertools.count():
                        await self._pull_some(f"{inbox}.{number}")
                finally:
                    with contextlib.suppress(nats.errors.Error):
                        await subscription.unsubscribe()
            except (nats.errors.Error, OSError) as error:  # a lost connection: nats-py reconnects by itself
                log.warning("pulling requests failed, trying again", error=str(error) or type(error).__name__)
                await asyncio.sleep(_RETRY_S)

    async def _pull_some(self, inbox: str) -> None:
        while len(self._held) >= self._max_held:
            self._freed.clear()
            await self._freed.wait()
        self._num_to_come = min(_FETCH, self._max_held - len(self._held))
        self._fault = ""
        self._inbox = inbox
        self._pull_over.clear()
        # The raw request, since nats-py's `fetch` takes any message with a header `Status` for the server's
        # word on the pull. That header is the publisher's to set: it would lose the request, or end the pull.
        request = {"batch": self._num_to_come, "expires": int(_EXPIRES_S * 1e9)}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._names.log}.{self._names.consumer}"
        await self._nc.publish(subject, json.dumps(request).encode(), reply=inbox)
        with contextlib.suppress(TimeoutError):  # the server's word may have been lost
            async with asyncio.timeout(_EXPIRES_S + 1.0):
                await self._pull_over.wait()
        if self._fault:
            raise nats.errors.Error(self._fault)

    def _arrival(self, ring: Ring) -> Callable[[Msg], Awaitable[None]]:
        async def arrived(message: Msg) -> None:
            if message.subject.startswith("_INBOX."):  # a request comes under its own subject
                if message.subject != self._inbox:
                    return
                headers = message.headers or {}
                status = headers.get("Status", "")
                if status not in _EMPTY:
                    self._fault = f"the server ended the pull: {status} {headers.get('Description', '')}"
                self._pull_over.set()
                return
            self._num_to_come -= 1
            if self._num_to_come <= 0:
                self._pull_over.set()
            key, seq = session_of(message.subject), message.metadata.sequence.stream
            if key is None:
                await self._refuse(message, seq)
                return
            known = seq in self._held
            self._held[seq] = message  # the newest delivery is the one whose ack counts
            if not known:
                ring(key, seq, message.data)

        return arrived

    async def _refuse(self, message: Msg, seq: int) -> None:
        """End a delivery that can be answered nowhere, so that it does not come again."""
        counts = self._telemetry.requests["unnamed"]
        counts["terminated"] += 1
        if counts["terminated"] == 1:  # whoever sends one may send thousands
            log.warning(
                "ended a request, and will end others, from whose subject no subject can be built",
                seq=seq,
                subject=message.subject[:80],
            )
        with contextlib.suppress(nats.errors.Error, OSError):  # lost, it comes again and is ended again
            await message.term()

    async def pull_again(self) -> None:
        """Give up the outstanding pull, which the server forgot when the connection was lost."""
        self._pull_over.set()

    async def keep_alive(self) -> None:
        """Tell the server again and again that the held requests are worked on, until cancelled.

        It must outlive the pulling: while the worker drains, its deliveries are still its own.
        """
        while True:
            await asyncio.sleep(self._ack_wait_s / 3)
            for message in list(self._held.values()):
                with contextlib.suppress(nats.errors.Error, OSError):
                    await message.in_progress()

    async def settle(self, seq: int) -> None:
        """Ack a request whose result is in the log. A lost ack costs a redelivery that is settled again."""
        message = self._held.pop(seq, None)
        self._freed.set()
        if message is not None:
            with contextlib.suppress(nats.errors.Error, OSError):
                await message.ack()

    async def give_back(self) -> None:
        """Return what is not settled, so that the next worker gets it without waiting for a time-out."""
        for message in list(self._held.values()):
            with contextlib.suppress(nats.errors.Error, OSError):
                await message.nak()
        self._held.clear()
