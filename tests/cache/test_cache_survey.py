"""Commands read the index of a cache while the worker that owns it changes it."""

from __future__ import annotations

import errno
import os
import shutil
import threading

import pytest
from made_kv import save_all

from cache.admin import archive, survey
from cache.disk.catalog import Catalog
from cache.disk.folder import Folder
from cache.disk.rows import SnapshotRow
from cache.names.errors import CacheError


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
