"""Pulls requests from the stream's consumer; keeps one delivery per session, and acks the others.

A delivery only tells a session that it has work: the session reads its log in order, so the order of
deliveries does not matter. So one unacknowledged delivery per session, its anchor, is enough: after a crash
the server redelivers the anchor, and the worker that gets the anchor answers all requests of the session
without a result. Older deliveries are acknowledged when newer ones come; the anchor is acknowledged when all
requests are answered. So memory grows with the number of sessions, not of requests.

The number of sessions is limited, also per tenant. A delivery above the limit is returned to the server
(nak), which delivers it again later.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Final

import nats.errors
import structlog
from anyio import Event, Lock, current_time, move_on_after, sleep

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.messages import decode_request
from turnkeep_client.subjects import CONSUMER, ID_RULE, SessionKey
from worker.process.equal_share import most_of_each

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, KeysView, Mapping
    from datetime import datetime

    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from turnkeep_client.messages import Request
    from turnkeep_client.subjects import Subjects
    from worker.observe.telemetry import Telemetry

    from .consistent_reads import StoredMessage
    from .journal import Journal

    Ring = Callable[["Delivery"], None]

log = structlog.get_logger()

_FETCH: Final = 64
_FETCH_BYTES: Final = 8 * 2**20
#: Short, since a worker that is paused still gets what comes during its last pull.
_EXPIRES_S: Final = 1.0
_RETRY_S: Final = 0.5
#: The server redelivers returned deliveries after `_RETURN_S` or later, about `_RETURNS_PER_S` a second.
_RETURN_S: Final = 1.0
_RETURNS_PER_S: Final = 200
#: If a returned delivery is late by this much, its request has left the log, for example by a close.
_GONE_S: Final = 30.0
#: How many refused requests are remembered, to recognise redeliveries: many more than one pull has.
_MAX_REFUSED: Final = 4096

#: Two timestamps of one entry differ by less than this, as they are rounded in different ways.
_SAME_TIME: Final = timedelta(microseconds=100)

#: Statuses with which a pull ends normally: no messages, or expired.
_EMPTY: Final = frozenset({"404", "408"})
#: Limit of a name in a subject: the server closes a connection that sends a line above 4 KiB.
_MAX_NAME_BYTES: Final = 256

#: Descriptions with which a pull ends normally: the byte limit or the number of messages was reached.
_FULL: Final = frozenset({"Message Size Exceeds MaxBytes", "Batch Completed"})


def session_of(subject: str) -> SessionKey | None:
    """Return the session that a stored request's subject names; None if its names cannot be used in subjects.

    A name may break the rule for ids and still be usable in subjects; then the session refuses the request on
    `out`. Call this before building a subject or filter from names that clients have chosen.
    """
    _, tenant, session, _ = subject.rsplit(".", 3)
    if _makes_a_subject(tenant) and _makes_a_subject(session):
        return SessionKey(tenant, session)
    return None


def _makes_a_subject(name: str) -> bool:
    # `*` and `>` are wildcards: they would read the logs of all sessions. U+FFFD replaces bytes that are not
    # UTF-8; nats-py may refuse to publish unprintable characters.
    if name in ("*", ">") or "\ufffd" in name:
        return False
    return name.isprintable() and len(name.encode()) <= _MAX_NAME_BYTES


def is_of(delivery: Msg, entry: StoredMessage | None) -> bool:
    """Whether a delivery is of this entry; a restarted server may have used a lost entry's sequence again."""
    return entry is not None and abs(entry.stored - delivery.metadata.timestamp) <= _SAME_TIME


@dataclass(frozen=True)
class Delivery:
    """A request as the server delivered it."""

    key: SessionKey
    seq: int
    stored: datetime
    body: bytes
    #: Whether an earlier delivery of the request may have crashed a worker.
    again: bool
    #: All requests below this sequence were delivered before, even if they are not redelivered.
    first_seq: int = 0

    @cached_property
    def request(self) -> Request | None:
        """The request; None if its body is invalid."""
        with contextlib.suppress(InvalidMessageError):
            return decode_request(self.body)
        return None


@dataclass(frozen=True, slots=True)
class _Returned:
    """A delivery that was returned to the server, which delivers it again at `due_s`.

    `again` says that another worker got the request before this one.
    """

    key: SessionKey
    again: bool
    due_s: float


class Intake:
    """Pulls deliveries, and keeps the anchors (one unacknowledged delivery per session with work).

    Event loop only.
    """

    def __init__(
        self,
        nc: Client,
        subjects: Subjects,
        telemetry: Telemetry,
        journal: Journal,
        *,
        ack_wait_s: float,
        max_sessions: int,
        max_sessions_per_tenant: int,
        max_message_bytes: int,
    ) -> None:
        """The server redelivers a message to another worker `ack_wait_s` after the last `keep_alive` for it.

        `max_sessions` limits the sessions with an anchor, as `most_of_each` divides it, and
        `max_sessions_per_tenant` those of one tenant.
        """
        self._nc = nc
        self._subjects = subjects
        self._telemetry = telemetry
        self._journal = journal
        self._ack_wait_s = ack_wait_s
        self._max_sessions = max_sessions
        self._max_per_tenant = max_sessions_per_tenant
        self._fetch_bytes = max(_FETCH_BYTES, 2 * max_message_bytes)  # at least the largest message
        self._anchors: dict[SessionKey, Msg | None] = {}  # None: another worker had the delivery, and ended
        self._tenants: Counter[str] = Counter()
        self._returned: dict[int, _Returned] = {}  # by the sequence of the request
        self._dues: dict[str, float] = {}  # by tenant: when the last delivery returned for it comes again
        self._refused: dict[int, None] = {}  # sequences refused last, the oldest first
        self._first_seq = 0  # the first request that no other worker got
        self._server = journal.server  # the server process that has the requests of all anchors
        self._checking = Lock(fast_acquire=True)
        self._num_to_come = 0
        self._fault = ""
        self._inbox = ""  # of the current pull; replies to older pulls are ignored
        self._pull_over = Event()

    @property
    def num_sessions(self) -> int:
        """Number of sessions with requests that wait or run here."""
        return len(self._anchors)

    @property
    def sessions_by_tenant(self) -> Mapping[str, int]:
        """Number of sessions with requests that wait or run here, by tenant."""
        return self._tenants

    @property
    def at_work(self) -> KeysView[SessionKey]:
        """The sessions with requests that wait or run here."""
        return self._anchors.keys()

    @property
    def num_returned(self) -> int:
        """Number of requests returned to the server because their tenants had too many sessions here."""
        return len(self._returned)

    async def pull(self, receive: Callable[[Msg], Awaitable[None]]) -> None:
        """Pull deliveries until cancelled, and give each to `receive`, which may call `deliver`."""
        while True:
            try:
                inbox = self._nc.new_inbox()
                subscription = await self._nc.subscribe(f"{inbox}.*", cb=self._arrival(receive))
                try:
                    for number in itertools.count():
                        await self._pull_some(f"{inbox}.{number}")
                finally:
                    await self._end(subscription)
            except (nats.errors.Error, OSError) as error:  # nats-py reconnects by itself
                log.warning("pulling requests failed, trying again", error=str(error) or type(error).__name__)
                await sleep(_RETRY_S)

    async def _end(self, subscription: Subscription) -> None:
        """Unsubscribe, and take the deliveries that have come: the server counts them as delivered."""
        with move_on_after(_EXPIRES_S, shield=True), contextlib.suppress(nats.errors.Error):
            await (subscription.drain() if self._nc.is_connected else subscription.unsubscribe())  # type: ignore[no-untyped-call]

    async def _pull_some(self, inbox: str) -> None:
        self._num_to_come = _FETCH
        self._fault = ""
        self._inbox = inbox
        self._pull_over = Event()
        # A raw request: nats-py's `fetch` takes any message with a `Status` header for the server's reply. A
        # publisher can set that header, which would lose the request or end the pull.
        request = {"batch": _FETCH, "max_bytes": self._fetch_bytes, "expires": int(_EXPIRES_S * 1e9)}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._subjects.log_stream}.{CONSUMER}"
        await self._nc.publish(subject, json.dumps(request).encode(), reply=inbox)
        with move_on_after(_EXPIRES_S + 1.0):  # in case the server's reply is lost
            await self._pull_over.wait()
        if self._fault:
            raise nats.errors.Error(self._fault)

    def _arrival(self, receive: Callable[[Msg], Awaitable[None]]) -> Callable[[Msg], Awaitable[None]]:
        async def arrived(message: Msg) -> None:
            if message.subject.startswith("_INBOX."):  # a status; requests have their own subjects
                if message.subject != self._inbox:
                    return
                headers = message.headers or {}
                status = headers.get("Status", "")
                reason = headers.get("Description", "")
                if status in _EMPTY:
                    self._forget_gone()
                elif reason not in _FULL:
                    self._fault = f"the server ended the pull: {status} {reason}"
                self._pull_over.set()
                return
            self._num_to_come -= 1
            if self._num_to_come <= 0:
                self._pull_over.set()
            await receive(message)

        return arrived

    def _forget_gone(self) -> None:
        """Forget the returned requests that are late by `_GONE_S`; the server has just had none to deliver.

        A worker that pulls nothing, as while it stops, forgets none: it gets none of them back.
        """
        gone_s = current_time() - _GONE_S
        self._returned = {seq: one for seq, one in self._returned.items() if one.due_s >= gone_s}

    def take(self, delivery: Delivery, ring: Ring) -> None:
        """Wake a session for a request that has no delivery to acknowledge: another worker had it."""
        if delivery.key not in self._anchors:
            self._keep(delivery.key, None)
        ring(delivery)

    async def deliver_late(self, message: Msg, ring: Ring, server: str) -> None:
        """Accept a delivery from the server process `server`, unless a later process has lost it."""
        if server == self._journal.server or await self._is_stored(message):
            await self.deliver(message, ring)

    async def deliver(self, message: Msg, ring: Ring) -> None:
        """Accept a delivery from the server or another worker, and wake its session with `ring`.

        Returns it to the server (nak) if the tenant has no room; refuses names that no subject can have.
        """
        await self._drop_lost()
        metadata = message.metadata
        seq = metadata.sequence.stream
        num_delivered = metadata.num_delivered or 1
        if num_delivered == 1:
            self._first_seq = min(self._first_seq or seq, seq)
        # A request that only this worker got and returned has crashed no worker.
        returned = self._returned.pop(seq, None)
        again = num_delivered > 1 if returned is None else returned.again
        key = session_of(message.subject)
        if key is None:
            await self._refuse(message, seq)
            return
        is_new, anchor = key not in self._anchors, self._anchors.get(key)
        if is_new and not self.room(key.tenant):
            delay_s = self._next_return_s(key.tenant)
            self._returned[seq] = _Returned(key, again, current_time() + delay_s)
            with contextlib.suppress(nats.errors.Error, OSError):
                await message.nak(delay=delay_s)
            return
        again = again and is_new  # else the session is at work here
        ring(Delivery(key, seq, metadata.timestamp, message.data, again, self._first_seq))
        message.data = b""  # frees memory: the anchor may stay for long
        if anchor is None:
            self._keep(key, message)
            return
        # The newest request is the anchor: a close removes older ones from the log, and what has left the log
        # is not redelivered. Of several deliveries of one request only the last can be acknowledged.
        older, newer = sorted((anchor, message), key=lambda one: one.metadata.sequence.stream)
        self._anchors[key] = newer
        if older.metadata.sequence.stream != newer.metadata.sequence.stream:
            with contextlib.suppress(nats.errors.Error, OSError):
                await older.ack()

    def _keep(self, key: SessionKey, message: Msg | None) -> None:
        if key not in self._anchors:
            self._tenants[key.tenant] += 1
        self._anchors[key] = message

    def _next_return_s(self, tenant: str) -> float:
        """Return the seconds after which a delivery that is returned now is to come again.

        A tenant's deliveries come again one after another, so those of a flood delay no other tenant's.
        """
        now_s = current_time()
        pause_s = len(self._dues.keys() | {tenant}) / _RETURNS_PER_S
        due_s = max(now_s + _RETURN_S, self._dues.get(tenant, 0.0) + pause_s)
        self._dues[tenant] = due_s
        return due_s - now_s

    async def _refuse(self, message: Msg, seq: int) -> None:
        """Refuse a request whose tenant or session cannot be named in a subject; terminate its delivery.

        A request that the server delivers again meanwhile is not refused a second time.
        """
        if seq not in self._refused:
            self._refused[seq] = None
            if len(self._refused) > _MAX_REFUSED:
                del self._refused[next(iter(self._refused))]
            await self._answer_unnamed(message, seq)
        with contextlib.suppress(nats.errors.Error, OSError):  # if lost, the redelivery is terminated
            await message.term()

    async def _answer_unnamed(self, message: Msg, seq: int) -> None:
        counts = self._telemetry.requests["unnamed"]
        counts["terminated"] += 1
        if counts["terminated"] == 1:  # log once: there may be thousands
            log.warning(
                "refusing this and further requests: from their names no subject can be built",
                seq=seq,
                subject=message.subject[:80],
            )
        await self._journal.refuse(message.subject, seq, f"the names in a subject must be {ID_RULE}")

    def room(self, tenant: str) -> int:
        """Return for how many more sessions of a tenant this worker may keep a delivery (an anchor) now."""
        most = min(most_of_each(self._tenants, self._max_sessions), self._max_per_tenant)
        return max(most - self._tenants[tenant], 0)

    def returns_again(self, key: SessionKey, message: Msg) -> bool:
        """Whether to return a redelivered request to the server once more, without asking for its owner.

        True if this worker has returned it before and still has no anchor free for the tenant: a backlog
        that the server delivers again and again would else cost a look-up of the owner each time.
        """
        return message.metadata.sequence.stream in self._returned and not self.room(key.tenant)

    def note_unbegun(self, requests: Mapping[int, SessionKey]) -> None:
        """Note that no worker has begun these requests, by sequence, although they were delivered before."""
        now_s = current_time()
        self._returned |= {seq: _Returned(key, again=False, due_s=now_s) for seq, key in requests.items()}

    def first_returned(self) -> dict[SessionKey, int]:
        """Return, by session, the first request returned to the server, if no other worker got it."""
        firsts: dict[SessionKey, int] = {}
        for seq in sorted(self._returned):
            firsts.setdefault(self._returned[seq].key, seq)
        return {key: seq for key, seq in firsts.items() if not self._returned[seq].again}

    def pass_returned(self, seqs: Iterable[int]) -> list[int]:
        """Forget returned requests, which another worker has now; return those that no other had before."""
        known = {seq: self._returned.pop(seq) for seq in seqs if seq in self._returned}
        return [seq for seq, one in known.items() if not one.again]

    async def pull_again(self) -> None:
        """Start a new pull request, since the server dropped the current one with the lost connection."""
        self._pull_over.set()

    async def keep_alive(self) -> None:
        """Tell the server periodically, until cancelled, that this worker still works on its deliveries.

        These are the anchors, one for each session. Must run longer than `pull`: while the worker ends its
        turns, the server must not redeliver them.
        """
        while True:
            await sleep(self._ack_wait_s / 3)
            await self._drop_lost()
            for message in [one for one in self._anchors.values() if one is not None]:
                with contextlib.suppress(nats.errors.Error, OSError):
                    await message.in_progress()
            now_s = current_time()
            self._dues = {tenant: due_s for tenant, due_s in self._dues.items() if due_s > now_s}

    async def ack(self, key: SessionKey) -> None:
        """Acknowledge a session's delivery (its anchor): all requests of the session have results.

        If the ack is lost, the server delivers the request again, which does no harm.
        """
        message = self._drop(key)
        if message is None or not (self._is_checked or await self._is_stored(message)):
            return
        with contextlib.suppress(nats.errors.Error, OSError):
            await message.ack()

    async def give_back(self, key: SessionKey) -> None:
        """Return a session's delivery (nak), since another worker has the session now."""
        message = self._drop(key)
        if message is not None and self._is_checked:
            with contextlib.suppress(nats.errors.Error, OSError):
                await message.nak()

    def _drop(self, key: SessionKey) -> Msg | None:
        if key not in self._anchors:
            return None
        message = self._anchors.pop(key)
        self._tenants[key.tenant] -= 1
        if not self._tenants[key.tenant]:
            del self._tenants[key.tenant]
        return message

    @property
    def _is_checked(self) -> bool:
        return self._server == self._journal.server

    async def _drop_lost(self) -> None:
        """Drop anchors that a restarted server has lost: other requests may have their sequences now.

        Whatever is told the server about such an anchor, it would take for the other request.
        """
        if self._is_checked:
            return
        async with self._checking:
            while self._server != (server := self._journal.server):
                self._refused.clear()
                for key, message in list(self._anchors.items()):
                    is_lost = message is not None and not await self._is_stored(message)
                    if is_lost and self._anchors.get(key) is message:
                        self._drop(key)
                self._server = server

    async def _is_stored(self, message: Msg) -> bool:
        return is_of(message, await self._journal.entry(message.metadata.sequence.stream))

    def expects(self, key: SessionKey, seq: int = 0) -> bool:
        """Whether a session is at work here, or its request at `seq` will be redelivered."""
        return key in self._anchors or seq in self._returned

    async def return_anchors(self) -> None:
        """Return all unacknowledged deliveries (nak); the server delivers them to the next worker at once.

        A server that has just restarted delivers them again by itself, after `ack_wait_s`.
        """
        messages = [one for one in self._anchors.values() if one is not None]
        for message in messages if self._is_checked else []:
            with contextlib.suppress(nats.errors.Error, OSError):
                await message.nak()
        self._anchors.clear()
        self._tenants.clear()
