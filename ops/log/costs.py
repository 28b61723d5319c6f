"""Adds up the costs of sessions: tokens reused from KV, prefilled and generated, and seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from turnkeep_client.messages import Appended, Generated
from turnkeep_client.session_log import read
from turnkeep_client.subjects import SessionKey

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from turnkeep_client.client import Client
    from turnkeep_client.session_log import Exchange

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


def _cost(one: Exchange) -> Cost:
    """Return a request's cost; if several workers ran it, with the seconds between the log's entries."""
    match one.result:
        case Appended(repeat_of=None) as result:
            return Cost(found=result.cached_tokens, prefilled=result.prefilled_tokens, seconds=result.seconds)
        case Generated(repeat_of=None, usage=used) as result:
            return Cost(
                found=used.cached_tokens,
                prefilled=used.prefilled_tokens,
                generated=used.completion_tokens,
                seconds=one.took_s if result.resumed_tokens else result.seconds.total,
            )
    return Cost()


class SessionCosts:
    """Keeps the sum of each session's costs, and reads only new results to update the sum."""

    def __init__(self, client: Client) -> None:
        self._client = client
        #: The last added result's sequence, the sum, the number of entries, and the time of the last one: the
        #: number alone is not enough, since a new result may replace a worker's note of its request.
        self._sums: dict[SessionKey, tuple[int, Cost, int, datetime]] = {}

    async def of(self, rows: Iterable[SessionRow]) -> list[Cost]:
        """Return each session's total costs, in the order of `rows`. Raises `TurnkeepError`."""
        return [await self._of(row) for row in rows]

    async def _of(self, row: SessionRow) -> Cost:
        key = SessionKey(row.tenant, row.session)
        seq, total, entries, last = self._sums.pop(key, (0, Cost(), 0, row.last))
        if row.entries < entries:  # the session was removed, and began again
            seq, total, entries = 0, Cost(), 0
        if row.entries > entries or row.last != last:
            log = await read(self._client.stored, key, seq + 1)
            seq = max([seq, *(one.entry.seq for one in log.answers)])
            total = sum(map(_cost, log.exchanges), total)
        self._sums[key] = (seq, total, row.entries, row.last)
        if len(self._sums) > _KEPT:
            del self._sums[next(iter(self._sums))]
        return total
