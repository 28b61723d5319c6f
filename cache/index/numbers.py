"""Small numbers for digests. Knows nothing of what they name.

A hash table in arrays: 40 bytes for a digest, where a dict and its keys take 170. With these numbers for
indices, what is known of ten thousand sessions' snapshots can lie in arrays too.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from cache.names.blocks import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

#: No number.
NONE: Final = -1
_LEAST_PLACES: Final = 8
#: So many digests are looked up in less time by numpy than one by one.
_MANY: Final = 24


class Numbers:
    """Digests and their numbers, from 0 on. The number of one that was removed is given to a later one."""

    def __init__(self, digests: Sequence[bytes] = ()) -> None:
        """Number digests that are all different in the order in which they come."""
        self._digests = bytearray(b"".join(digests))
        self._free = array("i")
        #: Where a digest's first 8 bytes point, or next behind that, is its number.
        self._places = array("i")
        self._spread(range(len(digests)))

    def __len__(self) -> int:
        return len(self._digests) // DIGEST_BYTES - len(self._free)

    def find(self, digest: bytes) -> int:
        """Return a digest's number, or `NONE`."""
        if len(digest) != DIGEST_BYTES:
            return NONE  # a part of one is not to be taken for it
        places, digests = self._places, self._digests
        mask = len(places) - 1
        place = int.from_bytes(digest[:8], "little") & mask
        while (number := places[place]) != NONE:
            if digests.startswith(digest, number * DIGEST_BYTES):
                return number
            place = (place + 1) & mask
        return NONE

    def find_all(self, digests: Sequence[bytes]) -> list[int]:
        """`find` for many, all a step further at once."""
        if len(digests) < _MANY or not len(self):
            return [self.find(digest) for digest in digests]
        import numpy as np  # here, because a command line that is asked for help has no time for it

        wanted = np.frombuffer(b"".join(digests), np.dtype("<u8")).reshape(-1, DIGEST_BYTES // 8)
        known = np.frombuffer(self._digests, np.dtype("<u8")).reshape(-1, DIGEST_BYTES // 8)
        places = np.frombuffer(self._places, np.int32)
        mask = len(places) - 1
        at = (wanted[:, 0] & np.uint64(mask)).astype(np.int64)
        found = np.empty(len(wanted), np.int32)
        left = np.arange(len(wanted))
        while left.size:
            found[left] = numbers = places[at[left]]
            left = left[(numbers != NONE) & (known[numbers] != wanted[left]).any(axis=1)]
            at[left] = (at[left] + 1) & mask
        return list(found.tolist())

    def digest(self, number: int) -> bytes:
        """Return the digest that has a number."""
        return bytes(self._digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES])

    def add(self, digest: bytes) -> int:
        """Number a digest that has none yet. Raises `ValueError` where it has not the length of one."""
        if len(digest) != DIGEST_BYTES:
            raise ValueError(f"a digest has {DIGEST_BYTES} bytes, not {len(digest)}")
        if 3 * (len(self) + 1) > 2 * len(self._places):
            self._spread([number for number in self._places if number != NONE])
        number = self._free.pop() if self._free else len(self._digests) // DIGEST_BYTES
        self._digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES] = digest
        self._enter(number)
        return number

    def remove(self, number: int) -> None:
        """Forget a digest; its number is free from now on."""
        places = self._places
        mask = len(places) - 1
        hole = self._home(number)
        while places[hole] != number:
            hole = (hole + 1) & mask
        # Without a gap between where a digest points and where its number is, it is found again.
        place = hole
        while (moved := places[place := (place + 1) & mask]) != NONE:
            if (place - self._home(moved)) & mask >= (place - hole) & mask:
                places[hole], hole = moved, place
        places[hole] = NONE
        self._free.append(number)

    def _home(self, number: int) -> int:
        at = number * DIGEST_BYTES
        return int.from_bytes(self._digests[at : at + 8], "little") & (len(self._places) - 1)

    def _enter(self, number: int) -> None:
        place, mask = self._home(number), len(self._places) - 1
        while self._places[place] != NONE:
            place = (place + 1) & mask
        self._places[place] = number

    def _spread(self, every: Sequence[int]) -> None:
        """Make a table for these numbers, a third full: all at once, since there may be very many."""
        import numpy as np  # here, because a command line that is asked for help has no time for it

        numbers = np.array(every, np.int64)
        size = max(_LEAST_PLACES, 1 << (2 * len(numbers)).bit_length())
        heads = np.frombuffer(self._digests, np.dtype("<u8"))[:: DIGEST_BYTES // 8]
        homes = (heads[numbers] & np.uint64(size - 1)).astype(np.int64)
        order = np.argsort(homes, kind="stable")
        # In the order of their homes each goes to its own, or to the one behind where the last one went.
        count = np.arange(len(numbers))
        ends = np.maximum.accumulate(homes[order] - count) + count
        fitting = ends < size
        places = np.full(size, NONE, np.int32)
        places[ends[fitting]] = numbers[order][fitting]
        self._places = array("i", places.tobytes())
        for number in numbers[order][~fitting].tolist():
            self._enter(number)
