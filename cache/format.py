"""One snapshot is one safetensors file: write it, check it, read it.

The header's metadata says whose KV the file holds, and carries a checksum over everything else in the
file. Nothing of a file is used before length, checksum, identity, name and layout are verified.
Knows files and bytes; nothing of MLX, of the index, or of what a snapshot is for.

Layout: 8 bytes header length, JSON header padded to 8 bytes, tensors back to back (safetensors 0.x): first
those that are cut by tokens, then the state of layers that cannot be. The first checksum covers all but the
state, which has its own: of a chain, only the last file's state is ever read.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import xxhash

from .blocks import TOKEN_BYTES
from .identity import FORMAT_VERSION
from .snapshot import ITEM_BYTES, STATE, DoubtfulSnapshotError, Layout, Name, Place, States, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from .identity import Identity

SUFFIX: Final = ".safetensors"

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
_METADATA: Final = '{"__metadata__":'
_OPENING: Final = f'{_METADATA}{{"checksum":"'.encode()
_CHECKSUM_CHARS: Final = 32
_BLANK: Final = b"0" * _CHECKSUM_CHARS
_CHECKSUM_AT: Final = 8 + len(_OPENING)
_CHECKSUM_END: Final = _CHECKSUM_AT + _CHECKSUM_CHARS
_STATE_AT: Final = _CHECKSUM_END + len(b'","state":"')
_STATE_SUM_END: Final = _STATE_AT + _CHECKSUM_CHARS
_STATE_END: Final = _STATE_SUM_END + 16

_DECODER: Final = json.JSONDecoder()
#: The process or the machine has no more of something: open files, memory.
_LACKS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_MAX_HEADER_BYTES: Final = 64 << 20
#: What is read by a system call: enough that waiting for the GIL after each costs little, and no more than
#: the processor's cache keeps until it is hashed.
_READ_BYTES: Final = 1 << 20
#: The most buffers that a system call takes (IOV_MAX).
_MAX_BUFFERS: Final = max(16, os.sysconf("SC_IOV_MAX"))


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
    metadata = {
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
    specs: dict[str, Any] = {}
    for tensor in tensors:
        spec = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (at, at + tensor.data.nbytes)}
        specs[tensor.name] = spec
        at += tensor.data.nbytes
    try:
        _check(specs, name.num_tokens, resumable=name.resumable, payload_bytes=at, state_bytes=state_bytes)
    except DoubtfulSnapshotError as error:
        raise ValueError(f"not a snapshot of {name.num_tokens} tokens: {error.reason}") from None
    text = json.dumps(metadata | specs, separators=(",", ":")).encode()
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
    header = header[:_CHECKSUM_AT] + hasher.hexdigest().encode() + header[_CHECKSUM_END:]
    # Few system calls for all tensors: one for each takes half as much of the processor again, and waits for
    # the GIL as often.
    with path.open("wb", buffering=0) as file:
        for group in _batches((memoryview(header), *(tensor.data for tensor in draft.tensors))):
            _pour(file.fileno(), group)
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
    name, *_ = _parse(head, payload_bytes=size_bytes - len(head))
    if name.digest.hex() != path.stem:
        raise DoubtfulSnapshotError("the file bears another snapshot's name")
    return name


def is_lack(error: Exception) -> bool:
    """Say whether a file could not be read for want of open files or memory: it is as good as it was."""
    return isinstance(error, OSError) and error.errno in _LACKS


def verify(path: Path, digest: bytes, start: int, identity: bytes) -> Layout:
    """Prove that a file is the snapshot `digest` from position `start` under `identity` (a digest).

    Reads the whole file, blocking: call it on an I/O thread. Raises `DoubtfulSnapshotError`, and `OSError`
    where that says nothing of the file (`is_lack`).
    """
    with _opened(path, digest, start, identity) as found:
        scratch = memoryview(bytearray(min(_READ_BYTES, found.payload_bytes)))
        found.read(_in_scratch(scratch, found.payload_bytes - found.state_bytes))
        found.read_state(_in_scratch(scratch, found.state_bytes))
        return found.layout


def look(path: Path, digest: bytes, start: int, identity: bytes) -> tuple[Layout, States]:
    """Read what tensors the snapshot `digest` has, from a header that nothing has verified yet.

    Raises `DoubtfulSnapshotError` where the file cannot be that snapshot, `OSError` as `verify` does.
    """
    with _opened(path, digest, start, identity) as found:
        return found.layout, found.states


def read(
    path: Path,
    digest: bytes,
    start: int,
    identity: bytes,
    *,
    layout: Layout,
    places: Sequence[Place],
    num_tokens: int,
    state: Sequence[memoryview] | None = None,
) -> int:
    """Read the first `num_tokens` tokens of a snapshot into their places, and verify what is read.

    `layout` is what all snapshots of a chain share, `places` are in its order. Each byte is read once, to
    where it stays, and hashed there. The header is checked before anything is written; the checksum can only
    be checked afterwards: after a `DoubtfulSnapshotError` the places of this span hold what nobody may use.

    `state` is the memory of the state's tensors, in the order of `look`, for the last snapshot of a chain
    whose model has such layers; None leaves a state unread.

    Returns the bytes of the file that were read; raises `OSError` as `verify` does. Safe on any thread: it
    waits for the disk without the GIL.
    """
    with _opened(path, digest, start, identity) as found:
        if state is not None and not found.name.resumable:
            raise DoubtfulSnapshotError("no state to resume from")
        if found.layout != layout:
            raise DoubtfulSnapshotError("layers unlike those before it")
        runs = [
            row[start * place.token_bytes : (start + num_tokens) * place.token_bytes]
            for place in places
            if place.token_bytes
            for row in place.rows
        ]
        unused = found.num_tokens - num_tokens
        if unused:
            scratch = memoryview(bytearray(unused * max(place.token_bytes for place in places)))
            found.read([run, scratch[: run.nbytes // num_tokens * unused]] for run in runs)
        else:
            found.read(_batches(runs))
        if state is None:
            return found.size_bytes - found.state_bytes
        found.read_state(_batches(buffer for buffer in state if buffer.nbytes))
        return found.size_bytes


class _Found:
    """An open file whose header has been read and checked, and whose checksums are yet to be taken."""

    def __init__(self, file: int, head: bytes, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.payload_bytes = size_bytes - len(head)
        self.name, self.model, self.layout, self.states = _parse(head, payload_bytes=self.payload_bytes)
        self.state_bytes = _state_bytes(head)
        self.num_tokens = self.name.num_tokens
        self._file = file
        self._head = head

    def read(self, groups: Iterable[list[memoryview]]) -> None:
        """Read all but the state, a system call per group of buffers, and compare the checksum.

        A group is hashed before the next one is read: while it is in the processor's cache, and so that
        groups may share a buffer.
        """
        head = self._head
        self._read(
            groups,
            xxhash.xxh3_128(head[:_CHECKSUM_AT] + _BLANK + head[_CHECKSUM_END:]),
            head[_CHECKSUM_AT:_CHECKSUM_END],
        )

    def read_state(self, groups: Iterable[list[memoryview]]) -> None:
        """Read the state, behind all else, and compare its checksum."""
        self._read(groups, xxhash.xxh3_128(), self._head[_STATE_AT:_STATE_SUM_END])

    def _read(self, groups: Iterable[list[memoryview]], hasher: xxhash.xxh3_128, claimed: bytes) -> None:
        for group in groups:
            _fill(self._file, group)
            for buffer in group:
                hasher.update(buffer)
        if hasher.hexdigest().encode() != claimed:
            raise DoubtfulSnapshotError("wrong checksum")


@contextmanager
def _opened(path: Path, digest: bytes, start: int, identity: bytes) -> Iterator[_Found]:
    """Open a file that says it is a snapshot. What is wrong with it is a `DoubtfulSnapshotError`."""
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
        if is_lack(error):
            raise
        raise DoubtfulSnapshotError(f"unreadable: {error.strerror}") from error


def _in_scratch(scratch: memoryview, size_bytes: int) -> Iterator[list[memoryview]]:
    """Give buffers for so many bytes that are only to be hashed."""
    return ([scratch[:num_left]] for num_left in range(size_bytes, 0, -_READ_BYTES))


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
        buffers = _behind(buffers, num_read)
        if not buffers:
            return
    raise DoubtfulSnapshotError("shorter than its header says")


def _pour(file: int, buffers: list[memoryview]) -> None:
    """Write all buffers behind one another; a system call may do it in parts, as the disk gets full, say."""
    while buffers:
        buffers = _behind(buffers, os.writev(file, buffers))


def _behind(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Leave out the first bytes of buffers, with those that are empty then."""
    full = 0
    while full < len(buffers) and num_bytes >= buffers[full].nbytes:
        num_bytes -= buffers[full].nbytes
        full += 1
    return [buffers[full][num_bytes:], *buffers[full + 1 :]] if full < len(buffers) else []


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


def _parse(head: bytes, *, payload_bytes: int) -> tuple[Name, str, Layout, States]:
    """Take a header and its length apart: name, the identity's digest in hex, both kinds of tensors.

    Whatever is wrong with it becomes a `DoubtfulSnapshotError`.
    """
    try:
        text = head[8:].decode()
        metadata, end_at = _DECODER.raw_decode(text, len(_METADATA))
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
    if not text.startswith(_METADATA):
        raise DoubtfulSnapshotError("a header of another kind")
    layout, states = _tensors(text[end_at:], payload_bytes, _state_bytes(head), name.num_tokens, resumable)
    return name, model, layout, states


@lru_cache(maxsize=16)
def _tensors(
    text: str, payload_bytes: int, state_bytes: int, num_tokens: int, resumable: bool
) -> tuple[Layout, States]:
    """Read what follows the metadata: the same in all blocks of a chain, and slow to check one by one."""
    try:
        specs = json.loads("{" + text.removeprefix(","))
    except (ValueError, RecursionError) as error:
        raise DoubtfulSnapshotError(f"unreadable header: {type(error).__name__}") from error
    return _check(
        specs, num_tokens, resumable=resumable, payload_bytes=payload_bytes, state_bytes=state_bytes
    )


def _check(
    specs: dict[str, Any], num_tokens: int, *, resumable: bool, payload_bytes: int, state_bytes: int
) -> tuple[Layout, States]:
    """Check the tensors: complete groups of keys and values, then the state, back to back, to the end."""
    if not _NAMES.fullmatch("".join(f"{key} " for key in specs)):
        raise DoubtfulSnapshotError("not the tensors of a KV snapshot")
    if not specs if resumable else any(key.startswith(STATE) for key in specs):
        raise DoubtfulSnapshotError("not the tensors that it says it has")
    layout: list[tuple[str, str, tuple[int, ...]]] = []
    states: list[tuple[str, str, tuple[int, ...]]] = []
    at = kv_bytes = 0
    for key, spec in specs.items():
        dtype, shape, end = _spec(spec, at)
        if end - at != math.prod(shape) * ITEM_BYTES[dtype]:
            raise DoubtfulSnapshotError(f"{key} has the wrong length")
        at = end
        if key.startswith(STATE):
            states.append((key, dtype, shape))
            continue
        if len(shape) != 4 or shape[0] != 1 or shape[2] != num_tokens:
            raise DoubtfulSnapshotError(f"{key} has the wrong shape")
        layout.append((key, dtype, (shape[1], shape[3])))
        kv_bytes = end
    if (kv_bytes + state_bytes, at) != (payload_bytes, payload_bytes):
        raise DoubtfulSnapshotError("tensors do not cover the payload")
    return tuple(layout), tuple(states)


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
