"""Defines the events of running answers: `conversations` queues them, the HTTP responses read them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, NamedTuple

from turnkeep_client.errors import ClientClosedError, NoWorkerError, TurnkeepError
from turnkeep_client.messages import Chunk, Generated

if TYPE_CHECKING:
    from collections.abc import Callable

    from .index import IndexedRequest
    from .logged_answers import LoggedHeader
    from .planning import How


class SessionMatch(NamedTuple):
    """Event: the session that answers a turn, and how much of the conversation this session has already."""

    session: str
    #: Whether the session is `continued`, `forked` from another one, or new (`begun`); `repeated` if the turn
    #: gets the answer of an equal, earlier request.
    how: How
    #: The session's number of tokens before the turn. The next two: how many of the conversation's messages
    #: the session has, and how many there are. All are 0 for an answer found by its idempotency key.
    position: int
    num_known: int
    num_messages: int
    #: If the conversation's last answer is not in the session: the first part that no recent conversation
    #: has, `tools` or `messages[3] (user, 120 characters)`; None also if each part is in one.
    differs: str | None = None

    def __str__(self) -> str:
        found = f"{self.how}; session={self.session}; messages={self.num_known}/{self.num_messages}"
        return f"{found}; tokens={self.position}; differs={self.differs or 'none'}"


class Receipt(NamedTuple):
    """Event: the log has stored the request."""


Event = SessionMatch | Receipt | Chunk | Generated | TurnkeepError


class AnswerFeed:
    """The answers to one turn while they run."""

    def __init__(
        self,
        on_end: Callable[[How, Generated], None],
        note: LoggedHeader,
        key_id: str = "",
        *,
        stays: bool = False,
    ) -> None:
        """`on_end` is called with each result, even if the client has disconnected.

        The log stores `note` with the request. `key_id` is the answer's id if the request has an idempotency
        key. An answer that `stays`, or has a `key_id`, goes on after its client disconnects, and its events
        include a `Receipt`.
        """
        self.on_end = on_end
        self.note = note
        self.key_id = key_id
        self.stays = stays or bool(key_id)
        #: Pairs of an answer's number and an event.
        self.events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        #: Set once the log has the request, or never will.
        self.begun = asyncio.Event()
        #: The requests of answers that run; equal prompts may share one, which is here for each of them.
        self.running: list[IndexedRequest] = []
        #: Whether the client has disconnected, so that nobody reads the events.
        self.is_abandoned = False
        #: The task that follows an answer of the log; None for a new one.
        self.following: asyncio.Task[None] | None = None

    async def next_events(self, until_s: float) -> list[tuple[int, Event]]:
        """Wait for an event; return it with those that have come meanwhile, as to a slow client.

        Returns none if there is none at `until_s`, by the event loop's clock.
        """
        taken: list[tuple[int, Event]] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                taken.append(await self.events.get())
        while not self.events.empty():
            taken.append(self.events.get_nowait())
        return taken

    def stop(self, why: NoWorkerError | None = None) -> None:
        """End the events by an error: `why`, or that the gateway stops. The answers go on."""
        self.events.put_nowait((0, why or ClientClosedError("the gateway stops")))
