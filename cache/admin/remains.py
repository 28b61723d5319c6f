"""Searches files for what is left of a forgotten session: its KV by its marks, and texts. Changes nothing."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from cache.disk.codec import PLAIN
from cache.disk.header import read_name
from cache.names.errors import DoubtfulSnapshotError
from cache.names.marks import STRIDE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from cache.disk.codec import Codec
    from cache.names.marks import Marks

#: Bytes that are read at a time.
_SOME: Final = 2**20


def search(
    folder: Path,
    marks: Sequence[Marks],
    needles: Sequence[bytes],
    codec: Codec = PLAIN,
    skipped: Collection[Path] = (),
) -> Iterator[tuple[Path, str]]:
    """Yield (path, "KV") for each snapshot with one of the marks, (path, "text") for each file with a needle.

    A file with both is yielded twice. Searches all subfolders but the `skipped` ones, and follows no links.
    Snapshots that end before token `STRIDE` have no mark of their own, and do not count as KV. Raises
    `OSError`.
    """
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file() or not set(skipped).isdisjoint(path.parents):
            continue
        with suppress(FileNotFoundError):  # removed meanwhile
            with suppress(DoubtfulSnapshotError):  # no snapshot
                name = read_name(path, codec)
                end = name.span.end
                if end >= STRIDE and any(one.has(name.mark, end) for one in marks):
                    yield path, "KV"
            if _has(path, needles):
                yield path, "text"


def _has(path: Path, needles: Sequence[bytes]) -> bool:
    longest = max(map(len, needles), default=0)
    with path.open("rb") as file:
        before = b""
        while needles and (some := file.read(_SOME)):
            part = before + some
            if any(needle in part for needle in needles):
                return True
            before = part[-longest:]
    return False
