"""Requests in: pull from the stream's consumer, hold one delivery for each session with work, ack the rest.

A delivery is a doorbell, no more: the session reads its log in order, whatever the order of deliveries. So
one unacknowledged delivery, the session's anchor, is enough: after a crash it comes again, and whoever gets
it answers all that the session's log has no result for. Every other delivery of the session is acknowledged
as it comes, and the anchor once nothing is left to answer. What is held grows with sessions, not requests.

Tenants share the places for sessions: what is over a tenant's share is given back, to come again later.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import nats.errors
import structlog
from anyio import Event, move_on_after, sleep

from turnkeep_client.subjects import ID_RULE, SessionKey
from worker.concurrency import shielded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import datetime

    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from worker.telemetry import Telemetry

    from .streams import Streams

    Ring = Callable[["Delivery"], None]

log = structlog.get_logger()

_FETCH: Final = 64
_FETCH_BYTES: Final = 8 * 2**20
_EXPIRES_S: Final = 5.0
_RETRY_S: Final = 0.5
#: What is given back comes again after so long, and later where there is much of it: so many in a second.
_RETURN_S: Final = 1.0
_RETURNS_PER_S: Final = 200

#: Ends of a pull that are no fault: nothing was there, or its time is over.
_EMPTY: Final = frozenset({"404", "408"})
#: A longer name makes no subject: a server ends the connection of whoever sends a line of more than 4 KiB.
_MAX_NAME_BYTES: Final = 256

#: And these: the next message is more than the rest of the pull's bytes, or it has brought all.
_FULL: Final = frozenset({"Message Size Exceeds MaxBytes", "Batch Completed"})


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
    # A `*` or `>` is a pattern: reading its log would be reading everybody's. U+FFFD stands for bytes that
    # are not UTF-8; what is not printable nats-py may refuse to publish.
    if name in ("*", ">") or "\ufffd" in name:
        return False
    return name.isprintable() and len(name.encode()) <= _MAX_NAME_BYTES


@dataclass(frozen=True, slots=True)
class Delivery:
    """A request as the server delivered it.

    `again` says that it was delivered before, and to another worker; so were those of sequences below
    `first_seq`, whether they come again or not.
    """

    key: SessionKey
    seq: int
    stored: datetime
    body: bytes
    again: bool
    first_seq: int = 0


class Intake:
    """The deliveries that this worker holds, one for each session with work. Event loop only."""

    def __init__(
        self,
        nc: Client,
        names: Streams,
        telemetry: Telemetry,
        refuse: Callable[[str, int, str], Awaitable[None]],
        *,
        ack_wait_s: float,
        max_sessions: int,
        max_sessions_per_tenant: int,
        max_message_bytes: int,
    ) -> None:
        """`refuse(subject, sequence, message)` answers what can be answered nowhere else.

        Without a sign of life for `ack_wait_s`, the server gives a delivery to another worker.

        At most `max_sessions` are worked on at a time, and `max_sessions_per_tenant` of one tenant. Where all
        places are taken, a tenant with less than an equal share of them still gets one.
        """
        self._nc = nc
        self._names = names
        self._telemetry = telemetry
        self._answer_refused = refuse
        self._ack_wait_s = ack_wait_s
        self._max_sessions = max_sessions
        self._max_per_tenant = max_sessions_per_tenant
        self._fetch_bytes = max(_FETCH_BYTES, 2 * max_message_bytes)  # the largest message must fit
        self._anchors: dict[SessionKey, Msg] = {}
        self._tenants: Counter[str] = Counter()
        self._returned: dict[int, bool] = {}  # sequences that are to come again -> another had them before
        self._first_seq = 0  # the first request that no other worker had
        self._num_to_come = 0
        self._fault = ""
        self._inbox = ""  # of the pull that is out; older ones may still be answered
        self._pull_over = Event()

    @property
    def num_sessions(self) -> int:
        """Sessions with requests that wait or run here."""
        return len(self._anchors)

    @property
    def num_returned(self) -> int:
        """Requests that were given back, since their tenant has as many sessions at work as it may."""
        return len(self._returned)

    async def pull(self, ring: Ring) -> None:
        """Pull until cancelled; `ring` is called for each delivery that is taken, and must not block."""
        while True:
            try:
                inbox = self._nc.new_inbox()
                subscription = await self._nc.subscribe(f"{inbox}.*", cb=self._arrival(ring))
                try:
                    for number in itertools.count():
                        await self._pull_some(f"{inbox}.{number}")
                finally:
                    with contextlib.suppress(nats.errors.Error):
                        await shielded(subscription.unsubscribe)
            except (nats.errors.Error, OSError) as error:  # a lost connection: nats-py reconnects by itself
                log.warning("pulling requests failed, trying again", error=str(error) or type(error).__name__)
                await sleep(_RETRY_S)

    async def _pull_some(self, inbox: str) -> None:
        self._num_to_come = _FETCH
        self._fault = ""
        self._inbox = inbox
        self._pull_over = Event()
        # The raw request, since nats-py's `fetch` takes any message with a header `Status` for the server's
        # word on the pull. That header is the publisher's to set: it would lose the request, or end the pull.
        request = {"batch": _FETCH, "max_bytes": self._fetch_bytes, "expires": int(_EXPIRES_S * 1e9)}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._names.log}.{self._names.consumer}"
        await self._nc.publish(subject, json.dumps(request).encode(), reply=inbox)
        with move_on_after(_EXPIRES_S + 1.0):  # the server's word may have been lost
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
                reason = headers.get("Description", "")
                if status not in _EMPTY and reason not in _FULL:
                    self._fault = f"the server ended the pull: {status} {reason}"
                self._pull_over.set()
                return
            self._num_to_come -= 1
            if self._num_to_come <= 0:
                self._pull_over.set()
            await self._deliver(message, ring)

        return arrived

    async def _deliver(self, message: Msg, ring: Ring) -> None:
        metadata = message.metadata
        seq = metadata.sequence.stream
        num_delivered = metadata.num_delivered or 1
        if num_delivered == 1:
            self._first_seq = self._first_seq or seq
        # Not what this worker has given back itself: nobody has died over that.
        again = self._returned.pop(seq, num_delivered > 1)
        key = session_of(message.subject)
        if key is None:
            await self._refuse(message, seq)
            return
        anchor = self._anchors.get(key)
        if anchor is None and not self._has_room(key.tenant):
            self._returned[seq] = again
            with contextlib.suppress(nats.errors.Error, OSError):
                await message.nak(delay=max(_RETURN_S, len(self._returned) / _RETURNS_PER_S))
            return
        again = again and anchor is None  # else it is at work, and lives
        ring(Delivery(key, seq, metadata.timestamp, message.data, again, self._first_seq))
        if anchor is None:
            self._tenants[key.tenant] += 1
        elif anchor.metadata.sequence.stream != seq:  # rung above, and covered by the anchor from here on
            with contextlib.suppress(nats.errors.Error, OSError):
                await message.ack()
            return
        message.data = b""  # it may be held for long
        self._anchors[key] = message  # the newest delivery is the one whose ack counts

    async def _refuse(self, message: Msg, seq: int) -> None:
        """End a delivery from whose names no subject can be built, so that it does not come again."""
        counts = self._telemetry.requests["unnamed"]
        counts["terminated"] += 1
        if counts["terminated"] == 1:  # whoever sends one may send thousands
            log.warning(
                "ended a request, and will end others, from whose subject no subject can be built",
                seq=seq,
                subject=message.subject[:80],
            )
        await self._answer_refused(message.subject, seq, f"the names in a subject must be {ID_RULE}")
        with contextlib.suppress(nats.errors.Error, OSError):  # lost, it comes again and is ended again
            await message.term()

    def _has_room(self, tenant: str) -> bool:
        mine = self._tenants[tenant]
        if len(self._anchors) < self._max_sessions:
            return mine < self._max_per_tenant
        return mine < min(self._max_sessions // (len(self._tenants) or 1), self._max_per_tenant)

    async def pull_again(self) -> None:
        """Give up the outstanding pull, which the server forgot when the connection was lost."""
        self._pull_over.set()

    async def keep_alive(self) -> None:
        """Tell the server again and again that the held sessions are worked on, until cancelled.

        It must outlive the pulling: while the worker drains, its deliveries are still its own.
        """
        while True:
            await sleep(self._ack_wait_s / 3)
            for message in list(self._anchors.values()):
                with contextlib.suppress(nats.errors.Error, OSError):
                    await message.in_progress()

    async def ack(self, key: SessionKey) -> None:
        """Ack a session's anchor: all that was delivered has its result. A lost ack costs a redelivery."""
        message = self._anchors.pop(key, None)
        if message is None:
            return
        self._tenants[key.tenant] -= 1
        if not self._tenants[key.tenant]:
            del self._tenants[key.tenant]
        with contextlib.suppress(nats.errors.Error, OSError):
            await message.ack()

    async def give_back(self) -> None:
        """Return what is not settled, so that the next worker gets it without waiting for a time-out."""
        for message in list(self._anchors.values()):
            with contextlib.suppress(nats.errors.Error, OSError):
                await message.nak()
        self._anchors.clear()
        self._tenants.clear()
