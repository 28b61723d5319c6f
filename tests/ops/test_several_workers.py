"""Metrics, commands and console with two workers that share a subject prefix."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from test_console import opened

from ops.fleet import Fleet
from tests.commands.command_runs import command, where
from tests.parts import LocalWorker

Start = Callable[..., Awaitable[LocalWorker]]


@pytest.fixture
async def two(local_worker: Start, tmp_path: Path) -> list[LocalWorker]:
    return [await local_worker(worker=name, data_dir=tmp_path / name) for name in ("one", "two")]


async def test_each_worker_publishes_metrics_that_name_the_other_workers(two: list[LocalWorker]) -> None:
    fleet, client = Fleet(60), two[0].client
    async with asyncio.timeout(30):
        async for metrics in client.metrics():
            fleet.hear(metrics)
            seen = {one.metrics.worker: one.metrics.others for one in fleet.sightings() if one.up}
            if len(seen) == 2:
                break
    assert seen == {"one": ("two",), "two": ("one",)}
    await two[1].stop()
    assert (await client.worker_metrics()).others == ()


async def test_sessions_and_info_show_the_worker_that_owns_a_session(two: list[LocalWorker]) -> None:
    await two[0].client.session("s").append(text="hello")
    owner = (await two[1].client.session("s").info()).worker
    assert owner.requests == {"append": {"ok": 1}}
    listed = await command("sessions", *where(two[0]))
    assert re.search(rf"^s +default .* {owner.worker} ", listed.stdout, re.MULTILINE), listed
    shown = await command("info", "s", *where(two[0]))
    assert re.search(rf"^worker +{owner.worker}$", shown.stdout, re.MULTILINE), shown
    assert re.search(rf"^other workers +{owner.others[0]}$", shown.stdout, re.MULTILINE), shown


async def test_the_console_refuses_to_switch_the_model_if_several_workers_share_the_prefix(
    two: list[LocalWorker],
) -> None:
    async with opened(two[0].client) as page:
        refused = await page.http.post("/api/models/serve", json={"name": "b"})
    assert "2 workers serve the prefix" in refused.text
