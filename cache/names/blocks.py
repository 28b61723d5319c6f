"""Divides a session's tokens into blocks and pieces, and computes the digests that name them. Pure.

The KV of the tokens `[0, n)` is named by these tokens, the tenant and the model's identity. The name of a
full block is a digest of the previous block's name and the block's tokens, so only equal prefixes have equal
names. The first block follows a root, a digest of identity and tenant, so tenants never share a name. The
tokens after the last full block are the tail, which is divided into pieces.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

DIGEST_BYTES: Final = 32

_LINK: Final = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"turnkeep.block")


@dataclass(frozen=True, slots=True)
class Span:
    """A run of tokens `[start, end)`: a full block, or a piece of a session's tail."""

    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the span."""
        return self.end - self.start


def root(identity: bytes, tenant: str) -> bytes:
    """Return the name of a tenant's empty prefix under an identity's digest."""
    return hashlib.blake2b(
        identity + tenant.encode(), digest_size=DIGEST_BYTES, person=b"turnkeep.root"
    ).digest()


def link(parent: bytes, packed: bytes) -> bytes:
    """Return the digest that names a block, or a piece of a tail, of `packed` tokens after `parent`."""
    digest = _LINK.copy()  # twice as fast as a new one with parameters
    digest.update(parent)
    digest.update(packed)
    return digest.digest()


def spans(start: int, end: int, block: int) -> list[Span]:
    """List the spans to save after a pass over the tokens `[start, end)`: full blocks, then the tail.

    Every span starts at a block boundary, so the first span may begin before `start`.
    """
    if start >= end:
        return []
    edges = [*range(start - start % block, end, block), end]
    return [Span(a, b) for a, b in pairwise(edges)]


def tail_start(edges: Sequence[int], end: int) -> int:
    """Return the start of a tail's next piece, which ends at `end` and may replace existing pieces.

    `edges` are the positions where existing pieces start and end; the first is a block boundary. As in a
    binary counter, the new piece absorbs the last piece while that piece is not longer than the new one. Each
    rewrite at least doubles the length of a token's piece, so a token is written at most log2(block / turn)
    times.
    """
    pieces = list(edges)
    while len(pieces) > 1 and pieces[-1] - pieces[-2] <= end - pieces[-1]:
        pieces.pop()
    return pieces[-1]
