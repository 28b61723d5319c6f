"""What of sessions is on disk: limits, closes with `forget`, and sessions that leave none there."""

import asyncio
import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from raw_wire import Start, Wire, append

from cache.names.tokens import as_tokens
from cache.store import Store
from tests.commands.command_runs import turnkeep
from tests.parts import BLOCK, WorkerProcess
from turnkeep_client.errors import InvalidMessageError, RequestFailedError
from turnkeep_client.messages import CachePolicy, ForkPoint, SessionCache
from worker.app import App
from worker.process.settings import Settings, default_worker


def text(letter: str, num_tokens: int = 3 * BLOCK) -> str:
    return letter * num_tokens


def snapshots(w: Wire) -> int:
    return len(list((w.worker.settings.data_dir / "snapshots" / "snapshots").iterdir()))


async def settled(w: Wire) -> None:
    assert await w.worker.app._store.queue.drained(10)


async def test_close_with_forget_reports_complete_erasure_if_the_worker_never_stored_snapshots(
    wire: Start,
) -> None:
    w = await wire(snapshots="off")
    await w.send("s", append("a", "hello"))
    closed = await w.send("s", {"type": "close", "id": "c", "forget": True})
    assert (closed["type"], closed["forgotten"]) == ("closed", 0)
    assert closed.get("settled", True), "there never were any"


async def test_close_with_forget_does_not_report_complete_erasure_after_a_restart_with_snapshots_off(
    wire: Start,
) -> None:
    w = await wire()
    await w.send("s", append("a", text("x")))
    await w.worker.stop()
    w = await wire(snapshots="off", data_dir=w.worker.settings.data_dir, prefix=w.prefix)
    closed = await w.send("s", {"type": "close", "id": "c", "forget": True})
    assert (closed["forgotten"], closed["settled"]) == (0, False)


async def test_with_snapshots_set_to_temporary_all_snapshots_are_removed_when_the_worker_stops(
    wire: Start,
) -> None:
    w = await wire(snapshots="temporary")
    await w.send("s", append("a", text("x")))
    await settled(w)
    assert snapshots(w) == 3
    await w.worker.stop()
    assert snapshots(w) == 0


async def test_a_reload_of_the_settings_changes_only_the_disk_limits(wire: Start) -> None:
    w = await wire()
    for i in range(4):
        await w.send(f"s{i}", append("a", text("abcd"[i])))
    await settled(w)
    app, settings = w.worker.app, w.worker.settings
    with structlog.testing.capture_logs() as logs:
        app.reload(dataclasses.replace(settings, max_disk=2**16, min_free_disk=5, max_batch=3))
    said = {log["event"]: log for log in logs}
    assert said["read the settings again"]["changed"] == ["max_disk", "min_free_disk"]
    assert app._settings.max_batch == settings.max_batch
    await asyncio.sleep(0.1)  # there are steps to take, of 10 ms each
    await settled(w)
    assert 0 < app._store.stats().stored_bytes <= 2**16


async def test_a_reload_of_the_settings_while_the_snapshot_store_is_opening_changes_the_disk_limits(
    wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    apps: list[App] = []
    init, opens = App.__init__, Store.open

    def made(app: App, *args: Any, **named: Any) -> None:
        init(app, *args, **named)
        apps.append(app)

    async def late(*args: Any, **named: Any) -> Store:
        (app,) = apps
        app.reload(dataclasses.replace(app._settings, max_disk=2**16))
        return await opens(*args, **named)

    monkeypatch.setattr(App, "__init__", made)
    monkeypatch.setattr(Store, "open", late)
    w = await wire()
    assert w.worker.app._store.quota.max_bytes == 2**16


async def said(worker: WorkerProcess, event: str) -> dict[str, Any]:
    """Wait for a line with `event` in the worker's log; return it as a dict."""
    async with asyncio.timeout(60):
        while True:
            for line in worker.log.splitlines():
                if event in line:
                    found: dict[str, Any] = json.loads(line)
                    return found
            assert worker.running, worker.log
            await asyncio.sleep(0.05)


def shown_limits(worker: WorkerProcess) -> tuple[int, int, str | None]:
    """Return the limits that `cache list`, which has none of the worker's settings, says of its directory."""
    done = turnkeep("cache", "list", "--json", "--data-dir", worker.data_dir)
    found = json.loads(done.stdout)
    return found["max_disk"], found["min_free_disk"], found["limits_of"]


@pytest.mark.process
async def test_sighup_makes_a_worker_read_its_settings_file_again_and_apply_the_disk_limits(
    worker_process: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    config = tmp_path / "turnkeep.toml"
    config.write_text('max_disk = "1GiB"\nmin_free_disk = 0\n')
    worker = worker_process("--config", str(config))
    worker.start()
    await said(worker, '"ready"')
    assert shown_limits(worker) == (2**30, 0, f"worker {default_worker()} (pid {worker.pid})")
    config.write_text("max_disk = 'much'\n")
    os.kill(worker.pid, signal.SIGHUP)
    assert "'much' is not valid" in (await said(worker, "the settings stay as they are"))["reason"]
    config.write_text('max_disk = "2MiB"\nmin_free_disk = 0\nmax_batch = 3\n')
    os.kill(worker.pid, signal.SIGHUP)
    assert (await said(worker, "read the settings again"))["changed"] == ["max_disk"]
    assert (await said(worker, "these settings need a restart"))["settings"] == ["max_batch"]
    assert (await said(worker, "cache_limits_changed"))["max_bytes"] == 2 * 2**20
    assert shown_limits(worker)[0] == 2 * 2**20
    assert worker.stop() == 0
    assert shown_limits(worker) == (Settings().max_disk, Settings().min_free_disk, None)


UNSAVED = {"snapshots": "none"}
SAID = SessionCache(policy="full", snapshots="none")
SECRET = [20 + (7 * number) % 41 for number in range(3 * BLOCK + 5)]
#: Any 16 tokens of it in a row, as files of snapshots have them.
WINDOWS = [as_tokens(SECRET).packed(at, at + 16).hex().encode() for at in range(len(SECRET) - 15)]


def holds_secret(*folders: Path) -> bool:
    """Whether any file of the folders has tokens of the session."""
    files = [one.read_bytes() for folder in folders for one in folder.rglob("*") if one.is_file()]
    return any(window in file for window in WINDOWS for file in files)


def num_snapshots(*folders: Path) -> int:
    """Count the files of KV, complete or not."""
    places = {"tmp", "quarantine"}
    return sum(
        one.is_file() and (one.parent.name in places or one.suffix == ".safetensors")
        for folder in folders
        for one in folder.rglob("*")
    )


@pytest.mark.parametrize("tail", [0, 5], ids=["full blocks only", "with a partial block"])
async def test_no_kv_of_a_session_opened_without_snapshots_is_written_to_disk_or_remote_tier(
    local_worker: Callable, tmp_path: Path, tail: int
) -> None:
    """Neither while it runs, idle, as a fork or at a stop; a session with snapshots has some."""
    data, tier = tmp_path / "data", tmp_path / "tier"
    worker = await local_worker(remote_tier=str(tier))
    session = worker.client.session("unsaved", cache=UNSAVED)
    await session.append(tokens=SECRET[: 3 * BLOCK + tail])
    answer = await session.generate(tokens=[5], max_tokens=BLOCK + 3)
    assert answer.cache == SAID
    fork = worker.client.session("fork")
    opened = await fork.open(fork_of=ForkPoint("unsaved"))
    assert opened.cache == SAID
    await fork.generate(tokens=[6], max_tokens=BLOCK)
    await worker.stop()
    assert num_snapshots(data / "snapshots", tier) == 0
    assert not holds_secret(data / "snapshots", tier)

    worker = await local_worker(remote_tier=str(tier))
    info = await worker.client.session("unsaved").info(snapshot=True)
    assert (info.cache, info.snapshot or None) == (SAID, None)
    again = await worker.client.session("unsaved").generate(tokens=[5], max_tokens=2)
    assert (again.cache, again.usage.cached_tokens) == (SAID, 0)
    await worker.client.session("saved").append(tokens=SECRET)
    await worker.stop()
    assert num_snapshots(data / "snapshots", tier) > 0
    assert holds_secret(data / "snapshots", tier)


async def test_a_session_opened_without_snapshots_still_restores_the_snapshots_of_other_sessions(
    local_worker: Callable,
) -> None:
    """Reading leaves nothing on disk, and a shared system prompt needs no second prefill."""
    worker = await local_worker()
    await worker.client.session("saved").append(tokens=SECRET)
    await worker.stop()
    worker = await local_worker()
    unsaved = worker.client.session("unsaved", cache=UNSAVED)
    appended = await unsaved.append(tokens=[*SECRET, 5, 6])
    assert appended.cached_tokens >= 3 * BLOCK
    saved = await worker.client.session("also-saved").append(tokens=[*SECRET, 5, 7])
    assert saved.cached_tokens >= 3 * BLOCK


async def test_a_client_refuses_to_open_a_paged_session_without_snapshots(local_worker: Callable) -> None:
    worker = await local_worker()
    with pytest.raises(InvalidMessageError, match="keeps the KV of a paged session on SSD"):
        await worker.client.session("s").open({"policy": "paged", "snapshots": "none"})
    with pytest.raises(InvalidMessageError, match="a fork keeps its parent's policy"):
        await worker.client.session("s").open(CachePolicy(snapshots="none"), fork_of=ForkPoint("t"))


async def test_a_client_session_without_snapshots_refuses_a_session_that_was_opened_with_snapshots(
    local_worker: Callable,
) -> None:
    worker = await local_worker()
    await worker.client.session("s").append(tokens=[5])
    with pytest.raises(RequestFailedError, match="open under full, not under full, no snapshots"):
        await worker.client.session("s", cache=UNSAVED).append(tokens=[5])
    window = {"policy": "sink_window", "sink": 2, "window": 32, "snapshots": "none"}
    found = await worker.client.session("w", cache=window).append(tokens=[5])
    assert found.cache == SessionCache(**window)
    assert (await worker.client.session("w", cache=UNSAVED).append(tokens=[5])).cache == found.cache
