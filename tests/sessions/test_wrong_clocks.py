"""How old an entry of the log is, its server's clock says, whatever the clock of a worker shows."""

from __future__ import annotations

import asyncio

import pytest
from raw_wire import Start, Wire, append

from tests.parts import fall_asleep
from worker.wire import retention

pytestmark = pytest.mark.simulated

DAY_S = 86400.0


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_PERIOD_S", 0.05)
    monkeypatch.setattr(retention, "_LAST_S", 0.0)


async def close(w: Wire, *names: str, forget: bool = False) -> None:
    for name in names:
        await w.send(name, append("a", "hello"))
        await w.send(name, {"type": "close", "id": "c", "forget": forget})


async def num_closed(w: Wire) -> int:
    return len((await w.worker.app._parts.journal.close_notes(0))[0])


async def test_a_clock_that_is_ahead_makes_no_session_leave_the_log_early(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = await quiet_wire(closed_ttl_s=DAY_S)
    await close(w, "s")
    fall_asleep(monkeypatch, 100 * DAY_S)
    await asyncio.sleep(2.0)
    assert await num_closed(w) == 1


async def test_closed_sessions_leave_the_log_on_time_though_the_workers_clock_is_behind_the_servers(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    fall_asleep(monkeypatch, -100 * DAY_S)
    w = await quiet_wire(closed_ttl_s=0.5)
    await close(w, "s")
    async with asyncio.timeout(20):
        while await num_closed(w):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_clock_that_is_ahead_makes_no_erasure_note_leave_the_log(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = await quiet_wire(closed_ttl_s=DAY_S)
    await close(w, "one", "two", forget=True)
    journal = w.worker.app._parts.journal
    notes, _ = await journal.erasure_notes(0)
    fall_asleep(monkeypatch, 100 * DAY_S)
    await w.worker.app._parts.erasures._clean()
    assert len(notes) == len((await journal.erasure_notes(0))[0]) == 2
