"""Commands read the index and the blocks of a cache while the worker that owns it changes it."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from made_kv import cut, identity, save_all

from cache.admin import archive, survey
from cache.admin.stored_blocks import StoredBlocks
from cache.disk.catalog import Catalog
from cache.disk.codec import PLAIN
from cache.disk.folder import Folder
from cache.disk.rows import SnapshotRow
from cache.names.blocks import Span
from cache.names.errors import CacheError
from cache.names.images import ImageSpan
from cache.names.tokens import as_tokens
from cache.store import Store


def rows_of(num: int, first: int) -> list[SnapshotRow]:
    return [SnapshotRow(i.to_bytes(16), bytes(16), 0, 4, 0, i) for i in range(first, first + num)]


def listed(directory) -> set[bytes]:
    """Return the digests in a copy of the index, as a survey makes it."""
    with survey._copied(directory / "index.sqlite") as db:
        return {digest for (digest,) in db.execute("SELECT digest FROM snapshot")}


def test_inspecting_an_index_while_a_worker_changes_it_shows_a_consistent_state(tmp_path) -> None:
    """The worker adds and removes all rows together, so an inconsistent copy would have only some."""
    folder = Folder(tmp_path)
    catalog = Catalog(folder)
    over = threading.Event()
    rows = rows_of(300, 0)

    def change() -> None:
        while not over.is_set():
            catalog.put(rows)
            catalog.clear()

    changing = threading.Thread(target=change)
    changing.start()
    try:
        seen = {len(listed(tmp_path)) for _ in range(150)}
    finally:
        over.set()
        changing.join()
    catalog.close()
    folder.close()
    assert seen == {0, len(rows)}


def test_the_index_is_copied_again_if_its_write_ahead_log_restarts_during_the_copy(
    tmp_path, monkeypatch
) -> None:
    """Otherwise the copy would have old pages for which the new log has no replacement."""
    folder = Folder(tmp_path)
    catalog = Catalog(folder)
    early, late = rows_of(2000, 0), rows_of(2000, 2000)
    catalog.put(early)
    copied, copy = [], shutil.copyfile

    def copy_while_it_changes(source, target) -> None:
        copy(source, target)
        copied.append(source.name)
        if len(copied) == 1:
            for _ in range(5):  # each writes so much that SQLite restarts its log
                catalog.clear()
                catalog.put(early)
            catalog.put(late)

    monkeypatch.setattr(shutil, "copyfile", copy_while_it_changes)
    assert listed(tmp_path) == {row.digest for row in (*early, *late)}
    assert copied == ["index.sqlite", "index.sqlite-wal"] * 2
    catalog.close()
    folder.close()


@pytest.fixture
async def without_files(open_store, tmp_path, monkeypatch):
    """A closed cache whose index is lost, and whose files cannot be opened (too many open files)."""
    store = await open_store()
    save_all(store, "a", range(10))
    assert await store.close()
    (tmp_path / "cache" / "index.sqlite").unlink()

    def lacking(path, *more):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(survey, "read_header", lacking)
    monkeypatch.setattr(archive, "read_name", lacking)
    return tmp_path / "cache"


async def test_verify_and_inspect_raise_an_error_if_no_file_can_be_opened(without_files) -> None:
    with pytest.raises(OSError, match="Too many open files"):
        survey.verify(without_files, lambda done, total: None)
    with pytest.raises(OSError, match="Too many open files"):
        survey.inspect(without_files)


async def test_an_export_fails_and_leaves_no_archive_if_no_file_can_be_opened(
    without_files, tmp_path
) -> None:
    with pytest.raises(CacheError, match=r"cannot be exported: .*Too many open files"):
        archive.export(without_files, None, tmp_path / "all.tar")
    assert not (tmp_path / "all.tar").exists()


async def test_blocks_are_listed_with_all_tokens_before_them_but_not_images_and_what_follows_a_missing_one(
    open_store: Callable[..., Awaitable[Store]], tmp_path: Path
) -> None:
    lost, forked, seen = [*range(10)], [*range(4), 77, 78], as_tokens(range(20, 32), [ImageSpan(5, 7, b"1")])
    store = await open_store()
    other = identity(weights="other")
    for tokens in (lost, forked, seen):
        save_all(store, "a", tokens)
    await store.close()
    store = await open_store(identity=other)
    save_all(store, "a", lost)
    await store.close()
    blocks = StoredBlocks(tmp_path / "cache", PLAIN)

    def listed() -> list[tuple[list[int], int, str]]:
        num, found = blocks.of(identity().digest())
        files = [([*tokens], span.start, file) for tokens, span, file in found]
        assert len(files) <= num
        return sorted(files)

    every = listed()
    assert [(tokens, start) for tokens, start, _ in every] == [
        ([0, 1, 2, 3], 0),
        ([0, 1, 2, 3, 4, 5, 6, 7], 4),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 8),
        ([0, 1, 2, 3, 77, 78], 4),
        ([20, 21, 22, 23], 0),
    ]
    for tokens, start, file in every:
        stored = blocks.read(file)
        assert stored is not None
        for one in cut(tokens, Span(start, len(tokens))):
            assert (stored[one.name].shape, bytes(stored[one.name].data)) == (one.shape, bytes(one.data))
    (tmp_path / "cache" / "snapshots" / every[1][2]).unlink()
    assert [file for _, _, file in listed()] == [every[i][2] for i in (0, 3, 4)]
    assert blocks.read(every[1][2]) is None
