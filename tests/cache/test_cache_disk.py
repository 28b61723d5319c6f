"""Disks that fail, hang, disappear or are full, and kills at any write, with real files and system calls.

The faults come from `faulty_disk.c`, which is preloaded into child processes (`on_faulty_disk.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_kv import Clock, assert_sum_rule, flip, num_restored, put, stored
from structlog.testing import capture_logs
from test_cache_windows import POLICY

from cache.admin import survey
from cache.names.tokens import pack

HERE = Path(__file__).parent
ONE, TWO = [1, *range(9)], [2, *range(4)]


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
async def test_a_kill_at_any_disk_write_loses_no_confirmed_snapshot_and_restores_no_erased_snapshot(
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
            assert two in (0, 4, 5), life
        assert two == 0 or "forgotten" not in said, life
        await put(store, ONE)
        assert await num_restored(store, ONE) == 10, life
        assert_sum_rule(store)
        await store.close()


@pytest.mark.process
def test_after_any_single_failed_disk_write_the_cache_still_saves_and_restores_snapshots(
    faulty_disk, base
) -> None:
    """One call fails with EIO, ENOSPC or EDQUOT, or all calls from some call on, also with EROFS."""
    assert run(faulty_disk, "failing", base)["changes"] > 100


@pytest.mark.process
def test_the_event_loop_of_the_cache_makes_no_disk_system_call(faulty_disk, base) -> None:
    """So no turn waits for the disk, however slow that is."""
    found = run(faulty_disk, "touched", base)
    assert found["here"] == 0
    assert found["everywhere"] > 20
    assert found["evicted"] > 0


@pytest.mark.process
def test_a_hung_disk_read_blocks_neither_restores_from_other_files_nor_the_exit_of_the_process(
    faulty_disk, base
) -> None:
    """A hanging read occupies its thread. At most two threads hang, and the process can still exit."""
    assert 0 < run(faulty_disk, "hanging", base)["stuck"] <= 2


@pytest.mark.process
async def test_snapshots_whose_eviction_or_erasure_was_confirmed_do_not_return_after_a_power_failure(
    faulty_disk, base, open_store
) -> None:
    """ErasureProgress tokens do not reappear in SQLite's log either."""
    found = run(faulty_disk, "powerless", base)
    store = await open_store(directory=base / "gaps")
    assert store.kv.match(store.kv.chain("a", POLICY), ONE * 10).num_tokens == 100
    await store.close()
    assert found == {"kept": 0, "erased": 0}, "the log's deleted pages do not come back"


async def test_a_store_whose_directory_is_removed_restores_nothing_and_counts_its_saves_as_lost(
    open_store, tmp_path
) -> None:
    now = 0.0
    store = await stored(open_store, ONE, monotonic=lambda: now)
    shutil.rmtree(tmp_path / "cache")
    match = store.kv.match(store.kv.chain("a"), ONE)
    assert await store.kv.load(match) is None
    await put(store, TWO)
    assert store.stats().failed + sum(store.stats().dropped.values()) == 2
    assert_sum_rule(store)
    store.eraser.forget("a", pack(ONE))
    assert await store.eraser.clear()
    assert_sum_rule(store)
    assert await store.close()


async def test_snapshots_on_a_file_system_with_inode_numbers_above_63_bits_are_kept(
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
        await put(store, tokens)
        assert store.kv.find(store.kv.chain("a"), tokens).num_tokens == 8
        await store.close()


async def saved(store, tokens) -> None:
    await put(store, tokens)
    assert_sum_rule(store)


async def failing(store, tokens) -> list[str]:
    """Try to save tokens, which must fail; return the codes of the logged faults."""
    with capture_logs() as logs:
        await saved(store, tokens)
    assert await num_restored(store, tokens) < len(tokens)
    assert store.queue.vacant_bytes() == 0, "it pauses"
    return [log["code"] for log in logs if log["event"] == "snapshot_writes_failing"]


async def test_a_cache_on_a_disk_remounted_read_only_restores_and_saves_again_once_the_disk_is_writable(
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
    assert await num_restored(store, TWO) == 5

    flip(first)
    read_only(directory, True)
    with capture_logs() as logs:
        assert await num_restored(store, ONE) == 0, "in doubt, though it can be moved nowhere"
    assert "snapshot_not_quarantined" in [log["event"] for log in logs]
    read_only(directory, False)
    await saved(store, ONE)
    assert await store.close()

    store = await open_store(directory=directory)
    assert [await num_restored(store, tokens) for tokens in (ONE, TWO)] == [10, 5]
