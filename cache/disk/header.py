"""A snapshot file's header: writing and parsing it.

The header says which model and which tokens the KV belongs to, and contains the checksums, which `format`
verifies. Each field has a type and a range, and only the exact text that `write` makes is valid; any other
text raises `DoubtfulSnapshotError`.

Layout: 8 bytes of length, then a JSON object padded to 8 bytes (safetensors 0.x): metadata, then the tensors
in the order of their sections, the state last.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cache.names.blocks import DIGEST_BYTES
from cache.names.errors import DoubtfulSnapshotError
from cache.names.identity import FORMAT_VERSION
from cache.names.snapshot import CARRIED, ITEM_BYTES, MOST_TOKEN_BYTES, STATE, Layout, Name, States, sections

from .codec import PLAIN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from cache.names.identity import Identity
    from cache.names.snapshot import Tensor

    from .codec import Codec, FileReader

#: The header's checksum is at a fixed place, since it is verified before the file is used. The checksum and
#: the length (16 hex digits) of each section follow.
CHECKSUM_CHARS: Final = 32
CHECKSUM_AT: Final = 8 + len('{"__metadata__":{"checksum":"')
CHECKSUM_END: Final = CHECKSUM_AT + CHECKSUM_CHARS
SECTIONS_AT: Final = CHECKSUM_END + len('","sections":"')
SECTION_CHARS: Final = CHECKSUM_CHARS + 16
BLANK: Final = b"0" * CHECKSUM_CHARS

#: Enough for thousands of tensors and the largest block; parsing takes up to twenty times that memory.
_MAX_BYTES: Final = 1 << 20
#: MLX stores an axis's length in 32 bits.
_MAX_DIM: Final = (1 << 31) - 1
_MAX_AXES: Final = 8

_HEX: Final = "[0-9a-f]"
_POSITION: Final = "(0|[1-9][0-9]{0,9})"
#: The beginning of the header, in every format version.
_BEGINNING: Final = re.compile(
    rf'{{"__metadata__":{{"checksum":"{_HEX}{{32}}",'
    rf'(?:"state":"{_HEX}{{48}}",|"sections":"((?:{_HEX}{{48}})*)",)?'
    rf'"format":"turnkeep","version":"([0-9]{{1,9}})","identity":"({_HEX}{{64}})",'.encode()
)
#: The rest of the metadata, in this version.
_REST: Final = re.compile(
    rf'"model":"{{\\"block_tokens\\":([1-9][0-9]{{0,4}}),[ !#-\[\]-~]*(?:\\[ -~][ !#-\[\]-~]*)*",'
    rf'"parent":"({_HEX}{{64}})","digest":"({_HEX}{{64}})","start":"{_POSITION}","end":"{_POSITION}",'
    rf'"tokens":"((?:{_HEX}{{8}})+)","resumable":"([01])","mark":"({_HEX}{{16}})"}}'.encode()
)

_SIZE: Final = "(?:0|[1-9][0-9]{0,18})"
#: One tensor; the JSON object ends after the last one.
_TENSOR: Final = re.compile(
    rf',"([a-z0-9.]+)":{{"dtype":"([A-Z0-9]+)","shape":\[((?:{_SIZE}(?:,{_SIZE})*)?)\],'
    rf'"data_offsets":\[({_SIZE}),({_SIZE})\]}}'.encode()
)

_PATH: Final = r"[0-9]+(?:\.[0-9]+)*"
#: All tensor names of a file, each followed by a space: each layer's keys and values, sketches, states.
_NAMES: Final = re.compile(
    rf"(?:({_PATH})\.keys \1\.values |"
    rf"({_PATH})(?:\.keys\.codes \2\.keys\.scales \2\.keys\.biases"
    r" \2\.values\.codes \2\.values\.scales \2\.values\.biases ))*"
    rf"(?:({_PATH})\.sketch\.codes \3\.sketch\.scales \3\.sketch\.biases )*"
    rf"(?:{re.escape(CARRIED)}({_PATH})\.sketch\.codes {re.escape(CARRIED)}\4\.sketch\.scales"
    rf" {re.escape(CARRIED)}\4\.sketch\.biases )*"
    rf"(?:{re.escape(STATE)}{_PATH}\.[a-z]+[0-9]* )*"
)
#: Stands for the unknown name of a file of another format version; no chain contains it.
NO_NAME: Final = Name(bytes(DIGEST_BYTES), 0, b"")


class Section(NamedTuple):
    """A part of a file whose tensors are read together: its size, and its checksum as hex."""

    size_bytes: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. `identity` is the model identity's hex digest.

    If the file has another format version, only the identity is known, and `name` is `NO_NAME`.
    """

    identity: str
    name: Name = NO_NAME
    layout: Layout = ()
    states: States = ()
    sections: tuple[Section, ...] = ()
    block_tokens: int = 1

    @property
    def is_foreign(self) -> bool:
        """Whether the file has another format version."""
        return not self.name.tokens


def write(name: Name, identity: Identity, tensors: Sequence[Tensor]) -> bytes:
    """Return a header's bytes, with zeros for the checksums, which `format.write` inserts.

    Raises `ValueError` if the tensors do not fit the name.
    """
    sizes = (sum(tensor.data.nbytes for tensor in section) for section in sections(tensors))
    metadata = {
        "checksum": BLANK.decode(),
        "sections": "".join(f"{BLANK.decode()}{size:016x}" for size in sizes),
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
        "mark": name.mark.hex(),
    }
    at = 0
    specs: dict[str, Any] = {"__metadata__": metadata}
    for tensor in tensors:
        end = at + tensor.data.nbytes
        specs[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(specs, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    try:
        _check_length(len(text), len(text))
        parse(head, payload_bytes=at)
    except DoubtfulSnapshotError as error:
        raise ValueError(f"not a snapshot of {name.num_tokens} tokens: {error.reason}") from None
    return head


def read_header(path: Path, codec: Codec = PLAIN) -> Header:
    """Read a snapshot file's header; verify no checksum.

    Of a file of another format version only the identity is read: see `Header.is_foreign`. Raises `OSError`,
    and `DoubtfulSnapshotError` if the file is not a snapshot of Turnkeep, or if its header names another
    snapshot than its file name (not checked if the format version differs).
    """
    with open_file(path, codec) as (_, head, payload_bytes):
        header = parse(head, payload_bytes=payload_bytes)
    if not header.is_foreign and header.name.digest != codec.digest_in(path):
        raise DoubtfulSnapshotError("the file bears another snapshot's name")
    return header


def read_name(path: Path, codec: Codec = PLAIN) -> Name:
    """Read a snapshot's `Name` from its file's header, as `read_header` does.

    Raises the errors of `read_header`, and `DoubtfulSnapshotError` for another format version.
    """
    header = read_header(path, codec)
    if header.is_foreign:
        raise DoubtfulSnapshotError("another format version")
    return header.name


@contextmanager
def open_file(path: Path, codec: Codec = PLAIN) -> Iterator[tuple[FileReader, bytes, int]]:
    """Open a file; yield a `FileReader`, the header's bytes (with its length), and the payload's size.

    Raises `OSError`, also for a symbolic link, and `DoubtfulSnapshotError` if the file is too short for a
    header, or does not decrypt.
    """
    # `_open` neither blocks on a pipe nor follows a link.
    with open(path, "rb", buffering=0, opener=_open) as file:
        reader = codec.reader(file.fileno(), path)
        if reader.size_bytes < 8:
            raise DoubtfulSnapshotError("shorter than its header")
        length: int = struct.unpack("<Q", reader.read(8))[0]
        _check_length(length, reader.size_bytes - 8)
        head = struct.pack("<Q", length) + reader.read(length)
        yield reader, head, reader.size_bytes - len(head)


def parse(head: bytes, *, payload_bytes: int) -> Header:
    """Parse a header, which begins with its length. Raises `DoubtfulSnapshotError`."""
    beginning = _BEGINNING.match(head, 8)
    if beginning is None:
        raise DoubtfulSnapshotError("unreadable header: it does not begin as a snapshot of Turnkeep's does")
    claims, version, identity = beginning.groups()
    if int(version) != FORMAT_VERSION:
        return Header(identity.decode())
    rest = _REST.match(head, beginning.end())
    if rest is None or claims is None:
        raise DoubtfulSnapshotError("unreadable header: fields of other types, or out of range")
    block, parent, digest, start, end, tokens, resumable, mark = (found.decode() for found in rest.groups())
    name = Name(
        bytes.fromhex(parent), int(start), bytes.fromhex(tokens), resumable == "1", bytes.fromhex(mark)
    )
    if name.span.end != int(end) or name.digest.hex() != digest:
        raise DoubtfulSnapshotError("a name that contradicts its tokens")
    if len(name.tokens) > MOST_TOKEN_BYTES:
        raise DoubtfulSnapshotError("more tokens than a snapshot has")
    found = tuple(
        Section(int(claims[at + CHECKSUM_CHARS : at + SECTION_CHARS], 16), claims[at : at + CHECKSUM_CHARS])
        for at in range(0, len(claims), SECTION_CHARS)
    )
    sizes = tuple(section.size_bytes for section in found)
    layout, states = _tensors(head[rest.end() :], payload_bytes, sizes, name.num_tokens, name.resumable)
    return Header(identity.decode(), name, layout, states, found, int(block))


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def _check_length(length: int, most: int) -> None:
    if not SECTIONS_AT < length <= min(most, _MAX_BYTES):
        raise DoubtfulSnapshotError("shorter than its header, or an absurd header length")


@lru_cache(maxsize=16)
def _tensors(
    text: bytes, payload_bytes: int, sizes: tuple[int, ...], num_tokens: int, resumable: bool
) -> tuple[Layout, States]:
    """Parse the header's list of tensors. Cached, because the text is the same in all blocks of a chain.

    A valid list has complete groups of keys and values, then the state, without gaps, up to the end of the
    file. Each section ends where a tensor ends, and the state is a section of its own.
    """
    layout: list[tuple[str, str, tuple[int, ...]]] = []
    states: list[tuple[str, str, tuple[int, ...]]] = []
    at = kv_bytes = 0
    ends = {0}
    for key, dtype, shape, at in _listed(text):
        ends.add(at)
        if key.startswith(STATE):
            states.append((key, dtype, shape))
            continue
        is_carried = key.startswith(CARRIED)
        if len(shape) != 4 or shape[0] != 1 or (shape[2] != num_tokens and not is_carried):
            raise DoubtfulSnapshotError(f"{key} has the wrong shape")
        layout.append((key, dtype, (shape[1], shape[3])))
        kv_bytes = at
    names = [name for name, _, _ in (*layout, *states)]
    if not _NAMES.fullmatch("".join(f"{name} " for name in names)) or len(set(names)) < len(names):
        raise DoubtfulSnapshotError("not the tensors of a KV snapshot")
    if not names if resumable else states:
        raise DoubtfulSnapshotError("not the tensors that it says it has")
    edges = [0, *accumulate(sizes)]
    if not at == edges[-1] == payload_bytes:
        raise DoubtfulSnapshotError("tensors do not cover the payload")
    if not ends.issuperset(edges) or (states and edges[-2:-1] != [kv_bytes]):
        raise DoubtfulSnapshotError("sections that are none of these tensors")
    return tuple(layout), tuple(states)


def _listed(text: bytes) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Yield each tensor's name, type, shape and end in the payload, from the text of a header."""
    place = at = 0
    while (found := _TENSOR.match(text, place)) is not None:
        place = found.end()
        key, dtype, dims, *offsets = (part.decode() for part in found.groups())
        shape = tuple(map(int, dims.split(","))) if dims else ()
        if dtype not in ITEM_BYTES or len(shape) > _MAX_AXES or max(shape, default=0) > _MAX_DIM:
            raise DoubtfulSnapshotError(f"{key} is of a type or a shape that no tensor has")
        start, at = at, at + math.prod(shape) * ITEM_BYTES[dtype]
        if offsets != [str(start), str(at)]:
            raise DoubtfulSnapshotError(f"{key} has the wrong place or length")
        yield key, dtype, shape, at
    if text[place:].rstrip(b" ") != b"}":
        raise DoubtfulSnapshotError("unreadable header: tensors that are said in another way")
