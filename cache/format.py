"""One snapshot is one safetensors file: write it, check it, load it.

The header's metadata says whose KV the file holds, and carries a checksum over everything else in the
file. Nothing of a file reaches MLX before length, checksum, identity, name and layout are verified.
Knows files and bytes; nothing of the index or of what a snapshot is for.

Layout: 8 bytes header length, JSON header padded to 8 bytes, tensors back to back (safetensors 0.x): first
those that are cut by tokens, then the state of layers that cannot be. The first checksum covers all but the
state, which has its own: of a chain, only the last file's state is ever read.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeAlias

import xxhash

from .blocks import TOKEN_BYTES, Span, link
from .identity import FORMAT_VERSION

if TYPE_CHECKING:
    from pathlib import Path

    import mlx.core as mx

    from .identity import Identity

SUFFIX: Final = ".safetensors"

#: Bytes per element of the types that KV and states come in, by their names in safetensors.
ITEM_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2, "BOOL": 1, "U8": 1, "I32": 4, "U32": 4, "I64": 8}

#: What the names of a state's tensors begin with; the others are cut by tokens, along their axis 2.
STATE: Final = "state."
_PATH: Final = r"\d+(?:\.\d+)*"
#: All names of a file, a space behind each: keys and values of a layer together, then states.
_NAMES: Final = re.compile(
    rf"(?:({_PATH})\.keys \1\.values |"
    rf"({_PATH})(?:\.keys\.codes \2\.keys\.scales \2\.keys\.biases"
    r" \2\.values\.codes \2\.values\.scales \2\.values\.biases ))*"
    rf"(?:{re.escape(STATE)}{_PATH}\.[a-z]+\d* )*"
)

#: The checksum stands first, at a fixed place: it is verified before anything of the file is parsed. Behind
#: it stand the state's checksum and length, which say how far the first one reaches.
_OPENING: Final = b'{"__metadata__":{"checksum":"'
_CHECKSUM_CHARS: Final = 32
_BLANK: Final = b"0" * _CHECKSUM_CHARS
_CHECKSUM_AT: Final = 8 + len(_OPENING)
_CHECKSUM_END: Final = _CHECKSUM_AT + _CHECKSUM_CHARS
_STATE_AT: Final = _CHECKSUM_END + len(b'","state":"')
_STATE_SUM_END: Final = _STATE_AT + _CHECKSUM_CHARS
_STATE_END: Final = _STATE_SUM_END + 16

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
    """One tensor as plain bytes. `dtype` is a key of `ITEM_BYTES`.

    `shape` is (1, heads, tokens, head_dim), unless it is part of a state: then it may be any.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def of_state(self) -> bool:
        """Whether it holds what is true at the snapshot's end only."""
        return self.name.startswith(STATE)


#: Tensors by name, as MLX arrays.
Arrays: TypeAlias = "dict[str, mx.array]"

#: Name, type and shape (the token axis left out) of every tensor that is cut by tokens: equal in all
#: snapshots of a chain.
Layout = tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Name:
    """Which KV a snapshot holds: the packed `tokens` from position `start` on, after the prefix `parent`.

    A session can be resumed at its end, unless it lacks the state that some layers have there: without being
    `resumable` it only joins what is before it to what follows.
    """

    parent: bytes
    start: int
    tokens: bytes
    resumable: bool = True

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
    """A snapshot ready to be written. `header` is complete but for its checksums."""

    header: bytes
    tensors: tuple[Tensor, ...]

    @property
    def size_bytes(self) -> int:
        """The exact size of the file."""
        return len(self.header) + sum(tensor.data.nbytes for tensor in self.tensors)


def draft(name: Name, identity: Identity, tensors: tuple[Tensor, ...]) -> Draft:
    """Lay out a file. Raises `ValueError` where the tensors do not fit the name: a fault of the caller."""
    state_bytes = sum(tensor.data.nbytes for tensor in tensors if tensor.of_state)
    header: dict[str, Any] = {
        "__metadata__": {
            "checksum": _BLANK.decode(),
            "state": f"{_BLANK.decode()}{state_bytes:016x}",
            "format": "turnkeep",
            "version": str(FORMAT_VERSION),
            "identity": identity.digest().hex(),
            "model": identity.to_json(),
            "parent": name.parent.hex(),
            "digest": name.digest.hex(),
            "start": str(name.start),
            "end": str(name.span.end),
            "tokens": name.tokens.hex(),
            "resumable": str(int(name.resumable)),
        }
    }
    at = 0
    for tensor in tensors:
        spec = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (at, at + tensor.data.nbytes)}
        header[tensor.name] = spec
        at += tensor.data.nbytes
    try:
        _layout(header, name, payload_bytes=at, state_bytes=state_bytes)
    except DoubtfulSnapshotError as error:
        raise ValueError(f"not a snapshot of {name.num_tokens} tokens: {error.reason}") from None
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Draft(struct.pack("<Q", len(text)) + text, tensors)


def write(draft: Draft, path: Path) -> None:
    """Write and fsync a file, over whatever is there, without copying a tensor.

    Runs on the writer thread. Raises `OSError`.
    """
    state = xxhash.xxh3_128()
    for tensor in draft.tensors:
        if tensor.of_state:
            state.update(tensor.data)
    header = draft.header[:_STATE_AT] + state.hexdigest().encode() + draft.header[_STATE_SUM_END:]
    hasher = xxhash.xxh3_128(header)
    for tensor in draft.tensors:
        if not tensor.of_state:
            hasher.update(tensor.data)
    with path.open("wb") as file:
        file.write(header[:_CHECKSUM_AT] + hasher.hexdigest().encode() + header[_CHECKSUM_END:])
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
        head = file.read(8)
        head += file.read(_header_bytes(head, size_bytes))
    name, _, _ = _parse(head, payload_bytes=size_bytes - len(head))
    if name.digest.hex() != path.stem:
        raise DoubtfulSnapshotError("the file bears another snapshot's name")
    return name


def verify(path: Path, digest: bytes, start: int, identity: bytes) -> Layout:
    """Prove that a file is the snapshot `digest` from position `start` under `identity` (a digest).

    Reads the whole file, blocking: call it on an I/O thread. Raises `DoubtfulSnapshotError`.
    """
    _, layout = _verify(path, digest, start, identity, state=True)
    return layout


def _verify(path: Path, digest: bytes, start: int, identity: bytes, *, state: bool) -> tuple[Name, Layout]:
    """Verify a file, but for its state where that is of no use."""
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            head = file.read(8)
            head += file.read(_header_bytes(head, size_bytes))
            hasher = xxhash.xxh3_128(head[:_CHECKSUM_AT] + _BLANK + head[_CHECKSUM_END:])
            _hash(file, hasher, size_bytes - len(head) - _state_bytes(head))
            sound = hasher.hexdigest().encode() == head[_CHECKSUM_AT:_CHECKSUM_END]
            if sound and state:
                hasher = xxhash.xxh3_128()
                _hash(file, hasher, _state_bytes(head))
                sound = hasher.hexdigest().encode() == head[_STATE_AT:_STATE_SUM_END]
    except OSError as error:
        raise DoubtfulSnapshotError(f"unreadable: {error.strerror}") from error
    if not sound:
        raise DoubtfulSnapshotError("wrong checksum")
    name, model, layout = _parse(head, payload_bytes=size_bytes - len(head))
    if model != identity.hex():
        raise DoubtfulSnapshotError("made by another model")
    if name.digest != digest or name.start != start:
        raise DoubtfulSnapshotError("holds other tokens than asked for")
    return name, layout


def leave_thread() -> None:
    """Give up what the calling thread holds of MLX, before it ends; it must not load any more.

    Streams that outlive their thread now and then abort the process at its exit.
    """
    import mlx.core as mx

    mx.clear_streams()


def load(
    path: Path, digest: bytes, start: int, identity: bytes, *, like: Layout | None = None, state: bool = True
) -> tuple[Layout, Arrays]:
    """Verify a file, then read its tensors, evaluated, on the calling I/O thread.

    `like` is the layout of the snapshot before it, which it must share. Its state, if it has one, is read
    where it is the last of its chain: with `state`.

    Everything runs on the CPU stream, so that no other thread than the device thread gives the device
    work. Raises `DoubtfulSnapshotError`.
    """
    import mlx.core as mx

    name, layout = _verify(path, digest, start, identity, state=state)
    if state and not name.resumable:
        raise DoubtfulSnapshotError("no state to resume from")
    if like not in (None, layout):
        raise DoubtfulSnapshotError("layers unlike those before it")
    try:
        arrays = mx.load(str(path), stream=mx.cpu)
    except RuntimeError as error:
        raise DoubtfulSnapshotError(f"MLX cannot read it: {error}") from error
    if not isinstance(arrays, dict):  # mx.load gives a dict for every safetensors file
        raise TypeError(type(arrays))
    arrays = {name: array for name, array in arrays.items() if state or not name.startswith(STATE)}
    # mx.load is lazy and holds the file open until its arrays are evaluated.
    mx.eval(arrays)
    return layout, arrays


def join(parts: list[Arrays], num_tokens: int) -> Arrays:
    """Join the tensors of consecutive snapshots along their tokens, and keep the first `num_tokens`.

    Returns evaluated arrays of exactly that length, and the last one's state as it is; runs on the same I/O
    thread as `load`. `parts` is emptied on the way, so that no more than one tensor is held twice.
    """
    import mlx.core as mx

    # The stream is named in every call: a default set here could be seen by the device thread.
    joined: Arrays = {name: parts[-1].pop(name) for name in list(parts[-1]) if name.startswith(STATE)}
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
    if not _STATE_END - 8 < length <= min(_MAX_HEADER_BYTES, size_bytes - 8):
        raise DoubtfulSnapshotError("shorter than its header, or an absurd header length")
    return length


def _state_bytes(head: bytes) -> int:
    try:
        return int(head[_STATE_SUM_END:_STATE_END], 16)
    except ValueError:
        raise DoubtfulSnapshotError("unreadable header: no length of its state") from None


def _hash(file: BinaryIO, hasher: xxhash.xxh3_128, size_bytes: int) -> None:
    """Feed the next `size_bytes` of a file to a hasher; there may be fewer."""
    while size_bytes > 0 and (piece := file.read(min(_READ_BYTES, size_bytes))):
        hasher.update(piece)
        size_bytes -= len(piece)


def _parse(head: bytes, *, payload_bytes: int) -> tuple[Name, str, Layout]:
    """Take a header and its length apart: name, the identity's digest in hex, layout.

    Whatever is wrong with it becomes a `DoubtfulSnapshotError`.
    """
    try:
        fields = json.loads(head[8:])
        metadata = fields["__metadata__"]
        if (metadata["format"], metadata["version"]) != ("turnkeep", str(FORMAT_VERSION)):
            raise DoubtfulSnapshotError("another format version")
        parent, tokens = bytes.fromhex(metadata["parent"]), bytes.fromhex(metadata["tokens"])
        resumable = {"0": False, "1": True}[metadata["resumable"]]
        name = Name(parent, int(metadata["start"]), tokens, resumable)
        end, digest, model = int(metadata["end"]), bytes.fromhex(metadata["digest"]), metadata["identity"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DoubtfulSnapshotError(f"unreadable header: {type(error).__name__}") from error
    if not name.tokens or len(name.tokens) % TOKEN_BYTES or name.start < 0:
        raise DoubtfulSnapshotError("no tokens, or half a token")
    if name.span.end != end or name.digest != digest:
        raise DoubtfulSnapshotError("a name that contradicts its tokens")
    return name, model, _layout(fields, name, payload_bytes=payload_bytes, state_bytes=_state_bytes(head))


def _layout(fields: dict[str, Any], name: Name, *, payload_bytes: int, state_bytes: int) -> Layout:
    """Check the tensors: complete groups of keys and values, then the state, back to back, to the end."""
    specs = {key: spec for key, spec in fields.items() if key != "__metadata__"}
    if not _NAMES.fullmatch("".join(f"{key} " for key in specs)):
        raise DoubtfulSnapshotError("not the tensors of a KV snapshot")
    if not specs if name.resumable else any(key.startswith(STATE) for key in specs):
        raise DoubtfulSnapshotError("not the tensors that it says it has")
    layout: list[tuple[str, str, tuple[int, ...]]] = []
    at = kv_bytes = 0
    for key, spec in specs.items():
        dtype, shape, end = _spec(spec, at)
        if end - at != math.prod(shape) * ITEM_BYTES[dtype]:
            raise DoubtfulSnapshotError(f"{key} has the wrong length")
        at = end
        if key.startswith(STATE):
            continue
        if len(shape) != 4 or shape[0] != 1 or shape[2] != name.num_tokens:
            raise DoubtfulSnapshotError(f"{key} has the wrong shape")
        layout.append((key, dtype, (shape[1], shape[3])))
        kv_bytes = end
    if (kv_bytes + state_bytes, at) != (payload_bytes, payload_bytes):
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
