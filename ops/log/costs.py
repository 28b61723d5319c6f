"""Adds up the costs of sessions: tokens reused from KV, prefilled and generated, and seconds."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from turnkeep_client.subjects import SessionKey

if TYPE_CHECKING:
    from collections.abc import Iterable

    from turnkeep_client.client import Client
    from turnkeep_client.log import Stored

    from .sessions import SessionRow

#: Most sessions whose sums stay in memory, so that only their new results are read next time.
_KEPT: Final = 5000


class Cost(Struct, frozen=True, kw_only=True):
    """Tokens `found` in KV, prefilled and generated, and seconds from requests to their results.

    If a worker crashed before it published a token, only the next worker's seconds count.
    """

    found: int = 0
    prefilled: int = 0
    generated: int = 0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        """Add two costs."""
        return Cost(
            found=self.found + other.found,
            prefilled=self.prefilled + other.prefilled,
            generated=self.generated + other.generated,
            seconds=self.seconds + other.seconds,
        )


class _Seconds(Struct):
    total: float = 0.0


class _Usage(Struct):
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    completion_tokens: int = 0


class _Spent(_Usage):
    """A result's cost fields. A generate has its token counts in `usage`, an append at the top level."""

    seq: int = 0
    repeat_of: int | None = None
    resumed_tokens: int = 0
    usage: _Usage | None = None
    seconds: float | _Seconds = 0.0


_SPENT: Final = msgspec.json.Decoder(_Spent)


def _spent(result: bytes) -> _Spent:
    """Decode the cost fields of a result's body; all are 0 for a repeated or invalid result."""
    try:
        spent = _SPENT.decode(result)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # not written by a worker
        return _Spent()
    return spent if spent.repeat_of is None else _Spent()


def _cost(spent: _Spent) -> Cost:
    used, seconds = spent.usage or spent, spent.seconds
    return Cost(
        found=used.cached_tokens,
        prefilled=used.prefilled_tokens,
        generated=used.completion_tokens,
        seconds=seconds.total if isinstance(seconds, _Seconds) else seconds,
    )


class Costs:
    """Keeps the sum of each session's costs, and reads only new results to update the sum."""

    def __init__(self, client: Client) -> None:
        self._client = client
        #: The last added result's sequence, the sum, the number of entries, and the time of the last one: the
        #: number alone is not enough, since a new result may replace a worker's note of its request.
        self._sums: dict[SessionKey, tuple[int, Cost, int, datetime]] = {}

    async def of(self, rows: Iterable[SessionRow]) -> list[Cost]:
        """Return the costs of sessions, in the same order. Raises `TurnkeepError`."""
        return [await self._of(row) for row in rows]

    async def _of(self, row: SessionRow) -> Cost:
        key = SessionKey(row.tenant, row.session)
        seq, total, entries, last = self._sums.pop(key, (0, Cost(), 0, row.last))
        if row.entries < entries:  # the session was removed, and began again
            seq, total, entries = 0, Cost(), 0
        if row.entries > entries or row.last != last:
            async for _, one in self._client.stored.every(key, "out", seq + 1):
                seq, total = one.seq, total + await self._cost(key, one)
        self._sums[key] = (seq, total, row.entries, row.last)
        if len(self._sums) > _KEPT:
            del self._sums[next(iter(self._sums))]
        return total

    async def _cost(self, key: SessionKey, result: Stored) -> Cost:
        """Return a result's cost; if several workers ran it, with the seconds between the log's entries."""
        spent = _spent(result.body)
        cost = _cost(spent)
        if spent.resumed_tokens and (asked := await self._client.stored.get(key, "in", spent.seq)):
            began, ended = (datetime.fromisoformat(one.headers["Nats-Time-Stamp"]) for one in (asked, result))
            return msgspec.structs.replace(cost, seconds=(ended - began).total_seconds())
        return cost
