"""Marks: digests by which a worker finds its copies of tokens that another worker has forgotten. Pure.

A mark is a digest of a tenant's name and a session's tokens up to a multiple of `STRIDE`. Unlike the names of
blocks, marks are equal for all models and policies. They reveal nothing to a reader without the tokens.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from .tokens import TOKEN_BYTES, as_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from .tokens import Tokens

#: Tokens between two marks. Sequences that differ only after the last mark have the same marks.
STRIDE: Final = 128
#: The length of a mark.
MARK_BYTES: Final = 8


class ErasureProgress(NamedTuple):
    """Up to which entry of a log a cache has carried out the erasures that the log asks for."""

    #: The log's name.
    log: str
    #: The sequence of the last entry that was carried out; 0 for none.
    seq: int
    #: When that was recorded, in seconds since 1970.
    time_s: float
    #: When the log stored the entry. If it has stored another time for `seq`, it has lost its last entries.
    stored_s: float = 0.0


class Marks(msgspec.Struct, frozen=True):
    """The marks of a token sequence whose KV must be erased."""

    #: The first `shared` tokens must not be erased, because another sequence has them too.
    shared: int
    #: The last mark at or before position `shared`, and all later ones, `MARK_BYTES` each.
    digests: bytes

    @classmethod
    def of(cls, tenant: str, packed: bytes, shared: int = 0) -> Self:
        """Compute the marks, which are digests, of a tenant's tokens as `tokens.pack` encodes them."""
        first = shared // STRIDE
        marks = [digest for number, digest in _digests(tenant, packed) if number >= first]
        return cls(shared, b"".join(marks))

    def has(self, mark: bytes, end: int) -> bool:
        """Whether a snapshot that ends at `end` and has this `mark` is to be erased."""
        at = (end // STRIDE - self.shared // STRIDE) * MARK_BYTES
        return end > self.shared and self.digests[at : at + MARK_BYTES] == mark

    def concerns(self, found: frozenset[bytes]) -> bool:
        """Whether any of the marks is in `found`."""
        starts = range(0, len(self.digests), MARK_BYTES)
        return any(self.digests[at : at + MARK_BYTES] in found for at in starts)

    def agrees(self, tenant: str, packed: bytes) -> bool:
        """Whether these packed tokens agree with all marks up to their end."""
        first = self.shared // STRIDE
        found = b"".join(mark for number, mark in _digests(tenant, packed) if number >= first)
        return self.digests.startswith(found)


class ErasureNote(msgspec.Struct, frozen=True):
    """A note that every worker must erase the KV of a forgotten session."""

    #: A digest of the session's name, by `digest_of_name`.
    session: bytes
    marks: Marks
    #: The worker processes that have erased it. Their successors erase it again: the data directory may be an
    #: older copy.
    done: tuple[str, ...] = ()


def digest_of_name(session: str) -> bytes:
    """Return the digest by which notes name a session, given its full name with the tenant's."""
    return hashlib.blake2b(session.encode(), digest_size=8).digest()


class Marker:
    """Computes the marks of a growing session's snapshots; hashes each token once."""

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant
        self._hashed = as_tokens()
        self._hasher = _start(tenant)

    def mark(self, tokens: Tokens) -> bytes:
        """Return the mark of a snapshot that ends with these tokens: at the last multiple of `STRIDE`."""
        end, num = len(tokens) - len(tokens) % STRIDE, len(self._hashed)
        if num > end or self._hashed.num_common(tokens) < num:
            self._hasher, num = _start(self._tenant), 0
        self._hasher.update(tokens.packed(num, end))
        self._hashed = tokens[:end].alone()
        return self._hasher.digest()


def _start(tenant: str) -> hashlib.blake2b:
    return hashlib.blake2b(tenant.encode() + b"\0", digest_size=MARK_BYTES, person=b"turnkeep.marks")


def _digests(tenant: str, packed: bytes) -> Iterator[tuple[int, bytes]]:
    hasher = _start(tenant)
    yield 0, hasher.digest()
    for num in _steps(0, packed, hasher):
        yield num // STRIDE, hasher.digest()


def _steps(num: int, packed: bytes, hasher: hashlib.blake2b) -> Iterator[int]:
    """Add packed tokens to a hasher that has had `num` tokens already.

    Yields the number of tokens that the hasher has had whenever it is a multiple of `STRIDE`.
    """
    width = STRIDE * TOKEN_BYTES
    end = width - num * TOKEN_BYTES % width
    start = 0
    while start < len(packed):
        hasher.update(packed[start:end])
        start, end = end, end + width
        if start <= len(packed):
            yield num + start // TOKEN_BYTES
