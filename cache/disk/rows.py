"""The rows of the catalog, one for each snapshot."""

from __future__ import annotations

from itertools import repeat
from operator import lshift, xor
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import xxhash

from cache.names.blocks import DIGEST_BYTES
from cache.names.marks import MARK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cache.names.snapshot import Name

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
    num_tokens: int
    size_bytes: int
    used: int
    resumable: int = 1
    mark: bytes = bytes(MARK_BYTES)
    proof: bytes = b""

    @classmethod
    def of(cls, digest: bytes, name: Name, size_bytes: int, used: int) -> Self:
        """Make the row of the file with this digest and name; `used` is its last use, in us since 1970."""
        resumable = int(name.resumable)
        return cls(digest, name.parent, name.start, name.num_tokens, size_bytes, used, resumable, name.mark)


def columns(rows: Sequence[SnapshotRow]) -> Columns:
    """Transpose rows into columns, since at a start a Python call for each row would take too long."""
    return tuple(zip(*rows, strict=True)) if rows else ((),) * len(SnapshotRow._fields)


def proofs(columns: Columns) -> Iterator[bytes]:
    """Yield each row's checksum. It excludes the time of last use, which changes often.

    Raises `TypeError` or `ValueError` if a field has the wrong type.
    """
    digests, parents, starts, lengths, sizes, _, resumable, marks, _ = columns
    seeds = map(xxhash.xxh3_64_intdigest, digests, starts)
    seeds = map(xxhash.xxh3_64_intdigest, parents, map(xor, seeds, sizes))
    seeds = map(xor, seeds, map(xor, map(lshift, lengths, repeat(1)), resumable))
    return map(xxhash.xxh3_64_digest, marks, seeds)


def is_right(row: SnapshotRow) -> bool:
    """Whether a row agrees with its checksum. The file's length is verified when the file is read."""
    try:
        fields = columns([row])
        return fit(fields) and next(proofs(fields)) == row.proof
    except (AttributeError, TypeError, ValueError):  # fields of wrong types
        return False


def fit(fields: Columns) -> bool:
    """Whether digests and marks have the right length, and numbers are integers, not negative."""
    digests, parents, starts, lengths, sizes, used, _, marks, _ = fields
    return (
        {*map(len, digests), *map(len, parents)} <= {DIGEST_BYTES}
        and {*map(len, marks)} <= {MARK_BYTES}
        and {*map(type, starts), *map(type, lengths), *map(type, sizes), *map(type, used)} <= {int}
        and min(min(starts, default=0), min(lengths, default=0), min(sizes, default=0)) >= 0
    )
