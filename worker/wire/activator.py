"""Stands in for the worker of a prefix while none runs: notices requests, and holds those that want a reply.

Requests on `in` are in the log, where the worker will find them. Requests on `ctl` and `ask` are held, and
published again once the worker has subscribed, so that the worker replies to the client itself. Requests for
`metrics` are answered here, since looking at the metrics must not load the model. Requests to load or unload
the model are passed to the supervisor.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Final

import nats.errors
import structlog
from anyio import current_time, move_on_after
from anyio.lowlevel import checkpoint_if_cancelled
from nats.js.errors import APIError

from turnkeep_client.errors import InvalidMessageError, TurnkeepError
from turnkeep_client.messages import (
    MetricsRequest,
    Serving,
    decode_control,
    decode_metrics,
    decode_serve,
    encode,
    failure,
)
from turnkeep_client.subjects import CONSUMER, DEFAULT_TENANT, SessionKey
from worker.process.equal_share import most_of_each

from .connection import confirm_subscriptions
from .discovery import QUEUE
from .outbox import Outbox
from .streams import ensure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from turnkeep_client.messages import Failed, Metrics, ServeRequest
    from turnkeep_client.subjects import Subjects
    from worker.process.settings import Settings

#: Limit of requests held for the worker, as `most_of_each` divides it; above it, a tenant gets `overloaded`.
_MOST_HELD: Final = 256
#: How long unsubscribing may take.
_END_S: Final = 30.0
#: How long a worker may take to tell its metrics.
_ANSWER_S: Final = 2.0
_FAILED: Final = "an error of turnkeep serve, which is in its log"
_TOO_MANY: Final = "too many questions wait until the model is loaded; ask again later"

log = structlog.get_logger()


class Activator:
    """Stands in for one worker; calls `wake` for each request that only the worker can answer."""

    def __init__(
        self,
        nc: Client,
        subjects: Subjects,
        metrics: Callable[[], Metrics],
        wake: Callable[[], None],
        serve: Callable[[ServeRequest], Awaitable[str]],
    ) -> None:
        """`serve` carries out a request to load or unload the model; returns a sentence, or raises."""
        self._nc = nc
        self._js = nc.jetstream()
        self._subjects = subjects
        self._held_subjects = (subjects.every("ctl"), subjects.every("ask"))
        self._metrics = metrics
        self._wake = wake
        self._serve = serve
        self._outbox = Outbox(nc, subjects)
        self._subscriptions: dict[str, Subscription] = {}
        self._held: list[Msg] = []
        #: When the last noticed request came, by the event loop's monotonic clock.
        self.used_s = current_time()

    async def open(self, settings: Settings, *, all_requests: bool) -> None:
        """Create the prefix's streams, and listen to its requests. Raises `BrokerError`.

        With `all_requests`, those on `ctl` and `ask` update `used_s` too, even if the worker gets them. Then
        NATS no longer says at once that nobody answers such a request.
        """
        await ensure(self._js, self._subjects, settings)
        await self._nc.subscribe(self._subjects.every("in"), cb=self._notice)
        await self._nc.subscribe(self._subjects.serve, cb=self._asked)
        for subject in self._held_subjects if all_requests else ():  # also those that the worker gets
            await self._nc.subscribe(subject, cb=self._hear)

    async def begin(self) -> None:
        """Hold requests on `ctl` and `ask` from now on, as a member of the workers' queue group."""
        if not (missing := [one for one in self._held_subjects if one not in self._subscriptions]):
            return
        for subject in missing:
            self._subscriptions[subject] = await self._nc.subscribe(subject, QUEUE, cb=self._hold)
        with contextlib.suppress(nats.errors.Error):  # without a connection: the next one subscribes again
            await confirm_subscriptions(self._nc)

    async def end(self) -> None:
        """Unsubscribe, then publish the held requests again; the worker must already have subscribed.

        If the caller is cancelled, as the worker has died, requests stay held for the next `end`.
        """
        with move_on_after(_END_S, shield=True):  # a cancelled drain would leave a subscription without owner
            while self._subscriptions:
                _, subscription = self._subscriptions.popitem()
                with contextlib.suppress(nats.errors.Error):
                    await subscription.drain()  # type: ignore[no-untyped-call]
        await checkpoint_if_cancelled()
        while self._held:
            one = self._held[0]
            await self._nc.publish(one.subject, one.data, reply=one.reply, headers=one.headers)
            del self._held[0]

    async def refuse(self, why: str) -> None:
        """Answer the held requests with a failure that says `why`."""
        while self._held:
            await self._outbox.reply(self._held.pop(0).reply, failure(None, "internal", why))

    async def publish_metrics(self) -> None:
        """Publish one metrics message, which shows that the prefix is served; call this every few seconds."""
        await self._outbox.metrics(self._metrics())

    async def has_work(self) -> bool:
        """Return whether requests wait or are being worked on; true if server or worker do not answer.

        Embeddings are not in the log: a running worker's metrics count them.
        """
        if self._held:
            return True
        try:
            found = await self._js.consumer_info(self._subjects.log_stream, CONSUMER)
            if found.num_pending or found.num_ack_pending:
                return True
            if self._subscriptions:  # no worker runs
                return False
            asked = self._subjects.of(SessionKey(DEFAULT_TENANT, "any"), "ctl")
            reply = await self._nc.request(asked, encode(MetricsRequest()), timeout=_ANSWER_S)
            return decode_metrics(reply.data).running > 0
        except (APIError, nats.errors.Error, OSError, InvalidMessageError) as error:
            log.debug("the log or the worker cannot be looked at", error=str(error))
            return True

    async def _asked(self, message: Msg) -> None:
        try:
            answer: Serving | Failed = Serving(said=await self._serve(decode_serve(message.data)))
        except TurnkeepError as error:
            answer = failure(None, "invalid_request", str(error))
        except Exception:
            log.exception("a request to load or unload a model failed")
            answer = failure(None, "internal", _FAILED)
        await self._outbox.reply(message.reply, answer)

    async def _notice(self, _: Msg) -> None:
        self.used_s = current_time()
        self._wake()

    async def _hear(self, message: Msg) -> None:
        if not _is_look(message.data):
            self.used_s = current_time()

    async def _hold(self, message: Msg) -> None:
        is_look = _is_look(message.data)
        if not is_look and self._has_room(message):
            self._held.append(message)
            await self._notice(message)
        elif message.reply:
            answer = self._metrics() if is_look else failure(None, "overloaded", _TOO_MANY)
            await self._outbox.reply(message.reply, answer)

    def _has_room(self, message: Msg) -> bool:
        held = Counter(map(_tenant, self._held))
        return held[_tenant(message)] < most_of_each(held, _MOST_HELD)


def _tenant(message: Msg) -> str:
    return message.subject.rsplit(".", 3)[1]


def _is_look(body: bytes) -> bool:
    try:
        return isinstance(decode_control(body), MetricsRequest)
    except InvalidMessageError:
        return False
