"""Full, corrupt and failing disks cause misses or counted losses, and never wrong KV."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import shutil
import sqlite3
import stat
import sys
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from made_kv import BLOCK, Clock, assert_sum_rule, cut, flip, identity, num_restored, put, save_all, stored
from structlog.testing import capture_logs

from cache.disk import format as snapshot_format
from cache.disk.catalog import Catalog
from cache.disk.folder import QUARANTINE_FILES, Folder
from cache.disk.io_threads import IoThreads
from cache.index import stored_kv
from cache.names import blocks
from cache.names.blocks import Span
from cache.names.tokens import Chain, as_tokens, pack

TOKENS = list(range(10))


@pytest.fixture
def small_disk(mounted):
    """A mounted file system of 4 MiB for the test alone."""
    return mounted("size=4m")


def fill(path) -> None:
    with path.open("wb", buffering=0) as file:
        written = 4096
        while written == 4096:
            try:
                written = file.write(b"x" * 4096)
            except OSError:
                return


async def test_a_disk_that_becomes_full_during_snapshot_writes_loses_only_the_snapshots_being_written(
    open_store, small_disk, monkeypatch
) -> None:
    """The error is a real ENOSPC: other files take the last bytes after the snapshots were accepted."""
    clock, gate, write = Clock(), threading.Event(), snapshot_format.write

    def held(draft, path, *more) -> None:
        assert gate.wait(10)
        write(draft, path, *more)

    store = await stored(open_store, TOKENS, directory=small_disk / "cache", monotonic=clock)
    monkeypatch.setattr(snapshot_format, "write", held)
    save_all(store, "b", TOKENS)
    fill(small_disk / "of another process")
    with capture_logs() as logs:
        gate.set()
        assert await store.queue.drained(5)
        stats = store.stats()
        assert (stats.durable, stats.in_flight) == (3, 0)
        assert stats.failed + stats.dropped.get("disk_error", 0) == 3
        assert_sum_rule(store)
        assert list((small_disk / "cache" / "tmp").iterdir()) == []

        assert (store.queue.vacant_bytes(), store.queue.spare_bytes(), store.queue.paused) == (0, 0, True)
        assert await num_restored(store, TOKENS) == 10, "what is stored is still served"
    failing = [log for log in logs if log["event"] == "snapshot_writes_failing"]
    assert [log["code"] for log in failing] == ["ENOSPC"]

    (small_disk / "of another process").unlink()
    clock.now += 1.1
    with capture_logs() as logs:
        assert save_all(store, "b", TOKENS) == [True, True, True]
        assert await store.queue.drained(5)
    assert [log["event"] for log in logs] == ["snapshot_writes_recovered"]
    assert await num_restored(store, TOKENS, "b") == 10


async def test_the_disk_writer_pauses_longer_after_each_failed_write_and_logs_only_the_first_failure(
    open_store, monkeypatch
) -> None:
    clock = Clock()
    store = await open_store(monotonic=clock)

    def fail(fd) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    pauses = []
    with capture_logs() as logs:
        for session in range(9):
            assert save_all(store, "a", [session, 1]) == [True]
            await store.queue.drained(5)
            before = clock.now
            while store.queue.vacant_bytes() == 0:
                assert save_all(store, "a", [session, 2]) == [False]
                clock.now += 0.5
            pauses.append(clock.now - before)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert [log["event"] for log in logs] == ["snapshot_writes_failing"]
    assert store.stats().failed == 9
    assert_sum_rule(store)


async def test_snapshots_saved_while_the_disk_writer_is_paused_are_dropped_and_counted(
    open_store, monkeypatch
) -> None:
    store = await open_store(monotonic=Clock())
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.EDQUOT, "quota")))
    spans = store.kv.wanted(store.kv.chain("a"), TOKENS[:10])
    await put(store, [1, 2])
    monkeypatch.setattr(os, "fsync", fsync)
    assert not store.kv.save(store.kv.chain("a"), TOKENS, spans[0], cut(TOKENS, spans[0]))
    store.queue.skip(2)
    assert store.stats().dropped == {"disk_error": 3}
    assert_sum_rule(store)


async def test_a_snapshot_file_is_synced_before_its_rename_and_its_folder_is_synced_after_the_rename(
    open_store, tmp_path, monkeypatch
) -> None:
    store, fsync, happened = await open_store(), os.fsync, []
    tmp, snapshots = (tmp_path / "cache" / name for name in ("tmp", "snapshots"))

    def noted(fd) -> None:
        inode = os.fstat(fd).st_ino
        names = {path.stat().st_ino: path.stem for path in (*tmp.iterdir(), *snapshots.iterdir())}
        where = "folder" if inode == snapshots.stat().st_ino else names[inode]
        happened.append((where, len(list(snapshots.iterdir()))))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    await put(store, TOKENS)
    files = [nth_file(tmp_path, n).stem for n in range(3)]
    assert happened == [each for n, file in enumerate(files) for each in ((file, n), ("folder", n + 1))]


async def test_all_queued_snapshots_are_dropped_unwritten_after_a_failed_disk_write(
    open_store, monkeypatch
) -> None:
    """Otherwise the writer would try the whole queue on a full disk."""
    store = await open_store(monotonic=Clock())
    loop, tried = asyncio.get_running_loop(), []

    def fail(draft, path, *more) -> None:
        tried.append(path)
        if len(tried) > 1:  # wait until the event loop has handled the first failure
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(10)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(snapshot_format, "write", fail)
    for session in range(20):
        save_all(store, "a", [session, 1])
    await store.queue.drained(5)
    failed = len(tried)
    assert failed in (1, 2), (
        "the one that failed, and the one that was under way when that became known, if any"
    )
    assert (store.stats().failed, store.stats().dropped) == (failed, {"disk_error": 20 - failed})
    assert_sum_rule(store)


async def test_a_snapshot_file_whose_rename_could_not_be_synced_is_removed(
    open_store, tmp_path, monkeypatch
) -> None:
    """It does not count as stored, so the next start must not find it either."""
    store = await open_store()
    fsync = os.fsync

    def fail_for_directories(fd) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail_for_directories)
    await put(store, [1, 2])
    assert (store.stats().failed, store.stats().stored) == (1, 0)
    assert list((tmp_path / "cache" / "snapshots").iterdir()) == []


async def test_any_exception_during_a_snapshot_write_leaves_the_writer_thread_running(
    open_store, monkeypatch
) -> None:
    clock = Clock()
    store = await open_store(monotonic=clock)
    write = snapshot_format.write
    monkeypatch.setattr(snapshot_format, "write", lambda *_: 1 / 0)
    await put(store, [1, 2])
    assert store.stats().failed == 1
    monkeypatch.setattr(snapshot_format, "write", write)
    clock.now += 2
    await put(store, [1, 2])
    assert await num_restored(store, [1, 2]) == 2


async def test_after_any_exception_in_a_file_removal_the_cache_restores_but_no_longer_saves(
    open_store, monkeypatch
) -> None:
    store, gate = await open_store(monotonic=Clock()), threading.Event()
    save_all(store, "a", TOKENS)
    await put(store, TOKENS, tenant="b")

    def fail(*_) -> None:
        assert gate.wait(10)
        raise ZeroDivisionError

    with monkeypatch.context() as patched, capture_logs() as logs:
        patched.setattr(Folder, "remove", fail)
        store.eraser.forget("a", pack(TOKENS))
        assert all(save_all(store, "c", TOKENS)), "queued behind it"
        gate.set()
        assert await store.queue.drained(5)
        assert not (await store.eraser.erase("a", pack(TOKENS))).settled
    assert [log["event"] for log in logs] == ["snapshot_writer_failed"]
    stats = store.stats()
    # The event loop drops the snapshots that still wait when it learns of the first failure.
    assert (stats.durable, stats.failed + sum(stats.dropped.values()), stats.in_flight) == (6, 3, 0)
    assert stats.failed
    span = Span(0, BLOCK)
    assert (store.queue.vacant_bytes(), store.queue.spare_bytes(), store.queue.paused) == (0, 0, True)
    assert not store.kv.save(store.kv.chain("c"), TOKENS, span, cut(TOKENS, span))
    assert store.stats().dropped["disk_error"] == stats.dropped.get("disk_error", 0) + 1
    assert_sum_rule(store)
    assert await num_restored(store, TOKENS, "b") == 10, "what is stored is still served"
    store.eraser.forget("b", pack(TOKENS))
    assert await store.close(), "the thread ends as ever"
    assert await num_restored(await open_store(), TOKENS, "b") == 0


@pytest.mark.parametrize(
    "error", [sqlite3.OperationalError("database or disk is full"), MemoryError()], ids=repr
)
async def test_snapshots_of_a_cache_whose_sqlite_index_cannot_be_written_are_still_restored(
    open_store, monkeypatch, error
) -> None:
    """For example, SQLite out of memory raises no `sqlite3.Error`."""
    store = await open_store()

    def fail(catalog, rows) -> None:
        raise error

    for change in ("put", "remove", "use"):
        monkeypatch.setattr(Catalog, change, fail)
    with capture_logs() as logs:
        await put(store, TOKENS)
        assert await num_restored(store, TOKENS) == 10
        await store.close()
    assert [log["event"] for log in logs] == ["index_not_written"]
    monkeypatch.undo()
    assert await num_restored(await open_store(), TOKENS) == 10


def nth_file(tmp_path, n, tenant="a"):
    """Return the path of the file of the n-th block of TOKENS, or of their tail."""
    root = blocks.root(identity().digest(), tenant)
    chain = [*Chain(root, BLOCK).names(as_tokens(TOKENS))][1:]
    chain.append(blocks.link(chain[-1], pack(TOKENS[8:])))
    return tmp_path / "cache" / "snapshots" / f"{chain[n].hex()}.safetensors"


@pytest.fixture
def no_files_left():
    """A context manager in which the process cannot open any more files."""

    @contextmanager
    def lacking():
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")
        highest = max(int(file.name) for file in files.iterdir())
        fillers = [
            os.open(os.devnull, os.O_RDONLY) for _ in range(highest)
        ]  # so that no lower number is free
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(fillers) + 1, before[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                os.open(os.devnull, os.O_RDONLY)
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for file in fillers:
                os.close(file)

    return lacking


async def test_a_restore_without_free_file_descriptors_is_a_miss_and_quarantines_no_file(
    open_store, tmp_path, no_files_left
) -> None:
    """The files are undamaged, and moving them to quarantine would lose the whole session's KV."""
    store = await stored(open_store, TOKENS)
    assert await num_restored(store, TOKENS) == len(TOKENS), "and all that it takes has been imported"
    with capture_logs() as logs, no_files_left():
        assert await num_restored(store, TOKENS) == 0
    assert [log["event"] for log in logs] == ["restore_failed"]
    assert store.stats().rejected == 0
    assert list((tmp_path / "cache" / "quarantine").iterdir()) == []
    assert await num_restored(store, TOKENS) == len(TOKENS)


@pytest.fixture
def no_room():
    """A context manager in which the process cannot enlarge any file, as on a full disk."""

    @contextmanager
    def lacking():
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return lacking


async def test_snapshots_missing_from_the_index_can_be_restored_and_erased_even_on_a_full_disk(
    open_store, tmp_path, no_room
) -> None:
    """A disk that fills up may have had room for a file, and not for its row."""
    for kv_dtype in ("float32", "int8"):
        store = await open_store(identity=identity(kv_dtype=kv_dtype))
        save_all(store, "a", TOKENS)
        await store.close()
    with closing(sqlite3.connect(tmp_path / "cache" / "index.sqlite")) as db, db:
        db.execute("DELETE FROM snapshot WHERE start > 0")
        db.execute("DELETE FROM model")
    with no_room(), capture_logs() as logs:
        store = await open_store()
        assert "index_not_written" in [log["event"] for log in logs]
        assert await num_restored(store, TOKENS) == 10
        assert store.stats().stored == 6
        assert store.eraser.forget("a", pack(TOKENS)) == 6, "the other model's files too"
        assert await store.queue.drained(5)
        assert list((tmp_path / "cache" / "snapshots").iterdir()) == []


async def test_a_damaged_snapshot_file_that_several_restores_read_concurrently_is_counted_as_one_damaged_file(
    open_store, tmp_path
) -> None:
    store = await stored(open_store, TOKENS)
    flip(nth_file(tmp_path, 1))
    assert await asyncio.gather(*(num_restored(store, TOKENS) for _ in range(4))) == [4] * 4
    assert store.stats().rejected == 1


async def test_emptying_the_quarantine_by_hand_gives_its_disk_space_back_to_the_cache(
    open_store, tmp_path
) -> None:
    """This works without stopping the worker."""
    store = await open_store()
    sessions = [[session, 1] for session in range(6)]
    for tokens in sessions:
        save_all(store, "a", tokens)
    assert await store.queue.drained(5)
    size = store.stats().stored_bytes // len(sessions)
    for path in (tmp_path / "cache" / "snapshots").iterdir():
        flip(path)
    found = await asyncio.gather(*(num_restored(store, tokens) for tokens in sessions))
    assert found == [0] * 6
    assert await store.queue.drained(5)
    assert store.stats().capacity_bytes == (1 << 30) - 6 * size
    for path in (tmp_path / "cache" / "quarantine").iterdir():
        path.unlink()
    await put(store, [1, 2], tenant="b")
    assert store.stats().capacity_bytes == 1 << 30


@pytest.mark.parametrize("room", ["snapshots", "tmp", "quarantine"])
async def test_a_cache_subdirectory_removed_while_a_store_runs_is_created_again(
    open_store, tmp_path, room
) -> None:
    store = await stored(open_store, TOKENS)
    shutil.rmtree(tmp_path / "cache" / room)
    await put(store, TOKENS, tenant="b")
    assert await num_restored(store, TOKENS, "b") == 10
    assert (store.stats().failed, store.stats().dropped) == (0, {})
    assert await num_restored(store, TOKENS) == (0 if room == "snapshots" else 10)
    flip(nth_file(tmp_path, 0, tenant="b"))
    assert await num_restored(store, TOKENS, "b") == 0
    assert await store.queue.drained(5)
    assert len(list((tmp_path / "cache" / "quarantine").iterdir())) == 1
    assert_sum_rule(store)


def a_folder(path) -> None:
    path.mkdir()


def a_full_folder(path) -> None:
    path.mkdir()
    (path / "somebody's").write_bytes(b"x")


@pytest.mark.parametrize("make", [a_folder, a_full_folder])
async def test_a_folder_in_the_place_of_a_snapshot_file_is_moved_to_quarantine(
    open_store, tmp_path, make
) -> None:
    store = await open_store()
    path = nth_file(tmp_path, 0)
    make(path)
    make(tmp_path / "cache" / "tmp" / path.stem)
    await put(store, TOKENS)
    assert (store.stats().failed, store.stats().dropped) == (0, {}), "nothing pauses for it"
    assert await num_restored(store, TOKENS) == 10
    assert (tmp_path / "cache" / "quarantine" / path.name).is_dir()
    make(nth_file(tmp_path, 0, tenant="c"))
    make(tmp_path / "cache" / "tmp" / "left")
    for i in range(QUARANTINE_FILES):
        make(tmp_path / "cache" / "quarantine" / str(i))
    assert await store.close()
    store = await open_store()
    assert await num_restored(store, TOKENS) == 10
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []
    assert len(list((tmp_path / "cache" / "quarantine").iterdir())) == QUARANTINE_FILES
    assert await store.eraser.clear()
    assert [*(tmp_path / "cache").glob("*/*")] == []


async def test_a_restore_that_exceeds_its_time_limit_reads_no_further_file(
    open_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tokens, begun = await open_store(), list(range(8 * BLOCK)), []
    await put(store, tokens)
    assert await num_restored(store, tokens) == len(tokens)  # has imported MLX, which takes long
    read = snapshot_format.read

    def slow(path: Path, *args: object, **named: object) -> int:
        begun.append(path)
        time.sleep(0.8)
        return read(path, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(snapshot_format, "read", slow)
    monkeypatch.setattr(stored_kv, "LOAD_S", 0.5)
    monkeypatch.setattr(stored_kv, "_LOAD_BYTES_PER_S", 2**60)
    found = store.kv.match(store.kv.chain("a"), tokens)
    assert await store.kv.load(found) is None
    assert await store.kv.close(60)
    assert 1 <= len(begun) <= stored_kv._IO_THREADS


async def test_while_one_disk_read_hangs_all_further_disk_reads_time_out_immediately() -> None:
    """Reads behind it would occupy the other threads too."""
    answers, readers = threading.Event(), IoThreads("test", 2)
    try:
        for work, limit_s in ((answers.wait, 0.05), (int, 60.0)):
            with pytest.raises(TimeoutError, match="does not answer"):
                await asyncio.wait_for(readers.run(work, limit_s), 10)
    finally:
        answers.set()
        assert await readers.close(10)


async def test_a_disk_read_that_fails_after_its_waiting_was_cancelled_logs_no_traceback() -> None:
    logged, goes_on, readers = list[Any](), threading.Event(), IoThreads("test", 1)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))

    def fail() -> None:
        goes_on.wait()
        raise OSError("the tier does not answer")

    waiting = asyncio.create_task(readers.run(fail, 60.0))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    goes_on.set()
    assert await readers.close(10)
    await asyncio.sleep(0)
    gc.collect()
    assert not logged
