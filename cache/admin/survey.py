"""Inspect a cache directory without its lock, even while a worker uses it.

Only reads (except `verify` with `quarantine`), and may miss concurrent changes. Blocking: for commands.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cache.disk import format as snapshot_format
from cache.disk.codec import PLAIN
from cache.disk.folder import Folder, scan
from cache.disk.header import read_header, read_name
from cache.disk.rows import SnapshotRow, columns, is_right
from cache.index.index import SnapshotIndex
from cache.names.errors import DoubtfulSnapshotError, NotACacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from cache.disk.codec import Codec
    from cache.index.nodes import Node


#: How often to retry a copy of the index when its log restarts meanwhile (every few hundred changes).
_COPY_TRIES: Final = 50


@dataclass(slots=True)
class StoredModel:
    """A model with snapshots in the cache, and their disk usage.

    `identity` is a hex digest; `name` is empty if it is unknown.
    """

    identity: str
    name: str
    num_files: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StoredChain:
    """A stored sequence of tokens, in snapshots that continue each other.

    Earlier snapshots of the sequence may be missing. The tenant is unknown, because names are hashes that
    include the tenant.
    """

    #: The name of the last snapshot.
    digest: bytes
    model: StoredModel
    #: The position of the sequence's end in the session.
    num_tokens: int
    num_files: int
    size_bytes: int
    #: The size of the files that no other chain shares.
    own_bytes: int
    #: The time of the last use, in seconds since 1970.
    used_s: float


@dataclass(slots=True)
class Survey:
    """The result of `inspect` or `verify`."""

    #: By `inspect` only; the last used chain first.
    chains: list[StoredChain] = field(default_factory=list)
    models: list[StoredModel] = field(default_factory=list)
    #: The name of each file that failed verification, and the reason.
    doubtful: list[tuple[str, str]] = field(default_factory=list)
    #: The names of the doubtful files that `verify` has moved to quarantine.
    quarantined: list[str] = field(default_factory=list)
    #: All files in the folder of snapshots; by `verify` only.
    num_files: int = 0
    #: Files of another format version, which are not verified.
    num_foreign: int = 0
    foreign_bytes: int = 0
    #: The size of all files in quarantine; by `inspect` only.
    quarantined_bytes: int = 0


def is_fresh(directory: Path) -> bool:
    """Whether a cache directory is missing or empty, so that a new cache can be made there."""
    return not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))


def check(directory: Path, codec: Codec | None) -> None:
    """Raise `NotACacheError` if a directory is not a cache, `SealedError` if `codec` does not fit it.

    Without a codec, encryption is not checked.
    """
    if not directory.is_dir():
        raise NotACacheError(f"there is no directory {directory}: --dir or --data-dir must name the cache's")
    if not (directory / "snapshots").is_dir():
        raise NotACacheError(
            f"{directory} is no snapshot cache, it has no folder 'snapshots':"
            " give the directory itself with --dir, or the worker's data directory with --data-dir"
        )
    if (directory / "snapshots" / "snapshots").is_dir():  # a change there would evade a running worker's lock
        raise NotACacheError(
            f"{directory} is a data directory: name it with --data-dir, or its folder snapshots with --dir"
        )
    with os.scandir(directory / "snapshots") as entries:
        if any(len(one.name) == 2 and one.is_dir() for one in entries):
            raise NotACacheError(
                f"{directory} is a remote tier, which its workers keep in order; name a worker's cache"
            )
    if codec is not None:
        codec.check(directory)


def inspect(directory: Path, codec: Codec = PLAIN) -> Survey:
    """List chains, models and disk usage. Raises `CacheError`, `OSError`.

    Reads a copy of the catalog, one header per chain, and those of files that the catalog does not have.
    """
    check(directory, codec)
    rows, survey, names = _read(directory, codec)
    index = SnapshotIndex(lambda: 0.0, [columns(rows)])
    models: dict[str, StoredModel] = {}
    counted: set[bytes] = set()
    for node in index:
        if index.children(node.digest):
            continue
        with suppress(OSError, DoubtfulSnapshotError):  # evicted meanwhile
            path = directory / "snapshots" / codec.file_name(node.digest)
            identity = read_header(path, codec).identity
            model = models.setdefault(identity, StoredModel(identity, names.get(identity, "")))
            links = list(index.chain(node))
            survey.chains.append(_stored_chain(index, links, model))
            new = [link for link in links if link.digest not in counted]
            counted.update(link.digest for link in new)
            model.num_files += len(new)
            model.size_bytes += sum(link.size_bytes for link in new)
    survey.chains.sort(key=lambda chain: -chain.used_s)
    survey.models = list(models.values())
    with suppress(OSError):
        survey.quarantined_bytes = sum(path.stat().st_size for path in (directory / "quarantine").iterdir())
    return survey


def verify(
    directory: Path,
    progress: Callable[[int, int], None],
    codec: Codec = PLAIN,
    *,
    quarantine: bool = False,
    wrong: Callable[[], Iterable[tuple[str, str]]] = tuple,
) -> Survey:
    """Verify every file: length, checksum, name, layout. Calls `progress(done, total)` with bytes read.

    The result lists the files that failed, then those that `wrong()` returns, each with the reason. Files of
    other format versions are counted, but not verified. With `quarantine`, files that failed are moved to
    quarantine, under the directory's lock. Raises `CacheError`, and `OSError` if the process cannot open more
    files or lacks memory.
    """
    check(directory, codec)
    with closing(Folder(directory, codec)) if quarantine else nullcontext() as folder:
        survey = _proved(directory, progress, codec)
        survey.doubtful += wrong()
        for name, _ in survey.doubtful if folder is not None else ():
            digest = codec.digest_of(name)
            if folder is not None and digest is not None:  # files without a snapshot's name are never read
                folder.quarantine(digest)
                survey.quarantined.append(name)
    return survey


def _proved(directory: Path, progress: Callable[[int, int], None], codec: Codec) -> Survey:
    # macOS's Finder leaves files such as .DS_Store in the folders that it shows.
    files = sorted(path for path in (directory / "snapshots").iterdir() if not path.name.startswith("."))
    survey = Survey(num_files=len(files))
    sizes = {path: _size(path) for path in files}
    done, total = 0, sum(sizes.values())
    for path in files:
        progress(done, total)
        done += sizes[path]
        try:
            if codec.digest_of(path.name) is None:
                raise DoubtfulSnapshotError("not the name of a snapshot")  # noqa: TRY301  # as any other doubt
            if read_header(path, codec).is_foreign:
                survey.num_foreign += 1
                survey.foreign_bytes += path.stat().st_size
                continue
            snapshot_format.prove(path, codec)
        except DoubtfulSnapshotError as error:
            if path.exists():
                survey.doubtful.append((path.name, error.reason))
        except FileNotFoundError:
            pass  # a worker has evicted it
        except OSError as error:
            if snapshot_format.is_lack(error):
                raise
            survey.doubtful.append((path.name, f"unreadable: {error.strerror}"))
    progress(total, total)
    return survey


def _read(directory: Path, codec: Codec) -> tuple[list[SnapshotRow], Survey, dict[str, str]]:
    """Read model names and rows from a copy of the index; make new rows where the files differ."""
    survey = Survey()
    known, names = {}, {}
    with suppress(sqlite3.Error, OSError), _copied(directory / "index.sqlite") as db:
        stored = [SnapshotRow(*row) for row in db.execute("SELECT * FROM snapshot")]
        known = {row.digest: row for row in codec.rows(stored) if is_right(row)}
        names = {row[0].hex(): row[1] for row in db.execute("SELECT identity, name FROM model")}
    rows = []
    for digest, (size_bytes, mtime_ns) in scan(directory / "snapshots", codec).items():
        row = known.get(digest)
        file = directory / "snapshots" / codec.file_name(digest)
        try:
            if row is None or row.size_bytes != size_bytes or not row.num_tokens:
                if read_header(file, codec).is_foreign:
                    survey.num_foreign += 1
                    survey.foreign_bytes += size_bytes
                    continue
                row = SnapshotRow.of(digest, read_name(file, codec), size_bytes, mtime_ns // 1000)
        except FileNotFoundError:
            continue
        except (DoubtfulSnapshotError, OSError) as error:
            if snapshot_format.is_lack(error):
                raise
            survey.doubtful.append((file.name, str(error)))
            continue
        rows.append(row)
    return rows, survey, names


@contextmanager
def _copied(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a copy of the index, since a running worker has the file locked.

    SQLite writes a change to its log (`-wal`) before it writes the change to the file. So the log is copied
    after the file: the copy of the log then has all changes that the copy of the file may have in part. If
    SQLite restarted the log meanwhile, both are copied again. Raises `OSError`, `sqlite3.Error`.
    """
    log = path.with_name(f"{path.name}-wal")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        for _ in range(_COPY_TRIES):
            before = _start_of(log)
            shutil.copyfile(path, copy)
            copy.with_name(log.name).unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                shutil.copyfile(log, copy.with_name(log.name))
            if before == _start_of(log):
                break
        else:
            raise sqlite3.OperationalError("the index changes faster than it can be copied")
        with closing(sqlite3.connect(copy)) as db:
            yield db


def _start_of(log: Path) -> bytes:
    """Read the header of an SQLite log (`-wal`), which changes whenever SQLite restarts the log."""
    try:
        with log.open("rb") as file:
            return file.read(32)
    except FileNotFoundError:
        return b""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # evicted meanwhile
        return 0


def _stored_chain(index: SnapshotIndex, links: list[Node], model: StoredModel) -> StoredChain:
    node, own_bytes = links[0], 0
    for link in links:
        if len(index.children(link.digest)) > 1:
            break
        own_bytes += link.size_bytes
    return StoredChain(
        digest=node.digest,
        model=model,
        num_tokens=node.end,
        num_files=len(links),
        size_bytes=sum(link.size_bytes for link in links),
        own_bytes=own_bytes,
        used_s=node.used / 1e6,
    )
