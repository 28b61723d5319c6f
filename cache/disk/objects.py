"""A remote tier in an object store: S3, Google Cloud Storage, Azure, or a server with S3's API (MinIO).

The only module that imports obstore (the extra `objects`), which reads credentials and endpoint from the
environment (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT`, ...). Only the object store's own rules limit its size.
"""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import from_url

from . import private
from .tier import ERASED, IDENTITIES, FileKey

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

#: In the message of a request that the server refuses, as it will again; obstore has no class for it.
_REFUSED: Final = "status code: 4"
#: The options with which a start asks once whether the store answers.
_QUICK: Final[Any] = {"retry_config": {"max_retries": 1}}


class ObjectStore:
    """A `Tier` at a URL, such as s3://bucket/prefix. Safe on any thread."""

    def __init__(self, url: str, *, must_answer: bool = True) -> None:
        """Open the store. Raises `OSError` if the URL names no object store, or listing it is refused.

        Without an answer only if it `must_answer`: otherwise it can be used once the store is back.
        """
        with _as_os_error():
            self._store = from_url(url)
        try:
            with _as_os_error():
                next(iter(obstore.list(from_url(url, **_QUICK), chunk_size=1)), None)
        except OSError as error:
            if must_answer or _REFUSED in str(error):
                raise

    def put(self, key: FileKey, path: Path) -> None:
        """Upload the file at `path`, unless the store has this key: see `Tier`."""
        with _as_os_error():
            if not self.contains(key.parent, [key.file]):
                obstore.put(self._store, _path(key), path)

    def contains(self, parent: str, files: Collection[str] | None = None) -> dict[str, int]:
        """List the stored files that continue `parent`, with their sizes: see `Tier`."""
        with _as_os_error():
            if files is not None and len(files) == 1:
                (file,) = files
                try:
                    return {file: obstore.head(self._store, _path(FileKey(parent, file)))["size"]}
                except (FileNotFoundError, NotFoundError):
                    return {}
            there = {
                one["path"].rpartition("/")[2]: one["size"]
                for page in obstore.list(self._store, parent)
                for one in page
            }
        return {file: size for file, size in there.items() if files is None or file in files}

    def get(self, key: FileKey, path: Path) -> bool:
        """Download a file to `path`; False if the store does not have the file."""
        with _as_os_error():
            try:
                stream = obstore.get(self._store, _path(key)).stream()
                with open(path, "wb", opener=private.opener) as file:
                    file.writelines(stream)
            except (FileNotFoundError, NotFoundError):
                return False
        return True

    def keys(self) -> Iterator[FileKey]:
        """Yield the keys of all snapshots: see `Tier`."""
        with _as_os_error():
            for page in obstore.list(self._store):
                for one in page:
                    parent, _, file = one["path"].rpartition("/")
                    if parent not in (IDENTITIES, ERASED):
                        yield FileKey(parent, file)

    def local(self, key: FileKey, path: Path) -> Path:
        """Download a file to `path`. Raises `FileNotFoundError` if the store does not have the file."""
        if not self.get(key, path):
            raise FileNotFoundError(errno.ENOENT, "not in the object store", key.file)
        return path

    def remove(self, keys: Iterable[FileKey]) -> None:
        """Delete files; missing ones are no error."""
        with _as_os_error():
            for key in keys:
                try:
                    obstore.delete(self._store, _path(key))
                except (FileNotFoundError, NotFoundError):
                    continue

    def sync(self) -> None:
        """Do nothing: an object store answers a removal only once it is durable."""


def _path(key: FileKey) -> str:
    return f"{key.parent}/{key.file}"


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Convert errors of obstore to `OSError`, with the first line of their message."""
    try:
        yield
    except BaseError as error:
        raise OSError(None, str(error).partition("\n")[0].partition(": <?xml")[0]) from None
