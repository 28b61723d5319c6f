"""Lists the blocks of one model in a cache directory, each with all tokens before it, and reads their KV.

Takes no lock and only reads; a worker may evict files meanwhile. Blocking: for commands.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING

from cache.disk import format as snapshot_format
from cache.disk.folder import scan
from cache.disk.header import read_header
from cache.names.errors import DoubtfulSnapshotError
from cache.names.images import has_image
from cache.names.tokens import as_tokens, unpack

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from cache.disk.codec import Codec
    from cache.names.blocks import Span
    from cache.names.snapshot import Name, Tensor
    from cache.names.tokens import Tokens


class StoredBlocks:
    """The blocks in a cache directory, and the pieces of blocks."""

    def __init__(self, directory: Path, codec: Codec) -> None:
        self._snapshots = directory / "snapshots"
        self._codec = codec

    def of(self, identity: bytes) -> tuple[int, Iterator[tuple[Tokens, Span, str]]]:
        """Return the number of a model's blocks, and an iterator over them: (tokens, span, file name).

        The tokens are all tokens of the session up to the block's end. Every block comes after the one that
        it continues. The iterator skips blocks after a missing block, since their tokens are not all known,
        and blocks with images and those after them; the number includes some of these.
        """
        following: defaultdict[bytes, list[Name]] = defaultdict(list)
        first: list[Name] = []
        for digest in scan(self._snapshots, self._codec):
            with suppress(DoubtfulSnapshotError, OSError):
                header = read_header(self._snapshots / self._codec.file_name(digest), self._codec)
                name = header.name
                if header.is_foreign or header.identity != identity.hex() or has_image(name.tokens):
                    continue
                (following[name.parent] if name.start else first).append(name)
        return len(first) + sum(map(len, following.values())), self._in_order(first, following)

    def read(self, file: str) -> dict[str, Tensor] | None:
        """Read a block's KV by the names of its tensors; None if it was evicted, or fails verification."""
        try:
            return snapshot_format.tensors(self._snapshots / file, self._codec)
        except (DoubtfulSnapshotError, FileNotFoundError):
            return None

    def _in_order(
        self, first: list[Name], following: Mapping[bytes, list[Name]]
    ) -> Iterator[tuple[Tokens, Span, str]]:
        todo = [(as_tokens(), name) for name in first]
        while todo:
            before, name = todo.pop()
            tokens = before + unpack(name.tokens)
            yield tokens, name.span, self._codec.file_name(name.digest)
            todo += [(tokens, one) for one in following.get(name.digest, ())]
