"""Names for runs of tokens: chained digests of blocks, and the pieces of a tail. Pure.

The tokens `[0, n)` of a tenant under a model's identity name their KV. A full block is named by its
parent's digest and its tokens, so that only equal prefixes have equal names. The chain starts at a root that
hashes identity and tenant, so tenants never share a name.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeAlias

from .policy import FULL, Policy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DIGEST_BYTES: Final = 32
TOKEN_BYTES: Final = 4

#: A session's token ids as `array("I")`: 4 bytes each, packed without iterating in Python.
Tokens: TypeAlias = "array[int]"

_LINK: Final = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"turnkeep.block")


@dataclass(frozen=True, slots=True)
class Span:
    """A run of tokens `[start, end)`: a full block, or a piece of a session's tail."""

    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Count the tokens."""
        return self.end - self.start


def as_tokens(ids: Iterable[int] = ()) -> Tokens:
    """Make tokens of ids. Raises `OverflowError` for one outside of uint32."""
    return array("I", ids)


def pack(tokens: Sequence[int]) -> bytes:
    """Pack token ids as little-endian uint32. `Tokens` are packed fifty times faster than a list.

    Raises `OverflowError` for an id outside of uint32.
    """
    packed = tokens if isinstance(tokens, array) and tokens.typecode == "I" else as_tokens(tokens)
    if sys.byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> Tokens:
    """Unpack what `pack` returned. Raises `ValueError` if a token is truncated."""
    tokens = as_tokens()
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def root(identity: bytes, tenant: str) -> bytes:
    """Return the name of a tenant's empty prefix under an identity's digest."""
    return hashlib.blake2b(
        identity + tenant.encode(), digest_size=DIGEST_BYTES, person=b"turnkeep.root"
    ).digest()


def link(parent: bytes, packed: bytes) -> bytes:
    """Return the name of the packed tokens that follow the prefix `parent`: a block, or a piece of a tail."""
    digest = _LINK.copy()  # twice as fast as a new one with parameters
    digest.update(parent)
    digest.update(packed)
    return digest.digest()


class Chain:
    """The names of a growing run of tokens, block by block; each block is hashed once."""

    def __init__(self, root: bytes, block: int, policy: Policy = FULL) -> None:
        self.root = root
        self.block = block
        self.policy = policy
        self._width = block * TOKEN_BYTES
        self._packed = b""
        self._names = [root]

    def names(self, packed: bytes) -> Sequence[bytes]:
        """Return the names of the empty prefix, then of every full block of the packed tokens, in order."""
        size = len(packed) - len(packed) % self._width
        if not packed.startswith(self._packed):
            if self._packed.startswith(packed[:size]):
                return self._names[: size // self._width + 1]
            shared = num_common(self._packed, packed) // self.block
            del self._names[shared + 1 :]
            self._packed = packed[: shared * self._width]
        for at in range(len(self._packed), size, self._width):
            self._names.append(link(self._names[-1], packed[at : at + self._width]))
        self._packed = packed[:size]
        return self._names


def spans(start: int, end: int, block: int) -> list[Span]:
    """List the spans to snapshot after running `[start, end)`: full blocks, then the tail up to `end`.

    Every span starts at a block boundary, so the first span may begin before `start`.
    """
    if start >= end:
        return []
    edges = [*range(start - start % block, end, block), end]
    return [Span(a, b) for a, b in pairwise(edges)]


def tail_start(edges: Sequence[int], end: int) -> int:
    """Choose where a tail's next piece, up to `end`, starts: a binary counter over the existing pieces.

    `edges` are the positions where existing pieces start and end; the first is a block boundary. The new
    piece replaces every piece at the end that is not longer than the tokens behind it. Each rewrite at least
    doubles the length of a token's piece, so a token is written at most log2(block / turn) times.
    """
    pieces = list(edges)
    while len(pieces) > 1 and pieces[-1] - pieces[-2] <= end - pieces[-1]:
        pieces.pop()
    return pieces[-1]


def num_common(one: bytes, other: bytes) -> int:
    """Count the leading tokens that two packed runs share."""
    size = min(len(one), len(other)) // TOKEN_BYTES * TOKEN_BYTES
    # Two large integers compare many tokens at a time; their lowest differing bit is in the first such token.
    differing = int.from_bytes(one[:size], "little") ^ int.from_bytes(other[:size], "little")
    if not differing:
        return size // TOKEN_BYTES
    return ((differing & -differing).bit_length() - 1) // (8 * TOKEN_BYTES)
