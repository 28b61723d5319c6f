"""Names for runs of tokens: chained digests over a grid of blocks, and the pieces of a tail. Pure.

The tokens `[0, n)` of a tenant under a model's identity name their KV. A full block is named by its
parent's digest and its tokens, so that equal prefixes have equal names and nothing else has. The chain
starts at a root salted with identity and tenant: across tenants no name is ever shared.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DIGEST_BYTES: Final = 32
TOKEN_BYTES: Final = 4

#: A session's token ids as `array("I")`: 4 bytes each, and packed without a look at any of them.
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
    """Write token ids as little-endian uint32. `Tokens` are packed fifty times faster than a list.

    Raises `OverflowError` for an id outside of uint32.
    """
    packed = tokens if isinstance(tokens, array) and tokens.typecode == "I" else as_tokens(tokens)
    if sys.byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> Tokens:
    """Read what `pack` wrote. Raises `ValueError` where a token is cut off."""
    tokens = as_tokens()
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def root(identity: bytes, tenant: str) -> bytes:
    """Name the empty prefix of a tenant under an identity's digest."""
    return hashlib.blake2b(
        identity + tenant.encode(), digest_size=DIGEST_BYTES, person=b"turnkeep.root"
    ).digest()


def link(parent: bytes, packed: bytes) -> bytes:
    """Name the run of packed tokens that follows the prefix `parent`: a block, or a shorter tail."""
    digest = _LINK.copy()  # half the time of making one with its parameters
    digest.update(parent)
    digest.update(packed)
    return digest.digest()


class Chain:
    """The names of a run of tokens, block by block: while it is one that grows, each block is hashed once."""

    def __init__(self, root: bytes, block: int) -> None:
        self.root = root
        self.block = block
        self._width = block * TOKEN_BYTES
        self._packed = b""
        self._names = [root]

    def names(self, packed: bytes) -> Sequence[bytes]:
        """Name the empty prefix, then every full block of the packed tokens, first to last."""
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
    """List what can be snapshotted at `end` after running `[start, end)`: full blocks, then the tail.

    Every span starts on the grid, so the first one may begin before `start`: it is the block that
    `start` lies in.
    """
    if start >= end:
        return []
    edges = [*range(start - start % block, end, block), end]
    return [Span(a, b) for a, b in pairwise(edges)]


def tail_start(edges: Sequence[int], end: int) -> int:
    """Choose where a tail's next piece, up to `end`, starts: a binary counter over the pieces that are there.

    `edges` are where those pieces start and end; the first lies on the grid. The new piece takes the place of
    all at the end that are not longer than what follows them. A token that is written again is then in a
    piece at least twice as long: log2(block / turn) times at the most, instead of once each turn.
    """
    pieces = list(edges)
    while len(pieces) > 1 and pieces[-1] - pieces[-2] <= end - pieces[-1]:
        pieces.pop()
    return pieces[-1]


def num_common(one: bytes, other: bytes) -> int:
    """Count the leading tokens that two packed runs share."""
    size = min(len(one), len(other)) // TOKEN_BYTES * TOKEN_BYTES
    # As two large numbers, which are compared many tokens at a time: the lowest bit that differs tells where.
    differing = int.from_bytes(one[:size], "little") ^ int.from_bytes(other[:size], "little")
    if not differing:
        return size // TOKEN_BYTES
    return ((differing & -differing).bit_length() - 1) // (8 * TOKEN_BYTES)
