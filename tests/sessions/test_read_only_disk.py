"""The disk with the snapshots becomes read-only while a worker runs, then writable: no turn is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parts import WorkerProcess
from turnkeep_client.client import Client
from turnkeep_client.messages import SnapshotCounters


async def until(client: Client, reached: Callable[[SnapshotCounters], bool]) -> None:
    """Wait until `reached` is true of the snapshot counters, and no snapshot is being written."""
    async with asyncio.timeout(20):
        async for metrics in client.metrics():
            counts = metrics.snapshots
            settled = counts.durable + sum(counts.dropped.values()) + counts.failed + counts.cancelled
            assert counts.accepted == settled + counts.in_flight
            if counts.in_flight == 0 and reached(counts):
                return


async def talk(client: Client, name: str, first: int, end: int) -> list[Any]:
    """Run a session's turns from `first` to before `end`; turn 0 has more than four blocks."""
    texts = [f"{name} says " * 15, " and then?", " and then?"]
    return [await client.session(name).generate(text=text, max_tokens=8) for text in texts[first:end]]


@pytest.mark.process
async def test_remounting_the_disk_read_only_and_back_costs_no_turn_and_no_stored_snapshot(
    mounted: Callable[[str], Path],
    read_only: Callable[[Path, bool], None],
    worker_process: Callable[..., WorkerProcess],
) -> None:
    data = mounted("size=64m") / "data"
    process = worker_process("--data-dir", str(data), "--min-free-disk", "0")
    process.start()
    async with await process.client() as client:
        before = await talk(client, "before", 0, 1)
        await until(client, lambda counts: counts.durable > 0)

        read_only(data / "snapshots", True)
        during = await talk(client, "during", 0, 1)
        await until(client, lambda counts: counts.failed > 0)
        before += await talk(client, "before", 1, 2)
        assert before[1].usage.cached_tokens == before[0].position - 1

        read_only(data / "snapshots", False)
        durable = (await client.session("before").info()).worker.snapshots.durable
        async with asyncio.timeout(20):
            number = 0
            while (await client.session("before").info()).worker.snapshots.durable == durable:
                number += 1
                after = await talk(client, f"after{number}", 0, 1)
        await until(client, lambda counts: True)
    process.kill()
    said = [json.loads(line) for line in process.log.splitlines() if line.startswith("{")]
    assert [line["code"] for line in said if line["event"] == "snapshot_writes_failing"] == ["EROFS"]
    assert [line["event"] for line in said].count("snapshot_writes_recovered") == 1

    process.start()
    # Another tenant shares no KV, so nothing of its answer is restored.
    async with await process.client() as client, await process.client(tenant="other") as other:
        before += await talk(client, "before", 2, 3)
        during += await talk(client, "during", 1, 2)
        after += await talk(client, f"after{number}", 1, 2)
        assert before[2].usage.cached_tokens >= before[0].position - 1, "at least what was stored by then"
        assert during[1].usage.cached_tokens < during[0].position, "perhaps all: it is written later"
        assert after[1].usage.cached_tokens == after[0].position - 1
        for name, turns in (("before", before), ("during", during), (f"after{number}", after)):
            alone = await talk(other, name, 0, len(turns))
            assert [turn.tokens for turn in turns] == [turn.tokens for turn in alone]
    assert process.stop() == 0
