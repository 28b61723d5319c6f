"""An erase with `settled` true is confirmed: no file in the cache directory contains the erased tokens."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import sqlite3
import stat

import pytest
from made_kv import cut, flip, identity, put, save_all, stored, traces

from cache.disk.catalog import Catalog
from cache.disk.folder import Folder
from cache.disk.header import read_name
from cache.names.blocks import Span
from cache.names.identity import FORMAT_VERSION
from cache.names.marks import Marker, Marks
from cache.names.tokens import as_tokens, pack, unpack
from cache.store import ErasureResult

#: Numbers that occur nowhere else, so that a search finds their bytes wherever they are left.
TOKENS = [0x5A5A0000 + i for i in range(10)]
OTHER = [0x6B6B0000 + i for i in range(10)]


async def test_after_an_erase_no_file_of_the_cache_directory_contains_the_erased_tokens(
    open_store, tmp_path
) -> None:
    """This includes SQLite's pages and its write-ahead log, which had the digests of the blocks."""
    store = await stored(open_store, OTHER, *([*TOKENS, i] for i in range(20)), TOKENS)
    for i in range(20):
        assert (await store.eraser.erase("a", pack([*TOKENS, i]), 10)).settled
    assert (await store.eraser.erase("a", pack(TOKENS), 10)).settled
    assert traces(tmp_path / "cache", TOKENS) == []
    assert store.kv.match(store.kv.chain("a"), OTHER).num_tokens == 10
    await store.close()
    assert traces(tmp_path / "cache", TOKENS) == []
    assert "index.sqlite" in traces(tmp_path / "cache", OTHER)


async def test_an_erase_removes_its_index_rows_even_if_the_index_was_locked_when_the_store_opened(
    open_store, tmp_path, monkeypatch
) -> None:
    """The store cannot open the file then, and has its rows in memory."""
    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, timeout=0.2))
    store = await stored(open_store, TOKENS, OTHER)
    await store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "cache" / "index.sqlite")) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM snapshot").fetchone()
        store = await open_store()
        assert (await store.eraser.erase("a", pack(TOKENS), 10)).settled
        assert traces(tmp_path / "cache", TOKENS) == []
    await store.close()
    assert traces(tmp_path / "cache", TOKENS) == []
    store = await open_store()
    assert store.kv.match(store.kv.chain("a"), OTHER).num_tokens == 10


async def test_an_erase_that_failed_to_remove_a_file_is_confirmed_only_once_that_file_has_been_removed(
    open_store, tmp_path, monkeypatch
) -> None:
    store = await stored(open_store, TOKENS, OTHER)
    remove = Folder.remove

    def failing(folder, digest) -> None:
        if digest == store.kv.chain("a").names(as_tokens(TOKENS))[1]:
            raise OSError(errno.EIO, "Input/output error")
        remove(folder, digest)

    monkeypatch.setattr(Folder, "remove", failing)
    erased = await store.eraser.erase("a", pack(TOKENS), 10)
    assert (erased.num_snapshots, erased.settled) == (3, False)
    assert (await store.eraser.erase("a", pack(OTHER), 10)).settled, "which is another session's"
    assert not (await store.eraser.erase("a", pack(TOKENS), 10)).settled, "nor is it when asked again"
    monkeypatch.undo()
    assert (await store.eraser.erase("a", pack(TOKENS), 10)).settled
    assert traces(tmp_path / "cache", TOKENS) == []


@pytest.mark.parametrize(
    "was_here", [True, False], ids=["after an erase that failed", "without an erase before"]
)
async def test_an_erase_by_logged_hashes_removes_a_file_that_the_first_erase_could_not_remove(
    open_store, tmp_path, monkeypatch, was_here: bool
) -> None:
    """At the next start the file would be found again, with its tokens."""
    store, marks = await stored(open_store, TOKENS), Marks.of("a", pack(TOKENS))
    monkeypatch.setattr(Folder, "remove", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
    if was_here:  # else this worker was away while the session was forgotten
        assert not (await store.eraser.erase("a", pack(TOKENS), 10)).settled
    assert not await store.eraser.erase_marked("a", marks)
    monkeypatch.undo()
    assert await store.eraser.erase_marked("a", marks)
    assert traces(tmp_path / "cache", TOKENS) == []


async def test_an_erase_by_logged_hashes_leaves_unfinished_erases_of_other_tenants_unfinished(
    open_store, monkeypatch
) -> None:
    store = await stored(open_store, TOKENS)
    await put(store, TOKENS, tenant="b")
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "remove", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
        assert not (await store.eraser.erase("b", pack(TOKENS), 10)).settled
    left = {*store.eraser._unsettled}
    assert await store.eraser.erase_marked("a", Marks.of("a", pack(TOKENS)))
    assert store.eraser._unsettled == left


async def test_an_erase_that_times_out_in_the_write_queue_still_removes_quarantined_copies_later(
    open_store, tmp_path, gate
) -> None:
    gate.set()
    store = await stored(open_store, TOKENS)
    for path in (tmp_path / "cache" / "snapshots").iterdir():
        flip(path)
    assert await store.kv.load(store.kv.match(store.kv.chain("a"), TOKENS)) is None
    gate.clear()
    save_all(store, "a", OTHER)
    assert not (await store.eraser.erase("a", pack(TOKENS), 0.01)).settled
    gate.set()
    assert await store.queue.drained(10)
    assert traces(tmp_path / "cache", TOKENS) == []


async def test_an_erase_is_not_confirmed_while_a_file_that_eviction_failed_to_remove_remains(
    open_store, tmp_path, monkeypatch
) -> None:
    store = await stored(open_store, TOKENS)
    monkeypatch.setattr(Folder, "remove", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
    store.quota.set_limits(max_bytes=0, min_free_bytes=0)
    while store.stats().stored:
        await store.queue.drained(10)
    assert not (await store.eraser.erase("a", pack(TOKENS), 10)).settled
    monkeypatch.undo()
    assert (await store.eraser.erase("a", pack(TOKENS), 10)).settled
    assert traces(tmp_path / "cache", TOKENS) == []


async def test_after_an_erase_failed_to_remove_a_file_a_later_erase_is_confirmed_once_the_file_is_saved_again(
    open_store, monkeypatch
) -> None:
    store = await stored(open_store, TOKENS)
    monkeypatch.setattr(Folder, "remove", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
    assert not (await store.eraser.erase("a", pack(TOKENS), 10)).settled
    monkeypatch.undo()
    await put(store, [*TOKENS, 7])
    assert (await store.eraser.erase("a", pack(TOKENS[:3]), 10)).settled
    assert store.kv.match(store.kv.chain("a"), [*TOKENS, 7]).num_tokens == 11


async def test_an_erase_is_not_confirmed_while_another_turn_uses_the_snapshot_files(
    open_store, tmp_path
) -> None:
    store = await stored(open_store, TOKENS)
    held = store.kv.hold(store.kv.chain("a"), TOKENS[:8])
    erased = await store.eraser.erase("a", pack(TOKENS), 10)
    assert (erased.num_snapshots, erased.settled) == (3, False)
    assert store.kv.match(store.kv.chain("a"), TOKENS).num_tokens == 0, "nobody new may use them"
    store.kv.release(held)
    erased = await store.eraser.erase("a", pack(TOKENS), 10)
    assert (erased.num_snapshots, erased.settled) == (0, True)
    assert traces(tmp_path / "cache", TOKENS) == []


async def test_an_erase_keeps_the_full_blocks_of_the_first_tokens_that_its_caller_declares_as_shared(
    open_store, tmp_path
) -> None:
    store = await stored(open_store, TOKENS)
    assert await store.eraser.erase("a", pack(TOKENS), 10, shared=9) == ErasureResult(1, settled=True)
    found = store.kv.match(store.kv.chain("a"), TOKENS)
    store.kv.release(found)
    assert found.num_tokens == 8
    assert not traces(tmp_path / "cache", TOKENS[8:])
    assert await store.eraser.erase("a", pack(TOKENS[:9]), 10) == ErasureResult(2, settled=True)
    assert not traces(tmp_path / "cache", TOKENS)


async def test_an_erase_removes_quarantined_files_of_the_erased_tokens_and_no_other_quarantined_files(
    open_store, tmp_path
) -> None:
    store = await stored(open_store, TOKENS, OTHER)
    for path in (tmp_path / "cache" / "snapshots").iterdir():
        flip(path)
    for tokens in (TOKENS, OTHER):
        assert await store.kv.load(store.kv.match(store.kv.chain("a"), tokens)) is None
    quarantine = tmp_path / "cache" / "quarantine"
    assert len(list(quarantine.iterdir())) == 2
    assert await store.queue.drained(10)
    room_before = store.stats().capacity_bytes
    assert (await store.eraser.erase("a", pack(TOKENS), 10)).settled
    assert traces(tmp_path / "cache", TOKENS) == []
    (kept,) = quarantine.iterdir()
    assert read_name(kept).tokens == pack(OTHER[:4]), "another session's copy is left to be looked at"
    assert store.stats().capacity_bytes > room_before, "and no longer counts"


async def test_the_store_notifies_its_listeners_when_snapshots_are_erased_or_found_damaged(
    open_store, tmp_path
) -> None:
    """Sessions that still have such KV on the device save it again."""
    store, heard = await stored(open_store, TOKENS, OTHER), list[str]()
    store.listen(lambda: heard.append("missing"))
    await store.eraser.erase("a", pack(TOKENS), 10)
    assert len(heard) == 1
    for path in (tmp_path / "cache" / "snapshots").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert await store.kv.load(store.kv.match(store.kv.chain("a"), OTHER)) is None
    assert len(heard) == 2


async def test_an_erase_removes_a_quarantined_file_whose_header_cannot_be_read(open_store, tmp_path) -> None:
    store = await stored(open_store, TOKENS, OTHER)
    first = next(
        path
        for path in (tmp_path / "cache" / "snapshots").iterdir()
        if read_name(path).tokens == pack(TOKENS[:4])
    )
    first.write_bytes(first.read_bytes().replace(b'"start":"0"', b'"start":"x"'))
    assert await store.kv.load(store.kv.match(store.kv.chain("a"), TOKENS)) is None
    (tmp_path / "cache" / "quarantine" / "folder").mkdir()
    assert (await store.eraser.erase("a", pack(TOKENS), 10)).settled
    assert traces(tmp_path / "cache", TOKENS) == []


async def test_a_file_found_damaged_after_its_erase_is_removed_and_not_moved_to_quarantine(
    open_store, tmp_path, monkeypatch
) -> None:
    store = await stored(open_store, TOKENS)
    for path in (tmp_path / "cache" / "snapshots").iterdir():
        flip(path)
    match = store.kv.match(store.kv.chain("a"), TOKENS)
    assert not (await store.eraser.erase("a", pack(TOKENS), 10)).settled
    assert await store.kv.load(match) is None
    assert await store.queue.drained(10)
    assert list((tmp_path / "cache" / "quarantine").iterdir()) == []
    assert (await store.eraser.erase("a", pack([1]), 10)).settled
    assert traces(tmp_path / "cache", TOKENS) == []


@pytest.mark.parametrize("lost", [False, True], ids=["with the index", "without the index"])
async def test_an_erase_removes_the_snapshots_of_the_same_tokens_of_other_models_and_settings(
    open_store, tmp_path, lost
) -> None:
    """They were made with other weights, `kv_bits` or block sizes; the index may have been lost since."""
    for changes in ({"caches": "8 bits"}, {"block_tokens": 3}, {"weights": "other"}, {}):
        await (await stored(open_store, TOKENS, OTHER, identity=identity(**changes))).close()
    if lost:
        for path in (tmp_path / "cache").glob("index.sqlite*"):
            path.unlink()
    store = await open_store()
    assert store.stats().stored == 4 * 6 + 2
    erased = await store.eraser.erase("a", pack(TOKENS), 10)
    assert (erased.num_snapshots, erased.settled) == (13, True)
    assert traces(tmp_path / "cache", TOKENS) == []
    assert store.stats().stored == 13


def test_after_a_rewind_the_hash_by_which_a_session_is_erased_is_that_of_its_current_tokens() -> None:
    """The rewind took only a part of the tokens since its last mark but one."""
    marker, after = Marker("a"), as_tokens([*range(250), *range(900, 1000)])
    marker.mark(as_tokens(range(300)))
    assert marker.mark(after) == Marker("a").mark(after)


def test_hashes_by_which_kv_is_erased_differ_by_tenant_and_depend_on_all_preceding_tokens() -> None:
    """With `shared`, marks also depend on the number of first tokens that are kept."""
    packed, other = pack(range(300)), pack([9, *range(1, 200)])
    marks = Marks.of("a", packed, shared=140)
    assert marks.digests != Marks.of("b", packed, shared=140).digests
    assert marks.agrees("a", packed)
    assert not marks.agrees("a", other)
    assert not marks.agrees("b", packed)
    marker = Marker("a")
    for end in (150, 280, 256, 299):
        assert marks.has(marker.mark(as_tokens(unpack(packed)[:end])), end)
        assert not marks.has(Marker("b").mark(as_tokens(unpack(packed)[:end])), end)
    assert not marks.has(marker.mark(as_tokens(unpack(packed)[:130])), 130), "the first tokens are shared"
    assert not marks.has(Marker("a").mark(unpack(other)), 200)


async def test_an_erase_is_not_confirmed_while_the_cache_has_files_of_an_unknown_format_version(
    open_store, tmp_path
) -> None:
    await (await stored(open_store, TOKENS, OTHER)).close()
    path = next((tmp_path / "cache" / "snapshots").iterdir())
    ours, other = f'"version":"{FORMAT_VERSION}"'.encode(), b'"version":"9"'
    path.write_bytes(path.read_bytes().replace(ours, other))
    for path in (tmp_path / "cache").glob("index.sqlite*"):
        path.unlink()
    store = await open_store()
    assert not (await store.eraser.erase("a", pack(TOKENS), 10)).settled


async def test_an_erase_syncs_the_directory_after_the_removal_of_the_last_file(
    open_store, tmp_path, monkeypatch
) -> None:
    store = await stored(open_store, TOKENS)
    inode = (tmp_path / "cache" / "snapshots").stat().st_ino
    happened, fsync, remove = [], os.fsync, Folder.remove

    def syncing(fd: int) -> None:
        happened.append("sync" if os.fstat(fd).st_ino == inode else "other")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(Folder, "remove", lambda *args: (happened.append("remove"), remove(*args)))
    assert (await store.eraser.erase("a", pack(TOKENS), 10)).settled
    assert [what for what in happened if what != "other"] == ["remove"] * 3 + ["sync"]


async def test_an_erase_is_not_confirmed_if_the_directory_cannot_be_synced(open_store, monkeypatch) -> None:
    store = await stored(open_store, TOKENS)
    fsync = os.fsync

    def failing(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", failing)
    assert not (await store.eraser.erase("a", pack(TOKENS), 10)).settled


@pytest.mark.parametrize("code", [0, errno.ENOTSUP, errno.EIO])
async def test_on_macos_an_erase_syncs_with_f_fullfsync_so_that_the_drives_cache_is_flushed(
    open_store, tmp_path, monkeypatch, code
) -> None:
    """fsync alone does not. For writing snapshots it is enough, since they have checksums and may be lost."""
    synced, fsynced, fsync = [], [], os.fsync

    def full_sync(fd: int, command: int) -> None:
        assert command == 51
        synced.append(os.fstat(fd).st_ino)
        if code:
            raise OSError(code, "no")

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", full_sync)
    store = await stored(open_store, TOKENS)
    assert synced == []
    monkeypatch.setattr(os, "fsync", lambda fd: (fsynced.append(os.fstat(fd).st_ino), fsync(fd)))
    assert (await store.eraser.erase("a", pack(TOKENS), 10)).settled == (code != errno.EIO)
    if code != errno.EIO:
        names = ["snapshots", "tmp", "quarantine", "index.sqlite-wal"]
        assert synced == [(tmp_path / "cache" / name).stat().st_ino for name in names]
        assert fsynced == (synced if code else []), "where the file system has no such command"
    assert store._opened.catalog._db.execute("PRAGMA fullfsync").fetchone() == (1,), "for SQLite's own syncs"


async def test_an_erase_is_not_confirmed_if_the_index_could_not_remove_its_rows(
    open_store, tmp_path, monkeypatch
) -> None:
    store = await stored(open_store, TOKENS)

    def failing(*_) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Catalog, "remove", failing)
    assert not (await store.eraser.erase("a", pack(TOKENS), 10)).settled
    monkeypatch.undo()
    assert (await store.eraser.erase("a", pack(TOKENS), 10)).settled
    assert traces(tmp_path / "cache", TOKENS) == []


async def test_an_erase_removes_unfinished_files_of_interrupted_writes(open_store, tmp_path) -> None:
    store = await stored(open_store, OTHER)
    (tmp_path / "cache" / "tmp" / "left").write_bytes(pack(TOKENS))
    assert (await store.eraser.erase("a", pack(TOKENS), 10)).settled
    assert traces(tmp_path / "cache", TOKENS) == []


async def test_erasing_a_session_of_more_than_a_thousand_blocks_removes_all_of_its_blocks(
    open_store, gate
) -> None:
    store, tokens = await open_store(identity=identity(block_tokens=2)), list(range(1100 * 2))
    kv = cut(tokens[:2], Span(0, 2))
    for start in range(0, len(tokens), 2):
        assert store.kv.save(store.kv.chain("a"), tokens, Span(start, start + 2), kv)
    assert store.eraser.forget("a", pack(tokens)) == 1100
    gate.set()
    assert await store.queue.drained(60)
    assert len(store._index) == store.stats().stored == 0


async def test_clearing_a_cache_returns_false_as_long_as_a_file_cannot_be_removed(
    open_store, tmp_path, monkeypatch
) -> None:
    store = await stored(open_store, TOKENS)
    (tmp_path / "cache" / "snapshots" / "folder").mkdir()
    assert not await store.eraser.clear(10)
    assert not (await store.eraser.erase("a", pack(TOKENS), 10)).settled, "whatever it was that stayed"
    (tmp_path / "cache" / "snapshots" / "folder").rmdir()
    assert await store.eraser.clear(10)
    assert (await store.eraser.erase("a", pack(TOKENS), 10)).settled
    assert traces(tmp_path / "cache", TOKENS) == []
