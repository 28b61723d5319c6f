"""Rebuilds the index of conversations and sessions, or one session's position, from the log."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from turnkeep_client.errors import NotPermittedError, StreamError
from turnkeep_client.messages import (
    Appended,
    Closed,
    Failed,
    Generate,
    Generated,
    Opened,
    Rewound,
    UnknownResult,
)
from turnkeep_client.session_log import End, ends, read
from turnkeep_client.subjects import session_key

from . import boundaries
from .index import (
    MOST_SESSIONS,
    PREFIX,
    IndexedRequest,
    IndexedSession,
    RequestName,
    SessionIndex,
    appended_to,
    base_of,
)

if TYPE_CHECKING:
    from turnkeep_client.client import Client
    from turnkeep_client.messages import Request
    from turnkeep_client.session_log import SessionLog
    from turnkeep_client.subjects import SessionKey

log = logging.getLogger(__name__)

#: How many sessions, last used first, are read whole; for the others, only the last result is read.
_MOST_READ: Final = 2_000
_AT_ONCE: Final = 16
#: How long after its end an answer from before the restart can go to the next equal request.
CLAIM_S: Final = 600.0


class _End(NamedTuple):
    """A session's state after a result: its position, and its last boundary's digests (None if unknown)."""

    bases: set[bytes] | None
    position: int


async def recover(client: Client, index: SessionIndex) -> None:
    """Fill an index of conversations with the answers in the log.

    If this user may not list the log's sessions, log a warning and leave the index empty. Raises
    `NoWorkerError` if the log cannot be read.
    """
    try:
        every = await client.stored.subjects(client.tenant)
        counts = {key: kinds for key, kinds in every.items() if key.session.startswith(PREFIX)}
        if not counts:
            return
        # Ages by the server's clock: this machine's may be wrong.
        ahead_s = time.monotonic() - (await client.stored.now()).timestamp()
    except (NotPermittedError, StreamError) as error:
        log.warning("conversations from before this start are not found again: %s", error)
        return
    found = await ends(client.stored, counts)
    places = asyncio.Semaphore(_AT_ONCE)

    async def read_whole(session: IndexedSession, key: SessionKey) -> None:
        async with places:
            session_log = await read(client.stored, key)
        end = _fold(index, session, session_log, ahead_s)
        for waiting in session_log.waiting:  # another gateway's may be among them
            _note_running(index, session, waiting.request, end)

    wanted: list[tuple[IndexedSession, SessionKey]] = []
    in_use_order = sorted(found.items(), key=lambda item: item[1].last.seq)
    for key, end in in_use_order[-MOST_SESSIONS:]:
        used_s = end.last.stored.timestamp() + ahead_s
        if (session := _session(key, end, used_s)) is not None:
            wanted.append((session, key))
            index.add(session)
    await asyncio.gather(*(read_whole(session, key) for session, key in wanted[-_MOST_READ:]))


def _session(key: SessionKey, end: End, used_s: float) -> IndexedSession | None:
    """Return a session as the end of its log has it; None if it is closed and has refused nothing since.

    A request that a closed session has refused is in the log, which must lose it with the session.
    """
    if end.answered is None:
        return IndexedSession(key.session, None, used_s)
    last = end.answered.result
    if last is None or isinstance(last, Closed | UnknownResult):
        return None
    return IndexedSession(key.session, last.position, used_s)


async def settle(client: Client, index: SessionIndex, session: IndexedSession) -> bool:
    """Set a session's position in the index from the last result in the log, and count it as used now.

    Changes neither if the session is closed or not in the log. Returns False, and changes neither, if a
    request has no result yet. Raises `TurnkeepError`.
    """
    key = session_key(client.tenant, session.name)
    end = (await ends(client.stored, {key: {"in": 1}})).get(key)
    if end is not None and end.waiting:
        return False
    if end is not None and (found := _session(key, end, time.monotonic())) is not None:
        index.move(session, found.position)
        index.use(session, found.used_s)
    return True


def _fold(index: SessionIndex, session: IndexedSession, session_log: SessionLog, ahead_s: float) -> _End:
    """Add a session's results to the index; `ahead_s` is this process's clock, less the server's."""
    end = _End(None, 0)
    for one in session_log.exchanges:
        request, result = one.request, one.result
        if result.position is None or result.repeat_of is not None:
            continue
        name = RequestName.parse(request.id)
        match result:
            case Closed():
                index.cut(session, -1)
                end = _End(None, 0)
            case Opened():
                base = base_of(result.tags)
                end = _End(None if base is None else {base}, result.position)
            case Generated() if isinstance(request, Generate) and name is not None:
                until_s = one.answered.stored.timestamp() + ahead_s + CLAIM_S
                until_s = until_s if until_s > time.monotonic() else 0.0
                asked = _asked(session, name, end, request.prefix, until_s)
                index.ask(asked)
                index.answer(asked, result)
                end = _End(boundaries.after_answer(name.prompt, result, asked.prefix), result.position)
            case Appended() if (boundary := appended_to(request.id)) is not None:
                index.append(session, boundary, result)
                end = _End({boundary}, result.position)
            case Failed():
                if name is not None:
                    asked = _asked(session, name, end)
                    asked.fail()
                    index.ask(asked)
            case _:  # not a gateway's request
                if isinstance(result, Rewound):
                    index.cut(session, result.position)
                end = _End(None, result.position)
    index.move(session, end.position)
    return end


def _note_running(index: SessionIndex, session: IndexedSession, request: Request | None, end: _End) -> None:
    """Add a request that has no result yet to the index, so that an equal request gets the same answer."""
    index.move(session, None)
    name = RequestName.parse(request.id) if request else None
    if isinstance(request, Generate) and name is not None and name.key not in index.asked:
        index.ask(_asked(session, name, end, request.prefix, math.inf))


def _asked(
    session: IndexedSession, name: RequestName, end: _End, prefix: str = "", claim_until_s: float = 0.0
) -> IndexedRequest:
    bases = end.bases or set()
    return IndexedRequest(session, name, bases, end.position, prefix, claim_until_s=claim_until_s)
