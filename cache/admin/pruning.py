"""Remove snapshots from a directory that no worker has open. Blocking: for the command line."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache.disk.access import PLAIN, SEAL, SUFFIX
from cache.disk.catalog import Catalog
from cache.disk.folder import Folder
from cache.disk.header import read_header
from cache.index.pins import Pins
from cache.index.reconciling import reconcile
from cache.names.errors import CacheError, DoubtfulSnapshotError

from .survey import check, is_fresh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cache.disk.access import Access
    from cache.disk.rows import Pin
    from cache.index.index import Index
    from cache.index.nodes import Node


@dataclass(frozen=True, slots=True)
class Pruned:
    """The result of pruning. `num_pinned` snapshots met the conditions, but stay because they are pinned."""

    num_files: int
    size_bytes: int
    num_pinned: int
    left_bytes: int


@contextmanager
def opened(
    directory: Path, access: Access = PLAIN, *, fresh: bool = False
) -> Iterator[tuple[Folder, Catalog, Index]]:
    """Lock a directory during the block; yield its folder, its catalog, and the index of its files.

    With `fresh` a missing directory is created. Raises `CacheError`, `OSError`.
    """
    if not (fresh and is_fresh(directory)):
        check(directory, access)
    folder = Folder(directory, access)
    try:
        folder.claim()
        folder.clear_tmp()
        with closing(Catalog(folder)) as catalog:
            index, *_ = reconcile(folder, catalog, folder.names(), lambda: 0.0)
            yield folder, catalog, index
    finally:
        folder.close()


def prune(
    directory: Path,
    access: Access = PLAIN,
    *,
    older_than_s: float | None,
    to_bytes: int | None,
    model: str | None,
    now_s: float,
) -> Pruned:
    """Remove the snapshots that meet all given conditions, the least recently used first.

    The conditions: the snapshot was not used for `older_than_s` seconds; it belongs to `model`; more than
    `to_bytes` are left in the cache. None means no condition. `model` is the hex digest of a model's
    identity, or a prefix of it. A snapshot that others continue is removed after them; pinned prefixes stay.
    """
    with opened(directory, access) as (folder, catalog, index):
        Pins(index, catalog.pins())
        left_bytes = index.stored_bytes
        is_of_model = _of_model(folder, model)
        victims: list[Node] = []
        gone: Counter[bytes] = Counter()
        num_pinned = 0
        for node in index:
            if to_bytes is not None and left_bytes <= to_bytes:
                break
            if older_than_s is not None and node.used / 1e6 >= now_s - older_than_s:
                break  # the rest was used later
            if len(node.children) > gone[node.digest] or not is_of_model(node):
                continue
            if node.kept:
                num_pinned += 1
                continue
            victims.append(node)
            gone[node.parent] += 1
            left_bytes -= node.size_bytes
        for node in victims:
            folder.remove(node.digest)
        catalog.remove(node.row for node in victims)
    num_files = sum(not node.is_gap for node in victims)
    return Pruned(num_files, sum(node.size_bytes for node in victims), num_pinned, left_bytes)


def prune_all(directory: Path) -> Pruned:
    """Remove all snapshots, quarantined files and pins, and the record of the encryption key. Needs no key.

    Raises `CacheError` if files cannot be removed.
    """
    check(directory, None)
    with closing(Folder(directory)) as folder:
        files = [path for path in folder.snapshots.iterdir() if path.suffix == SUFFIX]
        size_bytes = sum(path.lstat().st_size for path in files)
        folder.clear_tmp()
        if left := folder.clear():
            raise CacheError(f"{len(left)} files could not be removed, {left[0]} among them")
        for path in (*directory.glob(f"{folder.catalog.name}*"), directory / SEAL):
            path.unlink(missing_ok=True)  # the mark of the key last
    return Pruned(len(files), size_bytes, 0, 0)


def unpin(directory: Path, names: list[str], access: Access = PLAIN) -> list[Pin]:
    """Remove the pins whose hex names begin with the given prefixes; return the removed pins.

    Raises `CacheError` for an unknown or ambiguous prefix, or if the index cannot be written: then the pins
    would be back at the next start.
    """
    full = CacheError(f"{directory}: its index cannot be written; free some disk space, then unpin")
    with opened(directory, access) as (_, catalog, _):
        if not catalog.is_lasting:
            raise full
        found: list[Pin] = []
        pins = catalog.pins()
        for name in names:
            fitting = [pin for pin in pins if pin.name.hex().startswith(name.lower())]
            if len(fitting) != 1:
                raise CacheError(f"{len(fitting)} pins have a name that begins with {name!r}, not one")
            found += fitting
        try:
            catalog.unpin(found)
        except sqlite3.Error as error:
            raise full from error
    return found


def _of_model(folder: Folder, model: str | None) -> Callable[[Node], bool]:
    def is_of_model(node: Node) -> bool:
        try:
            # A gap comes here only if all nodes that continue it are to be removed.
            return (
                model is None
                or node.is_gap
                or read_header(folder.path(node.digest), folder.access).identity.startswith(model.lower())
            )
        except (DoubtfulSnapshotError, OSError):
            return False

    return is_of_model
