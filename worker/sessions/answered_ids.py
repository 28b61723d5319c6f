"""Records which request ids of a session have a result, and where in the log; takes 24 bytes per id.

Only a hash of each id is stored. So the caller of `find` must read the found request from the log, and
compare its id.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np

#: The dict of recent ids is merged into the array once it exceeds both this and a quarter of the array.
_FEW: Final = 64


class AnsweredAt(NamedTuple):
    """The stream sequences of an id's first request and of its result."""

    in_seq: int
    out_seq: int


class AnsweredIds:
    """The answered request ids of one session, each with the place of its first result. Not thread-safe."""

    def __init__(self) -> None:
        self._sorted = np.empty((0, 3), np.uint64)  # hash, request, result; by the hash
        self._recent: dict[int, AnsweredAt] = {}

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent)

    @property
    def size_bytes(self) -> int:
        """The memory that the ids take, approximately."""
        return self._sorted.nbytes + 256 * len(self._recent)

    def add(self, request_id: str, answered: AnsweredAt) -> None:
        """Add an id with its result; a second result of an id counts only after a `drop` of the first."""
        if self.find(request_id) == answered:
            return
        key = _hash(request_id)
        if key in self._recent:
            self._sort()
        self._recent[key] = answered
        if len(self._recent) > max(_FEW, len(self._sorted) // 4):
            self._sort()

    def _sort(self) -> None:
        if self._recent:
            rows = np.array([(key, *found) for key, found in self._recent.items()], np.uint64)
            merged = np.concatenate([self._sorted, rows])
            self._sorted = merged[np.argsort(merged[:, 0], kind="stable")]
            self._recent = {}

    def copy(self) -> AnsweredIds:
        """Return a copy of the ids as they are now, which another thread may read."""
        found = AnsweredIds()
        found._sorted, found._recent = self._sorted, {**self._recent}
        return found

    def pack(self) -> bytes:
        """Encode all ids for `load`."""
        self._sort()
        return self._sorted.astype("<u8").tobytes()

    def load(self, added: bytes) -> None:
        """Replace all ids by those that `pack` encoded. Raises `ValueError` if the bytes are truncated."""
        rows = np.frombuffer(added, "<u8").astype(np.uint64).reshape(-1, 3)
        self._sorted = rows[np.argsort(rows[:, 0], kind="stable")]

    def find(self, request_id: str) -> AnsweredAt | None:
        """Return the place of the first result of an id, or of an id with the same hash; None without one."""
        key = _hash(request_id)
        row = self._row(key)
        if row is None:
            return self._recent.get(key)
        return AnsweredAt(int(self._sorted[row, 1]), int(self._sorted[row, 2]))

    def drop(self, request_id: str) -> None:
        """Remove the result that `find` returns, as it has left the log; the id may have a later result."""
        key = _hash(request_id)
        row = self._row(key)
        if row is None:
            del self._recent[key]
        else:
            self._sorted = np.delete(self._sorted, row, axis=0)

    def _row(self, key: int) -> int | None:
        """Return the array row of an id's first result; None without one. Recent results are never older."""
        if not len(self._sorted):
            return None
        row = int(np.searchsorted(self._sorted[:, 0], np.uint64(key)))
        return row if row < len(self._sorted) and int(self._sorted[row, 0]) == key else None


def _hash(request_id: str) -> int:
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "big")
