"""Maps the answered request ids of a session to stream sequences.

Only a hash of each id is stored. The caller of `find` must therefore read the request from the log, and
compare its id.
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import chain
from math import inf
from typing import Final, NamedTuple

import numpy as np

#: Approximate bytes that an id takes in memory: little beside the tokens and texts of its request.
_ID_BYTES: Final = 300


class AnsweredAt(NamedTuple):
    """The stream sequences of an id's first request and of its result."""

    in_seq: int
    out_seq: int


class AnsweredIds:
    """The answered ids of one session, with the stream sequences of request and result. Not thread-safe."""

    def __init__(self) -> None:
        # By hash, the oldest first. Of plain tuples, as these are no work for the garbage collector.
        self._found: dict[int, tuple[tuple[int, int], ...]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._found.values()))

    @property
    def size_bytes(self) -> int:
        """The memory that the ids take, approximately."""
        return _ID_BYTES * len(self._found)

    def add(self, request_id: str, answered: AnsweredAt) -> None:
        """Add an id with its result, once. `find` returns an id's oldest result until `drop` removes it."""
        self._add(_hash(request_id), *answered)

    def _add(self, key: int, in_seq: int, out_seq: int) -> None:
        known = self._found.get(key, ())
        if (in_seq, out_seq) not in known:
            self._found[key] = (*known, (in_seq, out_seq))

    def copy(self) -> AnsweredIds:
        """Return a copy of the ids as they are now, which another thread may read."""
        found = AnsweredIds()
        found._found = {**self._found}
        return found

    def behind(self, seq: int, until: float = inf) -> AnsweredIds:
        """Return a copy with only the ids whose first requests have sequences above `seq`, up to `until`."""
        found = AnsweredIds()
        for key, several in self._found.items():
            if within := tuple(at for at in several if seq < at[0] <= until):
                found._found[key] = within
        return found

    def pack(self) -> bytes:
        """Encode all ids as bytes, which `load` decodes."""
        rows = ((key, *at) for key, several in self._found.items() for at in several)
        return np.fromiter(chain.from_iterable(rows), "<u8").tobytes()

    def load(self, added: bytes) -> None:
        """Add the ids that `pack` encoded. Raises `ValueError` for truncated bytes."""
        for row in np.frombuffer(added, "<u8").reshape(-1, 3).tolist():
            self._add(*row)

    def find(self, request_id: str) -> AnsweredAt | None:
        """Return the oldest entry for an id, or for another id with the same hash; None if there is none."""
        several = self._found.get(_hash(request_id))
        return AnsweredAt(*several[0]) if several else None

    def drop(self, request_id: str) -> None:
        """Remove an id's oldest entry, which has left the log; `find` then returns the next one, if any."""
        key = _hash(request_id)
        if later := self._found.pop(key)[1:]:
            self._found[key] = later


def _hash(request_id: str) -> int:
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "big")
