"""What is told of answers while they come: by `conversations`, to who sends them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import Chunk, Generated

if TYPE_CHECKING:
    from collections.abc import Callable

    from .index import Asked
    from .planning import How
    from .recorded import Note


class Found(NamedTuple):
    """The session that answers, and what it is to the conversation.

    It has `num_known` of the conversation's messages, which are `position` tokens. `differs` is the first
    message that is in no known conversation, if a session should have it: by number, role and size.
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


class Begun(NamedTuple):
    """The log has the request."""


Event = Found | Begun | Chunk | Generated | TurnkeepError


class Answering:
    """The answers to one turn. `events` has them as they come, each with its number among the answers."""

    def __init__(
        self, on_end: Callable[[How, Generated], None], note: Note, key_id: str = "", *, stays: bool = False
    ) -> None:
        """`on_end` gets each answer, also if nobody listens. `note` is kept with the request in the log.

        `key_id` is the id of the answer to a request with a key. If it `stays`, it is answered whatever
        becomes of its client, which is told when the log has the request.
        """
        self.on_end = on_end
        self.note = note
        self.key_id = key_id
        self.stays = stays or bool(key_id)
        self.events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.begun = asyncio.Event()
        self.running: set[Asked] = set()
        self.is_abandoned = False
        self.following: asyncio.Task[None] | None = None
