"""Adds up the costs of sessions: tokens reused from KV, prefilled and generated, and seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from turnkeep_client.messages import Appended, Generated
from turnkeep_client.session_log import read

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from turnkeep_client.client import Client
    from turnkeep_client.session_log import Exchange, LoggedResult
    from turnkeep_client.subjects import SessionKey

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


class _Sum(NamedTuple):
    """The sum of a session's costs up to its `last` result: its sequence, and when the log stored it.

    `state` has the log's number of entries then, and the time of the last one: the number alone is not
    enough, since a new result may replace a worker's note of its request.
    """

    last: tuple[int, datetime] | None = None
    total: Cost = Cost()
    state: tuple[int, datetime] | None = None

    @property
    def seq(self) -> int:
        return 0 if self.last is None else self.last[0]


def _place(answer: LoggedResult) -> tuple[int, datetime]:
    return answer.entry.seq, answer.entry.stored


class SessionCosts:
    """Keeps the sum of each session's costs, and reads only new results to update the sum."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._sums: dict[SessionKey, _Sum] = {}

    async def of(self, rows: Iterable[SessionRow]) -> list[Cost]:
        """Return each session's total costs, in the order of `rows`. Raises `TurnkeepError`."""
        return [await self._of(row) for row in rows]

    async def _of(self, row: SessionRow) -> Cost:
        known, state = self._sums.pop(row.key, _Sum()), (row.entries, row.last)
        if known.state != state:
            log = await read(self._client.stored, row.key, max(known.seq, 1))
            if known.seq and known.last not in [_place(one) for one in log.answers]:
                # The session was removed, or the log restored from a backup; entries have new sequences.
                known, log = _Sum(), await read(self._client.stored, row.key)
            new = (_cost(one) for one in log.exchanges if one.answered.seq > known.seq)
            last = _place(log.answers[-1]) if log.answers else None
            known = _Sum(last, sum(new, known.total), state)
        self._sums[row.key] = known
        if len(self._sums) > _KEPT:
            del self._sums[next(iter(self._sums))]
        return known.total
