"""Disks that fail, hang, disappear or are full, and kills at any write, with real files and system calls.

The faults come from `faulty_disk.c`, which is preloaded into child processes (`on_faulty_disk.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_kv import assert_sum_rule, num_restored, save_all
from structlog.testing import capture_logs
from test_cache_windows import POLICY

from cache.admin import survey
from cache.names.tokens import pack

HERE = Path(__file__).parent
ONE, TWO = [1, *range(9)], [2, *range(9)]


@pytest.fixture(scope="module")
def faulty_disk(tmp_path_factory) -> Path:
    """Compile the library that injects disk faults; return its path."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("faults are injected by a preloaded library: that takes Linux and a C compiler")
    library = tmp_path_factory.mktemp("faults") / "faulty_disk.so"
    source = HERE / "faulty_disk.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture
def base() -> Iterator[Path]:
    """A temporary directory, in memory if possible, since hundreds of child processes sync their writes."""
    memory = Path("/dev/shm")
    where = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="turnkeep-disk-", dir=where) as name:
        yield Path(name)


def run(library: Path, scenario: str, base: Path):
    found = subprocess.run(
        [sys.executable, HERE / "on_faulty_disk.py", scenario, base],
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": f"{HERE}:{HERE.parents[1]}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.mark.process
async def test_a_kill_at_any_disk_write_loses_no_confirmed_snapshot_and_brings_back_no_erased_one(
    faulty_disk, base, open_store
) -> None:
    """The kill comes before each call that changes the directory, and in the middle of each write."""
    lives = run(faulty_disk, "killed", base)
    assert len(lives) > 150
    for life in lives:
        directory = base / life
        said = (base / f"{life}.said").read_text().split()
        if (directory / "snapshots").is_dir():
            assert survey.verify(directory, lambda done, total: None).doubtful == [], life
        store = await open_store(directory=directory)
        assert store.stats().rejected == 0, life
        assert list((directory / "tmp").iterdir()) == []
        assert await num_restored(store, ONE) >= (10 if "two" in said else 6 if "one" in said else 0), life
        two = await num_restored(store, TWO)
        if "two" in said:  # a forget may be in progress, which removes files from the session's end
            assert two in (0, 4, 8, 10), life
        assert two == 0 or "forgotten" not in said, life
        save_all(store, "a", ONE)
        assert await store.queue.drained(10)
        assert await num_restored(store, ONE) == 10, life
        assert_sum_rule(store)
        await store.close()


@pytest.mark.process
def test_the_cache_stays_correct_and_works_again_after_any_failed_disk_write(faulty_disk, base) -> None:
    """One call fails with EIO, ENOSPC or EDQUOT, or all calls from some call on, also with EROFS."""
    assert run(faulty_disk, "failing", base)["changes"] > 100


@pytest.mark.process
def test_the_event_loop_never_touches_the_disk(faulty_disk, base) -> None:
    """So no turn waits for the disk, however slow that is."""
    found = run(faulty_disk, "touched", base)
    assert found["here"] == 0
    assert found["everywhere"] > 20
    assert found["evicted"] > 0


@pytest.mark.process
def test_a_disk_that_hangs_on_reads_blocks_neither_other_loads_nor_the_exit(faulty_disk, base) -> None:
    """A hanging read occupies its thread. At most two threads hang, and the process can still exit."""
    assert 0 < run(faulty_disk, "hanging", base)["stuck"] <= 2


@pytest.mark.process
async def test_confirmed_evictions_and_erasures_survive_a_power_failure(
    faulty_disk, base, open_store
) -> None:
    """ErasureProgress tokens do not reappear in SQLite's log either."""
    found = run(faulty_disk, "powerless", base)
    store = await open_store(directory=base / "gaps")
    assert store.kv.match(store.kv.chain("a", POLICY), ONE * 10).num_tokens == 100
    await store.close()
    assert found == {"kept": 0, "erased": 0}, "the log's deleted pages do not come back"


async def test_a_store_whose_directory_is_removed_keeps_running_without_its_snapshots(
    open_store, tmp_path
) -> None:
    now = 0.0
    store = await open_store(monotonic=lambda: now)
    save_all(store, "a", ONE)
    await store.queue.drained(5)
    shutil.rmtree(tmp_path / "cache")
    match = store.kv.match(store.kv.chain("a"), ONE)
    assert await store.kv.load(match) is None
    save_all(store, "a", TWO)
    assert await store.queue.drained(5)
    assert store.stats().failed + sum(store.stats().dropped.values()) == 3
    assert_sum_rule(store)
    store.eraser.forget("a", pack(ONE))
    assert await store.eraser.clear()
    assert_sum_rule(store)
    assert await store.close()


async def test_a_store_on_a_full_disk_starts_and_serves_its_stored_snapshots(open_store, mounted) -> None:
    disk = mounted("size=1m")
    store = await open_store(directory=disk / "cache", model="tiny")
    save_all(store, "a", ONE)
    await store.close()
    with (disk / "of another process").open("wb", buffering=0) as file:
        while True:
            try:
                if file.write(b"x" * 512) < 512:
                    break
            except OSError:
                break
    store = await open_store(directory=disk / "cache", model="tiny")
    assert await num_restored(store, ONE) == 10
    held = store.kv.hold(store.kv.chain("a"), ONE)
    save_all(store, "a", TWO)
    assert store.stats().dropped == {"disk_limit": 3}
    assert await num_restored(store, ONE) == 10, "in use, it does not give way to newer ones"
    store.kv.release(held)
    assert_sum_rule(store)
    await store.close()
    (disk / "of another process").unlink()
    with sqlite3.connect(disk / "cache" / "index.sqlite") as db:
        assert db.execute("SELECT count(*) FROM snapshot").fetchone() == (3,), "the index is still there"
    db.close()


async def test_a_file_system_whose_file_numbers_exceed_63_bits_keeps_its_snapshots(
    open_store, monkeypatch
) -> None:
    class Large:
        def __init__(self, stat: os.stat_result) -> None:
            self._stat = stat

        def __getattr__(self, name: str) -> Any:
            return 2**64 - 1 if name == "st_ino" else getattr(self._stat, name)

    fstat = os.fstat
    monkeypatch.setattr(os, "fstat", lambda file: Large(fstat(file)))
    tokens = list(range(8))
    for _ in range(2):
        store = await open_store()
        assert not store.eraser.put_back, "the directory knows itself"
        save_all(store, "a", tokens)
        assert await store.queue.drained(10)
        assert store.kv.find(store.kv.chain("a"), tokens).num_tokens == 8
        await store.close()


ONE, TWO, THREE = ([session, *range(9)] for session in (1, 2, 3))


async def command(*words) -> str:
    """Run a command; return its output."""
    done = await asyncio.to_thread(subprocess.run, words, check=True, capture_output=True, text=True)
    return done.stdout.strip()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def fill(path) -> None:
    with path.open("wb", buffering=0) as file:
        for size_bytes in [1 << 16] * 100 + [1 << 12] * 100:
            file.write(bytes(size_bytes))


def trigger_error(device) -> None:
    """Make ext4 report an error, after which it writes no more changes."""
    trigger = Path("/sys/fs/ext4", device, "trigger_fs_error")
    if not trigger.exists():
        pytest.skip("this kernel lets nobody trigger an error of a file system")
    trigger.write_text("a test")


async def saved(store, tokens) -> None:
    save_all(store, "a", tokens)
    assert await store.queue.drained(5)
    assert_sum_rule(store)


async def failing(store, tokens) -> list[str]:
    """Try to save tokens, which must fail; return the codes of the logged faults."""
    with capture_logs() as logs:
        await saved(store, tokens)
    assert await num_restored(store, tokens) < len(tokens)
    assert store.queue.vacant_bytes() == 0, "it pauses"
    return [log["code"] for log in logs if log["event"] == "snapshot_writes_failing"]


async def test_a_read_only_remount_stops_writes_but_not_reads_until_it_is_writable_again(
    open_store, mounted, read_only
) -> None:
    clock = Clock()
    directory = mounted("size=4m") / "cache"
    store = await open_store(directory=directory, monotonic=clock)
    await saved(store, ONE)
    first = min((directory / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime_ns)

    read_only(directory, True)
    with pytest.raises(OSError, match="Read-only"):
        (directory / "tmp" / "x").touch()
    assert await failing(store, TWO) == ["EROFS"]
    assert await num_restored(store, ONE) == 10, "what is stored is still served"
    assert not (await store.eraser.erase("a", pack(ONE[:4]))).num_snapshots, "others continue it"
    clock.now += 1.1
    assert await failing(store, TWO) == [], "one line for an episode"

    read_only(directory, False)
    clock.now += 1.1
    assert store.queue.vacant_bytes() == 0, "the second pause is longer"
    clock.now += 1.0
    with capture_logs() as logs:
        await saved(store, TWO)
    assert "snapshot_writes_recovered" in [log["event"] for log in logs]
    assert await num_restored(store, TWO) == 10

    whole = bytearray(first.read_bytes())
    whole[-1] ^= 1
    first.write_bytes(whole)
    read_only(directory, True)
    with capture_logs() as logs:
        assert await num_restored(store, ONE) == 0, "in doubt, though it can be moved nowhere"
    assert "snapshot_not_quarantined" in [log["event"] for log in logs]
    read_only(directory, False)
    await saved(store, ONE)
    assert await store.close()

    store = await open_store(directory=directory)
    assert [await num_restored(store, tokens) for tokens in (ONE, TWO)] == [10, 10]


async def test_snapshots_that_an_erase_could_not_remove_from_a_read_only_disk_are_found_at_restart(
    open_store, mounted, read_only
) -> None:
    directory = mounted("size=4m") / "cache"
    store = await open_store(directory=directory)
    await saved(store, ONE)
    read_only(directory, True)
    with capture_logs() as logs:
        await store.eraser.erase("a", pack(ONE))
    assert [log["event"] for log in logs].count("snapshot_not_removed") == 3
    assert store.kv.match(store.kv.chain("a"), ONE).num_tokens == 0, "here it is gone"
    assert_sum_rule(store)
    await store.close()
    read_only(directory, False)
    store = await open_store(directory=directory)
    assert await num_restored(store, ONE) == 10


async def test_a_file_system_that_becomes_read_only_after_an_error_loses_no_durable_snapshot(
    open_store, disk_image
) -> None:
    """It is ext4 with `errors=remount-ro`, where files that are already open cannot be written either."""
    folder = disk_image(16 << 20, "errors=remount-ro", "mkfs.ext4", "-q")
    device = Path(await command("findmnt", "-no", "SOURCE", folder)).name
    clock = Clock()
    store = await open_store(directory=folder / "cache", monotonic=clock)
    await saved(store, ONE)
    trigger_error(device)
    assert await failing(store, TWO) == ["EROFS"]
    clock.now += 1.1
    assert await failing(store, THREE) == []
    assert await num_restored(store, ONE) == 10, "what is stored is still served"
    assert await store.close()

    await command("umount", folder)
    folder = disk_image(16 << 20, "errors=remount-ro", "e2fsck", "-fy")
    store = await open_store(directory=folder / "cache", monotonic=clock)
    assert store.stats().rejected == 0
    assert [await num_restored(store, tokens) for tokens in (ONE, TWO)] == [10, 0]
    await saved(store, TWO)
    assert await num_restored(store, TWO) == 10


async def test_a_used_up_disk_quota_pauses_the_writer_until_space_is_free_again(
    open_store, disk_image
) -> None:
    """The error is EDQUOT from a btrfs quota group, which applies to root too; `statvfs` does not show it."""
    if shutil.which("btrfs") is None:
        pytest.skip("there is no btrfs here")
    folder = disk_image(128 << 20, "rw", "mkfs.btrfs", "-q", "--mixed")
    await command("btrfs", "quota", "enable", folder)
    await command("btrfs", "qgroup", "limit", "4M", "0/5", folder)
    clock = Clock()
    store = await open_store(directory=folder / "cache", monotonic=clock)
    await saved(store, ONE)
    filler = folder / "of another program"
    with pytest.raises(OSError, match="quota"):
        fill(filler)
    assert await failing(store, TWO) == ["EDQUOT"]
    assert store.stats().free_bytes > 64 << 20, "as far as the disk says"
    assert await num_restored(store, ONE) == 10, "what is stored is still served"

    filler.unlink()
    await command("btrfs", "filesystem", "sync", folder)  # until then it counts
    clock.now += 1.1
    with capture_logs() as logs:
        await saved(store, TWO)
    assert "snapshot_writes_recovered" in [log["event"] for log in logs]
    assert await store.close()
    store = await open_store(directory=folder / "cache")
    assert [await num_restored(store, tokens) for tokens in (ONE, TWO)] == [10, 10]
