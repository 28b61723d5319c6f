"""Reads and writes files, names and rows unencrypted; `encryption` overrides this for a directory with a key.

`format`, `folder` and `catalog` use this module for every codec. The module knows bytes and names, but
neither headers nor tensors.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final

from cache.names.blocks import DIGEST_BYTES
from cache.names.errors import DoubtfulSnapshotError, SealedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from .rows import SnapshotRow

SUFFIX: Final = ".safetensors"
#: The file that identifies the key with which a directory's contents are encrypted.
SEAL: Final = "sealed"

_IS_DIGEST: Final = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}").fullmatch


class FileReader:
    """Reads an open file's contents from a position. Used by one thread."""

    def __init__(self, file: int) -> None:
        self._file = file
        self.size_bytes = os.fstat(file).st_size

    def seek(self, at: int) -> None:
        """Move to a position in the contents, in bytes."""
        os.lseek(self._file, at, os.SEEK_SET)

    def fill(self, buffers: list[memoryview]) -> None:
        """Read until all buffers are full.

        Raises `DoubtfulSnapshotError` if the file ends before the buffers are full, and `OSError`.
        """
        while num_read := os.readv(self._file, buffers):
            buffers = skip_bytes(buffers, num_read)
            if not buffers:
                return
        raise DoubtfulSnapshotError("shorter than its header says")

    def read(self, num_bytes: int) -> bytes:
        """Read exactly `num_bytes` bytes. Raises the same errors as `fill`."""
        found = bytearray(num_bytes)
        self.fill([memoryview(found)])
        return bytes(found)


class FileWriter:
    """Writes a new file's contents. Used by one thread; its methods raise `OSError`."""

    def __init__(self, file: int) -> None:
        self._file = file

    def write(self, buffers: list[memoryview]) -> None:
        """Write all buffers in order, in further system calls if one writes only a part (on a full disk)."""
        while buffers:
            buffers = skip_bytes(buffers, os.writev(self._file, buffers))

    def finish(self) -> None:
        """Write the bytes that are still buffered, and sync the file."""
        os.fsync(self._file)


class Codec:
    """Reads and writes the files, names and catalog rows of a directory without encryption."""

    #: The contents of the file `SEAL`, which identify the key; empty without encryption.
    mark = ""

    def file_name(self, digest: bytes) -> str:
        """Return the file name of a snapshot."""
        return self.hidden(digest).hex() + SUFFIX

    def file_names(self, digests: Iterable[bytes]) -> set[str]:
        """Return the file names of many snapshots."""
        return {name + SUFFIX for name in map(bytes.hex, map(self.hidden, digests))}

    def digest_of(self, name: str) -> bytes | None:
        """Return the digest in a file name; None if it is not the name of a snapshot."""
        stem = name.removesuffix(SUFFIX)
        return bytes.fromhex(stem) if stem != name and _IS_DIGEST(stem) else None

    def digest_in(self, path: Path) -> bytes | None:
        """Return the digest in a snapshot's path, also in a tier's, or in that of a file being written."""
        return self.digest_of(path.stem.rpartition(".")[2] + SUFFIX)

    def size_bytes(self, num_bytes: int) -> int:
        """Return the size of a file, given the size of its contents."""
        return num_bytes

    def reader(self, file: int, path: Path) -> FileReader:  # noqa: ARG002  # subclasses use it
        """Return a reader of an open file. Raises `DoubtfulSnapshotError`, `OSError`."""
        return FileReader(file)

    def writer(self, file: int, path: Path) -> FileWriter:  # noqa: ARG002
        """Return a writer for the open file of the snapshot whose digest is in `path`."""
        return FileWriter(file)

    def hidden(self, digest: bytes) -> bytes:
        """Return a digest as the catalog stores it: unchanged here, encrypted by `EncryptedCodec`."""
        return digest

    def hidden_row(self, row: SnapshotRow, proof: bytes) -> tuple[Any, ...]:
        """Return a row and its checksum `proof` in the form that the catalog stores."""
        return (*row[:-1], proof)

    def rows(self, stored: list[SnapshotRow]) -> Iterable[SnapshotRow]:
        """Return the catalog's rows in plain form, except those that do not decrypt with this key."""
        return stored

    def check(self, directory: Path) -> None:
        """Raise `SealedError` if the key does not fit the directory; that class lists the three cases."""
        try:
            found = (directory / SEAL).read_text()
        except FileNotFoundError:
            found = ""
        if found == self.mark:
            return
        if not self.mark:
            raise SealedError(directory, "is encrypted; name its key's file by cache_key_file")
        if found:
            raise SealedError(directory, "is encrypted with another key; name its file by cache_key_file")
        if _has_contents(directory):
            raise SealedError(directory, "was written without a key; leave out cache_key_file")


PLAIN: Final = Codec()


def _has_contents(directory: Path) -> bool:
    folders = [directory / name for name in ("snapshots", "quarantine")]
    return (directory / "index.sqlite").exists() or any(
        any(folder.iterdir()) for folder in folders if folder.is_dir()
    )


def skip_bytes(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Return the buffers without their first `num_bytes` bytes."""
    full = 0
    while full < len(buffers) and num_bytes >= buffers[full].nbytes:
        num_bytes -= buffers[full].nbytes
        full += 1
    return [buffers[full][num_bytes:], *buffers[full + 1 :]] if full < len(buffers) else []
