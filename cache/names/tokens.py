"""A session's token ids, and the names of its blocks. Pure.

Appending tokens does not copy the earlier ids.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, overload

import numpy as np

from . import blocks
from .images import ImageSpan, name_images
from .policy import FULL, Policy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TypeAlias

    _Ids: TypeAlias = "array[int]"

TOKEN_BYTES: Final = 4

#: Tokens per part of `Tokens`: appending copies at most one part, and references to the other parts.
_PART: Final = 4096

#: The smallest numbers that take 2, 3, 4 and 5 bytes in LEB128.
_LEB_LIMITS: Final = np.array([1 << bits for bits in (7, 14, 21, 28)], np.uint32)
#: Up to this many bytes a loop is faster than numpy.
_FEW: Final = 512
_DIGESTED: Final = 16
_PLAIN: Final = hashlib.blake2b(digest_size=_DIGESTED)
_BEHIND: Final = hashlib.blake2b(digest_size=_DIGESTED, person=b"turnkeep.behind")


class _Part:
    """`_PART` tokens: their ids, and a digest of all tokens up to the part's end."""

    __slots__ = ("digest", "ids")

    def __init__(self, ids: _Ids, digest: bytes) -> None:
        self.ids = ids
        self.digest = digest


class Tokens(Sequence[int]):
    """A session's token ids, 4 bytes each. Immutable: appending makes new tokens that share the old ones.

    So the cost of a turn does not depend on its session's length: earlier ids are not copied, compared or
    hashed again. `chains` has the names of the blocks, by root, and is shared by all tokens that extend each
    other. `chains` belongs to the event loop.

    Ids are what the model runs. The tokens of an image have the same ids for every picture; `spans` says
    which pictures they are. Everything that compares or names tokens (`packed`, `num_common`, `digest`, the
    names of blocks) uses other ids for them, drawn from the picture (see `images`).
    """

    __slots__ = ("_parts", "_rest", "chains", "spans")

    def __init__(
        self,
        parts: tuple[_Part, ...] = (),
        rest: _Ids | None = None,
        chains: dict[bytes, Chain] | None = None,
        spans: tuple[ImageSpan, ...] = (),
    ) -> None:
        """Make tokens from whole parts and from `rest`, the ids after the last part; `spans` in order."""
        self._parts = parts
        self._rest = array("I") if rest is None else rest
        self.chains: dict[bytes, Chain] = {} if chains is None else chains
        self.spans = spans

    def __len__(self) -> int:
        return len(self._parts) * _PART + len(self._rest)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids())

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Tokens: ...
    def __getitem__(self, at: int | slice) -> int | Tokens:
        if isinstance(at, slice):
            start, end, _ = at.indices(len(self))
            if start:  # without the image in which the slice begins
                spans = (span.moved(-start) for span in self._spans(start, end) if span.start >= start)
                return as_tokens(self.ids(start, end), spans)[: end - start]
            if end == len(self):
                return self
            num, spans = end // _PART, (span.cut(end) for span in self._spans(0, end))
            return Tokens(self._parts[:num], self.ids(num * _PART, end), self.chains, tuple(spans))
        at = range(len(self))[at]
        return self._ids_from(at // _PART)[at % _PART]

    def __add__(self, more: Iterable[int]) -> Tokens:
        """Return tokens with more ids appended. Raises `OverflowError` for an id outside of uint32."""
        if isinstance(more, Tokens):
            return self.extended(more.ids(), (span.moved(len(self)) for span in more.spans))
        return self.extended(array("I", more))

    def extended(self, ids: _Ids, spans: Iterable[ImageSpan] = ()) -> Tokens:
        """Return tokens with `ids` appended; `spans` are the images in these, by positions in the result."""
        rest, spans = self._rest + ids, (*self.spans, *spans)
        parts, start = [*self._parts], len(self._parts) * _PART
        num_whole = len(rest) - len(rest) % _PART
        for at in range(0, num_whole, _PART):
            part = rest[at : at + _PART]
            packed = name_images(pack(part), start + at, spans)
            parts.append(_Part(part, _digest(parts[-1:], packed).digest()))
        return Tokens(tuple(parts), rest[num_whole:], self.chains, spans)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tokens):
            return NotImplemented
        return len(self) == len(other) == self.num_common(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} tokens>"

    def _ids_from(self, num: int) -> _Ids:
        """Return the ids of part `num`; after the last part, the ids of the rest."""
        return self._rest if num == len(self._parts) else self._parts[num].ids

    def ids(self, start: int = 0, end: int | None = None) -> _Ids:
        """Copy the ids of `[start, end)`."""
        found = array("I")
        end = len(self) if end is None else min(end, len(self))
        while start < end:
            num, skip = divmod(start, _PART)
            part = self._ids_from(num)
            found.extend(part[skip : skip + end - start])
            start += min(len(part) - skip, end - start)
        return found

    def packed(self, start: int = 0, end: int | None = None) -> bytes:
        """Pack the tokens of `[start, end)` to compare or name them; images' tokens have ids of their own."""
        return name_images(pack(self.ids(start, end)), start, self.spans)

    def _spans(self, start: int, end: int) -> list[ImageSpan]:
        return [span for span in self.spans if span.start < end and span.end > start]

    def num_common(self, other: Tokens) -> int:
        """Count the leading tokens that these two sequences share."""
        num = min(len(self._parts), len(other._parts))
        while num and self._parts[num - 1].digest != other._parts[num - 1].digest:
            num -= 1
        num *= _PART
        return num + num_common(self.packed(num, num + _PART), other.packed(num, num + _PART))

    def digest(self) -> str:
        """Return the 16-byte digest of the tokens, as hex: a hash of all parts' digests and of the rest."""
        rest = self.packed(len(self._parts) * _PART)
        return _digest(self._parts, rest).hexdigest()

    def alone(self) -> Tokens:
        """Return a copy with empty `chains`, for a `Chain` to keep without a cycle of references."""
        return Tokens(self._parts, self._rest, spans=self.spans)

    def apart(self) -> Tokens:
        """Return a copy with separate `chains`, for a fork of the session."""
        chains = {root: chain.copy() for root, chain in self.chains.items()}
        return Tokens(self._parts, self._rest, chains, self.spans)


class Chain:
    """The names of the blocks of a growing session of a `tenant` under one root. Hashes each block once."""

    def __init__(self, root: bytes, block: int, policy: Policy = FULL, tenant: str = "") -> None:
        """`block` is the number of tokens per block."""
        self.root = root
        self.block = block
        self.policy = policy
        self.tenant = tenant
        self._named = as_tokens()
        self._names = [root]

    def copy(self) -> Chain:
        """Return an independent copy of the chain."""
        chain = Chain(self.root, self.block, self.policy, self.tenant)
        chain._named, chain._names = self._named, [*self._names]  # of this class
        return chain

    def names(self, tokens: Tokens) -> Sequence[bytes]:
        """Return the names of the empty prefix, then of every full block of the tokens, in order."""
        num, shared = len(tokens) // self.block, self._named.num_common(tokens) // self.block
        if shared == num:
            return self._names[: num + 1]
        more = self._names[shared : shared + 1]
        packed = tokens.packed(shared * self.block, num * self.block)
        width = self.block * TOKEN_BYTES
        for at in range(0, len(packed), width):
            more.append(blocks.link(more[-1], packed[at : at + width]))
        self._names[shared:] = more
        self._named = tokens.alone()
        return self._names


def _digest(before: Sequence[_Part], packed: bytes) -> hashlib.blake2b:
    """Hash the digests of parts and the tokens after them; without parts, a plain hash of these tokens."""
    digest = (_BEHIND if before else _PLAIN).copy()
    digest.update(b"".join(part.digest for part in before))
    digest.update(packed)
    return digest


def as_tokens(ids: Iterable[int] = (), spans: Iterable[ImageSpan] = ()) -> Tokens:
    """Make `Tokens` from ids, with the images `spans`. Raises `OverflowError` for an id outside of uint32."""
    return ids if isinstance(ids, Tokens) else Tokens().extended(array("I", ids), spans)


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
    """Unpack the bytes that `pack` returned. Raises `ValueError` if a token is truncated."""
    return as_tokens(unpack_ids(packed))


def unpack_ids(packed: bytes) -> _Ids:
    """Unpack the bytes that `pack` returned into an array of ids. Raises `ValueError` if one is truncated."""
    ids = array("I")
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def to_compact(tokens: Sequence[int]) -> str:
    """Encode token ids for a result: base64 of LEB128 numbers, about two to three characters per token.

    LEB128 writes a number in groups of seven bits, the lowest first; a byte's high bit says whether another
    byte follows.
    """
    ids = np.frombuffer(pack(tokens.ids() if isinstance(tokens, Tokens) else tokens), "<u4")
    sizes = 1 + np.searchsorted(_LEB_LIMITS, ids, side="right")
    starts = np.cumsum(sizes) - sizes
    found = np.zeros(int(sizes.sum()), np.uint8)
    for number in range(1 + len(_LEB_LIMITS)):
        at = sizes > number
        group = (ids[at] >> np.uint32(7 * number)) & np.uint32(0x7F)
        found[starts[at] + number] = group | np.where(sizes[at] > number + 1, 0x80, 0).astype(np.uint32)
    return b64encode(found.tobytes()).decode()


def from_compact(text: str) -> Tokens:
    """Decode the result of `to_compact`. Raises `ValueError`."""
    packed = b64decode(text, validate=True)
    if packed and packed[-1] >= 0x80:
        raise ValueError("a token id is cut off")
    if len(packed) <= _FEW:
        return _of_few(packed)
    found = np.frombuffer(packed, np.uint8)
    ends = np.flatnonzero(found < 0x80)
    starts = np.concatenate([[0], ends[:-1] + 1])
    sizes = ends - starts + 1
    if sizes.max() > 1 + len(_LEB_LIMITS):
        raise ValueError("a token id is too large")
    ids = np.zeros(len(ends), np.uint64)
    for number in range(int(sizes.max())):
        at = sizes > number
        ids[at] |= (found[starts[at] + number] & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * number)
    if ids.max() >> np.uint64(32):
        raise ValueError("a token id is too large")
    return unpack(ids.astype("<u4").tobytes())


def _of_few(packed: bytes) -> Tokens:
    ids, value, shift = array("I"), 0, 0
    for byte in packed:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            if value >> 32:
                raise ValueError("a token id is too large")
            ids.append(value)
            value = shift = 0
    return as_tokens(ids)


def num_common(one: bytes, other: bytes) -> int:
    """Count the leading tokens that two packed sequences share."""
    size = min(len(one), len(other)) // TOKEN_BYTES * TOKEN_BYTES
    if one[:size] == other[:size]:
        return size // TOKEN_BYTES
    # Two large integers compare many tokens at a time; their lowest differing bit is in the first such token.
    differing = int.from_bytes(one[:size], "little") ^ int.from_bytes(other[:size], "little")
    return ((differing & -differing).bit_length() - 1) // (8 * TOKEN_BYTES)
