"""Rebuilds the index of conversations and sessions, or one session's position, from the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from turnkeep_client.errors import InvalidMessageError, NotPermittedError, StreamError
from turnkeep_client.messages import (
    Appended,
    Closed,
    Failed,
    Generate,
    Generated,
    Opened,
    Rewound,
    UnknownResult,
    decode_request,
    decode_result,
)
from turnkeep_client.subjects import session_key

from . import boundaries
from .index import (
    MOST_SESSIONS,
    PREFIX,
    Index,
    IndexedRequest,
    IndexedSession,
    RequestName,
    appended_to,
    base_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from turnkeep_client.client import Client
    from turnkeep_client.log import Stored
    from turnkeep_client.messages import Result
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


async def recover(client: Client, index: Index) -> None:
    """Fill an index of conversations with the answers in the log.

    Raises `NoWorkerError` if the log cannot be read.
    """
    try:
        every = await client.stored.subjects(client.tenant)
    except (NotPermittedError, StreamError) as error:
        log.warning("conversations from before this start are not found again: %s", error)
        return
    counts = {key: kinds for key, kinds in every.items() if key.session.startswith(PREFIX)}
    results = [(one, key) async for key, one in client.stored.last(counts, "out")]
    results.sort(key=lambda found: found[0].seq)
    waiting = [key for key, kinds in counts.items() if kinds.get("in", 0) > kinds.get("out", 0)]
    requests = {key: one async for key, one in client.stored.last(waiting, "in")}
    places = asyncio.Semaphore(_AT_ONCE)

    async def read(session: IndexedSession, key: SessionKey) -> None:
        prefixes: dict[str, str] = {}
        async with places:
            stored = [one async for _, one in client.stored.every(key, "out")]
            entries = [(one, found) for one in stored if (found := _decoded(one)) is not None]
            if any(isinstance(found, Generated) and found.prefix_tokens for _, found in entries):
                prefixes = _prefixes([one async for _, one in client.stored.every(key, "in")])
        end = _fold(index, session, entries, prefixes)
        if (request := requests.get(key)) is not None:
            _note_running(index, session, request, end)

    wanted: list[tuple[IndexedSession, SessionKey]] = []
    for one, key in results[-MOST_SESSIONS:]:
        last = _decoded(one)
        if last is not None and not isinstance(last, Closed | UnknownResult):
            wanted.append((IndexedSession(key.session, last.position, _time(one)), key))
            index.add(wanted[-1][0])
    begun = requests.keys() - {key for _, key in results}  # sessions in which no request has a result yet
    for key in begun:
        wanted.append((IndexedSession(key.session, None, _time(requests[key])), key))
        index.add(wanted[-1][0])
    await asyncio.gather(*(read(session, key) for session, key in wanted[-_MOST_READ:]))


async def settle(client: Client, index: Index, session: IndexedSession) -> bool:
    """Set a session's position and last use in the index from the last result in the log.

    The position stays None if the session is closed. Returns False if the last request has no result yet.
    Raises `TurnkeepError`.
    """
    key = session_key(client.tenant, session.name)
    asked = [one async for _, one in client.stored.last([key], "in")]
    ended = [one async for _, one in client.stored.last([key], "out")]
    last = _decoded(ended[0]) if ended else None
    if asked and (last is None or last.seq != asked[0].seq):
        return False
    if last is not None and not isinstance(last, Closed | UnknownResult):
        index.move(session, last.position)
        index.use(session, _time(ended[0]))
    return True


def _fold(
    index: Index, session: IndexedSession, entries: list[tuple[Stored, Result]], prefixes: Mapping[str, str]
) -> _End:
    """Add a session's results to the index; `prefixes` maps request ids to answer prefixes from clients."""
    end = _End(None, 0)
    for one, result in entries:
        if result.position is None or result.repeat_of is not None:
            continue
        name = RequestName.parse(result.id or "")
        match result:
            case Closed():
                index.cut(session, -1)
                end = _End(None, 0)
            case Opened():
                index.cut(session, -1)
                base = base_of(result.tags)
                end = _End(None if base is None else {base}, result.position)
            case Generated() if name is not None:
                until_s = _time(one) + CLAIM_S
                prefix = prefixes.get(result.id or "", "")
                asked = _asked(session, name, end, prefix, until_s if until_s > time.time() else 0.0)
                index.ask(asked)
                index.answer(asked, result)
                end = _End(boundaries.answered(name.prompt, result, asked.prefix), result.position)
            case Appended() if (boundary := appended_to(result.id or "")) is not None:
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


def _note_running(index: Index, session: IndexedSession, stored: Stored, end: _End) -> None:
    """Add a request that has no result yet to the index, so that an equal request gets the same answer."""
    index.move(session, None)
    try:
        request = decode_request(stored.body)
    except InvalidMessageError:
        return
    name = RequestName.parse(request.id)
    if isinstance(request, Generate) and name is not None and name.key not in index.asked:
        index.ask(_asked(session, name, end, request.prefix, math.inf))


def _asked(
    session: IndexedSession, name: RequestName, end: _End, prefix: str = "", claim_until_s: float = 0.0
) -> IndexedRequest:
    bases = end.bases or set()
    return IndexedRequest(session, name, bases, end.position, prefix, claim_until_s=claim_until_s)


def _prefixes(stored: list[Stored]) -> dict[str, str]:
    found = {}
    for one in stored:
        with contextlib.suppress(InvalidMessageError):
            request = decode_request(one.body)
            if isinstance(request, Generate) and request.prefix:
                found[request.id] = request.prefix
    return found


def _decoded(stored: Stored) -> Result | None:
    try:
        return decode_result(stored.body)
    except InvalidMessageError:  # no worker wrote it
        return None


def _time(stored: Stored) -> float:
    return datetime.fromisoformat(stored.headers["Nats-Time-Stamp"]).timestamp()
