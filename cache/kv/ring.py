"""KV of a session's first few tokens and its last ones, in memory that never grows beyond them.

`RingCache` is a cache class of ours, beside mlx-lm's: for `sink_window`, and for the sliding windows that a
model has itself. Where a token's key and value lie follows from the token's position alone, whatever way the
tokens came in, so the same tokens give the same bits after a restore. Device thread only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Tokens held beyond the window: a run of so many is written before its first token looks back, and a
#: session can be rewound by as many without being read anew.
SLACK: Final = 256


class RingCache:
    """The first `sink` tokens and the last `window` of one layer, and up to `SLACK` before those.

    `keys` and `values` are tuples of arrays, (1, KV heads, allocated, size) each: one array, or codes, scales
    and biases where KV is quantised in groups of `group_size` to `bits` bits. Token p lies at place p while
    p < sink, and behind them in turns. `offset` counts the tokens that were run. A key at position p is
    rotated by p modulo `grid`, a power of two of no less than `sink + window`: see `worker.batch.far`.
    """

    def __init__(
        self, sink: int, window: int, group_size: int = 0, bits: int = 0, grid: int | None = None
    ) -> None:
        self.sink = sink
        self.window = window
        self.group_size = group_size
        self.bits = bits
        self.grid = grid or 1 << max(12, (2 * (sink + window) - 1).bit_length())
        self.keys: tuple[mx.array, ...] | None = None
        self.values: tuple[mx.array, ...] | None = None
        self.offset = 0
        #: The first position behind the sinks that still has its place: all from there on have.
        self.first_held = sink

    @property
    def capacity(self) -> int:
        """Places at the most."""
        return self.sink + self.window + SLACK

    @property
    def earliest(self) -> int:
        """The fewest tokens that it can go back to, and to any number from there on."""
        return 0 if self.first_held <= self.sink else self.first_held + self.window

    @property
    def state(self) -> tuple[mx.array, ...]:
        """All arrays, to be evaluated."""
        return (*(self.keys or ()), *(self.values or ()))

    @property
    def nbytes(self) -> int:
        """Bytes of what is allocated."""
        return sum(array.nbytes for array in self.state)

    def empty(self) -> bool:
        """Whether it holds nothing yet."""
        return self.keys is None

    def can_trim(self, num_tokens: int) -> bool:
        """Say whether it can go back to its first `num_tokens`: what they see is still here."""
        return self.earliest <= num_tokens <= self.offset

    def trim(self, num_tokens: int) -> None:
        """Forget the last `num_tokens`, as caches of mlx-lm do. Raises `ValueError` where it cannot."""
        left = self.offset - num_tokens
        if not self.can_trim(left):
            raise ValueError(f"a ring of {self.offset} tokens cannot go back to {left}")
        self.offset = left

    def copy_from(self, other: RingCache) -> None:
        """Hold what a ring of the same form holds, copied, unevaluated: either may go on."""
        if other.keys is not None and other.values is not None:
            self.keys, self.values = tuple(map(mx.array, other.keys)), tuple(map(mx.array, other.values))
        self.offset, self.first_held = other.offset, other.first_held

    def shrink(self) -> None:
        """Give back the places behind its last token, unevaluated; for a ring that has not come round."""
        self.keys, self.values = (
            tuple(mx.contiguous(array[..., : self.offset, :]) for array in side or ())
            for side in (self.keys, self.values)
        )

    def holds(self, start: int, end: int) -> bool:
        """Say whether it has the keys and values of the tokens `[start, end)`."""
        first = max(start, self.sink)
        return 0 <= start < end <= self.offset and (end <= self.sink or first >= self.first_held)

    def places(self, start: int, end: int) -> Iterator[slice]:
        """Give the places of the tokens `[start, end)`, in order, as few slices."""
        yield from _places(start, end, self.sink, self.capacity)

    def tokens(self, start: int, end: int) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
        """Copy the keys and values of the tokens `[start, end)`, unevaluated.

        Raises `ValueError` where some of them are not held.
        """
        if self.keys is None or self.values is None or not self.holds(start, end):
            raise ValueError(f"not held: the tokens [{start}, {end}) of {self.offset}")
        places = list(self.places(start, end))
        keys, values = (
            tuple(mx.concatenate([array[..., place, :] for place in places], axis=2) for array in side)
            for side in (self.keys, self.values)
        )
        return keys, values

    def packed(self, array: mx.array) -> tuple[mx.array, ...]:
        """Make of keys, or values, what is held of them."""
        return mx.quantize(array, self.group_size, self.bits) if self.bits else (array,)

    def unpacked(self, num_places: int) -> tuple[mx.array, mx.array]:
        """Show the keys and the values at the first places, unevaluated."""
        keys, values = (self._unpacked(side or (), num_places) for side in (self.keys, self.values))
        return keys, values

    def _unpacked(self, side: tuple[mx.array, ...], num_places: int) -> mx.array:
        shown = [array[..., :num_places, :] for array in side]
        if not self.bits:
            return shown[0]
        codes, scales, biases = shown
        return mx.dequantize(codes, scales, biases, group_size=self.group_size, bits=self.bits)

    def write(self, keys: Sequence[mx.array], values: Sequence[mx.array]) -> None:
        """Add the keys and values of the next tokens, `SLACK` at the most: (1, KV heads, tokens, size)."""
        start, end = self.offset, self.offset + keys[0].shape[2]
        self._make_room(keys, values, end)
        for side, new in ((self.keys, keys), (self.values, values)):
            for array, part in zip(side or (), new, strict=True):
                at = 0
                for place in self.places(start, end):
                    num = place.stop - place.start
                    array[..., place, :] = part[..., at : at + num, :]
                    at += num
        self.offset = end
        self.first_held = max(self.first_held, end - self.window - SLACK)

    def fill(self, keys: Sequence[mx.array], values: Sequence[mx.array], num_tokens: int) -> None:
        """Make an empty cache hold what one of `num_tokens` tokens needs: its sinks, then its window.

        That is `policy.num_visible(num_tokens)` tokens. Raises `ValueError` where there are others.
        """
        num_sinks = min(self.sink, num_tokens)
        num_held = min(num_tokens, self.sink + self.window)
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

    def _make_room(self, keys: Sequence[mx.array], values: Sequence[mx.array], end: int) -> None:
        """Allocate for `end` tokens, or for all that there will ever be."""
        held = self.keys[0].shape[2] if self.keys is not None else 0
        wanted = min(-(-end // SLACK) * SLACK, self.capacity)
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
    """Say where the token at `position` lies."""
    return position if position < sink else sink + (position - sink) % (capacity - sink)


def _places(start: int, end: int, sink: int, capacity: int) -> Iterator[slice]:
    while start < end:
        place = place_of(start, sink, capacity)
        stop = min(end - start, (sink if start < sink else capacity) - place)
        yield slice(place, place + stop)
        start += stop
