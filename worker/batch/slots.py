"""KV of running answers in shared buffers: attention over all rows is one operation. Device thread only.

A pool holds rows of similar length: `(slots, KV heads, capacity, head_dim)` for the keys of a layer, and for
its values. A row is copied into a slot when it joins, and out of the slot when it leaves; the other rows stay
in place, each at its own length. Attention masks the positions beyond a row's length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from mlx_lm.models.cache import KVCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .forward import Attention


#: Positions of the smallest pool; each next pool has twice as many.
SMALLEST: Final = 256


def capacity_for(num_tokens: int) -> int:
    """Return the capacity of the pool for a row of up to `num_tokens`: a power of two."""
    return max(SMALLEST, 1 << (num_tokens - 1).bit_length())


class _Buffer:
    """Keys, or values, of one layer in all slots: `(slots x heads x capacity, head_dim)`.

    Flat, since writing to a list of rows takes a quarter of the time of writing by slot, head and position.
    """

    def __init__(self, like: mx.array, capacity: int) -> None:
        _, self.heads, _, self._dim = like.shape
        self._capacity = capacity
        self.flat = mx.zeros((0, self._dim), like.dtype)

    @property
    def slots(self) -> mx.array:
        """The buffer as `(slots, heads, capacity, head_dim)`."""
        return self.flat.reshape(-1, self.heads, self._capacity, self._dim)

    def grow(self, num_slots: int) -> None:
        more = mx.zeros((num_slots * self.heads * self._capacity, self._dim), self.flat.dtype)
        self.flat = mx.concatenate([self.flat, more])
        mx.eval(self.flat)  # now, so that only one layer at a time exists twice

    def put(self, slot: int, row: mx.array, length: int) -> None:
        for head in range(self.heads):
            start = (slot * self.heads + head) * self._capacity
            self.flat[start : start + length] = row[0, head, :length]


class Pool:
    """Rows of up to `capacity` tokens. A slot is an index, in use or free."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._keys: list[_Buffer] = []
        self._values: list[_Buffer] = []
        self._used: list[bool] = []  # by slot

    @property
    def num_rows(self) -> int:
        """Slots in use."""
        return sum(self._used)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, in use or not."""
        return sum(buffer.flat.nbytes for buffer in (*self._keys, *self._values))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot; 0 before the first row."""
        return self.nbytes // len(self._used) if self._used else 0

    def growth_bytes(self, caches: Sequence[KVCache]) -> int:
        """Return the most bytes allocated if a session with these caches joins, and leaves again."""
        parts: list[Any] = [part for cache in caches for part in (cache.keys, cache.values)]
        slot: int = sum(part.nbytes // part.shape[2] for part in parts) * self.capacity
        if False in self._used:
            return slot
        num_more = max(2, len(self._used))
        # While a layer grows, its old slots, the new ones and their concatenation exist together.
        layer = 2 * (len(self._used) + num_more) * slot // len(caches)
        return num_more * slot + layer + slot

    def join(self, caches: Sequence[KVCache]) -> int:
        """Copy a session's plain caches, of one length within the capacity, into a slot; return the slot."""
        length = caches[0].offset
        if False not in self._used:
            self._grow(caches)
        slot = self._used.index(False)
        for keys, values, cache in zip(self._keys, self._values, caches, strict=True):
            keys.put(slot, _filled(cache.keys), length)
            values.put(slot, _filled(cache.values), length)
        self._used[slot] = True
        mx.eval([buffer.flat for buffer in (*self._keys, *self._values)])
        return slot

    def leave(self, slot: int, length: int) -> list[KVCache]:
        """Copy a row of `length` tokens to caches of its own, and free its slot."""
        caches = [_copied(view) for view in self.views(slot, length)]
        mx.eval([(cache.keys, cache.values) for cache in caches])
        self._used[slot] = False
        return caches

    def views(self, slot: int, length: int) -> list[KVCache]:
        """Return a row as caches that share the pool's memory: to be read, not kept."""
        here = slice(slot, slot + 1)
        return [
            _cache(keys.slots[here], values.slots[here], length)
            for keys, values in zip(self._keys, self._values, strict=True)
        ]

    def _grow(self, like: Sequence[KVCache]) -> None:
        """Double the number of slots; the first slots get the shapes of these caches."""
        if not self._used:
            self._keys = [_Buffer(_filled(cache.keys), self.capacity) for cache in like]
            self._values = [_Buffer(_filled(cache.values), self.capacity) for cache in like]
        num_more = max(2, len(self._used))
        for buffer in (*self._keys, *self._values):
            buffer.grow(num_more)
        self._used += [False] * num_more

    def part(self, slots: list[int], lengths: list[int]) -> PoolPart:
        """Begin a pass over one new token for each of `slots` (ascending), which hold `lengths` tokens."""
        return PoolPart(self._keys, self._values, self.capacity, slots, lengths)


class PoolPart:
    """One token for each of several rows of a pool, as part of a pass; see `forward.Part`."""

    def __init__(
        self,
        keys: list[_Buffer],
        values: list[_Buffer],
        capacity: int,
        slots: list[int],
        lengths: list[int],
    ) -> None:
        self.offsets = lengths
        self._keys, self._values = keys, values
        self._capacity = capacity
        self._slots = mx.array(slots)[:, None]
        self._at = mx.array(lengths)[:, None]
        self._ends: dict[int, mx.array] = {}  # by the number of heads
        # Attention runs over all slots from the first row's to the last row's, including free ones between.
        self._first, self._num = slots[0], slots[-1] + 1 - slots[0]
        self._dense = self._num == len(slots)
        self._span = max(lengths) + 1
        self._places = mx.array([slot - self._first for slot in slots])
        rows = dict(zip(slots, range(len(slots)), strict=True))
        self._rows = [rows.get(self._first + i, 0) for i in range(self._num)]
        held = mx.array([lengths[row] for row in self._rows])
        self._mask = (mx.arange(self._span) <= held[:, None])[:, None, None]

    def grid(self, layer: int) -> int:
        """Plain caches count from the beginning."""
        del layer
        return 0

    def masks(self, layer: int, options: dict[str, Any]) -> Any:
        """Let each token see its whole session: for a single token plain caches ignore the options."""
        del layer, options
        return self._mask

    def update(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Write each row's key and value at its own end."""
        for buffer, new in ((self._keys[layer], keys), (self._values[layer], values)):
            buffer.flat[self._rows_of(buffer.heads)] = new.reshape(-1, new.shape[-1])

    def _rows_of(self, heads: int) -> mx.array:
        """Return the rows of a flat buffer for the new tokens: by slot, then by head."""
        if heads not in self._ends:
            first = (self._slots * heads + mx.arange(heads)) * self._capacity
            self._ends[heads] = (first + self._at).reshape(-1)
        return self._ends[heads]

    def attend(self, layer: int, queries: mx.array, mask: Any, attention: Attention) -> mx.array:
        """Attend with every row at once."""
        here, upto = slice(self._first, self._first + self._num), slice(0, self._span)
        keys, values = (side[layer].slots[here, :, upto] for side in (self._keys, self._values))
        if self._dense:
            together: mx.array = attention(queries, keys, values, cache=None, mask=mask)
            return together
        spread = queries[mx.array(self._rows)]
        with_free: mx.array = attention(spread, keys, values, cache=None, mask=mask)
        return with_free[self._places]


def _cache(keys: mx.array, values: mx.array, length: int) -> KVCache:
    cache = KVCache()  # type: ignore[no-untyped-call]  # mlx-lm has no annotations
    cache.state = (keys, values, length)
    return cache


def _copied(view: KVCache) -> KVCache:
    parts: Any = (view.keys, view.values)
    keys, values = (mx.contiguous(part[..., : view.offset, :]) for part in parts)
    return _cache(keys, values, view.offset)


def _filled(part: mx.array | None) -> mx.array:
    if part is None:
        raise ValueError("a session without KV cannot join a pool")
    return part
