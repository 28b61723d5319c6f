"""Deliveries to a worker that is full or stops: another worker answers the requests before `ack_wait`."""

from __future__ import annotations

import asyncio

import pytest
from raw_wire import Start, append, generate

from tests.simulation.world import Server

pytestmark = pytest.mark.simulated


async def test_requests_that_a_full_worker_only_returned_count_no_attempt_at_another_worker(
    quiet_wire: Start, server: Server
) -> None:
    """The floods come at different times between two pulls, so that the other worker gets some of them."""
    full = await quiet_wire(worker="full", max_waiting=1, ack_wait_s=60.0)
    await asyncio.sleep(0.5)
    await quiet_wire(worker="idle", ack_wait_s=60.0)
    await asyncio.sleep(1.0)
    log = server.jetstream.streams["turnkeep_log"]
    for flood in range(10):
        await asyncio.sleep(0.1)
        asked = [await full.publish(f"s{flood}-{number}", generate("g", text="e")) for number in range(12)]
        for seq in asked:
            await full.result(seq)
    assert server.counts["redeliveries"] > 0
    assert not [one.data for one in log.all if one.subject.endswith(".attempt")]


async def test_what_a_stopping_worker_has_not_answered_is_answered_at_once_by_another(
    quiet_wire: Start, server: Server
) -> None:
    """It stops between two steps of pulling, passing on and answering the requests, and keeps no delivery."""
    stays = await quiet_wire(worker="stays", ack_wait_s=60.0)
    (consumer,) = server.jetstream.streams["turnkeep_log"].consumers.values()
    for number in range(10):
        stops = await quiet_wire(worker="stops", ack_wait_s=60.0)
        await asyncio.sleep(0.5)
        asked = [asyncio.create_task(stays.send(f"s{session}", append(f"{number}"))) for session in range(30)]
        await asyncio.sleep(number * 0.001)
        stops.worker.app.stop()
        async with asyncio.timeout(5.0):
            await asyncio.gather(*asked)
        await stops.worker.task
        await asyncio.sleep(1.0)
        assert not consumer.pending
