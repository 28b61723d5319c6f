"""Requests in: pull from the stream's consumer, keep each delivery alive, ack it when it is settled.

A delivery is a doorbell, no more: the session reads its log in order, whatever the order of deliveries. So
a redelivery after a crash, or a message that overtakes another one, cannot change a session's order.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import nats.errors
import structlog

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

    from .streams import Streams

log = structlog.get_logger()

_FETCH = 64
_FETCH_TIMEOUT_S = 5.0
_RETRY_S = 0.5


class Intake:
    """Deliveries that this worker holds, by stream sequence. Event loop only."""

    def __init__(
        self,
        js: JetStreamContext,
        names: Streams,
        *,
        ack_wait_s: float,
        max_held: int,
    ) -> None:
        """Without a sign of life for `ack_wait_s`, the server gives a delivery to another worker."""
        self._js = js
        self._names = names
        self._ack_wait_s = ack_wait_s
        self._max_held = max_held
        self._held: dict[int, Msg] = {}
        self._freed = asyncio.Event()
        self._fetching: asyncio.Task[list[Msg]] | None = None

    @property
    def num_held(self) -> int:
        """Requests that wait or run here."""
        return len(self._held)

    async def pull(self, ring: Callable[[str, int], None]) -> None:
        """Pull until cancelled. At `max_held` it pauses: what is not pulled waits in the stream.

        `ring(subject, sequence)` is called for each delivery that is not held yet; it must not block.
        """
        while True:
            try:
                subscription = await self._js.pull_subscribe_bind(self._names.consumer, self._names.log)
                try:
                    while True:
                        await self._pull_some(subscription, ring)
                finally:
                    with contextlib.suppress(nats.errors.Error):
                        await subscription.unsubscribe()
            except (nats.errors.Error, OSError) as error:  # a lost connection: nats-py reconnects by itself
                log.warning("pulling requests failed, trying again", error=str(error) or type(error).__name__)
                await asyncio.sleep(_RETRY_S)

    async def _pull_some(
        self, subscription: JetStreamContext.PullSubscription, ring: Callable[[str, int], None]
    ) -> None:
        while len(self._held) >= self._max_held:
            self._freed.clear()
            await self._freed.wait()
        size = min(_FETCH, self._max_held - len(self._held))
        self._fetching = asyncio.create_task(subscription.fetch(size, timeout=_FETCH_TIMEOUT_S))
        try:
            await asyncio.wait([self._fetching])
        finally:
            self._fetching.cancel()
        if self._fetching.cancelled():  # by pull_again
            return
        try:
            messages = self._fetching.result()
        except TimeoutError:  # nats-py's own is one, and now and then a plain one gets out
            return
        for message in messages:
            seq = message.metadata.sequence.stream
            known = seq in self._held
            self._held[seq] = message  # the newest delivery is the one whose ack counts
            if not known:
                ring(message.subject, seq)

    async def pull_again(self) -> None:
        """Give up the outstanding pull, which the server forgot when the connection was lost."""
        if self._fetching is not None:
            self._fetching.cancel()

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
