"""Dead letters: records of requests that workers gave up after every attempt crashed or failed (ADR 0027).

A dead letter is stored on its session's subject `dead`. The request is answered with the error `internal`,
and stays in the log.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import DeadLetter, Request
from turnkeep_client.session_log import find_request
from turnkeep_client.subjects import SessionKey

if TYPE_CHECKING:
    from turnkeep_client.client import Client
    from turnkeep_client.messages import Result

_LETTER: Final = msgspec.json.Decoder(DeadLetter)


class DeadError(TurnkeepError):
    """A dead letter cannot be found, or its request cannot be sent again."""


class DeadRequest(Struct, frozen=True, kw_only=True):
    """A dead letter at the sequence `at`; `asked` is its request, None if that is gone or was not read."""

    tenant: str
    session: str
    at: int
    stored: datetime
    letter: DeadLetter
    asked: Request | None = None

    @property
    def key(self) -> SessionKey:
        """The session's key."""
        return SessionKey(self.tenant, self.session)


async def letters(client: Client, tenant: str = "*", session: str = "*") -> list[DeadRequest]:
    """Read the dead letters of a session, of a tenant or of all tenants, in order, without the requests."""
    found = []
    async for key, one in client.stored.every(SessionKey(tenant, session), "dead"):
        try:
            letter = _LETTER.decode(one.body)
        except (msgspec.DecodeError, UnicodeDecodeError):  # not written by a worker
            continue
        stored = datetime.fromisoformat(one.headers["Nats-Time-Stamp"])
        found.append(
            DeadRequest(tenant=key.tenant, session=key.session, at=one.seq, stored=stored, letter=letter)
        )
    return found


async def find(client: Client, session: str, request: str) -> DeadRequest:
    """Return the last dead letter of a request, with the request if the log still has it.

    `request` is the request's id or its sequence in the log. Raises `DeadError` if there is no such letter.
    """
    for dead in reversed(await letters(client, client.tenant, session)):
        if request in (dead.letter.id, str(dead.letter.seq)):
            asked = await find_request(client.stored, dead.key, dead.letter.seq)
            return replace(dead, asked=asked and asked.request)
    raise DeadError(
        f"session {session} has no dead letter of a request {request}; see turnkeep sessions --state dead"
    )


async def retry(client: Client, dead: DeadRequest, *, anyway: bool, timeout_s: float) -> Result:
    """Send a dead letter's request again under a new id; return the result, which may be `Failed`.

    The letter stays: a power cut could lose the new request (ADR 0099). Unless `anyway`, the request fails if
    the session's position has changed since workers gave it up. Raises `DeadError` if the request is gone.
    """
    if dead.asked is None:
        raise DeadError(f"the request at {dead.letter.seq} is not in the log any more; drop its letter")
    position = None if anyway else dead.letter.position
    request = replace(dead.asked, id=f"retry-{uuid4().hex}", expect_position=position)
    return await (await client.submit(dead.key, request, timeout_s=timeout_s))
