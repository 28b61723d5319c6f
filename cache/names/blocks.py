"""Runs of tokens, and names for them: chained digests of blocks, and the pieces of a tail. Pure.

The tokens `[0, n)` of a tenant under a model's identity name their KV. A full block is named by its
parent's digest and its tokens, so that only equal prefixes have equal names. The chain starts at a root that
hashes identity and tenant, so tenants never share a name.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Final, overload

from .policy import FULL, Policy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TypeAlias

    _Ids: TypeAlias = "array[int]"

DIGEST_BYTES: Final = 32
TOKEN_BYTES: Final = 4

#: Tokens of a part of `Tokens`: to append copies one part at the most, and a reference to each other one.
_PART: Final = 4096

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


class Tokens(Sequence[int]):
    """A session's token ids, 4 bytes each. Immutable; what grows from other tokens shares theirs.

    So the cost of a turn does not depend on what its session has said before: nothing of that is copied,
    compared or hashed again. `chains` are the names that these tokens, or those they grew from, have by root;
    they belong to the event loop.
    """

    __slots__ = ("_digested", "_parts", "_rest", "chains")

    def __init__(
        self,
        parts: tuple[_Ids, ...] = (),
        rest: _Ids | None = None,
        chains: dict[bytes, Chain] | None = None,
        digested: list[tuple[Tokens, hashlib.blake2b]] | None = None,
    ) -> None:
        """Make tokens of whole parts, each of which only ever has the same parts before it, and the rest."""
        self._parts = parts
        self._rest = array("I") if rest is None else rest
        self.chains: dict[bytes, Chain] = {} if chains is None else chains
        self._digested = [] if digested is None else digested  # the last digest, to go on from

    def __len__(self) -> int:
        return len(self._parts) * _PART + len(self._rest)

    def __iter__(self) -> Iterator[int]:
        return chain(*self._parts, self._rest)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Tokens: ...
    def __getitem__(self, at: int | slice) -> int | Tokens:
        if isinstance(at, slice):
            start, end, _ = at.indices(len(self))
            if start:
                return as_tokens(self.ids(start, end))
            if end == len(self):
                return self
            num, more = divmod(end, _PART)
            rest = [*self._parts[num : num + 1], self._rest][0][:more]
            return Tokens(self._parts[:num], rest, self.chains, self._digested)
        at = range(len(self))[at]
        num, more = divmod(at, _PART)
        return self._parts[num][more] if num < len(self._parts) else self._rest[more]

    def __add__(self, more: Iterable[int]) -> Tokens:
        """Append token ids. Raises `OverflowError` for one outside of uint32."""
        rest = self._rest[:]
        rest.extend(more.ids() if isinstance(more, Tokens) else array("I", more))
        starts = range(0, len(rest) - _PART + 1, _PART)
        parts = self._parts + tuple(rest[at : at + _PART] for at in starts)
        return Tokens(parts, rest[len(starts) * _PART :], self.chains, self._digested)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tokens):
            return NotImplemented
        return len(self) == len(other) == self.num_common(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} tokens>"

    def ids(self, start: int = 0, end: int | None = None) -> _Ids:
        """Copy the ids of `[start, end)`."""
        found = array("I")
        end = len(self) if end is None else min(end, len(self))
        while start < end:
            num, skip = divmod(start, _PART)
            part = self._parts[num] if num < len(self._parts) else self._rest
            found.extend(part[skip : skip + end - start])
            start += min(len(part) - skip, end - start)
        return found

    def packed(self, start: int = 0, end: int | None = None) -> bytes:
        """Pack the tokens of `[start, end)`; see `pack`."""
        return pack(self.ids(start, end))

    def num_common(self, other: Tokens) -> int:
        """Count the leading tokens that both have; those that both share are not looked at."""
        num = min(len(self._parts), len(other._parts))
        while num and self._parts[num - 1] is not other._parts[num - 1]:
            num -= 1
        num *= _PART
        while True:
            found = num_common(self.packed(num, num + _PART), other.packed(num, num + _PART))
            num += found
            if found < _PART:
                return num

    def digest(self) -> str:
        """Return the 16-byte digest of the tokens, as hex; goes on from where the last one could be cut."""
        begun, digest = self._digested[0] if self._digested else (as_tokens(), _DIGEST)
        if begun.num_common(self) < len(begun):
            begun, digest = as_tokens(), _DIGEST
        digest = digest.copy()
        kept = Tokens(self._parts[:-1])  # a template may rewrite what comes behind it
        if len(kept) > len(begun):
            digest.update(self.packed(len(begun), len(kept)))
            begun, self._digested[:] = kept, [(kept, digest.copy())]
        digest.update(self.packed(len(begun)))
        return digest.hexdigest()

    def alone(self) -> Tokens:
        """Return these tokens without what is known of them: to be kept in there."""
        return Tokens(self._parts, self._rest)


_DIGEST: Final = hashlib.blake2b(digest_size=16)


def as_tokens(ids: Iterable[int] = ()) -> Tokens:
    """Make tokens of ids. Raises `OverflowError` for one outside of uint32."""
    return ids if isinstance(ids, Tokens) else Tokens() + ids


def pack(tokens: Sequence[int]) -> bytes:
    """Pack token ids as little-endian uint32. `Tokens` are packed fifty times faster than a list.

    Raises `OverflowError` for an id outside of uint32.
    """
    if isinstance(tokens, Tokens):
        return tokens.packed()
    packed = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
    if sys.byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> Tokens:
    """Unpack what `pack` returned. Raises `ValueError` if a token is truncated."""
    ids = array("I")
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return as_tokens(ids)


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
        self._named = as_tokens()
        self._names = [root]

    def names(self, tokens: Tokens) -> Sequence[bytes]:
        """Return the names of the empty prefix, then of every full block of the tokens, in order."""
        num, shared = len(tokens) // self.block, self._named.num_common(tokens) // self.block
        if shared == num:
            return self._names[: num + 1]
        del self._names[shared + 1 :]
        for at in range(shared * self.block, num * self.block, self.block):
            self._names.append(link(self._names[-1], tokens.packed(at, at + self.block)))
        self._named = tokens.alone()
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
    if one[:size] == other[:size]:
        return size // TOKEN_BYTES
    # Two large integers compare many tokens at a time; their lowest differing bit is in the first such token.
    differing = int.from_bytes(one[:size], "little") ^ int.from_bytes(other[:size], "little")
    return ((differing & -differing).bit_length() - 1) // (8 * TOKEN_BYTES)
