"""Says what the log has for an idempotency key, whichever client or gateway sent the request.

A request with an `Idempotency-Key` has a session of its own, whose name is derived from the key, so any
gateway can read the request's state from the log at any time.
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from turnkeep_client.errors import NoAnswerError, NoServerError, RequestFailedError
from turnkeep_client.messages import Close, Failed, Opened
from turnkeep_client.session_log import read
from turnkeep_client.subjects import session_key

from . import logged_answers
from .index import PREFIX, RequestName, base_of
from .logged_answers import FIRST_PAUSE_S, MISTAKEN

if TYPE_CHECKING:
    from turnkeep_client.client import Client

    from .logged_answers import LoggedAnswer, LoggedHeader

#: The failure code of a request whose idempotency key was sent before with another request.
KEY_REUSED: Final = "key_reused"


class KeyState(NamedTuple):
    """What the log has for an idempotency key."""

    #: The name of the key's session.
    session: str
    #: The request's last attempt.
    last: LoggedAnswer | None = None
    #: Where the session was forked, as a boundary's digest and a position; None if it is no fork.
    opened: tuple[bytes, int] | None = None
    #: The sequence of the last request to close the session; 0 without one.
    closed_seq: int = 0

    @property
    def nonce(self) -> int:
        """The nonce for the next attempt's request id; no earlier attempt, even a deleted one, had it."""
        name = RequestName.parse(self.last.request.id) if self.last else None
        return name.nonce + 1 if name else self.closed_seq

    @property
    def answer(self) -> LoggedAnswer | None:
        """The last attempt if it has an answer, runs, or failed for good; None if the request may be sent."""
        failed = self.last.result if self.last else None
        may_try = isinstance(failed, Failed) and (failed.retryable or failed.code in MISTAKEN)
        return None if may_try else self.last


def id_of(key: str) -> str:
    """Return the answer's id for a request with this idempotency key."""
    return blake2b(key.encode(), digest_size=24).hexdigest()


async def state_of(client: Client, answer_id: str, body: str) -> KeyState:
    """Read the state of an idempotency key from the log; `answer_id` is what `id_of` returns for the key.

    Raises `RequestFailedError` if the logged request had another body (`body` is a digest), `NoWorkerError`.
    """
    session = PREFIX + answer_id[:32]
    last = (await logged_answers.find(client, {answer_id}, conversation=False)).get(answer_id)
    if last is not None and last.note.body != body:
        raise key_reused()
    found = KeyState(session, last)
    if found.answer is None:
        log = await read(client.stored, session_key(client.tenant, session))
        closes = [entry.seq for entry, request in log.asked if isinstance(request, Close)]
        found = found._replace(closed_seq=max(closes, default=0))
        for one in log.exchanges:
            if isinstance(one.result, Opened) and one.asked.seq > found.closed_seq:
                base = base_of(one.result.tags)
                found = found._replace(opened=None if base is None else (base, one.result.position))
    return found


def key_reused() -> RequestFailedError:
    """Build the error for an idempotency key that was sent before with another request."""
    why = "this Idempotency-Key was sent with another request: each request needs a key of its own"
    return RequestFailedError(KEY_REUSED, why, retryable=False)


async def first_note(client: Client, session: str, request_id: str, note: LoggedHeader) -> LoggedHeader:
    """Return the note that the log first stored with a request; `note` if that is of another body.

    Retries while the log cannot be read.
    """
    while True:
        try:
            first = await logged_answers.note_of(client, session, request_id)
        except (NoAnswerError, NoServerError):
            await asyncio.sleep(FIRST_PAUSE_S)
        else:
            return first if first is not None and first.body == note.body else note
