"""Write, verify and read a snapshot's file, which is a safetensors file.

The header (`header`) says which model and which tokens the KV belongs to. No part of a file is used before
its length, checksum, identity, name and layout are verified. The module knows files and bytes, but nothing of
MLX, of the index, or of sessions.

The tensors follow the header without gaps, in sections: one for all layers of the same reach (the tokens that
a layer sees). Some files, the carriers, then have the sketches (2-bit copies of keys) of the blocks before
them. Last comes the state of layers that are not stored per token. The header and each section have their own
checksum, because a restore reads only the sections that a layer still sees, and the state only from a chain's
last file.
"""

from __future__ import annotations

import errno
import math
import os
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import xxhash

from cache.names.errors import DoubtfulSnapshotError
from cache.names.snapshot import CARRIED, ITEM_BYTES, Tensor, sections

from . import header as headers
from . import private
from .codec import PLAIN
from .header import BLANK, CHECKSUM_AT, CHECKSUM_CHARS, CHECKSUM_END, SECTION_CHARS, SECTIONS_AT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from cache.names.blocks import Span
    from cache.names.identity import Identity
    from cache.names.snapshot import Layout, Name, States, TensorBuffers

    from .codec import Codec, FileReader

#: Errors that mean a lack of open files or memory, in the process or the machine.
_LACKS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
#: Bytes per system call: enough that retaking the GIL after each costs little, few enough that they are still
#: in the processor's cache when they are hashed.
_READ_BYTES: Final = 1 << 20
#: The most buffers that a system call takes (IOV_MAX).
_MAX_BUFFERS: Final = max(16, os.sysconf("SC_IOV_MAX"))


@dataclass(frozen=True, slots=True)
class EncodedSnapshot:
    """A snapshot ready to be written. Its `header` still lacks the checksums."""

    header: bytes
    tensors: tuple[Tensor, ...]

    @property
    def size_bytes(self) -> int:
        """The exact size of the file's contents."""
        return len(self.header) + sum(tensor.data.nbytes for tensor in self.tensors)


def encode(name: Name, identity: Identity, tensors: tuple[Tensor, ...]) -> EncodedSnapshot:
    """Encode a snapshot for `write`. Raises `ValueError` if the tensors do not fit the name."""
    return EncodedSnapshot(headers.write(name, identity, tensors), tensors)


def write(encoded: EncodedSnapshot, path: Path, codec: Codec = PLAIN) -> None:
    """Write and fsync a file, replacing any old content. Without an encryption key no tensor is copied.

    Runs on the writer thread. Raises `OSError`.
    """
    header = bytearray(encoded.header)
    for i, section in enumerate(sections(encoded.tensors)):
        hasher = xxhash.xxh3_128()
        for tensor in section:
            hasher.update(tensor.data)
        at = SECTIONS_AT + i * SECTION_CHARS
        header[at : at + CHECKSUM_CHARS] = hasher.hexdigest().encode()
    header[CHECKSUM_AT:CHECKSUM_END] = xxhash.xxh3_128_hexdigest(header).encode()
    # A system call for each tensor would take 1.5 times the processor time, and retake the GIL each time.
    with open(path, "wb", buffering=0, opener=private.opener) as file:
        writer = codec.writer(file.fileno(), path)
        for group in _batches((memoryview(header), *(tensor.data for tensor in encoded.tensors))):
            writer.write(group)
        writer.finish()


def is_lack(error: Exception) -> bool:
    """Whether an error is a lack of memory or of open files, which does not mean that the file is damaged."""
    return isinstance(error, OSError) and error.errno in _LACKS


def prove(path: Path, codec: Codec = PLAIN) -> Name:
    """Verify a whole file against its file name and its header; return its snapshot's `Name`. Blocking.

    Raises `DoubtfulSnapshotError`, or `OSError` if the file may be valid (see `is_lack`).
    """
    name = headers.read_name(path, codec)
    with _opened(path, codec) as found:
        scratch = memoryview(bytearray(min(_READ_BYTES, found.payload_bytes)))
        for i, section in enumerate(found.header.sections):
            found.read(i, _in_scratch(scratch, section.size_bytes))
    return name


def tensors(path: Path, codec: Codec = PLAIN) -> dict[str, Tensor]:
    """Verify a whole file; return its KV by the names of the tensors, without sketches of other blocks.

    Raises the errors of `prove`.
    """
    with _opened(path, codec) as found:
        payload, at = memoryview(bytearray(found.payload_bytes)), 0
        for i, section in enumerate(found.header.sections):
            part = payload[at : at + section.size_bytes]
            found.read(i, _batches([part] if part else []))
            at += part.nbytes
    kv: dict[str, Tensor] = {}
    at = 0
    for name, dtype, (num_heads, width) in found.header.layout:
        if name.startswith(CARRIED):
            break
        shape = 1, num_heads, found.header.name.num_tokens, width
        part = payload[at : at + math.prod(shape) * ITEM_BYTES[dtype]]
        kv[name] = Tensor(name, dtype, shape, part)
        at += part.nbytes
    return kv


def peek(
    path: Path, digest: bytes, start: int, identity: bytes, codec: Codec = PLAIN
) -> tuple[Layout, States]:
    """Read the layout and states of the snapshot `digest` from its header, and verify the header.

    Raises `DoubtfulSnapshotError` if the file is not that snapshot, `OSError` as `prove` does.
    """
    with _opened(path, codec) as found:
        found.check(digest, start, identity)
        return found.header.layout, found.header.states


def read(
    path: Path,
    digest: bytes,
    start: int,
    identity: bytes,
    codec: Codec = PLAIN,
    *,
    layout: Layout,
    places: Sequence[TensorBuffers],
    carried: tuple[Span, Sequence[TensorBuffers]] | None = None,
    state: Sequence[memoryview] | None = None,
) -> int:
    """Read a snapshot's KV into buffers, and verify each section that is read.

    `layout` is the model's. `places` are the buffers for each of its tensors, in the same order; a buffer may
    be for some of the tokens only, and a section without a buffer is skipped. If the file is a carrier,
    `carried` has the earlier tokens whose sketches the file contains, and the buffers for these sketches,
    which come last in the layout. Each byte is read once, to its final buffer, and hashed there. The header
    is verified before the first write, a section after its last byte: after a `DoubtfulSnapshotError` the
    contents of the buffers must not be used.

    `state` are the buffers for the state's tensors, in the order of `peek`. Only the state of a chain's last
    snapshot is read; None skips the state.

    Returns the number of bytes read; raises `OSError` as `prove` does. Safe on any thread; waits for the disk
    without the GIL.
    """
    with _opened(path, codec) as found:
        found.check(digest, start, identity)
        if state is not None and not (found.header.name.resumable and len(state) == len(found.header.states)):
            raise DoubtfulSnapshotError("no state to resume from")
        together = _together(found.header, layout, places, carried)
        for i, (of, run) in enumerate(together):
            segments = list(run[0].segments(of))
            if any(at is not None for at, _ in segments):
                found.read(i, _to_places(run, segments))
        if state:
            found.read(len(together), _batches(buffer for buffer in state if buffer.nbytes))
        return found.num_read


def _together(
    header: headers.Header,
    layout: Layout,
    places: Sequence[TensorBuffers],
    carried: tuple[Span, Sequence[TensorBuffers]] | None,
) -> list[tuple[Span, list[TensorBuffers]]]:
    """Group the tensors' buffers by section of the file, in order; return each section's tokens and buffers.

    Raises `DoubtfulSnapshotError` if the file has other sections than this layout.
    """
    together = [(header.name.span, list(run)) for _, run in groupby(places, key=attrgetter("section"))]
    if carried is not None:
        together.append((carried[0], list(carried[1])))
    if header.layout != layout:
        raise DoubtfulSnapshotError("layers unlike the model's")
    wanted = [
        of.num_tokens * sum(len(place.rows) * place.token_bytes for place in run) for of, run in together
    ]
    sizes = [section.size_bytes for section in header.sections]
    if sizes[: len(sizes) - bool(header.states)] != wanted:
        raise DoubtfulSnapshotError("layers unlike the model's")
    return together


def _to_places(
    places: Sequence[TensorBuffers], segments: Sequence[tuple[int | None, int]]
) -> Iterator[list[memoryview]]:
    """Yield the buffers for a section; tokens without a buffer go to scratch memory, only to be hashed.

    A row's buffers are filled together before they are hashed, so they must not overlap.
    """
    unused = 0
    parts: list[tuple[bool, int, int]] = []  # of the scratch memory or of a row: start and length in tokens
    for at, num in segments:
        parts.append((at is None, unused if at is None else at, num))
        unused += num if at is None else 0
    scratch = memoryview(bytearray(unused * max(place.token_bytes for place in places)))
    rows = (
        [
            (scratch if is_unused else row)[at * place.token_bytes : (at + num) * place.token_bytes]
            for is_unused, at, num in parts
        ]
        for place in places
        if place.token_bytes
        for row in place.rows
    )
    # Rows share the scratch memory, so each row is read and hashed by itself.
    return rows if unused else _batches(chain.from_iterable(rows))


class _OpenSnapshot:
    """An open file whose header has been verified, and whose sections have not been verified yet."""

    def __init__(self, file: FileReader, head: bytes, payload_bytes: int) -> None:
        self.header = headers.parse(head, payload_bytes=payload_bytes)
        self.payload_bytes = payload_bytes
        #: Bytes read so far.
        self.num_read = len(head)
        self._file = file
        self._starts = [*accumulate((one.size_bytes for one in self.header.sections), initial=len(head))]
        blank = head[:CHECKSUM_AT] + BLANK + head[CHECKSUM_END:]
        if (
            not self.header.is_foreign
            and xxhash.xxh3_128_hexdigest(blank).encode() != head[CHECKSUM_AT:CHECKSUM_END]
        ):
            raise DoubtfulSnapshotError("wrong checksum")

    def check(self, digest: bytes, start: int, identity: bytes) -> None:
        """Raise `DoubtfulSnapshotError` if this is not the requested snapshot."""
        if self.header.is_foreign:
            raise DoubtfulSnapshotError("another format version")
        if self.header.identity != identity.hex():
            raise DoubtfulSnapshotError("made by another model")
        if self.header.name.digest != digest or self.header.name.start != start:
            raise DoubtfulSnapshotError("holds other tokens than asked for")

    def read(self, section: int, groups: Iterable[list[memoryview]]) -> None:
        """Read a section, one system call per group of buffers.

        Each group is hashed at once, while it is in the processor's cache, so groups may share a buffer.
        Raises `DoubtfulSnapshotError` if the section is too short or its checksum wrong.
        """
        self._file.seek(self._starts[section])
        hasher = xxhash.xxh3_128()
        for group in groups:
            self._file.fill(group)
            for buffer in group:
                hasher.update(buffer)
        size_bytes, checksum = self.header.sections[section]
        if hasher.hexdigest().encode() != checksum:
            raise DoubtfulSnapshotError("wrong checksum")
        self.num_read += size_bytes


@contextmanager
def _opened(path: Path, codec: Codec) -> Iterator[_OpenSnapshot]:
    """Open a snapshot's file and parse its header. Any defect is a `DoubtfulSnapshotError`."""
    try:
        with headers.open_file(path, codec) as (file, head, payload_bytes):
            yield _OpenSnapshot(file, head, payload_bytes)
    except OSError as error:
        if is_lack(error):
            raise
        raise DoubtfulSnapshotError(f"unreadable: {error.strerror}") from error


def _in_scratch(scratch: memoryview, size_bytes: int) -> Iterator[list[memoryview]]:
    """Yield buffers in scratch memory for `size_bytes` bytes that are hashed and not kept."""
    return ([scratch[:num_left]] for num_left in range(size_bytes, 0, -_READ_BYTES))


def _batches(runs: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Group buffers, one group per system call: about `_READ_BYTES`, at most `_MAX_BUFFERS` buffers."""
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
