"""Defines the parts of a pass. A part is a group of tokens whose attention is computed together.

Each part has the KV that its tokens attend to. `slots.PoolPart` is a part, too. Device thread only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
import numpy as np

from cache.kv.ring import RingCache
from cache.names.images import whole_end
from cache.names.policy import SLACK

from . import ring_attention

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cache.names.images import ImageSpan

    from .attention import Attention
    from .image_rows import ImageRows
    from .plane import Position
    from .ring_attention import VisibleSlots


class Part(Protocol):
    """Tokens of one pass whose attention is computed together, over KV that belongs to this part."""

    @property
    def positions(self) -> Sequence[Position]:
        """The rotary position of each token."""

    def grid(self, layer: int) -> int:
        """Return a layer's grid, modulo which rotary positions count; 0 if they are plain positions."""

    def masks(self, layer: int, options: dict[str, Any]) -> Any:
        """Make the mask for `attend`, with the model's mask `options`. Called before `update`."""

    def update(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Add the tokens' keys and values, of shape (tokens, KV heads, 1, head_dim), to the layer's KV."""

    def attend(self, layer: int, queries: mx.array, mask: Any, attention: Attention) -> mx.array:
        """Return the attention's output for queries of shape (tokens, heads, 1, head_dim), in that shape."""


class OwnPart:
    """A part with consecutive tokens of one session, which has caches of its own, of any class."""

    def __init__(
        self,
        caches: Sequence[Any],
        start: int,
        num_tokens: int,
        positions: Sequence[Position] | None = None,
        images: ImageRows | None = None,
    ) -> None:
        """`start` is the first token's number in the session.

        `positions` are the tokens' rotary positions, by default their numbers in the session. `images` are
        the images' tokens among them.
        """
        self._images = images
        self.joint: Sequence[ImageSpan] = images.joint if images is not None else ()
        self.caches = caches
        self._num_tokens = num_tokens
        self._fetched: tuple[Any, Any] = (None, None)
        self._sights: dict[tuple[int, ...], VisibleSlots] = {}  # by ring kind; most models have one
        self.numbers: Sequence[int] = range(start, start + num_tokens)
        self.positions: Sequence[Position] = positions or self.numbers

    def cut(self, start: int, end: int | None = None) -> OwnPart:
        """Return a part of the tokens with indices `[start, end)`; all of them by default."""
        if not start and end is None:
            return self
        numbers, positions = self.numbers[start:end], self.positions[start:end]
        return OwnPart(self.caches, numbers[0], len(numbers), positions, self._images)

    def grid(self, layer: int) -> int:
        """Return the number modulo which a ring counts positions (its grid); 0 for any other cache."""
        cache = self.caches[layer]
        return cache.grid if isinstance(cache, RingCache) else 0

    def masks(self, layer: int, options: dict[str, Any]) -> Any:
        """Make the mask with the cache's `make_mask`. None for a ring: `attend` makes its mask itself."""
        cache = self.caches[layer]
        if isinstance(cache, RingCache):
            return None
        if self._num_tokens == 1 and not hasattr(cache, "make_mask"):
            return None
        joins = self._images is not None and (self._images.joins_everywhere or options.get("window_size"))
        if not (joins and self.joint) or self._num_tokens == 1:
            return cache.make_mask(self._num_tokens, **options)
        mask = cache.make_mask(self._num_tokens, **{**options, "return_array": True})
        numbers, num = np.array(self.numbers), self._num_tokens
        later = (numbers > numbers[:, None]) & (numbers <= self._last_seen(0, num)[:, None])
        return mx.concatenate([mask[..., :-num], mask[..., -num:] | mx.array(later)], axis=-1)

    def _last_seen(self, start: int, end: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return, for the tokens with indices `[start, end)`, the last one that each sees, by its number."""
        last = np.array(self.numbers[start:end])
        for span in self.joint:
            last[(last >= span.start) & (last < span.end)] = min(span.end, last[-1] + 1) - 1
        return last

    def update(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Add the tokens' keys and values to the layer's cache; for a ring, `attend` adds them later."""
        if self._num_tokens > 1:
            keys, values = keys.transpose(2, 1, 0, 3), values.transpose(2, 1, 0, 3)
        cache = self.caches[layer]
        is_ring = isinstance(cache, RingCache)
        self._fetched = (keys, values) if is_ring else cache.update_and_fetch(keys, values)

    def attend(self, layer: int, queries: mx.array, mask: Any, attention: Attention) -> mx.array:
        """Compute attention to all keys and values of the layer's cache."""
        if isinstance(self.caches[layer], RingCache):
            return self._attend_ring(layer, queries, attention)
        keys, values = self._fetched
        if self._num_tokens == 1:
            return attention(queries, keys, values, cache=self.caches[layer], mask=mask)
        turned = queries.transpose(2, 1, 0, 3)
        return attention(turned, keys, values, cache=self.caches[layer], mask=mask).transpose(2, 1, 0, 3)

    def _attend_ring(self, layer: int, queries: mx.array, attention: Attention) -> mx.array:
        """Write the tokens to a ring and compute their attention, one run of tokens after the other.

        The runs are so short that none overwrites keys that its tokens still need.
        """
        ring, outputs = self.caches[layer], []
        if ring.sees_all:
            outputs.append(self._attend_all(layer, queries, attention))
        for at, run in self._written(ring):
            asked = queries[run]
            if not ring.sees_all:
                seen = self._sight(ring, at, run)
                places = ring.unpacked(seen.num_places)
                outputs.append(attention.to_ring(asked, places, seen, of_one_session))
            ring.weigh(at, asked, attention.scale)
        together = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)
        return together.transpose(2, 1, 0, 3)

    def _written(self, ring: RingCache) -> Iterator[tuple[int, slice]]:
        """Write the tokens to the ring in runs; yield each run's position in the session and its indices.

        No run crosses a multiple of the ring's grid (see `grid`), where offsets start again from 0.
        """
        (keys, values), start, end = self._fetched, ring.offset, ring.offset + self._num_tokens
        while ring.offset < end:
            at, most = ring.offset, min(SLACK, ring.grid or SLACK)
            stop = whole_end(self.joint, at, min(at + most - at % most, end))
            run = slice(at - start, min(stop, end) - start)
            ring.write(ring.packed(keys[..., run, :]), ring.packed(values[..., run, :]))
            yield at, run

    def _sight(self, ring: RingCache, at: int, run: slice) -> VisibleSlots:
        kind, num = (ring.grid, ring.sink, ring.window, at), run.stop - run.start
        if kind not in self._sights:
            last = self._last_seen(run.start, run.stop)[None] if self.joint else None
            self._sights[kind] = ring_attention.sight(ring, [at + num], num, last)
        return self._sights[kind]

    def _attend_all(self, layer: int, queries: mx.array, attention: Attention) -> mx.array:
        """Compute attention to all the session's tokens; return (1, heads, tokens, head_dim).

        Called before the part's own tokens are written to the cache.
        """
        cache = self.caches[layer]
        later = (i for i in range(layer + 1, len(self.caches)) if self.caches[i].sees_all)
        then = next(later, None)
        running = attention.running(of_one_session(queries))
        for keys, values in cache.before(str(layer), None if then is None else str(then)):
            running.add(keys, values)
        keys, values = (cache.rounded(part) for part in self._fetched)
        at = mx.arange(self._num_tokens)
        running.add(keys, values, at[None] <= at[:, None])
        return running.result()


def of_one_session(array: mx.array) -> mx.array:
    """Convert (tokens, heads, 1, size) of one session to (1, heads, tokens, size), or back."""
    return array.transpose(2, 1, 0, 3)


class MergedPart(OwnPart):
    """A part with one token for each merged row; `caches` are mlx-lm's batch caches.

    `numbers` are the tokens' numbers in their sessions.
    """

    def __init__(self, caches: Sequence[Any], numbers: list[int], shifts: Sequence[int]) -> None:
        super().__init__(caches, 0, 1)
        self.numbers = numbers
        self.positions = [number + shift for number, shift in zip(numbers, shifts, strict=True)]


def rotary_offsets(positions: Sequence[Position]) -> mx.array:
    """Return positions as an array, (tokens,), or (3, tokens) if one is in a plane; see `SectionedRope`."""
    if any(isinstance(each, tuple) for each in positions):
        return mx.array([each if isinstance(each, tuple) else (each,) * 3 for each in positions]).T
    return mx.array([*positions])
