"""Carry snapshots from one cache to another, as a tar of their files. Blocking: for the command line.

What comes out of an archive is believed no more than what lies in a cache: every file is proved before it
gets its place, and none is ever written under a name of the archive's choice.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from .entries import Row
from .folder import scan
from .format import SUFFIX, is_lack, prove
from .header import read_name
from .pruning import opened
from .snapshot import CacheError, DoubtfulSnapshotError
from .survey import check

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .catalog import Catalog
    from .folder import Folder
    from .index import Index
    from .snapshot import Name

_MEMBER: Final = re.compile(rf"([0-9a-f]{{64}}){re.escape(SUFFIX)}")
_COPY_BYTES: Final = 4 << 20


@dataclass(slots=True)
class Carried:
    """What was carried; `skipped` are names with the reason."""

    num_files: int = 0
    size_bytes: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)


def export(directory: Path, digests: Sequence[str] | None, target: Path) -> Carried:
    """Write the chains that end in `digests` (beginnings of hex names; None: everything) to a tar file.

    Needs no lock. Every file is proved on the way. Raises `CacheError` where one is unknown, doubtful, or
    was evicted meanwhile; then there is no archive.
    """
    check(directory)
    paths = _chains(directory, digests)
    if not paths:
        raise CacheError(f"there is nothing to export in {directory}")
    carried = Carried()
    draft = target.with_name(target.name + ".part")
    try:
        with tarfile.open(draft, "w") as tar:
            for path in paths:
                prove(path)
                tar.add(path, path.name, filter=_plain)
                carried.num_files += 1
                carried.size_bytes += path.stat().st_size
        draft.replace(target)
    except DoubtfulSnapshotError as error:
        raise CacheError(f"{path.name} is doubtful ({error.reason}): see turnkeep cache verify") from None
    except FileNotFoundError:
        raise CacheError(f"{path.name} was evicted meanwhile: export again, or pin it first") from None
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    return carried


def restore(directory: Path, source: Path, *, max_bytes: int, min_free_bytes: int) -> Carried:
    """Take the files of an archive into a cache, each after it is proved; the lock is held meanwhile.

    What is there already, is doubtful, lacks its prefix, or exceeds a limit is skipped with the reason.
    Raises `CacheError` where the archive cannot be read, `DirectoryLockedError`, `OSError`.
    """
    with opened(directory) as (folder, catalog, index):
        intake = _Intake(folder, catalog, index, max_bytes, min_free_bytes)
        try:
            with tarfile.open(source, "r:*") as tar:
                for member in tar:
                    try:
                        intake.take(tar, member)
                    except DoubtfulSnapshotError as error:
                        intake.carried.skipped.append((member.name, error.reason))
        except (tarfile.TarError, EOFError) as error:
            raise CacheError(f"{source} is no sound tar file: {error}") from None
    return intake.carried


class _Intake:
    """Takes one member after the other into an open cache."""

    def __init__(
        self, folder: Folder, catalog: Catalog, index: Index, max_bytes: int, min_free_bytes: int
    ) -> None:
        self.carried = Carried()
        self._folder = folder
        self._catalog = catalog
        self._names = {entry.digest: entry.name for entry in index}
        self._used_bytes = index.stored_bytes + folder.quarantined_bytes()
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes

    def take(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Raise `DoubtfulSnapshotError` with the reason where a member is not taken."""
        fits = _MEMBER.fullmatch(member.name)
        if fits is None or not member.isreg():
            raise DoubtfulSnapshotError("not a file with the name of a snapshot")
        digest = bytes.fromhex(fits[1])
        if digest in self._names:
            raise DoubtfulSnapshotError("there already")
        if self._used_bytes + member.size > self._max_bytes:
            raise DoubtfulSnapshotError(
                f"over the limit: {self._used_bytes} bytes are there, it has {member.size},"
                f" max_disk is {self._max_bytes}"
            )
        if self._folder.free_bytes() - member.size < self._min_free_bytes:
            raise DoubtfulSnapshotError(f"the disk would have less than {self._min_free_bytes} bytes free")
        with self._folder.placing(digest) as path:
            content = tar.extractfile(member)
            if content is None:
                raise DoubtfulSnapshotError("not a file with the name of a snapshot")
            with path.open("wb") as file:
                shutil.copyfileobj(content, file, _COPY_BYTES)
                file.flush()
                os.fsync(file.fileno())
            name = prove(path)
            self._check_prefix(name)
            self._folder.place(path, digest)
        self._names[digest] = name
        used = time.time_ns() // 1000
        self._catalog.put(
            [Row(digest, name.parent, name.start, name.tokens, member.size, used, name.resumable)]
        )
        self._used_bytes += member.size
        self.carried.num_files += 1
        self.carried.size_bytes += member.size

    def _check_prefix(self, name: Name) -> None:
        if name.start == 0:
            return
        parent = self._names.get(name.parent)
        if parent is None or parent.span.end != name.start:
            raise DoubtfulSnapshotError("the prefix that it continues is not there")


def _chains(directory: Path, digests: Sequence[str] | None) -> list[Path]:
    """List the files of the chains, every parent before its children."""
    snapshots = directory / "snapshots"
    there = {digest.hex() for digest in scan(snapshots)}
    ends = there if digests is None else {_only(there, digest) for digest in digests}
    starts: dict[str, int] = {}
    for end in ends:
        digest = end
        while digest not in starts:
            path = snapshots / f"{digest}{SUFFIX}"
            try:
                name = read_name(path)
            except (DoubtfulSnapshotError, OSError) as error:
                if digests is None and not is_lack(error):
                    break  # everything means: all that is sound
                raise CacheError(f"{path.name} cannot be exported: {error}") from None
            starts[digest] = name.start
            if name.start == 0:
                break
            digest = name.parent.hex()
    return [
        snapshots / f"{digest}{SUFFIX}"
        for digest in sorted(starts, key=lambda digest: (starts[digest], digest))
    ]


def _only(there: set[str], beginning: str) -> str:
    fitting = [digest for digest in there if digest.startswith(beginning.lower())]
    if len(fitting) != 1:
        raise CacheError(
            f"{len(fitting)} snapshots have a name that begins with {beginning!r}, not one:"
            " see turnkeep cache ls"
        )
    return fitting[0]


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out who owned the file: it says nothing where it is going."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o600
    return member
