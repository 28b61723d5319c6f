"""Encrypts a directory with a key: the only module that knows ciphers, imported only where there is a key.

A file is its salt, then its contents in chunks. Each chunk is encrypted by AES-256-GCM with a key that is
derived from the directory's key, the salt and the snapshot's digest. The nonce is the chunk's number, so no
nonce is used twice with a key. A renamed file or a moved chunk does not decrypt. Digests (and so file names),
and the marks of rows are encrypted by AES-SIV, which needs no nonce: an observer sees which of them are
equal, and nothing else. Sizes, times, positions, and which snapshot continues which, are visible.
"""

from __future__ import annotations

import base64
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESSIV
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cache.names.blocks import DIGEST_BYTES
from cache.names.errors import DoubtfulSnapshotError, KeyFileError

from .codec import SUFFIX, Codec, FileReader, FileWriter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .rows import SnapshotRow

_KEY_BYTES: Final = 32
_MOST_KEY_FILE: Final = 1024
_MAGIC: Final = b"turnkeep sealed\1"
_SALT_BYTES: Final = 32
_BEFORE: Final = len(_MAGIC) + _SALT_BYTES
#: Bytes of contents in a chunk. Encrypting a chunk holds the GIL for about 10 µs.
_CHUNK: Final = 1 << 16
_TAG: Final = 16
#: Chunks that are written by one system call.
_TOGETHER: Final = 16
_NAME: Final = [b"name"]


def read_key(path: Path) -> bytes:
    """Read a key: 32 bytes, raw or in base64. Raises `KeyFileError`, also if others can read the file."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            found = file.read(_MOST_KEY_FILE)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}; name a file of yours") from None
    # The same rule as PostgreSQL's: a mounted secret may belong to another user and be readable to the group.
    if stat.S_IMODE(status.st_mode) & (0o077 if status.st_uid == os.geteuid() else 0o027):
        raise KeyFileError(f"{path} can be read by others; chmod 600 {path}")
    if len(found) == _KEY_BYTES:
        return found
    with suppress(ValueError):
        key = base64.b64decode(b"".join(found.split()), validate=True)
        if len(key) == _KEY_BYTES:
            return key
    raise KeyFileError(
        f"{path} holds no key; it must be 32 bytes, raw or in base64, as openssl rand -base64 32 prints them"
    )


class EncryptedCodec(Codec):
    """Reads and writes a directory that is encrypted with a key of 32 bytes. Safe on any thread."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._siv = AESSIV(self._derived(b"names", 64))
        self.mark = f"AES-256 {self._derived(b'mark', 16).hex()}\n"

    def _derived(self, purpose: bytes, num_bytes: int, salt: bytes | None = None) -> bytes:
        return HKDF(SHA256(), num_bytes, salt, b"turnkeep " + purpose).derive(self._key)

    def cipher(self, salt: bytes, path: Path) -> AESGCM:
        """Return a file's cipher. Raises `DoubtfulSnapshotError` if another key made the file's name."""
        digest = self.digest_in(path)
        if digest is None:
            raise DoubtfulSnapshotError("its name is not encrypted with this key")
        return AESGCM(self._derived(b"file" + digest, 32, salt))

    def digest_of(self, name: str) -> bytes | None:
        """Return the digest in a file name; None if the name was not made with this key."""
        with suppress(ValueError, InvalidTag):
            digest = self._siv.decrypt(bytes.fromhex(name.removesuffix(SUFFIX)), _NAME)
            return digest if name == self.file_name(digest) and len(digest) == DIGEST_BYTES else None
        return None

    def size_bytes(self, num_bytes: int) -> int:
        """Return the size of an encrypted file."""
        return _BEFORE + num_bytes + _TAG * max(1, -(-num_bytes // _CHUNK))

    def reader(self, file: int, path: Path) -> FileReader:
        """Return a reader that decrypts a file."""
        return _Reader(file, path, self)

    def writer(self, file: int, path: Path) -> FileWriter:
        """Return a writer that encrypts a file."""
        return _Writer(file, path, self)

    def hidden(self, digest: bytes) -> bytes:
        """Encrypt a digest. Equal digests are encrypted to equal bytes."""
        return self._siv.encrypt(digest, _NAME)

    def hidden_row(self, row: SnapshotRow, proof: bytes) -> tuple[Any, ...]:
        """Encrypt a row and its `proof`, a checksum by which anybody could test guesses of the tokens."""
        digest = self.hidden(row.digest)
        mark = self._siv.encrypt(proof + row.mark, [b"row", digest])
        return (digest, self.hidden(row.parent), *row[2:-2], mark, None)

    def rows(self, stored: list[SnapshotRow]) -> Iterator[SnapshotRow]:
        """Decrypt rows, and skip those that do not decrypt."""
        for row in stored:
            with suppress(InvalidTag, TypeError, ValueError):  # a damaged row: its file is adopted again
                mark = self._siv.decrypt(row.mark, [b"row", row.digest])
                digest, parent = (self._siv.decrypt(one, _NAME) for one in (row.digest, row.parent))
                yield row._replace(digest=digest, parent=parent, proof=mark[:8], mark=mark[8:])


def _nonce(number: int, *, last: bool) -> bytes:
    """Return the nonce of a chunk. The last chunk's nonce is marked, so a truncated file does not decrypt."""
    return number.to_bytes(11, "big") + bytes([last])


class _Writer(FileWriter):
    """Writes an encrypted file, chunk by chunk."""

    def __init__(self, file: int, path: Path, sealed: EncryptedCodec) -> None:
        super().__init__(file)
        salt = os.urandom(_SALT_BYTES)
        self._cipher = sealed.cipher(salt, path)
        self._out = [memoryview(_MAGIC + salt)]
        self._chunk = bytearray(_CHUNK)
        self._num_bytes = self._number = 0

    def write(self, buffers: list[memoryview]) -> None:
        """Encrypt and write full chunks; buffer the bytes after the last one."""
        for buffer in buffers:
            done = 0
            while done < buffer.nbytes:
                if self._num_bytes == _CHUNK:
                    self._seal(last=False)
                num = min(buffer.nbytes - done, _CHUNK - self._num_bytes)
                self._chunk[self._num_bytes : self._num_bytes + num] = buffer[done : done + num]
                self._num_bytes += num
                done += num

    def finish(self) -> None:
        """Encrypt and write the bytes that are still buffered, and sync the file."""
        self._seal(last=True)
        super().write(self._out)
        super().finish()

    def _seal(self, *, last: bool) -> None:
        contents = memoryview(self._chunk)[: self._num_bytes]
        self._out.append(memoryview(self._cipher.encrypt(_nonce(self._number, last=last), contents, None)))
        self._number += 1
        self._num_bytes = 0
        if len(self._out) > _TOGETHER:
            super().write(self._out)
            self._out = []


class _Reader(FileReader):
    """Reads an encrypted file, and verifies each chunk."""

    def __init__(self, file: int, path: Path, sealed: EncryptedCodec) -> None:
        super().__init__(file)
        head = os.pread(file, _BEFORE, 0)
        if len(head) < _BEFORE or not head.startswith(_MAGIC):
            raise DoubtfulSnapshotError("not an encrypted file")
        self._cipher = sealed.cipher(head[len(_MAGIC) :], path)
        self._num_chunks = -(-(self.size_bytes - _BEFORE) // (_CHUNK + _TAG))
        self.size_bytes -= _BEFORE + _TAG * self._num_chunks
        self._at, self._number, self._chunk = 0, -1, memoryview(b"")

    def seek(self, at: int) -> None:
        """Move to a position in the decrypted contents, in bytes."""
        self._at = at

    def fill(self, buffers: list[memoryview]) -> None:
        """Read until all buffers are full. Each chunk is verified before any of its bytes are copied."""
        for buffer in buffers:
            done = 0
            while done < buffer.nbytes:
                number, start = divmod(self._at, _CHUNK)
                if number != self._number:
                    self._open(number)
                num = min(buffer.nbytes - done, len(self._chunk) - start)
                if num <= 0:
                    raise DoubtfulSnapshotError("shorter than its header says")
                buffer[done : done + num] = self._chunk[start : start + num]
                self._at += num
                done += num

    def _open(self, number: int) -> None:
        found = os.pread(self._file, _CHUNK + _TAG, _BEFORE + number * (_CHUNK + _TAG))
        nonce = _nonce(number, last=number == self._num_chunks - 1)
        try:
            self._chunk = memoryview(self._cipher.decrypt(nonce, found, None))
        except InvalidTag:
            raise DoubtfulSnapshotError("damaged, or encrypted with another key") from None
        self._number = number
