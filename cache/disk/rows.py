"""What the catalog keeps of each snapshot, and of each pinned prefix."""

from __future__ import annotations

from operator import xor
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import xxhash

from cache.names.blocks import TOKEN_BYTES, link
from cache.names.snapshot import Name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


#: All fields of very many rows, a sequence for each field.
Columns: TypeAlias = "tuple[tuple[Any, ...], ...]"


class Row(NamedTuple):
    """A snapshot as the catalog keeps it. `used` is microseconds since 1970, and never repeats.

    `proof` is what `proofs` says of the rest; rows from older versions have none.
    """

    digest: bytes
    parent: bytes
    start: int
    tokens: bytes
    size_bytes: int
    used: int
    resumable: bool = True
    proof: bytes | None = None

    @classmethod
    def of(cls, digest: bytes, name: Name, size_bytes: int, used: int) -> Self:
        """Make the row of a file with this digest, which holds what the name says."""
        return cls(digest, name.parent, name.start, name.tokens, size_bytes, used, name.resumable)

    @property
    def name(self) -> Name:
        """Which KV it holds."""
        return Name(self.parent, self.start, self.tokens, bool(self.resumable))

    def is_of(self, packed: bytes) -> bool:
        """Say whether it holds nothing but a part of a run of packed tokens."""
        return packed.startswith(self.tokens, self.start * TOKEN_BYTES)


class Pin(NamedTuple):
    """A pinned prefix as the catalog keeps it: packed `tokens` after a tenant's and a model's `root`."""

    root: bytes
    tokens: bytes

    @property
    def name(self) -> bytes:
        """Name the prefix."""
        return link(self.root, self.tokens)


def columns(rows: Sequence[Row]) -> Columns:
    """Turn rows into columns: a start has very many, and no time for a step of Python's for each."""
    return tuple(zip(*rows, strict=True)) if rows else ((),) * len(Row._fields)


def proofs(columns: Columns) -> Iterator[bytes]:
    """Make a checksum of each row, of all but its last use, which changes too often.

    Raises `TypeError` or `ValueError` on the way where a field is not of its type.
    """
    digests, parents, starts, tokens, sizes, _, resumable, _ = columns
    seeds = map(xxhash.xxh3_64_intdigest, digests, starts)
    seeds = map(xxhash.xxh3_64_intdigest, parents, map(xor, seeds, sizes))
    return map(xxhash.xxh3_64_digest, tokens, map(xor, seeds, resumable))
