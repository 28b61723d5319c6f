"""One snapshot is one safetensors file: write it, check it, read it.

The header's metadata says whose KV the file holds, and carries a checksum over everything else in the
file. Nothing of a file is used before length, checksum, identity, name and layout are verified.
Knows files and bytes; nothing of MLX, of the index, or of what a snapshot is for.

Layout: 8 bytes header length, JSON header padded to 8 bytes, tensors back to back (safetensors 0.x).
"""

from __future__ import annotations

import json
import math
import os
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import xxhash

from .blocks import TOKEN_BYTES, Span, link
from .identity import FORMAT_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from .arrays import Place
    from .identity import Identity

SUFFIX: Final = ".safetensors"

#: Bytes per element of the types that KV comes in, by their names in safetensors.
ITEM_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}

#: The checksum stands first, at a fixed place: it is verified before anything of the file is parsed.
_METADATA: Final = '{"__metadata__":'
_OPENING: Final = f'{_METADATA}{{"checksum":"'.encode()
_CHECKSUM_CHARS: Final = 32
_BLANK: Final = b"0" * _CHECKSUM_CHARS
_CHECKSUM_AT: Final = 8 + len(_OPENING)
_CHECKSUM_END: Final = _CHECKSUM_AT + _CHECKSUM_CHARS

_DECODER: Final = json.JSONDecoder()
_MAX_HEADER_BYTES: Final = 64 << 20
#: What is read by a system call: enough that waiting for the GIL after each costs little, and no more than
#: the processor's cache keeps until it is hashed.
_READ_BYTES: Final = 4 << 20
#: The most buffers that a system call takes (IOV_MAX).
_MAX_BUFFERS: Final = max(16, os.sysconf("SC_IOV_MAX"))


class CacheError(Exception):
    """Root of what this package raises."""


class DoubtfulSnapshotError(CacheError):
    """A file is not, beyond doubt, the snapshot that was asked for. `reason` is a short phrase."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as plain bytes. `shape` is (1, heads, tokens, head_dim), `dtype` a key of `ITEM_BYTES`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


#: Name, type and shape (the token axis left out) of every tensor: equal in all snapshots of a chain.
Layout = tuple[tuple[str, str, tuple[int, ...]], ...]


class Name(NamedTuple):
    """Which KV a snapshot holds: the packed `tokens` from position `start` on, after the prefix `parent`."""

    parent: bytes
    start: int
    tokens: bytes

    @property
    def digest(self) -> bytes:
        """The name proper; the file is called after it."""
        return link(self.parent, self.tokens)

    @property
    def num_tokens(self) -> int:
        """Count the tokens."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def span(self) -> Span:
        """The positions that it covers."""
        return Span(self.start, self.start + self.num_tokens)


@dataclass(frozen=True, slots=True)
class Draft:
    """A snapshot ready to be written. `header` is complete but for its checksum."""

    header: bytes
    tensors: tuple[Tensor, ...]

    @property
    def size_bytes(self) -> int:
        """The exact size of the file."""
        return len(self.header) + sum(tensor.data.nbytes for tensor in self.tensors)


def draft(name: Name, identity: Identity, tensors: tuple[Tensor, ...]) -> Draft:
    """Lay out a file. Raises `ValueError` where the tensors do not fit the name: a fault of the caller."""
    header: dict[str, Any] = {
        "__metadata__": {
            "checksum": _BLANK.decode(),
            "format": "turnkeep",
            "version": str(FORMAT_VERSION),
            "identity": identity.digest().hex(),
            "model": identity.to_json(),
            "parent": name.parent.hex(),
            "digest": name.digest.hex(),
            "start": str(name.start),
            "end": str(name.span.end),
            "tokens": name.tokens.hex(),
        }
    }
    at = 0
    for tensor in tensors:
        spec = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (at, at + tensor.data.nbytes)}
        header[tensor.name] = spec
        at += tensor.data.nbytes
    try:
        _layout(header, payload_bytes=at, num_tokens=name.num_tokens)
    except DoubtfulSnapshotError as error:
        raise ValueError(f"not a snapshot of {name.num_tokens} tokens: {error.reason}") from None
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Draft(struct.pack("<Q", len(text)) + text, tensors)


def write(draft: Draft, path: Path) -> None:
    """Write and fsync a file, over whatever is there, without copying a tensor.

    Runs on the writer thread. Raises `OSError`.
    """
    hasher = xxhash.xxh3_128(draft.header)
    for tensor in draft.tensors:
        hasher.update(tensor.data)
    with path.open("wb") as file:
        file.write(draft.header[:_CHECKSUM_AT] + hasher.hexdigest().encode() + draft.header[_CHECKSUM_END:])
        for tensor in draft.tensors:
            file.write(tensor.data)
        file.flush()
        os.fsync(file.fileno())


def read_name(path: Path) -> Name:
    """Read which KV a file claims to hold, to find it again after the index is lost.

    Checks length, layout and that the file bears its own name, but not the checksum: that is verified
    when it is loaded. Raises `DoubtfulSnapshotError`, `OSError`.
    """
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        start = file.read(8)
        header = file.read(_header_bytes(start, size_bytes))
    name, _, _ = _parse(header, payload_bytes=size_bytes - 8 - len(header))
    if name.digest.hex() != path.stem:
        raise DoubtfulSnapshotError("the file bears another snapshot's name")
    return name


def verify(path: Path, digest: bytes, start: int, identity: bytes) -> Layout:
    """Prove that a file is the snapshot `digest` from position `start` under `identity` (a digest).

    Reads the whole file, blocking: call it on an I/O thread. Raises `DoubtfulSnapshotError`.
    """
    with _opened(path, digest, start, identity) as found:
        scratch = memoryview(bytearray(min(_READ_BYTES, found.payload_bytes)))
        rest = range(found.payload_bytes, 0, -_READ_BYTES)
        found.read([scratch[:num_left]] for num_left in rest)
        return found.layout


def look(path: Path, digest: bytes, start: int, identity: bytes) -> Layout:
    """Read the layout of the snapshot `digest`, from a header that nothing has verified yet.

    Raises `DoubtfulSnapshotError` where the file cannot be that snapshot.
    """
    with _opened(path, digest, start, identity) as found:
        return found.layout


def read(
    path: Path,
    digest: bytes,
    start: int,
    identity: bytes,
    *,
    layout: Layout,
    places: Sequence[Place],
    num_tokens: int,
) -> int:
    """Read the first `num_tokens` tokens of a snapshot into their places, and verify all of the file.

    `layout` is what all snapshots of a chain share, `places` are in its order. Each byte is read once, to
    where it stays, and hashed there. The header is checked before anything is written; the checksum can only
    be checked afterwards: after a `DoubtfulSnapshotError` the places of this span hold what nobody may use.

    Returns the size of the file. Safe on any thread: it waits for the disk without the GIL.
    """
    with _opened(path, digest, start, identity) as found:
        if found.layout != layout:
            raise DoubtfulSnapshotError("layers unlike those before it")
        runs = (
            (place.memory[at : at + num_tokens * place.token_bytes], place.token_bytes)
            for place in places
            for row in range(place.num_rows)
            for at in (row * place.row_bytes + start * place.token_bytes,)
        )
        unused = found.num_tokens - num_tokens
        if unused:
            scratch = memoryview(bytearray(unused * max(place.token_bytes for place in places)))
            found.read([run, scratch[: unused * token_bytes]] for run, token_bytes in runs)
        else:
            found.read(_batches(run for run, _ in runs))
        return found.size_bytes


class _Found:
    """An open file whose header has been read and checked, and whose checksum is being taken."""

    def __init__(self, file: int, head: bytes, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.payload_bytes = size_bytes - len(head)
        self.name, self.model, self.layout = _parse(head[8:], payload_bytes=self.payload_bytes)
        self.num_tokens = self.name.num_tokens
        self._file = file
        self._claimed = head[_CHECKSUM_AT:_CHECKSUM_END]
        self._hasher = xxhash.xxh3_128(head[:_CHECKSUM_AT] + _BLANK + head[_CHECKSUM_END:])

    def read(self, groups: Iterable[list[memoryview]]) -> None:
        """Read the payload, a system call per group of buffers, and compare the checksum.

        A group is hashed before the next one is read: while it is in the processor's cache, and so that
        groups may share a buffer.
        """
        for group in groups:
            _fill(self._file, group)
            for buffer in group:
                self._hasher.update(buffer)
        if self._hasher.hexdigest().encode() != self._claimed:
            raise DoubtfulSnapshotError("wrong checksum")


@contextmanager
def _opened(path: Path, digest: bytes, start: int, identity: bytes) -> Iterator[_Found]:
    """Open a file that says it is a snapshot. All that may go wrong is a `DoubtfulSnapshotError`."""
    try:
        with path.open("rb", buffering=0) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            head = file.read(8)
            head += file.read(_header_bytes(head, size_bytes))
            found = _Found(file.fileno(), head, size_bytes)
            if found.model != identity.hex():
                raise DoubtfulSnapshotError("made by another model")
            if found.name.digest != digest or found.name.start != start:
                raise DoubtfulSnapshotError("holds other tokens than asked for")
            yield found
    except OSError as error:
        raise DoubtfulSnapshotError(f"unreadable: {error.strerror}") from error


def _batches(runs: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Group buffers for one system call each: enough bytes to be worth it, and no more than it takes."""
    batch: list[memoryview] = []
    size_bytes = 0
    for run in runs:
        batch.append(run)
        size_bytes += run.nbytes
        if size_bytes >= _READ_BYTES or len(batch) == _MAX_BUFFERS:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _fill(file: int, buffers: list[memoryview]) -> None:
    """Read on in a file until all buffers are full; a system call may do it in parts."""
    while num_read := os.readv(file, buffers):
        full = 0
        while full < len(buffers) and num_read >= buffers[full].nbytes:
            num_read -= buffers[full].nbytes
            full += 1
        if full == len(buffers):
            return
        buffers = [buffers[full][num_read:], *buffers[full + 1 :]]
    raise DoubtfulSnapshotError("shorter than its header says")


def _header_bytes(head: bytes, size_bytes: int) -> int:
    if len(head) < 8:
        raise DoubtfulSnapshotError("shorter than its header")
    length: int = struct.unpack("<Q", head)[0]
    if not _CHECKSUM_END - 8 < length <= min(_MAX_HEADER_BYTES, size_bytes - 8):
        raise DoubtfulSnapshotError("shorter than its header, or an absurd header length")
    return length


def _parse(header: bytes, *, payload_bytes: int) -> tuple[Name, str, Layout]:
    """Take a header apart: name, the identity's digest in hex, layout.

    Whatever is wrong with it becomes a `DoubtfulSnapshotError`.
    """
    try:
        text = header.decode()
        metadata, end_at = _DECODER.raw_decode(text, len(_METADATA))
        form = metadata["format"], metadata["version"]
        parent, tokens = bytes.fromhex(metadata["parent"]), bytes.fromhex(metadata["tokens"])
        name = Name(parent, int(metadata["start"]), tokens)
        end, digest, model = int(metadata["end"]), bytes.fromhex(metadata["digest"]), metadata["identity"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DoubtfulSnapshotError(f"unreadable header: {type(error).__name__}") from error
    if form != ("turnkeep", str(FORMAT_VERSION)):
        raise DoubtfulSnapshotError("another format version")
    if not name.tokens or len(name.tokens) % TOKEN_BYTES or name.start < 0:
        raise DoubtfulSnapshotError("no tokens, or half a token")
    if name.span.end != end or name.digest != digest:
        raise DoubtfulSnapshotError("a name that contradicts its tokens")
    if not text.startswith(_METADATA):
        raise DoubtfulSnapshotError("a header of another kind")
    return name, model, _tensors(text[end_at:], payload_bytes, name.num_tokens)


@lru_cache(maxsize=16)
def _tensors(text: str, payload_bytes: int, num_tokens: int) -> Layout:
    """Read what follows the metadata: the same in all blocks of a chain, and slow to check one by one."""
    try:
        fields = json.loads("{" + text.removeprefix(","))
    except (ValueError, RecursionError) as error:
        raise DoubtfulSnapshotError(f"unreadable header: {type(error).__name__}") from error
    return _layout(fields, payload_bytes=payload_bytes, num_tokens=num_tokens)


def _layout(fields: dict[str, Any], *, payload_bytes: int, num_tokens: int) -> Layout:
    """Check the tensors: complete pairs of keys and values, back to back, covering the payload exactly."""
    specs = {name: spec for name, spec in fields.items() if name != "__metadata__"}
    if not specs or list(specs) != [
        f"{i}.{part}" for i in range(len(specs) // 2) for part in ("keys", "values")
    ]:
        raise DoubtfulSnapshotError("not the tensors of a KV snapshot")
    layout: list[tuple[str, str, tuple[int, ...]]] = []
    at = 0
    for name, spec in specs.items():
        dtype, shape, end = _spec(spec, at)
        if len(shape) != 4 or shape[0] != 1 or shape[2] != num_tokens:
            raise DoubtfulSnapshotError(f"{name} has the wrong shape")
        if end - at != math.prod(shape) * ITEM_BYTES[dtype]:
            raise DoubtfulSnapshotError(f"{name} has the wrong length")
        layout.append((name, dtype, (shape[1], shape[3])))
        at = end
    if at != payload_bytes:
        raise DoubtfulSnapshotError("tensors do not cover the payload")
    return tuple(layout)


def _spec(spec: Any, at: int) -> tuple[str, tuple[int, ...], int]:
    """Read one tensor's entry; it must begin at offset `at`."""
    try:
        dtype, shape, (begin, end) = spec["dtype"], tuple(spec["shape"]), spec["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise DoubtfulSnapshotError("unreadable tensor entry") from error
    numbers = (*shape, begin, end)
    if not all(type(number) is int and number >= 0 for number in numbers) or begin != at:
        raise DoubtfulSnapshotError("tensor offsets or shapes out of order")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise DoubtfulSnapshotError("unknown tensor type")
    return dtype, shape, end
