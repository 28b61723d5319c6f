"""Copy snapshots from one cache to another as a plain tar of their files. Blocking: for the command line.

An archive is not encrypted: its files are like those of an unencrypted cache. An import verifies every file
before moving it into the cache, and never uses a path from the archive. Verification does not prove that a
model computed the KV: see `turnkeep cache import --help`.
"""

from __future__ import annotations

import os
import stat
import tarfile
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Final

from cache.disk import private
from cache.disk.codec import PLAIN
from cache.disk.folder import scan
from cache.disk.format import is_lack, prove
from cache.disk.header import read_header, read_name
from cache.disk.rows import SnapshotRow
from cache.names.errors import CacheError, DoubtfulSnapshotError

from .pruning import lock_directory
from .survey import check

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from cache.disk.catalog import Catalog
    from cache.disk.codec import Codec, FileWriter
    from cache.disk.folder import Folder
    from cache.index.index import SnapshotIndex
    from cache.names.snapshot import Name

_COPY_BYTES: Final = 4 << 20
#: An archive with more members than this that are not snapshots is rejected.
_MOST_OTHERS: Final = 1000
#: Types of members that only describe the next member.
_EXTENDED: Final = {tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK}
#: Types of members without content, whatever their size field says.
_EMPTY: Final = {
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
}


@dataclass(slots=True)
class Transfer:
    """The result of an export or import: the files that were copied, and those that were not."""

    num_files: int = 0
    size_bytes: int = 0
    #: The name of each file that an import skipped, and the reason.
    skipped: list[tuple[str, str]] = field(default_factory=list)


def export(directory: Path, digests: Sequence[str] | None, target: Path, codec: Codec = PLAIN) -> Transfer:
    """Write chains of snapshots to a tar file: those that end in `digests`, or with None all chains.

    A chain is a sequence of snapshots, each continuing the one before, as far as they are there. `digests`
    are hex names of snapshots, or prefixes of such names. Takes no lock, and verifies every file. Raises
    `CacheError`, and leaves no archive, if a snapshot is unknown, fails verification, or was evicted
    meanwhile.
    """
    check(directory, codec)
    paths = _chains(directory, digests, codec)
    if not paths:
        raise CacheError(f"there is nothing to export in {directory}")
    transferred = Transfer()
    made, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")  # with mode 0600
    temporary = target.parent / name
    try:
        with (
            os.fdopen(made, "wb") as to,
            tarfile.open(fileobj=to, mode="w", format=tarfile.GNU_FORMAT) as tar,
        ):
            for path in paths:
                prove(path, codec)
                transferred.size_bytes += _add_file(tar, path, codec)
                transferred.num_files += 1
        temporary.replace(target)
    except DoubtfulSnapshotError as error:
        raise CacheError(f"{path.name} is doubtful ({error.reason}): see turnkeep cache verify") from None
    except FileNotFoundError:
        raise CacheError(f"{path.name} was evicted meanwhile: export again") from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return transferred


def import_files(
    directory: Path,
    source: Path,
    codec: Codec = PLAIN,
    *,
    max_bytes: int,
    min_free_bytes: int,
    others: Collection[str] = (),
    fresh: bool = False,
) -> Transfer:
    """Verify the files of an archive one by one, and add them to a cache. Locks the directory meanwhile.

    Skips a file that the cache has already, that fails verification, that is a piece of a tail without the
    piece before it, or that exceeds a limit; the result has the reasons. `others` are names of archive
    members to ignore, which are not snapshots. With `fresh` the cache is created if there is none. Raises
    `CacheError` if the archive cannot be read, `DirectoryLockedError`, `OSError`.
    """
    with source.open("rb") as file, lock_directory(directory, codec, fresh=fresh) as (folder, catalog, index):
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CacheError(f"{source} is no file: save the archive to one first")
        importer = _Importer(folder, catalog, index, max_bytes, min_free_bytes)
        try:
            for member in _members(file):
                if member.name in others:
                    continue
                try:
                    importer.add(member, file)
                except DoubtfulSnapshotError as error:
                    importer.transferred.skipped.append((member.name, error.reason))
        except tarfile.TarError as error:
            raise CacheError(
                f"{source} is no sound tar file ({error}); it must be whole, and not compressed"
            ) from None
    return importer.transferred


def _members(file: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    """Yield an archive's members; at each one `file` is positioned at the start of the member's content.

    Reads only headers of 512 bytes. Extended headers are skipped, however long: a snapshot's name is short,
    and its own header has its size. Raises `tarfile.TarError`.
    """
    at = num_others = 0
    while num_others <= _MOST_OTHERS:
        file.seek(at)
        block = file.read(tarfile.BLOCKSIZE)
        if block == bytes(tarfile.BLOCKSIZE):
            return
        member = tarfile.TarInfo.frombuf(block, "ascii", "surrogateescape")
        if member.size < 0:
            raise tarfile.ReadError("a member of less than no bytes")
        at = file.tell() + (-(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE) * (
            member.type not in _EMPTY
        )
        if member.type not in _EXTENDED:
            num_others += not _is_snapshot(member)
            yield member
    raise tarfile.ReadError(f"more than {_MOST_OTHERS} members that are no snapshots")


class _Importer:
    """Adds the members of an archive one by one to an open cache, within its limits."""

    def __init__(
        self, folder: Folder, catalog: Catalog, index: SnapshotIndex, max_bytes: int, min_free_bytes: int
    ) -> None:
        self.transferred = Transfer()
        self._folder = folder
        self._catalog = catalog
        self._ends = {node.digest: node.end for node in index}
        self._used_bytes = index.stored_bytes + folder.quarantined_bytes()
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes

    def add(self, member: tarfile.TarInfo, content: IO[bytes]) -> None:
        """Verify and add a member. If it must be skipped, raises `DoubtfulSnapshotError` with the reason."""
        digest = PLAIN.digest_of(member.name)
        if digest is None or not _is_snapshot(member):
            raise DoubtfulSnapshotError("not a file with the name of a snapshot")
        if digest in self._ends:
            raise DoubtfulSnapshotError("there already")
        codec = self._folder.codec
        size_bytes = codec.size_bytes(member.size)
        if self._used_bytes + size_bytes > self._max_bytes:
            raise DoubtfulSnapshotError(
                f"over the limit: {self._used_bytes} bytes are there, it has {member.size},"
                f" max_disk is {self._max_bytes}"
            )
        if self._folder.free_bytes() - size_bytes < self._min_free_bytes:
            raise DoubtfulSnapshotError(f"the disk would have less than {self._min_free_bytes} bytes free")
        with self._folder.placing(digest) as path:
            with open(path, "wb", opener=private.opener) as file:
                writer = codec.writer(file.fileno(), path)
                _copy(content, writer, member.size)
                writer.finish()
            name = prove(path, codec)
            header = read_header(path, codec)
            self._check_prefix(name, header.block_tokens)
            self._catalog.note_identities([(bytes.fromhex(header.identity), header.block_tokens)])
            self._folder.place(path, digest)
        self._ends[digest] = name.span.end
        used = time.time_ns() // 1000
        self._catalog.put([SnapshotRow.of(digest, name, size_bytes, used)])
        self._used_bytes += size_bytes
        self.transferred.num_files += 1
        self.transferred.size_bytes += size_bytes

    def _check_prefix(self, name: Name, block_tokens: int) -> None:
        end = self._ends.get(name.parent)
        # Without the piece before it, neither a match nor an erasure would find it.
        is_lost = end is None and name.start % block_tokens
        if is_lost or (end is not None and end != name.start):
            raise DoubtfulSnapshotError("the prefix that it continues is not there")


def _chains(directory: Path, digests: Sequence[str] | None, codec: Codec) -> list[Path]:
    """Return the files of the chains that end in `digests`, or of all chains, parents before children."""
    snapshots = directory / "snapshots"
    there = {digest.hex() for digest in scan(snapshots, codec)}
    ends = there if digests is None else {_only(there, digest) for digest in digests}
    starts: dict[str, int] = {}
    for end in ends:
        digest, links = end, dict[str, int]()
        try:
            while digest not in starts:
                path = snapshots / codec.file_name(bytes.fromhex(digest))
                name = read_name(path, codec)
                links[digest] = name.start
                if name.parent.hex() not in there:  # the first one, or after one that was evicted
                    break
                digest = name.parent.hex()
        except (DoubtfulSnapshotError, OSError) as error:
            if digests is None and not is_lack(error):
                continue  # without `digests`, damaged chains are left out
            raise CacheError(f"{path.name} cannot be exported: {error}") from None
        starts |= links
    return [
        snapshots / codec.file_name(bytes.fromhex(digest))
        for digest in sorted(starts, key=lambda digest: (starts[digest], digest))
    ]


def _only(there: set[str], beginning: str) -> str:
    fitting = [digest for digest in there if digest.startswith(beginning.lower())]
    if len(fitting) != 1:
        many = f"{len(fitting)} snapshots have" if fitting else "no snapshot has"
        raise CacheError(f"{many} a name that begins with {beginning!r}; see turnkeep cache list")
    return fitting[0]


def _add_file(tar: tarfile.TarFile, path: Path, codec: Codec) -> int:
    """Add a file to an archive under its file name, without its owner's name and ids; return its size."""
    with open(path, "rb", opener=private.opener) as file:
        status = os.fstat(file.fileno())
        reader: Any = codec.reader(file.fileno(), path)  # has `read`, all that tarfile uses
        member = tarfile.TarInfo(PLAIN.file_name(codec.digest_of(path.name) or b""))
        member.size, member.mtime, member.mode = reader.size_bytes, int(status.st_mtime), private.FILE_MODE
        tar.addfile(member, reader)
    return member.size


def _is_snapshot(member: tarfile.TarInfo) -> bool:
    """Whether a member is a plain file (not a sparse one) with the name of a snapshot."""
    return member.type in {tarfile.REGTYPE, tarfile.AREGTYPE} and PLAIN.digest_of(member.name) is not None


def _copy(source: IO[bytes], target: FileWriter, num_bytes: int) -> None:
    while num_bytes:
        piece = source.read(min(num_bytes, _COPY_BYTES))
        if not piece:
            raise tarfile.ReadError("it ends in the middle of a member")
        target.write([memoryview(piece)])
        num_bytes -= len(piece)
