"""Marks: digests by which a worker finds its copies of tokens that another worker has forgotten. Pure.

A mark is a digest of a tenant's name and a session's tokens up to a multiple of `STRIDE`. Unlike the names of
blocks, marks are equal for all models and policies. They reveal nothing to a reader without the tokens.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from .tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

#: Tokens between two marks. Sequences that differ only after the last mark have the same marks.
STRIDE: Final = 128
_BYTES: Final = 8


class ErasureProgress(NamedTuple):
    """The entry `seq` of a `log` up to which a cache has carried out erasures, at `time_s` (since 1970)."""

    log: str
    seq: int
    time_s: float


class Marks(msgspec.Struct, frozen=True):
    """The marks of a token sequence: the last one at or before position `shared`, and all later ones.

    The first `shared` tokens must not be erased, because another sequence has them too.
    """

    shared: int
    digests: bytes

    @classmethod
    def of(cls, tenant: str, packed: bytes, shared: int = 0) -> Self:
        """Compute the marks, which are digests, of a tenant's tokens as `tokens.pack` encodes them."""
        first = shared // STRIDE
        marks = [digest for number, digest in _digests(tenant, packed) if number >= first]
        return cls(shared, b"".join(marks))

    def begin(self, tenant: str) -> Trail:
        """Return an empty trail, to which `Trail.then` adds tokens to compare with these marks."""
        return Trail(self, _start(tenant), 0)


class Trail:
    """A sequence of tokens that agrees with all marks up to its end. Immutable."""

    def __init__(self, marks: Marks, hasher: hashlib.blake2b, num_tokens: int) -> None:
        self._marks = marks
        self._hasher = hasher
        self._num = num_tokens

    def then(self, packed: bytes) -> Trail | None:
        """Return a trail with these packed tokens added; None if a mark differs or is missing."""
        hasher, marks = self._hasher.copy(), self._marks.digests
        for num in _steps(self._num, packed, hasher):
            at = (num // STRIDE - self._marks.shared // STRIDE) * _BYTES
            if at >= 0 and hasher.digest() != marks[at : at + _BYTES]:
                return None
        return Trail(self._marks, hasher, self._num + len(packed) // TOKEN_BYTES)


def _start(tenant: str) -> hashlib.blake2b:
    return hashlib.blake2b(tenant.encode() + b"\0", digest_size=_BYTES, person=b"turnkeep.marks")


def _digests(tenant: str, packed: bytes) -> Iterator[tuple[int, bytes]]:
    hasher = _start(tenant)
    yield 0, hasher.digest()
    for num in _steps(0, packed, hasher):
        yield num // STRIDE, hasher.digest()


def _steps(num: int, packed: bytes, hasher: hashlib.blake2b) -> Iterator[int]:
    """Add packed tokens to a hasher of `num` tokens; stop at each multiple of `STRIDE`, and yield it."""
    width = STRIDE * TOKEN_BYTES
    end = width - num * TOKEN_BYTES % width
    start = 0
    while start < len(packed):
        hasher.update(packed[start:end])
        start, end = end, end + width
        if start <= len(packed):
            yield num + start // TOKEN_BYTES
