"""The rows of the catalog, one for each snapshot."""

from __future__ import annotations

from operator import xor
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import xxhash

from cache.names.marks import MARK_BYTES
from cache.names.snapshot import Name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


#: Many rows as columns: one sequence for each field.
Columns: TypeAlias = "tuple[tuple[Any, ...], ...]"


class SnapshotRow(NamedTuple):
    """A snapshot in the catalog. `used` is microseconds since 1970.

    `resumable` is 1 if a session can resume at the snapshot's end, otherwise 0. `proof` is the row's checksum
    from `proofs`, once it is stored.
    """

    digest: bytes
    parent: bytes
    start: int
    tokens: bytes
    size_bytes: int
    used: int
    resumable: int = 1
    mark: bytes = bytes(MARK_BYTES)
    proof: bytes = b""

    @classmethod
    def of(cls, digest: bytes, name: Name, size_bytes: int, used: int) -> Self:
        """Make the row of the file with this digest and name."""
        return cls(digest, name.parent, name.start, name.tokens, size_bytes, used, name.resumable, name.mark)

    @property
    def name(self) -> Name:
        """The snapshot's `Name`: its tokens, their position, and the prefix that they continue."""
        return Name(self.parent, self.start, self.tokens, bool(self.resumable), self.mark)


def columns(rows: Sequence[SnapshotRow]) -> Columns:
    """Transpose rows into columns, since at a start a Python call for each row would take too long."""
    return tuple(zip(*rows, strict=True)) if rows else ((),) * len(SnapshotRow._fields)


def proofs(columns: Columns) -> Iterator[bytes]:
    """Yield each row's checksum. It excludes the time of last use, which changes often.

    Raises `TypeError` or `ValueError` if a field has the wrong type.
    """
    digests, parents, starts, tokens, sizes, _, resumable, marks, _ = columns
    seeds = map(xxhash.xxh3_64_intdigest, digests, starts)
    seeds = map(xxhash.xxh3_64_intdigest, marks, seeds)
    seeds = map(xxhash.xxh3_64_intdigest, parents, map(xor, seeds, sizes))
    return map(xxhash.xxh3_64_digest, tokens, map(xor, seeds, resumable))
