"""Lists the sessions in the log with their states, by the ends of their logs, also as trees of forks.

Reads one entry of each session (two if requests wait, more if the last result does not say its state), so
100,000 sessions take seconds. For sizes it reads all entries, and for first words the first entries of each
session.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from datetime import datetime  # noqa: TC003  # msgspec reads the annotations
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.images import as_text, text_in
from turnkeep_client.messages import (
    Append,
    Closed,
    Failed,
    Generate,
    Opened,
    Parent,
)
from turnkeep_client.session_log import End, ends, first
from turnkeep_client.subjects import SessionKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from turnkeep_client.client import Client
    from turnkeep_client.messages import Request

State = Literal["idle", "running", "waiting", "failed", "closed", "forgotten"]
#: The fields that `order` can sort by; the largest first, except names.
ORDERS: Final = ("last", "name", "position", "entries", "bytes")


class SessionRow(Struct, frozen=True, kw_only=True):
    """One session in the log."""

    tenant: str
    session: str
    #: `waiting` while requests have no result (`running` sets `running` if a worker runs one of them);
    #: `failed` if workers refuse all requests, since the tokens do not have the digest that the log states;
    #: `forgotten` if only the close is left in the log.
    state: State
    #: The number of requests without a result.
    waiting: int
    #: The number of tokens; None if no result states it.
    position: int | None
    #: The time of the last result or, if that is later, of the last request without one.
    last: datetime
    #: The number of entries, without answered requests, which leave the log.
    entries: int
    #: The number of dead letters.
    dead: int
    #: Who has made the last result; None if that is not known.
    model: str | None
    worker: str | None
    #: Set by `measured`.
    size_bytes: int | None = None
    #: The first words, the parent and the tags: set by `begun`.
    begins: str | None = None
    parent: Parent | None = None
    tags: tuple[str, ...] = ()

    @property
    def key(self) -> SessionKey:
        """The session's key."""
        return SessionKey(self.tenant, self.session)


#: Most characters of a session's first words.
_WORDS: Final = 55
#: How many requests to search for the first words: an open and a system message may come before.
_FIRST: Final = 3
_AT_ONCE: Final = 32
#: Most waiting sessions whose workers are asked if they run, and the time limit for all answers.
_ASKED: Final = 256
_ASK_S: Final = 1.0
#: Kinds of entries that leave the log some time after their request was answered.
_LEAVING: Final = frozenset({"in", "attempt"})


def is_named(session: str, names: Sequence[str]) -> bool:
    """Return whether a session has one of these names, which may be patterns; without names always."""
    return not names or any(fnmatchcase(session, name) for name in names)


async def list_sessions(client: Client, tenant: str = "*", names: Sequence[str] = ()) -> list[SessionRow]:
    """List a tenant's sessions (`*`: all tenants') with these names, unordered. Raises `TurnkeepError`."""
    every = await client.stored.subjects(tenant)
    return await _rows(client, {key: kinds for key, kinds in every.items() if is_named(key.session, names)})


async def find_session(client: Client, key: SessionKey) -> SessionRow | None:
    """Return a session, with its first words; None if the log does not have it. Raises `TurnkeepError`."""
    rows = await _rows(client, await client.stored.subjects(key.tenant, key.session))
    return (await begun(client, rows))[0] if rows else None


async def _rows(client: Client, counts: Mapping[SessionKey, Mapping[str, int]]) -> list[SessionRow]:
    return [_row(key, counts[key], end) for key, end in (await ends(client.stored, counts)).items()]


def _row(key: SessionKey, kinds: Mapping[str, int], end: End) -> SessionRow:
    result = end.answered.entry if end.answered else None
    return SessionRow(
        tenant=key.tenant,
        session=key.session,
        state="waiting" if end.waiting else _state(end, was_closed="closed" in kinds),
        waiting=len(end.waiting),
        position=end.position,
        last=end.last.stored,
        entries=sum(num for kind, num in kinds.items() if kind not in _LEAVING) + len(end.waiting),
        dead=kinds.get("dead", 0),
        model=result.model if result else None,
        worker=result.build.get("worker") if result else None,
    )


def _state(end: End, *, was_closed: bool) -> State:
    """Derive the state of a session without waiting requests; `was_closed`: its `closed` has a message."""
    match end.answered and end.answered.result:
        case Failed(code="history_diverged"):
            return "failed"
        case Failed(code="unknown_session") if was_closed:
            return "closed"
        case Closed(repeat_of=None, forgotten=int()):
            return "forgotten"
    return "closed" if end.changed and isinstance(end.changed.result, Closed) else "idle"


async def running(client: Client, rows: Sequence[SessionRow]) -> list[SessionRow]:
    """Ask the workers of waiting sessions; return the rows, with the state `running` if a request runs.

    The state stays `waiting` if no worker answers within a second, or the user may not ask it, and for all
    but the 256 waiting sessions that were used last.
    """
    places = asyncio.Semaphore(_AT_ONCE)
    found = set[SessionKey]()

    async def ask(row: SessionRow) -> None:
        session = client.session(row.session, tenant=row.tenant)
        async with places:
            with contextlib.suppress(TurnkeepError):
                if (await session.info(limit=0)).state == "running":
                    found.add(session.key)

    waiting = [row for row in order(rows, "last") if row.state == "waiting"]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ASK_S):
            await asyncio.gather(*map(ask, waiting[:_ASKED]))
    return [replace(row, state="running") if row.key in found else row for row in rows]


async def begun(client: Client, rows: Sequence[SessionRow]) -> list[SessionRow]:
    """Read each session's first entries; return the rows with first words, parents and tags.

    Entries of a closed session with the name of an open one do not count. Raises `TurnkeepError`.
    """
    places = asyncio.Semaphore(_AT_ONCE)
    there = [row.key for row in rows if row.state not in ("closed", "forgotten")]
    notes = {key: one.seq async for key, one in client.stored.last(there, "closed")}

    async def read(row: SessionRow) -> SessionRow:
        async with places:
            start = await _start(client, row.key, notes[row.key]) if row.key in notes else 1
            log = await first(client.stored, row.key, _FIRST, start)
        opened = next((one.result for one in log.answers if isinstance(one.result, Opened)), None)
        row = replace(row, begins=_first_words(one.request for one in log.asked))
        return replace(row, parent=opened.parent, tags=opened.tags) if opened else row

    return list(await asyncio.gather(*map(read, rows)))


async def _start(client: Client, key: SessionKey, note: int) -> int:
    """Return the sequence behind a close, given that of the close's note; 1 if it has no result yet."""
    results = (one.result for one in (await first(client.stored, key, _FIRST, note)).answers)
    return next((one.seq + 1 for one in results if isinstance(one, Closed) and one.repeat_of is None), 1)


def _first_words(requests: Iterable[Request | None]) -> str | None:
    """Return the first words of the user in a session's first requests; if there are none, of any role."""
    others = ""
    for request in requests:
        if not isinstance(request, Append | Generate):
            continue
        said = [("user", request.text)] if request.text else []
        said += [
            (message.role, text_in(message.content) or as_text(message.content))
            for message in request.messages or ()
        ]
        for role, text in said:
            if role == "user" and text.strip():
                return _shortened(text)
            others = others or text
    return _shortened(others) if others.strip() else None


def _shortened(text: str) -> str:
    words = " ".join(text[: 4 * _WORDS].split())
    return words if len(words) <= _WORDS else f"{words[:_WORDS]}..."


async def measured(client: Client, rows: Sequence[SessionRow], tenant: str = "*") -> list[SessionRow]:
    """Read every entry of a tenant; return the rows with their sizes, bodies and headers together.

    Raises `TurnkeepError`.
    """
    sizes: dict[SessionKey, int] = dict.fromkeys((row.key for row in rows), 0)
    async for key, one in client.stored.every(SessionKey(tenant, "*")):
        if key in sizes:
            headers = sum(len(name) + len(value) for name, value in one.headers.items())
            sizes[key] += len(one.body) + headers
    return [replace(row, size_bytes=sizes[row.key]) for row in rows]


def order(rows: Iterable[SessionRow], by: str) -> list[SessionRow]:
    """Return the rows sorted by `by`, one of `ORDERS`: names ascending, all others descending."""
    if by == "name":
        return sorted(rows, key=lambda row: (row.tenant, row.session))
    field = {"bytes": "size_bytes"}.get(by, by)
    return sorted(rows, key=lambda row: getattr(row, field) or 0, reverse=True)


class Branch(Struct, frozen=True, kw_only=True):
    """A session and its forks. `row` is None if the session is no longer in the log."""

    tenant: str
    session: str
    row: SessionRow | None
    forks: tuple[Branch, ...] = ()

    def __iter__(self) -> Iterator[Branch]:
        """Iterate over this branch and all branches below it."""
        yield self
        for fork in self.forks:
            yield from fork


def trees(rows: Iterable[SessionRow]) -> list[Branch]:
    """Return the trees of forked sessions. `rows` must have their parents (see `sessions.begun`).

    Parents are found by name: forks of a removed session belong to a new session of the same name. Raises
    `TurnkeepError` for forks of forks of more levels than Python can recurse.
    """
    known = {(row.tenant, row.session): row for row in rows}
    forks: defaultdict[tuple[str, str], list[SessionRow]] = defaultdict(list)
    for row in known.values():
        if row.parent is not None:
            forks[row.tenant, row.parent.session].append(row)
    seen = set[tuple[str, str]]()

    def grow(key: tuple[str, str]) -> Branch:
        seen.add(key)
        below = sorted(forks[key], key=lambda row: (row.parent.position if row.parent else 0, row.session))
        grown = tuple(
            grow((one.tenant, one.session)) for one in below if (one.tenant, one.session) not in seen
        )
        return Branch(tenant=key[0], session=key[1], row=known.get(key), forks=grown)

    roots = sorted(key for key in forks if key not in known or known[key].parent is None)
    try:
        grown = [grow(key) for key in roots]
        # The rest are cycles of names: a session ended, and one of the same name was forked from its fork.
        return grown + [grow(key) for key in sorted(forks) if key not in seen]
    except RecursionError:
        raise TurnkeepError(
            "forks of forks are too many levels deep to be shown; `turnkeep info` of each names its parent"
        ) from None
