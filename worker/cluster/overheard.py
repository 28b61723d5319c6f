"""Keeps the requests on `ctl` and `ask` that another worker answers, in case that worker ends or is paused.

The server gives each request to one worker, by the queue group, and a copy to all. The worker that answers a
request tells the others when it begins and when it has replied. A request that nobody begins, or whose worker
has ended, is answered by another worker. Then two workers may answer it, if the first one was only slow:
that does no harm, since the client takes the first reply, and an ask has the same id at both (see
`endpoints`), so it is carried out once. A worker that was always alone keeps and tells nothing.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec
import nats.errors
from anyio import current_time, sleep

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from .liveness import Members

#: Limit of the requests that are kept; others are answered only by the worker that the server has chosen.
_MAX_KEPT: Final = 4096
#: How long a request may go without a worker that begins it, and how often this is checked.
_UNBEGUN_S: Final = 1.0
_PERIOD_S: Final = 0.25


class _Note(msgspec.Struct, frozen=True):
    """What a worker says about a request: that it begins to answer it, or that it has replied."""

    request: str
    boot: str
    has_replied: bool


@dataclass(slots=True)
class _Kept:
    """A request, the function that answers it, and the `Member.boot` of the worker that has begun to."""

    message: Msg
    answer: Callable[[Msg], Awaitable[None]]
    heard_s: float
    boot: str = ""


def digest(message: Msg) -> str:
    """Return a request's digest: the same at each worker, and unique, as reply subjects are used once."""
    named = b"\0".join((message.subject.encode(), message.reply.encode(), message.data))
    return blake2b(named, digest_size=16).hexdigest()


class OverheardRequests:
    """Keeps the requests of other workers, and answers those that they do not answer. Event loop only."""

    def __init__(self, nc: Client, members: Members) -> None:
        self._nc = nc
        self._members = members
        self._kept: dict[str, _Kept] = {}
        # Whether another worker ever kept requests: one that is paused counts as ended, and has them later.
        self._is_heard = False

    @property
    def _has_others(self) -> bool:
        return any(one.serves for one in self._members.others.values())

    async def open(self) -> None:
        """Subscribe to what other workers say about requests."""
        await self._nc.subscribe(self._members.common_address("requests"), cb=self._noted)

    async def keep_requests(self, subject: str, answer: Callable[[Msg], Awaitable[None]]) -> None:
        """From now on keep each request on `subject`; `run` gives it to `answer` if no worker replies."""

        async def keep(message: Msg) -> None:
            if self._has_others and message.reply and len(self._kept) < _MAX_KEPT:
                self._kept[digest(message)] = _Kept(message, answer, current_time())

        await self._nc.subscribe(subject, cb=keep)

    def is_late(self) -> bool:
        """Whether this worker was paused, or cannot renew its record: others answer what came meanwhile."""
        return self._has_others and not self._members.has_record

    def forget(self) -> None:
        """Drop all kept requests. Call it after the connection to NATS was lost.

        Meanwhile this worker has not heard which requests the others have replied to, so it would answer
        them a second time.
        """
        self._kept.clear()

    async def tell(self, message: Msg, *, has_replied: bool) -> None:
        """Tell the other workers that this one begins to answer a request, or has replied."""
        self._is_heard = self._is_heard or self._has_others or bool(self._kept)
        if self._is_heard and message.reply:
            note = _Note(digest(message), self._members.me.boot, has_replied)
            with suppress(nats.errors.Error, OSError):
                subject = self._members.common_address("requests")
                await self._nc.publish(subject, msgspec.json.encode(note))

    async def pass_on(self, message: Msg) -> bool:
        """Publish a request again for another worker; return false without one, or if nobody wants a reply.

        This worker must have left the queue group.
        """
        if not (self._has_others and message.reply):
            return False
        await self.tell(message, has_replied=True)
        with suppress(nats.errors.Error, OSError):
            await self._nc.publish(
                message.subject, message.data, reply=message.reply, headers=message.headers
            )
        return True

    async def _noted(self, message: Msg) -> None:
        with suppress(msgspec.MsgspecError):
            note = msgspec.json.decode(message.data, type=_Note)
            if note.has_replied:
                self._kept.pop(note.request, None)
            elif note.request in self._kept:
                self._kept[note.request].boot = note.boot

    async def run(self) -> None:
        """Answer the kept requests whose worker has ended, or that none has begun, until cancelled."""
        while True:
            await sleep(_PERIOD_S)
            running = {one.boot for one in (self._members.me, *self._members.others.values())}
            late_s = current_time() - _UNBEGUN_S
            for one in [*self._kept.values()] if not self.is_late() else []:
                if one.boot not in running if one.boot else one.heard_s < late_s:
                    one.boot = self._members.me.boot
                    await one.answer(one.message)
