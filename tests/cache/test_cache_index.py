"""The index finds the same snapshots as a full search, and is rebuilt if its file is lost."""

from __future__ import annotations

import errno
import os
import sqlite3

import pytest
from made_kv import assert_is_kv_of, put, stored
from structlog.testing import capture_logs

from cache.disk.header import read_name
from cache.index import catalog_repair as reconciling
from cache.index.index import SnapshotIndex
from cache.names import blocks
from cache.names.snapshot import Name
from cache.names.tokens import pack

ROOT = bytes(blocks.DIGEST_BYTES)


def name(tokens, parent=ROOT) -> Name:
    return Name(parent, 0 if parent == ROOT else 4, pack(tokens))


def test_of_a_sessions_snapshots_with_equal_last_use_the_one_nearest_the_sessions_end_is_evicted_first() -> (
    None
):
    index = SnapshotIndex(lambda: 0.0)
    one = index.add(name((1, 2)), 1)
    two = index.add(Name(one.digest, 2, pack((3,))), 1)
    other = index.add(name((4,)), 1)
    for node in (one, two, other):
        index.mark_durable(node)
    assert list(index) == [two, one, other], "what continues a snapshot counts as used with it"
    index.use([one, other])
    assert next(iter(index)) is index.oldest() is two
    index.hold([two])
    index.remove(other)
    assert index.oldest() is one
    index.release([two])
    assert index.oldest() is two
    index.use([two])
    assert index.oldest() is one


def test_the_release_of_a_snapshot_removed_while_in_use_leaves_nothing_to_evict_and_0_bytes_in_use() -> None:
    index = SnapshotIndex(lambda: 0.0)
    node = index.add(name((1, 2)), 1)
    index.mark_durable(node)
    index.hold([node])
    index.remove(node)
    index.release([node])
    assert (index.held_bytes, index.oldest()) == (0, None)


def test_the_last_use_times_of_the_cache_index_increase_even_if_the_clock_goes_back() -> None:
    times = iter([5.0, 3.0, 5.0, 9.0])
    index = SnapshotIndex(lambda: next(times))
    assert [index.next_use() for _ in range(4)] == [5_000_000, 5_000_001, 5_000_002, 9_000_000]


TOKENS = list(range(10))


async def stored_once(open_store) -> None:
    await (await stored(open_store, TOKENS)).close()


async def assert_finds_everything(open_store) -> None:
    store = await open_store()
    assert store.stats().stored == 3
    restored = await store.kv.load(store.kv.match(store.kv.chain("a"), TOKENS))
    assert_is_kv_of(restored.tensors, TOKENS)
    await store.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"no database at all" * 100),
        lambda path: path.write_bytes(path.read_bytes()[:5000]),
        lambda path: path.write_bytes(path.read_bytes()[:4096] + b"\xa5" * 4096),
        lambda path: sqlite3.connect(path).execute("PRAGMA user_version=99").connection.close(),
    ],
    ids=["lost", "empty", "overwritten", "cut short", "garbled", "another version"],
)
async def test_a_missing_or_damaged_cache_index_is_rebuilt_from_the_snapshot_files_with_a_log_line(
    open_store, tmp_path, damage
) -> None:
    await stored_once(open_store)
    damage(tmp_path / "cache" / "index.sqlite")
    with capture_logs() as logs:
        await assert_finds_everything(open_store)
    reconciled = [log for log in logs if log["event"] == "index_reconciled"]
    assert [(log["adopted"], log["log_level"]) for log in reconciled] == [(3, "info")], "it must be announced"
    with capture_logs() as logs:
        await assert_finds_everything(open_store)
    assert logs == [], "and the next start has nothing to mend"


@pytest.mark.parametrize(
    "change",
    [
        "start = 4",
        "start = 'eight'",
        "parent = digest",
        "parent = 7",
        "num_tokens = 'text'",
        "num_tokens = 1",
        "mark = zeroblob(8)",
        "size_bytes = size_bytes + 4096",
        "resumable = 0",
        "resumable = 1.5",
        "used = 'yesterday'",
        "proof = NULL, start = 'eight'",
        "proof = NULL, size_bytes = 1.5",
        "proof = x'00'",
        "proof = 'text'",
        "digest = zeroblob(32)",
        "digest = 'text'",
    ],
)
async def test_an_altered_row_of_the_cache_index_is_replaced_from_its_snapshot_file(
    open_store, tmp_path, change
) -> None:
    """SQLite itself has no checksums, so each row has one."""
    await stored_once(open_store)
    columns = "SELECT digest, parent, start, num_tokens, size_bytes, resumable, mark, proof FROM snapshot"
    db = sqlite3.connect(tmp_path / "cache" / "index.sqlite")
    before = set(db.execute(columns))
    with db:
        db.execute(f"UPDATE snapshot SET {change} WHERE start = 8")
    db.close()
    with capture_logs() as logs:
        await assert_finds_everything(open_store)
    assert [(log["event"], log["adopted"]) for log in logs] == [("index_reconciled", 1)]
    db = sqlite3.connect(tmp_path / "cache" / "index.sqlite")
    after = set(db.execute(columns))
    db.close()
    assert after == before


@pytest.mark.parametrize("is_folder", [False, True], ids=["a file", "a folder in its place"])
async def test_opening_a_store_removes_a_partial_block_whose_preceding_partial_block_is_missing(
    open_store, tmp_path, *, is_folder: bool
) -> None:
    """Nothing finds it, and an erasure would not either; nor a folder that is in its place."""
    store = await open_store()
    for end in (10, 11):
        await put(store, TOKENS[:8] + [7] * (end - 8))
    second, first = (store._folder.path(node.digest) for node in store._index if node.start in (8, 10))
    await store.close()
    first.unlink()
    if is_folder:
        second.unlink()
        (second / "below").mkdir(parents=True)
    with capture_logs() as logs:
        store = await open_store()
    assert [(log["lost"], log["orphans"], log["log_level"]) for log in logs] == [(1, 1, "warning")]
    assert store.stats().stored == len(list((tmp_path / "cache" / "snapshots").iterdir())) == 2


@pytest.mark.parametrize("is_whole", [True, False], ids=["without the index", "without the first block"])
async def test_opening_a_store_that_cannot_read_its_files_fails_and_quarantines_no_file(
    open_store, tmp_path, monkeypatch, *, is_whole: bool
) -> None:
    """Without its index, or without the first block, as after an eviction that was cut short."""
    await stored_once(open_store)
    snapshots = tmp_path / "cache" / "snapshots"
    if is_whole:
        (tmp_path / "cache" / "index.sqlite").unlink()
    else:
        next(path for path in snapshots.iterdir() if read_name(path).start == 0).unlink()
    before = set(snapshots.iterdir())

    def lacking(path, *more):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(reconciling, "read_header", lacking)
        with pytest.raises(OSError, match="Too many open files"):
            await open_store()
    assert set(snapshots.iterdir()) == before
    if is_whole:
        await assert_finds_everything(open_store)


async def test_opening_a_store_removes_and_logs_unfinished_files_of_an_earlier_process(
    open_store, tmp_path
) -> None:
    await stored_once(open_store)
    (tmp_path / "cache" / "tmp" / ("cd" * 32)).write_bytes(b"half")
    with capture_logs() as logs:
        store = await open_store()
    assert [(log["event"], log["files"]) for log in logs] == [("unfinished_snapshots_removed", 1)]
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []
    assert store.stats().stored == 3
