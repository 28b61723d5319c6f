"""Remove snapshots from a directory that no worker has open. Blocking: for the command line."""

from __future__ import annotations

from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache.disk.codec import PLAIN, SEAL, SUFFIX
from cache.disk.folder import Folder
from cache.disk.header import read_header
from cache.index.directory import open_directory
from cache.names.errors import CacheError, DoubtfulSnapshotError

from .survey import check, is_fresh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cache.disk.catalog import Catalog
    from cache.disk.codec import Codec
    from cache.index.index import SnapshotIndex
    from cache.index.nodes import Node


@dataclass(frozen=True, slots=True)
class PruneResult:
    """The result of pruning."""

    #: The number of removed snapshots, and their bytes.
    num_files: int
    size_bytes: int
    #: The bytes of the snapshots that stay.
    left_bytes: int


@contextmanager
def lock_directory(
    directory: Path, codec: Codec = PLAIN, *, fresh: bool = False
) -> Iterator[tuple[Folder, Catalog, SnapshotIndex]]:
    """Lock a directory during the block; yield its folder, its catalog, and the index of its files.

    With `fresh` a missing directory is created. Raises `CacheError`, `OSError`.
    """
    if not (fresh and is_fresh(directory)):
        check(directory, codec)
    with closing(open_directory(directory, None, "", lambda: 0.0, codec)) as opened:
        yield opened.folder, opened.catalog, opened.index


def prune(
    directory: Path,
    codec: Codec = PLAIN,
    *,
    older_than_s: float | None,
    to_bytes: int | None,
    model: str | None,
    now_s: float,
) -> PruneResult:
    """Remove the snapshots that meet all given conditions, the least recently used first.

    The conditions: the snapshot was not used for `older_than_s` seconds; it belongs to `model`; more than
    `to_bytes` are left in the cache. None means no condition. `model` is the hex digest of a model's
    identity, or a prefix of it. Raises `CacheError`, `OSError`.
    """
    with lock_directory(directory, codec) as (folder, catalog, index):
        left_bytes = index.stored_bytes
        is_of_model = _of_model(folder, model)
        victims: list[Node] = []
        for node in index:
            if to_bytes is not None and left_bytes <= to_bytes:
                break
            if older_than_s is not None and node.used / 1e6 >= now_s - older_than_s:
                break  # the rest was used later
            if is_of_model(node):
                victims.append(node)
                left_bytes -= node.size_bytes
        for node in victims:
            folder.remove(node.digest)
        catalog.remove(node.row for node in victims)
    return PruneResult(len(victims), sum(node.size_bytes for node in victims), left_bytes)


def prune_all(directory: Path) -> PruneResult:
    """Remove all snapshots and quarantined files, and the record of the encryption key. Needs no key.

    Raises `OSError`, and `CacheError` if files cannot be removed or a worker has the directory open.
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
    return PruneResult(len(files), size_bytes, 0)


def _of_model(folder: Folder, model: str | None) -> Callable[[Node], bool]:
    def is_of_model(node: Node) -> bool:
        try:
            return model is None or read_header(folder.path(node.digest), folder.codec).identity.startswith(
                model.lower()
            )
        except (DoubtfulSnapshotError, OSError):
            return False

    return is_of_model
