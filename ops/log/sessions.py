"""What is in the log: its sessions, and of each its state, by its last result and the number of its entries.

Reads one entry of a session, so that 100,000 sessions take seconds. Only sizes need all entries.
"""

from __future__ import annotations

from datetime import datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from turnkeep_client.log import BUILD_HEADER, MODEL_HEADER, words
from turnkeep_client.subjects import SessionKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from turnkeep_client.calls import Stored
    from turnkeep_client.client import Client

State = Literal["idle", "waiting", "failed", "closed"]
#: What `order` can sort by; with the largest first, except names.
ORDERS: Final = ("last", "name", "position", "entries", "bytes")


class SessionRow(Struct, frozen=True, kw_only=True):
    """One session. `last` is when its last result was stored, or its last request if that waits.

    `state` is `waiting` while requests have no result; `failed` if the last one was. `position` is None if
    the last result has none. `dead` counts dead letters. `size_bytes` is None unless it was asked for.
    """

    tenant: str
    session: str
    state: State
    waiting: int
    position: int | None
    last: datetime
    entries: int
    dead: int
    model: str | None
    worker: str | None
    size_bytes: int | None = None


class _Outcome(Struct):
    type: str = ""
    position: int | None = None


_OUTCOME: Final = msgspec.json.Decoder(_Outcome)


async def list_sessions(client: Client, tenant: str = "*", match: str = "*") -> list[SessionRow]:
    """List the sessions of a tenant, or of all, whose names match, in no order. Raises `TurnkeepError`."""
    every = await client.stored.subjects(tenant)
    counts = {key: kinds for key, kinds in every.items() if fnmatchcase(key.session, match)}
    results = {key: one async for key, one in client.stored.last(counts, "out")}
    waiting = [key for key, kinds in counts.items() if kinds.get("in", 0) > kinds.get("out", 0)]
    requests = {key: one async for key, one in client.stored.last(waiting, "in")}
    return [
        _row(key, kinds, results.get(key), requests.get(key))
        for key, kinds in counts.items()
        if key in results or key in requests  # else all of it was removed meanwhile
    ]


def _row(
    key: SessionKey, kinds: Mapping[str, int], result: Stored | None, request: Stored | None
) -> SessionRow:
    outcome, headers = _Outcome(), dict[str, str]()
    if result is not None:
        headers = dict(result.headers)
        try:
            outcome = _OUTCOME.decode(result.body)
        except (msgspec.DecodeError, UnicodeDecodeError):  # not a worker's
            outcome = _Outcome()
    last = max(one.headers["Nats-Time-Stamp"] for one in (result, request) if one is not None)
    ended: dict[str, State] = {"closed": "closed", "failed": "failed"}
    return SessionRow(
        tenant=key.tenant,
        session=key.session,
        state="waiting" if request is not None else ended.get(outcome.type, "idle"),
        waiting=max(kinds.get("in", 0) - kinds.get("out", 0), 0),
        position=outcome.position,
        last=datetime.fromisoformat(last),
        entries=sum(kinds.values()),
        dead=kinds.get("dead", 0),
        model=headers.get(MODEL_HEADER),
        worker=words(headers.get(BUILD_HEADER, "")).get("worker"),
    )


async def measured(client: Client, rows: Sequence[SessionRow], tenant: str = "*") -> list[SessionRow]:
    """Add the sizes of the sessions: bodies and headers of their entries, all of which are read."""
    sizes: dict[SessionKey, int] = dict.fromkeys((SessionKey(row.tenant, row.session) for row in rows), 0)
    async for key, one in client.stored.every(SessionKey(tenant, "*")):
        if key in sizes:
            headers = sum(len(name) + len(value) for name, value in one.headers.items())
            sizes[key] += len(one.body) + headers
    return [replace(row, size_bytes=sizes[SessionKey(row.tenant, row.session)]) for row in rows]


def order(rows: Iterable[SessionRow], by: str) -> list[SessionRow]:
    """Sort by one of `ORDERS`."""
    if by == "name":
        return sorted(rows, key=lambda row: (row.tenant, row.session))
    field = {"bytes": "size_bytes"}.get(by, by)
    return sorted(rows, key=lambda row: getattr(row, field) or 0, reverse=True)
