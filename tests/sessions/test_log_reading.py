"""All sessions read the log over one subscription, and each gets exactly its own entries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import nats
import pytest
from nats.js.api import StreamConfig

from turnkeep_client.subjects import SessionKey, Subjects
from worker.wire.consistent_reads import StoredMessage
from worker.wire.journal import Journal

NUM_SESSIONS = 12
#: More entries per session than one read returns.
NUM_ENTRIES = 300


@pytest.fixture
async def journal(nats_url: str) -> AsyncIterator[Journal]:
    """Make a log in which entries of several sessions alternate; each body names its session and number."""
    nc = await nats.connect(nats_url)
    js, subjects = nc.jetstream(), Subjects(f"r{time.monotonic_ns()}")
    await js.add_stream(
        StreamConfig(name=subjects.log_stream, subjects=[subjects.every("in")], allow_direct=True)
    )
    for number in range(NUM_ENTRIES):
        for session in range(NUM_SESSIONS):
            await nc.publish(subjects.of(key(session), "in"), f"{session}:{number}".encode())
    while (await js.stream_info(subjects.log_stream)).state.messages < NUM_ENTRIES * NUM_SESSIONS:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    yield Journal(nc, js, subjects)
    await js.delete_stream(subjects.log_stream)
    await nc.close()


def key(session: int) -> SessionKey:
    return SessionKey("default", f"s{session}")


async def bodies(journal: Journal, session: int) -> list[str]:
    found: list[StoredMessage] = []
    more = 1
    while more:
        entries, more = await journal.page(key(session), "in", found[-1].seq if found else 0)
        found += entries
    return [entry.body.decode() for entry in found]


async def test_sessions_that_read_the_log_at_the_same_time_get_their_own_entries_in_order(
    journal: Journal,
) -> None:
    found = await asyncio.gather(*(bodies(journal, session) for session in range(NUM_SESSIONS)))
    for session, entries in enumerate(found):
        assert entries == [f"{session}:{number}" for number in range(NUM_ENTRIES)]


async def test_a_cancelled_read_of_the_log_does_not_disturb_other_reads(journal: Journal) -> None:
    for pause_s in (0.0, 0.001, 0.003):
        given_up = [asyncio.create_task(bodies(journal, session)) for session in range(4)]
        others = [asyncio.create_task(bodies(journal, session)) for session in range(4, 8)]
        await asyncio.sleep(pause_s)
        for task in given_up:
            task.cancel()
        for session, entries in zip(range(4, 8), await asyncio.gather(*others), strict=True):
            assert entries == [f"{session}:{number}" for number in range(NUM_ENTRIES)]
        await asyncio.gather(*given_up, return_exceptions=True)
    assert await bodies(journal, 0) == [f"0:{number}" for number in range(NUM_ENTRIES)]
