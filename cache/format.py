"""One snapshot is one safetensors file: write it, check it, load it.

The header's metadata says whose KV the file holds, and carries a checksum over everything else in the
file. Nothing of a file reaches MLX before length, checksum, identity, name and layout are verified.
Knows files and bytes; nothing of the index or of what a snapshot is for.

Layout: 8 bytes header length, JSON header padded to 8 bytes, tensors back to back (safetensors 0.x).
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import xxhash

from .blocks import TOKEN_BYTES, Span, link
from .identity import FORMAT_VERSION

if TYPE_CHECKING:
    from pathlib import Path

    import mlx.core as mx

    from .identity import Identity

SUFFIX: Final = ".safetensors"

#: Bytes per element of the types that KV comes in, by their names in safetensors.
ITEM_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}

#: The checksum stands first, at a fixed place: it is verified before anything of the file is parsed.
_OPENING: Final = b'{"__metadata__":{"checksum":"'
_CHECKSUM_CHARS: Final = 32
_BLANK: Final = b"0" * _CHECKSUM_CHARS
_CHECKSUM_AT: Final = 8 + len(_OPENING)
_CHECKSUM_END: Final = _CHECKSUM_AT + _CHECKSUM_CHARS

_MAX_HEADER_BYTES: Final = 64 << 20
_READ_BYTES: Final = 4 << 20


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


#: Tensors by name, as MLX arrays.
Arrays: TypeAlias = "dict[str, mx.array]"

#: Name, type and shape (the token axis left out) of every tensor: equal in all snapshots of a chain.
Layout = tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Name:
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
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            head = file.read(8)
            head += file.read(_header_bytes(head, size_bytes))
            claimed = head[_CHECKSUM_AT:_CHECKSUM_END]
            hasher = xxhash.xxh3_128(head[:_CHECKSUM_AT] + _BLANK + head[_CHECKSUM_END:])
            while piece := file.read(_READ_BYTES):
                hasher.update(piece)
    except OSError as error:
        raise DoubtfulSnapshotError(f"unreadable: {error.strerror}") from error
    if hasher.hexdigest().encode() != claimed:
        raise DoubtfulSnapshotError("wrong checksum")
    name, model, layout = _parse(head[8:], payload_bytes=size_bytes - len(head))
    if model != identity.hex():
        raise DoubtfulSnapshotError("made by another model")
    if name.digest != digest or name.start != start:
        raise DoubtfulSnapshotError("holds other tokens than asked for")
    return layout


def leave_thread() -> None:
    """Give up what the calling thread holds of MLX, before it ends; it must not load any more.

    Streams that outlive their thread now and then abort the process at its exit.
    """
    import mlx.core as mx

    mx.clear_streams()


def load(
    path: Path, digest: bytes, start: int, identity: bytes, *, like: Layout | None = None
) -> tuple[Layout, Arrays]:
    """Verify a file, then read its tensors, evaluated, on the calling I/O thread.

    `like` is the layout of the snapshot before it, which it must share.

    Everything runs on the CPU stream, so that no other thread than the device thread gives the device
    work. Raises `DoubtfulSnapshotError`.
    """
    import mlx.core as mx

    layout = verify(path, digest, start, identity)
    if like not in (None, layout):
        raise DoubtfulSnapshotError("layers unlike those before it")
    try:
        arrays = mx.load(str(path), stream=mx.cpu)
    except RuntimeError as error:
        raise DoubtfulSnapshotError(f"MLX cannot read it: {error}") from error
    if not isinstance(arrays, dict):  # mx.load gives a dict for every safetensors file
        raise TypeError(type(arrays))
    # mx.load is lazy and holds the file open until its arrays are evaluated.
    mx.eval(arrays)
    return layout, arrays


def join(parts: list[Arrays], num_tokens: int) -> Arrays:
    """Join the tensors of consecutive snapshots along their tokens, and keep the first `num_tokens`.

    Returns evaluated arrays of exactly that length; runs on the same I/O thread as `load`. `parts` is
    emptied on the way, so that no more than one tensor is held twice.
    """
    import mlx.core as mx

    # The stream is named in every call: a default set here could be seen by the device thread.
    joined: Arrays = {}
    for name in list(parts[0]):
        pieces = [part.pop(name) for part in parts]
        whole = mx.concatenate(pieces, axis=2, stream=mx.cpu) if len(pieces) > 1 else pieces[0]
        if whole.shape[2] > num_tokens:
            first, _ = mx.split(whole, [num_tokens], axis=2, stream=mx.cpu)
            whole = mx.contiguous(first, stream=mx.cpu)
        mx.eval(whole)
        joined[name] = whole
    return joined


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
        fields = json.loads(header)
        metadata = fields["__metadata__"]
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
    return name, model, _layout(fields, payload_bytes=payload_bytes, num_tokens=name.num_tokens)


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
