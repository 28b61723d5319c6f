"""Maps the answered request ids of a session to stream sequences; takes 24 bytes of memory per id.

Only a hash of each id is stored. The caller of `find` must therefore read the request from the log, and
compare its id.
"""

from __future__ import annotations

from hashlib import blake2b
from math import inf
from typing import Final, NamedTuple

import numpy as np

#: The recent ids are merged into the array once there are more than this, and than a quarter of its rows.
_FEW: Final = 64


class AnsweredAt(NamedTuple):
    """The stream sequences of an id's first request and of its result."""

    in_seq: int
    out_seq: int


class AnsweredIds:
    """The answered ids of one session, with the stream sequences of request and result. Not thread-safe."""

    def __init__(self) -> None:
        self._sorted = np.empty((0, 3), np.uint64)  # columns: hash, request, result; sorted by hash
        self._recent: dict[int, AnsweredAt] = {}

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent)

    @property
    def size_bytes(self) -> int:
        """The memory that the ids take, approximately."""
        return self._sorted.nbytes + 256 * len(self._recent)

    def add(self, request_id: str, answered: AnsweredAt) -> None:
        """Add an id with its result, once. `find` returns an id's oldest result until `drop` removes it."""
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

    def behind(self, seq: int, until: float = inf) -> AnsweredIds:
        """Return a copy with only the ids whose first requests have sequences above `seq`, up to `until`."""
        found = AnsweredIds()
        seqs = self._sorted[:, 1]
        found._sorted = self._sorted[(seqs > seq) & (seqs <= until)]
        found._recent = {key: at for key, at in self._recent.items() if seq < at.in_seq <= until}
        return found

    def pack(self) -> bytes:
        """Encode all ids as bytes, which `load` decodes."""
        self._sort()
        return self._sorted.astype("<u8").tobytes()

    def load(self, added: bytes) -> None:
        """Fill an empty object with the ids that `pack` encoded. Raises `ValueError` for truncated bytes."""
        rows = np.frombuffer(added, "<u8").astype(np.uint64).reshape(-1, 3)
        self._sorted = rows[np.argsort(rows[:, 0], kind="stable")]

    def find(self, request_id: str) -> AnsweredAt | None:
        """Return the oldest entry for an id, or for another id with the same hash; None if there is none."""
        key = _hash(request_id)
        row = self._row(key)
        if row is None:
            return self._recent.get(key)
        return AnsweredAt(int(self._sorted[row, 1]), int(self._sorted[row, 2]))

    def drop(self, request_id: str) -> None:
        """Remove an id's oldest entry, which has left the log; `find` then returns the next one, if any."""
        key = _hash(request_id)
        row = self._row(key)
        if row is None:
            del self._recent[key]
        else:
            self._sorted = np.delete(self._sorted, row, axis=0)

    def _row(self, key: int) -> int | None:
        """Return the array's first row with this hash, or None. Entries in `_recent` were added later."""
        if not len(self._sorted):
            return None
        row = int(np.searchsorted(self._sorted[:, 0], np.uint64(key)))
        return row if row < len(self._sorted) and int(self._sorted[row, 0]) == key else None


def _hash(request_id: str) -> int:
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "big")
