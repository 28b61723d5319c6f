"""`RingCache`: KV of a session's first few tokens and its last ones, in bounded memory.

Used for the policy `sink_window`, and for models with sliding windows. The index of a token's key and value
in the arrays (its place) depends only on the token's position, not on how the tokens were split into passes.
So a restored session computes the same bits, unlike with mlx-lm's `RotatingKVCache`. Device thread only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from cache.names.policy import SLACK, Policy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class RingCache:
    """KV of one layer's first `sink` tokens, its last `kept`, and up to `SLACK` tokens before these.

    A token sees the last `window` tokens. More are kept if a block is longer than the window: a session that
    continues within a block must still have the beginning of the block, which is stored once it is full.
    Token p is at place p if p < sink; later tokens cycle through the places after the sinks. A subclass may
    keep other tokens too, in slots behind the ring's places, and small copies of all keys.
    """

    #: Copies of all keys in few bits, (1, KV heads, tokens, size) each; empty if the cache keeps none.
    sketch: tuple[mx.array, ...] = ()

    def __init__(
        self,
        sink: int,
        window: int,
        group_size: int = 0,
        bits: int = 0,
        grid: int | None = None,
        kept: int = 0,
    ) -> None:
        self.policy = Policy(sink, window)  # the tokens that a token sees
        self.sink = sink
        self.window = window
        self.kept = max(window, kept)
        #: KV is quantised in groups of `group_size` to `bits` bits; with 0 it is not quantised.
        self.group_size = group_size
        self.bits = bits
        #: The rotary embedding (RoPE) of a key at position p uses p modulo `grid`, a power of two of at least
        #: `sink + window`; with 0 it uses p. See `worker.batch.ring_attention`. Stored keys depend on the
        #: grid: another formula needs another `FORMAT_VERSION`.
        self.grid = 1 << max(12, (2 * (sink + window) - 1).bit_length()) if grid is None else grid
        #: One array, or codes, scales and biases if quantised: (1, KV heads, allocated places, size) each.
        self.keys: tuple[mx.array, ...] | None = None
        self.values: tuple[mx.array, ...] | None = None
        #: How many tokens the layer has run.
        self.offset = 0
        #: The first position after the sinks whose token has not been overwritten.
        self.first_held = sink

    @property
    def sees_all(self) -> bool:
        """Whether the tokens being run attend to all earlier tokens, also those that are not held."""
        return False

    @property
    def capacity(self) -> int:
        """The largest number of places, each for one token: sinks, kept tokens and `SLACK`."""
        return self.sink + self.kept + SLACK

    @property
    def earliest(self) -> int:
        """The smallest number of tokens to which `trim` can shorten the cache; greater numbers work too."""
        return 0 if self.first_held <= self.sink else self.first_held + self.kept

    @property
    def state(self) -> tuple[mx.array, ...]:
        """All arrays, for `mx.eval`."""
        return (*(self.keys or ()), *(self.values or ()))

    @property
    def nbytes(self) -> int:
        """The allocated bytes."""
        return sum(array.nbytes for array in self.state)

    def places_for(self, end: int) -> int:
        """Return how many places the arrays need for a session of `end` tokens."""
        return min(end, self.capacity)

    def slot_positions(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the token position of each place in slots, -1 if it is empty; a plain ring has no slots."""
        return np.zeros(0, np.int64)

    def empty(self) -> bool:
        """Whether the cache is still empty."""
        return self.keys is None

    def can_trim(self, num_tokens: int) -> bool:
        """Whether the cache, shortened to `num_tokens`, would have all tokens that it must keep."""
        return self.earliest <= num_tokens <= self.offset

    def trim(self, num_tokens: int) -> None:
        """Drop the last `num_tokens` tokens, as mlx-lm's caches do. Raises `ValueError` below `earliest`."""
        left = self.offset - num_tokens
        if not self.can_trim(left):
            raise ValueError(f"a ring of {self.offset} tokens cannot go back to {left}")
        self.offset = left

    def copy_from(self, other: RingCache) -> None:
        """Replace this ring's contents by a copy of `other`, unevaluated. Both have the same parameters."""
        if other.keys is not None and other.values is not None:
            self.keys, self.values = tuple(map(mx.array, other.keys)), tuple(map(mx.array, other.values))
        self.offset, self.first_held = other.offset, other.first_held

    def like(self, keys: mx.array, values: mx.array, num_tokens: int, first_held: int) -> RingCache:
        """Make an unquantised ring with the same parameters from arrays with each token at its place.

        The ring has run `num_tokens` tokens; after the sinks it has the tokens from `first_held` on.
        """
        ring = RingCache(self.sink, self.window, grid=self.grid, kept=self.kept)
        ring.keys, ring.values, ring.offset = (keys,), (values,), num_tokens
        ring.first_held = max(first_held, num_tokens - self.kept - SLACK)
        return ring

    def shrink(self) -> None:
        """Drop the unused places after the last token; the arrays are lazy. A wrapped ring has none."""
        self.keys, self.values = (
            tuple(mx.contiguous(array[..., : self.offset, :]) for array in side or ())
            for side in (self.keys, self.values)
        )

    def holds(self, start: int, end: int) -> bool:
        """Whether the cache has the keys and values of the tokens `[start, end)`."""
        first = max(start, self.sink)
        return 0 <= start < end <= self.offset and (end <= self.sink or first >= self.first_held)

    def places(self, start: int, end: int) -> Iterator[slice]:
        """Yield the places of the tokens `[start, end)` in the arrays, in order, as slices."""
        yield from _places(start, end, self.sink, self.capacity)

    def tokens(self, start: int, end: int) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
        """Copy the keys and values of the tokens `[start, end)`, unevaluated.

        Raises `ValueError` if some of them are not held.
        """
        if self.keys is None or self.values is None or not self.holds(start, end):
            raise ValueError(f"not held: the tokens [{start}, {end}) of {self.offset}")
        places = list(self.places(start, end))
        keys, values = (
            tuple(mx.concatenate([array[..., place, :] for place in places], axis=2) for array in side)
            for side in (self.keys, self.values)
        )
        return keys, values

    def rounded(self, array: mx.array) -> mx.array:
        """Return keys or values with the cache's precision: quantised and dequantised if it is quantised."""
        return self._unpacked(self.packed(array), array.shape[2]) if self.bits else array

    def packed(self, array: mx.array) -> tuple[mx.array, ...]:
        """Return keys or values in the form that the cache stores: quantised if the cache is quantised."""
        return mx.quantize(array, self.group_size, self.bits) if self.bits else (array,)

    def unpacked(self, num_places: int) -> tuple[mx.array, mx.array]:
        """Return the keys and values at the first `num_places` places, dequantised, unevaluated."""
        keys, values = (self._unpacked(side or (), num_places) for side in (self.keys, self.values))
        return keys, values

    def _unpacked(self, side: tuple[mx.array, ...], num_places: int) -> mx.array:
        shown = [array[..., :num_places, :] if array.shape[2] > num_places else array for array in side]
        if not self.bits:
            return shown[0]
        codes, scales, biases = shown
        return mx.dequantize(codes, scales, biases, group_size=self.group_size, bits=self.bits)

    def write(self, keys: Sequence[mx.array], values: Sequence[mx.array]) -> None:
        """Add the KV of the next tokens, at most `SLACK`, as `packed` has it: (1, KV heads, tokens, size)."""
        start, end = self.offset, self.offset + keys[0].shape[2]
        self._allocate(keys, values, end)
        for side, new in ((self.keys, keys), (self.values, values)):
            for array, part in zip(side or (), new, strict=True):
                at = 0
                for place in self.places(start, end):
                    num = place.stop - place.start
                    array[..., place, :] = part[..., at : at + num, :]
                    at += num
        self.offset = end
        self.first_held = max(self.first_held, end - self.kept - SLACK)

    def fill(self, keys: Sequence[mx.array], values: Sequence[mx.array], num_tokens: int) -> None:
        """Fill an empty cache for a session of `num_tokens` tokens with the KV of sinks and of the last ones.

        Raises `ValueError` unless `keys` and `values` have exactly these tokens.
        """
        num_sinks = min(self.sink, num_tokens)
        num_held = min(num_tokens, self.sink + self.kept)
        if any(array.shape[2] != num_held for array in (*keys, *values)):
            raise ValueError(f"not the keys and values of {num_held} tokens")
        for start, end, at in (
            (0, num_sinks, 0),
            (num_tokens - num_held + num_sinks, num_tokens, num_sinks),
        ):
            self.offset = start
            for begin in range(start, end, SLACK):
                size = min(SLACK, end - begin)
                shift = at + begin - start
                self.write(
                    [array[..., shift : shift + size, :] for array in keys],
                    [array[..., shift : shift + size, :] for array in values],
                )
        self.first_held = num_tokens - num_held + num_sinks

    def weigh(self, at: int, queries: mx.array, scale: float) -> None:
        """Score other tokens by the `queries` of those from position `at` on; a plain ring has no others."""

    def _allocate(self, keys: Sequence[mx.array], values: Sequence[mx.array], end: int) -> None:
        """Allocate places for `end` tokens, up to the capacity."""
        self._extend(keys, values, min(-(-end // SLACK) * SLACK, self.capacity))

    def _extend(self, keys: Sequence[mx.array], values: Sequence[mx.array], wanted: int) -> None:
        """Grow the arrays to `wanted` places, with the types and shapes of these keys and values."""
        held = self.keys[0].shape[2] if self.keys is not None else 0
        if held >= wanted:
            return
        grown = []
        for side, new in ((self.keys, keys), (self.values, values)):
            blank = [mx.zeros((*part.shape[:2], wanted - held, part.shape[3]), part.dtype) for part in new]
            grown.append(
                tuple(blank)
                if side is None
                else tuple(mx.concatenate([*pair], axis=2) for pair in zip(side, blank, strict=True))
            )
        self.keys, self.values = grown


def place_of(position: int, sink: int, capacity: int) -> int:
    """Return the place in the arrays of the token at `position`."""
    return position if position < sink else sink + (position - sink) % (capacity - sink)


def _places(start: int, end: int, sink: int, capacity: int) -> Iterator[slice]:
    while start < end:
        place = place_of(start, sink, capacity)
        stop = min(end - start, (sink if start < sink else capacity) - place)
        yield slice(place, place + stop)
        start += stop
