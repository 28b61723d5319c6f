"""Keeps KV of running answers in shared buffers, so that one operation computes attention for all rows.

Device thread only.

A pool holds rows of similar length: `(slots, KV heads, capacity, head_dim)` for the keys of a layer, and for
its values. A row is copied into a slot when it joins, and out of the slot when it leaves; the other rows stay
in place, each at its own length. Attention masks the positions beyond a row's length.

A ring has its full size in a slot from the start, so a row whose layers are all rings never changes pools.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from cache.kv.ring import RingCache, place_of

from . import metal, ring_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .attention import Attention
    from .ring_attention import VisibleSlots

#: For each layer its ring's sink, window, grid and kept tokens, or None for a plain cache. Rows of equal form
#: share pools.
Form: TypeAlias = tuple[tuple[int, int, int, int] | None, ...]


#: Capacity of the smallest pool, in tokens; each larger pool has twice the capacity.
SMALLEST: Final = 256


def form_of(caches: Sequence[Any]) -> Form | None:
    """Return the `Form` of a row with these caches; None if no pool can hold the row."""
    if not all(type(cache) is KVCache or (type(cache) is RingCache and not cache.bits) for cache in caches):
        return None
    return tuple(
        (cache.sink, cache.window, cache.grid, cache.kept) if type(cache) is RingCache else None
        for cache in caches
    )


def capacity_for(form: Form, num_tokens: int) -> int:
    """Return the capacity, in tokens, of the pool for a row of up to `num_tokens`: a power of two.

    Returns 0 if all layers are rings.
    """
    return max(SMALLEST, 1 << (num_tokens - 1).bit_length()) if None in form else 0


class _Buffer:
    """The keys, or the values, of one layer in all slots: `(slots x heads x capacity, head_dim)`.

    The array is flat, since writing with one index takes a quarter of the time of writing with three: slot,
    head and position.
    """

    def __init__(self, like: mx.array, capacity: int) -> None:
        _, self.heads, _, self._dim = like.shape
        self.capacity = capacity
        self.flat = mx.zeros((0, self._dim), like.dtype)

    @property
    def slots(self) -> mx.array:
        """The buffer as `(slots, heads, capacity, head_dim)`."""
        return self.flat.reshape(-1, self.heads, self.capacity, self._dim)

    def grow(self, num_slots: int) -> None:
        more = mx.zeros((num_slots * self.heads * self.capacity, self._dim), self.flat.dtype)
        self.flat = mx.concatenate([self.flat, more])
        mx.eval(self.flat)  # at once, so that only one layer at a time exists twice

    def put(self, slot: int, row: mx.array, length: int) -> None:
        for head in range(self.heads):
            start = (slot * self.heads + head) * self.capacity
            self.flat[start : start + length] = row[0, head, :length]


class Pool:
    """The shared buffers for rows of one form, with up to `capacity` tokens in plain layers.

    A slot is an index into the buffers; it is in use or free.
    """

    def __init__(self, form: Form, capacity: int) -> None:
        self.capacity = capacity
        self.rings = [
            None if ring is None else RingCache(ring[0], ring[1], grid=ring[2], kept=ring[3]) for ring in form
        ]
        self._first_held: dict[int, list[int]] = {}  # by slot: each layer's `first_held` when the row joined
        self.keys: list[_Buffer] = []
        self.values: list[_Buffer] = []
        self._used: list[bool] = []  # by slot

    @property
    def num_rows(self) -> int:
        """Number of slots in use."""
        return sum(self._used)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, in use or not."""
        return sum(buffer.flat.nbytes for buffer in (*self.keys, *self.values))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot; 0 before the first row."""
        return self.nbytes // len(self._used) if self._used else 0

    def is_full(self, num_tokens: int) -> bool:
        """Say whether a slot with a row of `num_tokens` tokens has no room for another token."""
        return bool(self.capacity) and num_tokens >= self.capacity

    def growth_bytes(self, caches: Sequence[Any]) -> int:
        """Return the most bytes that are allocated if a row with these caches joins and later leaves."""
        layers = zip(caches, self.rings, strict=True)
        slot = sum(
            (part.nbytes // part.shape[2]) * (ring.capacity if ring is not None else self.capacity)
            for cache, ring in layers
            for part in _filled(cache)
        )
        if False in self._used:
            return slot
        num_more = max(2, len(self._used))
        # While a layer grows, its old slots, the new ones and their concatenation exist together.
        layer = 2 * (len(self._used) + num_more) * slot // len(caches)
        return num_more * slot + layer + slot

    def join(self, caches: Sequence[Any]) -> int:
        """Copy a row's caches into a free slot; return the slot.

        The caches must have equal lengths, at most the capacity.
        """
        if False not in self._used:
            self._grow(caches)
        slot = self._used.index(False)
        self._first_held[slot] = [getattr(cache, "first_held", 0) for cache in caches]
        for keys, values, cache in zip(self.keys, self.values, caches, strict=True):
            for buffer, part in zip((keys, values), _filled(cache), strict=True):
                buffer.put(slot, part, min(cache.offset, part.shape[2]))
        self._used[slot] = True
        mx.eval([buffer.flat for buffer in (*self.keys, *self.values)])
        return slot

    def leave(self, slot: int, length: int) -> list[Any]:
        """Return the KV of a row of `length` tokens, copied to separate caches, and free its slot."""
        caches = [_copied(view) for view in self.views(slot, length)]
        mx.eval([cache.state for cache in caches])
        self._used[slot] = False
        return caches

    def views(self, slot: int, length: int) -> list[Any]:
        """Return a row of `length` tokens as caches that share the pool's memory.

        They are valid until the next step.
        """
        layers = zip(self.keys, self.values, self.rings, self._first_held[slot], strict=True)
        here = slice(slot, slot + 1)
        return [
            _cache(keys.slots[here], values.slots[here], length)
            if ring is None
            else ring.like(keys.slots[here], values.slots[here], length, first_held)
            for keys, values, ring, first_held in layers
        ]

    def _grow(self, like: Sequence[Any]) -> None:
        """Double the number of slots. The first time, make buffers with the shapes of the caches `like`."""
        if not self._used:
            places = [self.capacity if ring is None else ring.capacity for ring in self.rings]
            made = [
                [_Buffer(part, num) for part in _filled(cache)]
                for cache, num in zip(like, places, strict=True)
            ]
            self.keys, self.values = ([pair[i] for pair in made] for i in (0, 1))
        num_more = max(2, len(self._used))
        for buffer in (*self.keys, *self.values):
            buffer.grow(num_more)
        self._used += [False] * num_more


class PoolPart:
    """A part of a pass: equally many tokens for each of several rows of a pool; see `parts.Part`."""

    def __init__(
        self, pool: Pool, slots: list[int], lengths: list[int], num_each: int, shifts: list[int]
    ) -> None:
        """Make the part of a pass over `num_each` tokens of each slot; the slots hold `lengths` tokens.

        `slots` are ascending. With rings, `num_each` must be 1. `shifts` are those of the rows (`Row.shift`).
        """
        self._offsets = [length + i for length in lengths for i in range(num_each)]
        self.positions = [
            length + shift + i for length, shift in zip(lengths, shifts, strict=True) for i in range(num_each)
        ]
        self._num_each = num_each
        self._keys, self._values, self._rings = pool.keys, pool.values, pool.rings
        self._slots = mx.array(slots)[:, None]
        self._ends: dict[tuple[int, int, int], mx.array] = {}  # flat row indices, by heads, sink and window
        self._sights: dict[tuple[int, int, int], VisibleSlots] = {}  # by ring kind; most models have one
        self._laid: dict[int, mx.array] = {}  # the mask, by number of heads
        # Attention runs over all slots from the first row's to the last row's, even the free ones between.
        self._first, self._num = slots[0], slots[-1] + 1 - slots[0]
        self._span = max(lengths) + num_each
        rows = {slot: row for row, slot in enumerate(slots)}
        spread = [rows.get(self._first + i, 0) for i in range(self._num)]
        self._held = [lengths[row] for row in spread]
        # Each array made from numbers of the host is a copy to the device.
        self._at = mx.array(self._offsets).reshape(-1, num_each)
        self._spread = self._places = None  # the slots are the rows
        if self._num > len(slots):
            self._spread = mx.array(spread)
            self._places = mx.array([slot - self._first for slot in slots])
        ends = self._at if self._spread is None else self._at[self._spread]
        self._mask = (mx.arange(self._span) <= ends[:, :, None])[:, None]

    def grid(self, layer: int) -> int:
        """Return the number modulo which a ring counts positions (its grid); 0 for a plain cache."""
        ring = self._rings[layer]
        return ring.grid if ring is not None else 0

    def masks(self, layer: int, options: dict[str, Any]) -> Any:
        """Return a causal mask. `options` are ignored, as mlx-lm's plain caches ignore them."""
        del layer, options
        return self._mask

    def update(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Write the new keys and values at the end of each row in its slot."""
        for buffer, new in ((self._keys[layer], keys), (self._values[layer], values)):
            buffer.flat[self._rows_of(buffer, self._rings[layer])] = new.reshape(-1, new.shape[-1])

    def _rows_of(self, buffer: _Buffer, ring: RingCache | None) -> mx.array:
        """Return the indices in a flat buffer for the new tokens, ordered by slot, token and head."""
        key = (buffer.heads, 0, 0) if ring is None else (buffer.heads, ring.sink, ring.window)
        if key not in self._ends:
            at = self._at
            if ring is not None:
                places = [place_of(position, ring.sink, ring.capacity) for position in self._offsets]
                at = mx.array(places).reshape(-1, self._num_each)
            first = (self._slots * buffer.heads + mx.arange(buffer.heads)) * buffer.capacity
            self._ends[key] = (first[:, None] + at[:, :, None]).reshape(-1)
        return self._ends[key]

    def attend(self, layer: int, queries: mx.array, mask: Any, attention: Attention) -> mx.array:
        """Compute the attention of all rows in one operation."""
        ring = self._rings[layer]
        sight = self._sight(ring) if ring is not None else None
        upto = slice(0, self._span if sight is None else sight.num_places)
        here = slice(self._first, self._first + self._num)
        keys, values = (side[layer].slots[here, :, upto] for side in (self._keys, self._values))
        if self._num_each > 1:  # (rows, heads, tokens, head_dim)
            num, heads, _, size = queries.shape
            queries = queries.reshape(-1, self._num_each, heads, size).transpose(0, 2, 1, 3)
        spread = queries if self._spread is None else queries[self._spread]
        found: mx.array
        if sight is None:
            found = attention(spread, keys, values, cache=None, mask=self._laid_out(mask, spread.shape[1]))
        else:
            found = attention.to_ring(spread, (keys, values), sight, lambda array: array)
        found = found if self._places is None else found[self._places]
        if self._num_each > 1:
            found = found.transpose(0, 2, 1, 3).reshape(num, heads, 1, -1)
        return found

    def _laid_out(self, mask: mx.array, num_heads: int) -> mx.array:
        """Return the mask as the kernel of this device reads it, made once for all layers."""
        if not metal.spreads_masks(mask):
            return mask
        if num_heads not in self._laid:
            self._laid[num_heads] = metal.spread(mask, num_heads)
        return self._laid[num_heads]

    def _sight(self, ring: RingCache) -> VisibleSlots:
        key = (ring.sink, ring.window, ring.grid)
        if key not in self._sights:
            self._sights[key] = ring_attention.sight(ring, [length + 1 for length in self._held], 1)
        return self._sights[key]


def _filled(cache: Any) -> tuple[mx.array, mx.array]:
    """Return the key and value arrays of a cache that is not empty."""
    if cache.keys is None:
        raise ValueError("a session without KV cannot join a pool")
    keys, values = cache.keys, cache.values
    return (keys[0], values[0]) if type(cache) is RingCache else (keys, values)


def _cache(keys: mx.array, values: mx.array, length: int) -> KVCache:
    cache = KVCache()  # type: ignore[no-untyped-call]  # mlx-lm has no annotations
    cache.state = (keys, values, length)
    return cache


def _copied(view: Any) -> Any:
    """Copy a view of a row's layer to a separate cache."""
    keys, values = (mx.contiguous(part[..., : view.offset, :]) for part in _filled(view))
    if type(view) is RingCache:
        return view.like(keys, values, view.offset, view.first_held)
    return _cache(keys, values, view.offset)
