"""KV of a forgotten session does not come back with a copy or a backup of the data directory."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache.names.tokens import as_tokens
from worker.wire import erasures

#: As in production: a mark is of the tokens up to the end of a block.
BLOCK = 128
FORGOTTEN = [20 + (7 * number) % 41 for number in range(3 * BLOCK)]
KEPT = [61 - (5 * number) % 41 for number in range(3 * BLOCK)]


def num_stored(worker: Any, tokens: list[int]) -> int:
    kv = worker.app._store.kv
    found = as_tokens(tokens)
    return kv.find(kv.chain("default", of=found), found).num_tokens


def num_files(worker: Any) -> int:
    """Count the files with any block of the forgotten session, in whichever folder."""
    folder = worker.settings.data_dir / "snapshots"
    blocks = [as_tokens(FORGOTTEN).packed(at, at + BLOCK).hex().encode() for at in range(0, 3 * BLOCK, BLOCK)]
    files = [one.read_bytes() for one in folder.rglob("*") if one.is_file()]
    return sum(any(block in file for block in blocks) for file in files)


def whole(backup: Path, data: Path) -> None:
    shutil.rmtree(data / "snapshots")
    shutil.copytree(backup / "snapshots", data / "snapshots")


def over(backup: Path, data: Path) -> None:
    """As `cp -a` does: into the same files, with the earlier times; what is newer stays."""
    shutil.copytree(backup / "snapshots", data / "snapshots", dirs_exist_ok=True)
    (data / "worker.lock").write_bytes((backup / "worker.lock").read_bytes())


def files_only(backup: Path, data: Path) -> None:
    shutil.copytree(backup / "snapshots/snapshots", data / "snapshots/snapshots", dirs_exist_ok=True)


def quarantined(backup: Path, data: Path) -> None:
    shutil.copytree(backup / "snapshots/snapshots", data / "snapshots/quarantine", dirs_exist_ok=True)
    shutil.copy2(backup / "snapshots/lock", data / "snapshots/lock")


@pytest.mark.parametrize("put_back", [whole, over, files_only, quarantined])
async def test_a_backup_that_is_put_back_brings_no_forgotten_kv_to_life(
    local_worker: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    put_back: Callable[[Path, Path], None],
) -> None:
    """Its blocks are out of the index before the worker is ready, although it has forgotten them itself."""
    data, backup = tmp_path / "data", tmp_path / "backup"
    worker = await local_worker(block_tokens=BLOCK)
    await worker.client.session("kept").append(tokens=[*KEPT, 5])
    await worker.client.session("gone").append(tokens=[*FORGOTTEN, 5])
    await worker.stop()
    shutil.copytree(data, backup)
    worker = await local_worker(block_tokens=BLOCK)
    assert num_stored(worker, FORGOTTEN) == 3 * BLOCK
    assert (await worker.client.session("gone").close(forget=True)).settled
    await worker.app._parts.erasures._look(lambda _: set())
    assert num_files(worker) == 0
    await worker.stop()
    put_back(backup, data)
    assert num_files(worker) == 3

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(erasures.Erasures, "run", never)  # it would be too late
    worker = await local_worker(block_tokens=BLOCK)
    assert (num_stored(worker, FORGOTTEN), num_stored(worker, KEPT)) == (0, 3 * BLOCK)
    assert await worker.app._store.queue.drained(10)
    assert num_files(worker) == 0
    await worker.stop()
    worker = await local_worker(block_tokens=BLOCK)
    assert worker.app._store.eraser.doubtful == frozenset()


async def test_a_copy_of_a_data_directory_has_no_forgotten_kv(local_worker: Callable, tmp_path: Path) -> None:
    worker = await local_worker(block_tokens=BLOCK)
    await worker.client.session("kept").append(tokens=[*KEPT, 5])
    await worker.client.session("gone").append(tokens=[*FORGOTTEN, 5])
    await worker.stop()
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    worker = await local_worker(block_tokens=BLOCK)
    assert (await worker.client.session("gone").close(forget=True)).settled
    await worker.stop()
    worker = await local_worker(block_tokens=BLOCK, data_dir=tmp_path / "copy")
    assert (num_stored(worker, FORGOTTEN), num_stored(worker, KEPT)) == (0, 3 * BLOCK)
    assert await worker.app._store.queue.drained(10)
    assert num_files(worker) == 0


async def test_a_backup_from_before_the_oldest_notes_is_dropped(
    local_worker: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await local_worker(block_tokens=BLOCK)
    await worker.client.session("kept").append(tokens=[*KEPT, 5])
    await worker.client.session("gone").append(tokens=[*FORGOTTEN, 5])
    await worker.stop()
    shutil.copytree(tmp_path / "data", tmp_path / "backup")
    worker = await local_worker(block_tokens=BLOCK)
    assert (await worker.client.session("gone").close(forget=True)).settled
    await worker.stop()
    whole(tmp_path / "backup", tmp_path / "data")
    monkeypatch.setattr(erasures, "time", lambda: time.time() + erasures._KEPT_S + 60)
    worker = await local_worker(block_tokens=BLOCK)
    assert (num_stored(worker, FORGOTTEN), num_stored(worker, KEPT)) == (0, 0)


async def test_a_directory_that_nobody_has_copied_reads_no_note_twice(local_worker: Callable) -> None:
    """Neither after a stop nor after the worker's own forget."""
    worker = await local_worker(block_tokens=BLOCK)
    await worker.client.session("kept").append(tokens=[*KEPT, 5])
    await worker.stop()
    for name in ("one", "two"):
        worker = await local_worker(block_tokens=BLOCK)
        assert worker.app._store.eraser.doubtful == frozenset()
        await worker.client.session(name).append(tokens=[*FORGOTTEN, 5])
        assert (await worker.client.session(name).close(forget=True)).settled
        await worker.stop()


def in_tier(tmp_path: Path, tokens: list[int]) -> int:
    block = as_tokens(tokens).packed(0, BLOCK).hex().encode()
    return sum(block in one.read_bytes() for one in (tmp_path / "tier").rglob("*") if one.is_file())


async def uploaded(worker: Any) -> None:
    """Wait until the worker's snapshots are on disk and in the remote tier."""
    assert await worker.app._store.queue.drained(10)
    await asyncio.to_thread(worker.app._store.remote._uploading.submit(lambda: None).result, 10)


async def num_fetched(worker: Any, tokens: list[int]) -> int:
    """Fetch tokens from the remote tier; return how many are then stored."""
    kv, found = worker.app._store.kv, as_tokens(tokens)
    there = await kv.find_remote(kv.chain("default", of=found), found)
    if there is not None:
        await worker.app._store.remote.fetch(there)
    return num_stored(worker, tokens)


@pytest.mark.parametrize("runs", [False, True])
async def test_a_remote_tier_that_is_put_back_brings_no_forgotten_kv_to_life(
    local_worker: Callable, tmp_path: Path, runs: bool
) -> None:
    """Neither for a worker that starts, nor for one that runs meanwhile; the files leave the tier."""
    settings = {"block_tokens": BLOCK, "remote_tier": str(tmp_path / "tier")}
    worker = await local_worker(**settings)
    await worker.client.session("kept").append(tokens=[*KEPT, 5])
    await worker.client.session("gone").append(tokens=[*FORGOTTEN, 5])
    await uploaded(worker)
    shutil.copytree(tmp_path / "tier", tmp_path / "backup")
    assert (await worker.client.session("gone").close(forget=True)).settled
    await worker.app._parts.tier_erasures._look(lambda _: set())
    assert (in_tier(tmp_path, FORGOTTEN), in_tier(tmp_path, KEPT)) == (0, 1)
    if not runs:
        await worker.stop()
    shutil.copytree(tmp_path / "backup", tmp_path / "tier", dirs_exist_ok=True)
    assert in_tier(tmp_path, FORGOTTEN) == 1
    if runs:
        await worker.app._parts.tier_erasures._look(lambda _: set())
    else:
        worker = await local_worker(data_dir=tmp_path / "empty", **settings)
    assert await num_fetched(worker, FORGOTTEN) == 0
    await uploaded(worker)
    assert (in_tier(tmp_path, FORGOTTEN), in_tier(tmp_path, KEPT)) == (0, 1)
    assert await num_fetched(worker, KEPT) == 3 * BLOCK
