"""Searches the log for what is left of a forgotten session, and for the marks of its tokens."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from cache.names.marks import ErasureNote, digest_of_name
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import Close, Closed
from turnkeep_client.session_log import read

if TYPE_CHECKING:
    from cache.names.marks import Marks
    from turnkeep_client.client import Client
    from turnkeep_client.subjects import SessionKey


class LogRemains(Struct, frozen=True, kw_only=True):
    """What the log's streams have of a forgotten session."""

    #: The subjects of entries from before the session was last forgotten.
    entries: tuple[str, ...]
    #: The marks of its erased tokens, by which these are found on a disk (`cache.names.marks`).
    marks: tuple[Marks, ...]


async def remains(client: Client, key: SessionKey) -> LogRemains:
    """Find what the log's streams still have of a session that was forgotten.

    Raises `TurnkeepError` if nothing says that it was forgotten: it is open, or its name is another.
    """
    forgets = [
        one.asked.stored
        for one in (await read(client.stored, key)).exchanges
        if isinstance(one.request, Close) and one.request.forget and isinstance(one.result, Closed)
    ]
    digest = digest_of_name(str(key))
    notes = [_note(one.body) async for one in client.stored.erasures(key.tenant)]
    marks = tuple(one.marks for one in notes if one is not None and one.session == digest)
    found = [one async for one in client.stored.remains(key)]
    if not forgets and (found or not marks):
        raise TurnkeepError(f"the log does not say that {key} was forgotten; see turnkeep close --forget")
    left = [
        one.headers["Nats-Subject"]
        for one in found
        if datetime.fromisoformat(one.headers["Nats-Time-Stamp"]) < max(forgets)
    ]
    return LogRemains(entries=tuple(left), marks=marks)


def _note(body: bytes) -> ErasureNote | None:
    try:
        return msgspec.json.decode(body, type=ErasureNote)
    except msgspec.MsgspecError:
        return None
