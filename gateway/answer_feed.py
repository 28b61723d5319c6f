"""Defines the events of running answers: `conversations` queues them, the HTTP responses read them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import Chunk, Generated

if TYPE_CHECKING:
    from collections.abc import Callable

    from .index import IndexedRequest
    from .logged_answers import LoggedHeader
    from .planning import How


class SessionMatch(NamedTuple):
    """Event: the session that answers a turn, and how much of the conversation this session has already.

    The session has the first `num_known` messages, which are `position` tokens. If an earlier answer was not
    found, `differs` names the first message (number, role, size) that no known conversation has.
    """

    session: str
    how: How
    position: int
    num_known: int
    num_messages: int
    differs: str | None = None

    def __str__(self) -> str:
        found = f"{self.how}; session={self.session}; messages={self.num_known}/{self.num_messages}"
        return f"{found}; tokens={self.position}; differs={self.differs or 'none'}"


class Receipt(NamedTuple):
    """Event: the log has stored the request."""


Event = SessionMatch | Receipt | Chunk | Generated | TurnkeepError


class AnswerFeed:
    """The answers to one turn while they run. `events` is a queue of (number of the answer, event)."""

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
        key. An answer that `stays` goes on after its client disconnects, and sends `Receipt`.
        """
        self.on_end = on_end
        self.note = note
        self.key_id = key_id
        self.stays = stays or bool(key_id)
        self.events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.begun = asyncio.Event()
        #: The requests of answers that run; equal prompts may share one, which is here for each of them.
        self.running: list[IndexedRequest] = []
        self.is_abandoned = False
        self.following: asyncio.Task[None] | None = None
