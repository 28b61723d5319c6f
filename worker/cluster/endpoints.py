"""Answers requests on core NATS: control requests (`ctl`) and asks (`ask`, a generate with a reply).

An ask without an id gets one that depends only on the message. So if two workers store it (see `overheard`),
the second request is a repeat of the first, and runs nothing.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING
from uuid import uuid4

import nats.errors
import structlog
from anyio import current_time, get_cancelled_exc_class, move_on_after
from msgspec import Raw

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.messages import Failed, encode, failure
from worker.process.equal_share import most_of_each
from worker.wire.connection import confirm_subscriptions
from worker.wire.discovery import QUEUE

from .overheard import digest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup
    from msgspec import Struct
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from turnkeep_client.messages import ControlReply, Result
    from turnkeep_client.subjects import Subjects
    from worker.observe.telemetry import RequestTimes, Telemetry
    from worker.wire.asks import Asks
    from worker.wire.outbox import Outbox

    from .overheard import OverheardRequests
    from .owners import Owners

log = structlog.get_logger()

_CLOSE_S = 5.0
#: Limit of open requests, as `most_of_each` divides it; above it, a tenant gets `overloaded`.
_MAX_OPEN = 4096
_TOO_MANY = f"the worker has {_MAX_OPEN} questions to answer already; ask again later"
#: The time for a last reply when the worker stops.
_LAST_S = 1.0
_STOPS = "the worker stops: ask again"
_FAILED = "an error of the worker, which is in its log"
_ASK_STOPS = "the worker stops; if the log has the request, its result comes on the session's out"


class Endpoints:
    """Answers requests on `ctl` and `ask`. An ask is stored in the log like any generate. Event loop only."""

    def __init__(
        self,
        nc: Client,
        subjects: Subjects,
        asks: Asks,
        control: Callable[[str, bytes], Awaitable[ControlReply]],
        owners: Owners,
        overheard: OverheardRequests,
        outbox: Outbox,
        telemetry: Telemetry,
        tasks: TaskGroup,
    ) -> None:
        """`control(subject, body)` answers a request on `ctl`. Each request runs as a task in `tasks`."""
        self._nc = nc
        self._subjects = subjects
        self._asks = asks
        self._control = control
        self._owners = owners
        self._overheard = overheard
        self._outbox = outbox
        self._telemetry = telemetry
        self._subscriptions: list[Subscription] = []
        self._tasks = tasks
        self._tenants: Counter[str] = Counter()  # open requests by tenant

    async def open(self) -> None:
        """Subscribe; return when the server has confirmed the subscriptions."""
        calls = self._telemetry.calls
        await self._overheard.open()
        for subject, spawn in (
            (self._subjects.every("ctl"), self._spawning(calls["ctl"], self._control_reply, _STOPS)),
            (self._subjects.every("ask"), self._spawning(calls["ask"], self._ask, _ASK_STOPS)),
        ):
            await self._overheard.keep_requests(subject, spawn)
            self._subscriptions.append(await self._nc.subscribe(subject, QUEUE, cb=self._unless_late(spawn)))
        await confirm_subscriptions(self._nc)

    async def close(self) -> None:
        """Accept no more requests. Those that have arrived are begun, and get a reply when cancelled."""
        with move_on_after(_CLOSE_S):
            for subscription in self._subscriptions if self._nc.is_connected else []:
                with contextlib.suppress(nats.errors.Error):
                    await subscription.drain()  # type: ignore[no-untyped-call]

    def _unless_late(self, spawn: Callable[[Msg], Awaitable[None]]) -> Callable[[Msg], Awaitable[None]]:
        async def arrived(message: Msg) -> None:
            if not self._overheard.is_late():
                await spawn(message)

        return arrived

    def _spawning(
        self, calls: RequestTimes, answer: Callable[[Msg], Awaitable[Struct | Raw]], stops: str
    ) -> Callable[[Msg], Awaitable[None]]:
        """Return a callback that answers each message in its own task, so that none delays the next.

        If the worker stops first, another worker gets the request; if there is none, the answer is
        `overloaded` with the text `stops`.
        """

        async def handle(message: Msg, tenant: str) -> None:
            began_s, error = current_time(), "internal"
            try:
                await self._overheard.tell(message, has_replied=False)
                error = await self._try(message, answer)
                await self._overheard.tell(message, has_replied=True)
            except get_cancelled_exc_class():
                error = "overloaded"
                with move_on_after(_LAST_S, shield=True):
                    if not await self._overheard.pass_on(message):
                        await self._reply(message, failure(None, "overloaded", stops))
                raise
            finally:
                calls.count(current_time() - began_s, error)
                self._tenants[tenant] -= 1
                if not self._tenants[tenant]:
                    del self._tenants[tenant]

        async def spawn(message: Msg) -> None:
            tenant = message.subject.rsplit(".", 3)[1]
            is_over = self._tasks.cancel_scope.cancel_called  # a new task would spin until the others end
            if is_over and await self._overheard.pass_on(message):
                return
            if is_over or self._tenants[tenant] >= most_of_each(self._tenants, _MAX_OPEN):
                calls.count(0, "overloaded")
                await self._reply(message, failure(None, "overloaded", _STOPS if is_over else _TOO_MANY))
                await self._overheard.tell(message, has_replied=True)
                return
            self._tenants[tenant] += 1
            self._tasks.start_soon(handle, message, tenant)

        return spawn

    async def _try(self, message: Msg, answer: Callable[[Msg], Awaitable[Struct | Raw]]) -> str:
        """Answer a request, also if that fails; return the code of the error, empty if there was none."""
        try:
            reply = await answer(message)
            await self._reply(message, reply)
        except Exception:
            log.exception("answering failed", subject=message.subject)
            with contextlib.suppress(Exception):  # it may be the reply that fails
                await self._reply(message, failure(None, "internal", _FAILED))
            return "internal"
        return reply.code if isinstance(reply, Failed) else ""

    async def _reply(self, message: Msg, reply: Struct | Raw) -> None:
        if message.reply:
            await self._outbox.reply(message.reply, reply)

    async def _control_reply(self, message: Msg) -> ControlReply | Raw:
        with contextlib.suppress(InvalidMessageError):
            key, _, _ = self._subjects.parse(message.subject)
            reply = await self._owners.control(key, message.subject, message.data)
            if reply is not None:
                return Raw(reply)
        return await self._control(message.subject, message.data)

    async def _ask(self, message: Msg) -> Result:
        return await self._asks.answer(message, digest(message) if message.reply else uuid4().hex)

    async def control(self, subject: str, body: bytes) -> bytes:
        """Answer a control request that another worker has passed on; return the encoded reply."""
        return encode(await self._control(subject, body))
