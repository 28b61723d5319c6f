"""Finds answers in the logs of all models, for requests that name an answer by its id or idempotency key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from . import event_ids, idempotency, logged_answers
from .turn import Fault, fault_of, number_in, refused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .connections import Connections
    from .conversations import Conversations
    from .event_ids import Cursor
    from .logged_answers import LoggedAnswer

_MOST_KEY: Final = 255
_LENGTH: Final = 48


class LocatedAnswer(NamedTuple):
    """An answer from the log, and the conversations (tenant and model) that it belongs to."""

    conversations: Conversations
    answer: LoggedAnswer


class AnswerLookup:
    """Finds answers in the log, for any tenant and model."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def find(
        self, tenant: str, answer_id: str, *, conversation: bool = True, but: str | None = None
    ) -> LocatedAnswer | None:
        """Find an answer by its id in the logs of all models except `but`; None if no log has it.

        With `conversation`, read the messages before the answer too. Raises `TurnkeepError`.
        """
        wanted = own_id(answer_id)
        for name in self._connections.models:
            if name == but:
                continue
            conversations = await self._connections.of(tenant, name)
            if found := await logged_answers.find(conversations.client, {wanted}, conversation=conversation):
                return LocatedAnswer(conversations, found[wanted])
        return None

    async def find_kept(self, tenant: str, answer_id: str, api: str, *, conversation: bool) -> LocatedAnswer:
        """Find an answer of an API that clients can read by its id. Raises `Fault` (404), `TurnkeepError`."""
        found = await self.find(tenant, answer_id, conversation=conversation)
        if found is None or not found.answer.note.is_kept or found.answer.note.api != api:
            raise Fault(404, f"Response with id '{answer_id}' not found.")
        return found

    async def find_resumed(
        self, tenant: str, headers: Mapping[str, str], digest: str
    ) -> tuple[LocatedAnswer, Cursor] | None:
        """Find the answer whose stream a client resumes by `Last-Event-ID`, and the place of this event.

        `digest` is that of the request's API and body. Return None without that header, or if the request has
        not reached the log. Raises `Fault` if the answer is gone or belongs to another request, and
        `TurnkeepError`.
        """
        if (read := event_ids.read(headers.get("last-event-id", ""))) is None:
            return None
        found = await self.find(tenant, read[0], conversation=False)
        if found is None:
            if read[1].has_content:
                raise Fault(404, f"the answer that the Last-Event-ID {read[0]} is of is not in the log")
            return None
        if found.answer.note.body != digest:
            raise Fault(422, "the Last-Event-ID is of another request", code="last_event_id_mismatch")
        return found, read[1]

    async def key_id(self, tenant: str, headers: Mapping[str, str], model: str) -> str:
        """Return the answer's id for a request with an `Idempotency-Key`; empty without this header.

        Raises `Fault` if the key is empty or too long, or an earlier request with it was for another model,
        and `TurnkeepError`.
        """
        if (key := headers.get("idempotency-key")) is None:
            return ""
        if not 0 < len(key) <= _MOST_KEY:
            raise refused(f"an Idempotency-Key has 1 to {_MOST_KEY} characters", "Idempotency-Key")
        wanted = idempotency.id_of(key)
        found = await self.find(tenant, wanted, conversation=False, but=model)
        if found is not None:
            raise fault_of(idempotency.key_reused())
        return wanted

    async def answers(self, tenant: str, answer_ids: set[str]) -> dict[str, LoggedAnswer]:
        """Find answers by their ids, in all models; return those found. Raises `TurnkeepError`."""
        found: dict[str, LoggedAnswer] = {}
        for name in self._connections.models:
            found |= await logged_answers.find((await self._connections.of(tenant, name)).client, answer_ids)
        return found


def own_id(answer_id: str) -> str:
    """Strip the API's prefix, such as `resp_`, from an answer's id."""
    return answer_id[-_LENGTH:]


def after(answer: LoggedAnswer, headers: Mapping[str, str], query: Mapping[str, str]) -> Cursor | None:
    """Return the place after which a client resumes an answer's stream; None for the whole stream.

    The query's `starting_after` precedes the header `Last-Event-ID`. Raises `Fault` if it is no number.
    """
    if (number := number_in(query, "starting_after")) is not None:
        return event_ids.behind_number(number)
    read = event_ids.read(headers.get("last-event-id", ""))
    return read[1] if read and read[0] == answer.id else None
