"""What the catalog keeps of each snapshot, and of each pinned prefix."""

from __future__ import annotations

from operator import xor
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from cache.names.blocks import TOKEN_BYTES, link
from cache.names.snapshot import Name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Row(NamedTuple):
    """A snapshot as the catalog keeps it. `used` is microseconds since 1970, and never repeats."""

    digest: bytes
    parent: bytes
    start: int
    tokens: bytes
    size_bytes: int
    used: int
    resumable: bool = True

    @property
    def name(self) -> Name:
        """Which KV it holds."""
        return Name(self.parent, self.start, self.tokens, bool(self.resumable))

    def is_of(self, packed: bytes) -> bool:
        """Say whether it holds nothing but a part of a run of packed tokens."""
        return packed.startswith(self.tokens, self.start * TOKEN_BYTES)


class Columns(NamedTuple):
    """Very many rows, a sequence for each field: making a `Row` of each would take a fifth of a start."""

    digests: Sequence[bytes] = ()
    parents: Sequence[bytes] = ()
    starts: Sequence[int] = ()
    tokens: Sequence[bytes] = ()
    sizes: Sequence[int] = ()
    used: Sequence[int] = ()
    resumable: Sequence[bool] = ()

    @classmethod
    def of(cls, rows: Sequence[Row | tuple[Any, ...]]) -> Columns:
        """Turn rows, or their plain fields."""
        return cls(*zip(*rows, strict=True)) if rows else cls()

    def rows(self) -> list[Row]:
        """Turn them back."""
        return list(map(Row, *self))

    def proofs(self) -> Iterator[bytes]:
        """Make a checksum of each row, of all but its last use, which changes too often.

        Raises `TypeError` or `ValueError` on the way where a field is not of its type.
        """
        seeds = map(xxhash.xxh3_64_intdigest, self.digests, self.starts)
        seeds = map(xxhash.xxh3_64_intdigest, self.parents, map(xor, seeds, self.sizes))
        return map(xxhash.xxh3_64_digest, self.tokens, map(xor, seeds, self.resumable))


class Pin(NamedTuple):
    """A pinned prefix as the catalog keeps it: packed `tokens` after a tenant's and a model's `root`."""

    root: bytes
    tokens: bytes

    @property
    def name(self) -> bytes:
        """Name the prefix."""
        return link(self.root, self.tokens)
