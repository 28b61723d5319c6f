"""The sums of sessions' costs, of which a console reads only what is new."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from ops.log import costs
from ops.log.costs import Cost, SessionCosts
from turnkeep_client.log import Entry
from turnkeep_client.messages import Append, Appended, encode
from turnkeep_client.session_log import SessionLog, paired
from turnkeep_client.subjects import SessionKey

KEY = SessionKey("default", "s")


class Log:
    """A log of appends, and how many of its entries were read."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.num_read = 0
        self._now = datetime(2026, 1, 1, tzinfo=UTC)

    def append(self, number: int, num_tokens: int) -> None:
        """Store an append and its result, at the next sequences."""
        seq = self.entries[-1].seq + 1 if self.entries else 1
        result = Appended(
            id=f"a{number}",
            seq=seq,
            position=num_tokens,
            tokens=num_tokens,
            cached_tokens=0,
            prefilled_tokens=num_tokens,
            kv_live_bytes=0,
            seconds=1.0,
        )
        for kind, body in (("in", Append(id=f"a{number}", text="x")), ("out", result)):
            self._now += timedelta(seconds=1)
            self.entries.append(Entry(seq, KEY, kind, self._now, encode(body), {}))  # type: ignore[arg-type]
            seq += 1

    async def read(self, _: object, key: SessionKey, start: int = 1) -> SessionLog:
        found = [one for one in self.entries if one.seq >= start]
        self.num_read += len(found)
        return paired(key, [one for one in self.entries if one.kind == "in" or one in found])

    def row(self) -> Any:
        last = self.entries[-1].stored
        return SimpleNamespace(key=SessionKey("default", "s"), entries=len(self.entries), last=last)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    made = Log()
    monkeypatch.setattr(costs, "read", made.read)
    return made


async def total(kept: SessionCosts, log: Log) -> Cost:
    (found,) = await kept.of([log.row()])
    return found


async def test_session_costs_are_updated_from_new_results_only_and_recomputed_if_the_log_lost_entries(
    log: Log,
) -> None:
    """A log that has lost its end gives the lost sequences to other entries."""
    client: Any = SimpleNamespace(stored=None)
    kept = SessionCosts(client)
    for number, num_tokens in enumerate((1, 10, 100)):
        log.append(number, num_tokens)
        log.num_read = 0
        assert (await total(kept, log)).prefilled == (1, 11, 111)[number]
        assert log.num_read <= 3, "the last result, and what is new"
    assert (await total(kept, log)).prefilled == 111
    del log.entries[4:]
    for num_tokens, expected in ((1000, 1011), (10_000, 11_011)):
        log.append(num_tokens, num_tokens)
        assert (await total(kept, log)).prefilled == expected
    log.entries.clear()
    log.append(0, 5)
    assert (await total(kept, log)).prefilled == 5, "the session was removed, and began again"
