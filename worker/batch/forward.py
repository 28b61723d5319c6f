"""One forward pass over tokens of many sessions, each at its own length. Device thread only.

mlx-lm's models take tokens as (rows, length) and pad shorter rows. Here every token is a row of length one:
what works token by token (embeddings, projections, norms, experts, rotary positions) runs over all tokens at
once. Attention, the only operation across tokens, is delegated to the parts of the pass, each with its own
KV. So decoding answers and prompts in prefill share one pass over the weights, nothing is padded, and no
cache is merged.

The code of the models is not changed. During a pass, views with `offset`, `make_mask` and `update_and_fetch`
replace the layers' caches, and the attention function that models call is replaced by one that accepts such
views. Not every architecture fits: `choosing` runs a few tokens with and without this module and compares the
logits.
"""

from __future__ import annotations

import sys
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import activations
from mlx_lm.models.cache import make_prompt_cache

from cache.kv.paged import PagedCache, compared
from cache.kv.ring import RingCache
from cache.names.policy import SLACK

from . import cpu, ring_attention
from .attention import THEIR_ATTENTION, Attention

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .batch import PrefillPiece
    from .ring_attention import Rotate, Sight


class Part(Protocol):
    """Consecutive tokens of one pass whose attention is computed together."""

    @property
    def offsets(self) -> list[int]:
        """The position of each token in its session."""

    def grid(self, layer: int) -> int:
        """Return a layer's grid: offsets are positions modulo the grid; plain positions if it is 0."""

    def masks(self, layer: int, options: dict[str, Any]) -> Any:
        """Make the mask for `attend`. Called before the tokens are written to the layer's cache."""

    def update(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Add the tokens' keys and values, of shape (tokens, KV heads, 1, head_dim), to the layer's KV."""

    def attend(self, layer: int, queries: mx.array, mask: Any, attention: Attention) -> mx.array:
        """Return the attention's output for queries of shape (tokens, heads, 1, head_dim), in that shape."""


class OwnPart:
    """Tokens of one session that use the session's own caches, of any class."""

    def __init__(self, caches: Sequence[Any], start: int, num_tokens: int) -> None:
        self._caches = caches
        self._num_tokens = num_tokens
        self._fetched: tuple[Any, Any] = (None, None)
        self._sights: dict[tuple[int, ...], Sight] = {}  # of rings, which are mostly of one kind
        self.offsets = list(range(start, start + num_tokens))

    def grid(self, layer: int) -> int:
        """Return the grid of a ring; 0 for any other cache, whose offsets are plain positions."""
        cache = self._caches[layer]
        return cache.grid if isinstance(cache, RingCache) else 0

    def masks(self, layer: int, options: dict[str, Any]) -> Any:
        """Return the mask that the cache makes for the model; for a ring none, since `attend` makes it."""
        cache = self._caches[layer]
        if isinstance(cache, RingCache):
            return None
        if self._num_tokens == 1 and not hasattr(cache, "make_mask"):
            return None
        return cache.make_mask(self._num_tokens, **options)

    def update(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Add the tokens to the cache, in the cache's shape."""
        if self._num_tokens > 1:
            keys, values = keys.transpose(2, 1, 0, 3), values.transpose(2, 1, 0, 3)
        cache = self._caches[layer]
        is_ring = isinstance(cache, RingCache)
        self._fetched = (keys, values) if is_ring else cache.update_and_fetch(keys, values)

    def attend(self, layer: int, queries: mx.array, mask: Any, attention: Attention) -> mx.array:
        """Attend to all keys and values of the cache."""
        if isinstance(self._caches[layer], RingCache):
            return self._attend_ring(layer, queries, attention)
        keys, values = self._fetched
        if self._num_tokens == 1:
            return attention(queries, keys, values, cache=self._caches[layer], mask=mask)
        turned = queries.transpose(2, 1, 0, 3)
        return attention(turned, keys, values, cache=self._caches[layer], mask=mask).transpose(2, 1, 0, 3)

    def _attend_ring(self, layer: int, queries: mx.array, attention: Attention) -> mx.array:
        """Write tokens and attend in runs: no run overwrites keys that its tokens still need."""
        ring, outputs = self._caches[layer], []
        sees_all = isinstance(ring, PagedCache) and ring.pages.sees_all
        if sees_all:
            outputs.append(self._attend_all(layer, queries, attention))
        for at, run in self._written(ring):
            asked = queries[run]
            if not sees_all:
                seen = self._sight(ring, at, asked.shape[0])
                places = ring.unpacked(seen.num_places)
                outputs.append(attention.to_ring(asked, places, seen, _of_one_session))
            if isinstance(ring, PagedCache) and ring.is_sketched and ring.pages.asks(at, asked.shape[0]):
                ring.weigh(asked, attention.scale, cpu.compared if cpu.faster_compared(asked) else compared)
        together = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)
        return together.transpose(2, 1, 0, 3)

    def _written(self, ring: RingCache) -> Iterator[tuple[int, slice]]:
        """Write the tokens to the ring in runs; yield each run's position and token indices.

        No run crosses a multiple of the ring's grid, where offsets start again from 0.
        """
        (keys, values), start, end = self._fetched, ring.offset, ring.offset + self._num_tokens
        while ring.offset < end:
            at, most = ring.offset, min(SLACK, ring.grid or SLACK)
            run = slice(at - start, min(at + most - at % most, end) - start)
            ring.write(ring.packed(keys[..., run, :]), ring.packed(values[..., run, :]))
            yield at, run

    def _sight(self, ring: RingCache, at: int, num: int) -> Sight:
        kind = (ring.grid, ring.sink, ring.window, at)
        if kind not in self._sights:
            self._sights[kind] = ring_attention.sight(ring, [at + num], num)
        return self._sights[kind]

    def _attend_all(self, layer: int, queries: mx.array, attention: Attention) -> mx.array:
        """Attend to all earlier tokens of the session and to the new ones: (1, heads, tokens, head_dim).

        The new tokens are not in the cache yet.
        """
        cache = self._caches[layer]
        later = (i for i in range(layer + 1, len(self._caches)) if isinstance(self._caches[i], PagedCache))
        then = next(later, None)
        running = attention.running(_of_one_session(queries))
        for keys, values in cache.before(str(layer), None if then is None else str(then)):
            running.add(keys, values)
        keys, values = (cache.rounded(part) for part in self._fetched)
        at = mx.arange(self._num_tokens)
        running.add(keys, values, at[None] <= at[:, None])
        return running.result()


def _of_one_session(array: mx.array) -> mx.array:
    """Convert (tokens, heads, 1, size) of one session to (1, heads, tokens, size), or back."""
    return array.transpose(2, 1, 0, 3)


class _Masks:
    """One mask for each part of the pass. The model passes them on to attention without reading them."""

    def __init__(self, masks: list[Any]) -> None:
        self.of_parts = masks


class _LayerView:
    """Takes the place of a layer's cache during a pass."""

    def __init__(
        self,
        layer: int,
        parts: Sequence[Part],
        ends: Sequence[int],
        offset: mx.array | int,
        rotate: Rotate | None,
    ) -> None:
        self._layer = layer
        self._rotate = rotate
        self._parts = parts
        self._ends = ends
        self.offset = offset

    def make_mask(self, num_tokens: int, **options: Any) -> _Masks:
        """Ignore `num_tokens`, which is 1 for each row of the pass: a part knows its number of tokens."""
        del num_tokens
        return _Masks([part.masks(self._layer, options) for part in self._parts])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        for part, k, v in zip(self._parts, self._split(keys), self._split(values), strict=True):
            part.update(self._layer, k, v)
        return keys, values

    def attend(self, queries: mx.array, mask: Any, attention: Attention) -> mx.array:
        if not isinstance(mask, _Masks):
            raise TypeError("the model makes its own attention masks")
        attention.rotate = self._rotate
        outputs = [
            part.attend(self._layer, some, own, attention)
            for part, some, own in zip(self._parts, self._split(queries), mask.of_parts, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _split(self, array: mx.array) -> list[mx.array]:
        return [array] if len(self._parts) == 1 else list(mx.split(array, list(self._ends[:-1])))


class RingView(_LayerView):
    """Replaces a ring cache while mlx-lm's own code runs consecutive tokens of one session.

    All these tokens must lie between the same two multiples of the ring's grid.
    """

    def __init__(self, layer: int, part: OwnPart, rotate: Rotate) -> None:
        num_tokens, offset = len(part.offsets), part.offsets[0] % part.grid(layer)
        super().__init__(layer, [part], [num_tokens], offset, rotate)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take keys and values of the shape (1, KV heads, tokens, head_dim)."""
        super().update_and_fetch(_of_one_session(keys), _of_one_session(values))
        return keys, values

    def attend(self, queries: mx.array, mask: Any, attention: Attention) -> mx.array:
        """Attend for queries of the shape (1, heads, tokens, head_dim)."""
        return _of_one_session(super().attend(_of_one_session(queries), mask, attention))


class _Offsets:
    """The offsets of all tokens of a pass. They differ between layers if some layers count modulo a grid."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._made: dict[tuple[int, ...], mx.array] = {}

    def of(self, layer: int) -> mx.array:
        grids = tuple(part.grid(layer) for part in self._parts)
        if grids not in self._made:
            self._made[grids] = mx.array(
                [
                    position % grid if grid else position
                    for part, grid in zip(self._parts, grids, strict=True)
                    for position in part.offsets
                ]
            )
        return self._made[grids]


class Forward:
    """Runs passes over one model, which it patches; the model can still be called as before."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._num_layers = len(make_prompt_cache(model))
        #: How each layer rotates queries; None where that cannot be told, and rings cannot be used.
        self.rotations = ring_attention.rotations(model, self._num_layers)
        self._selected = _select_hidden(model)
        _patch_functions(model)

    def __call__(
        self, parts: Sequence[Part], tokens: Sequence[int] | mx.array, pieces: Sequence[PrefillPiece] = ()
    ) -> mx.array:
        """Build a pass over `tokens` and over pieces of prompts. The caches are updated.

        `tokens` are the tokens of `parts`, in order. Returns logits, (rows, vocabulary): first of all
        `tokens`, then of the last token of each piece that starts a row.
        """
        num_parts, wanted = len(parts), list(range(len(tokens)))
        if not isinstance(tokens, mx.array):
            tokens = mx.array([*tokens, *(token for piece in pieces for token in piece.tokens)])
        parts = [*parts, *(OwnPart(piece.caches, piece.start, len(piece.tokens)) for piece in pieces)]
        ends = list(accumulate(len(part.offsets) for part in parts))
        prompts = zip(pieces, ends[num_parts:], strict=True)
        wanted += [end - 1 for piece, end in prompts if piece.row is not None]
        offsets = _Offsets(parts)
        views = [
            _LayerView(i, parts, ends, offsets.of(i), self.rotations[i] if self.rotations else None)
            for i in range(self._num_layers)
        ]
        chosen = mx.array(wanted or [0])
        if self._selected is None:
            logits = self._model(tokens[:, None], cache=views)[chosen]
        else:
            self._selected.append(chosen)
            try:
                logits = self._model(tokens[:, None], cache=views)
            finally:
                self._selected.clear()
        last: mx.array = logits[:, -1]
        return last


def _select_hidden(model: Any) -> list[mx.array] | None:
    """Patch the model so that its output head runs for chosen positions only.

    For all positions the head takes a tenth of a pass.

    Returns a list: the caller adds the positions before a pass and clears the list after it. While the list
    is empty, the head runs for all positions. Returns None if the model has another structure.
    """
    inner = getattr(model, "model", None)
    if not isinstance(inner, Module):
        return None
    kind = type(inner)
    if hasattr(kind, "selected"):  # patched by an earlier `Forward`
        earlier: list[mx.array] = kind.selected
        return earlier
    selected: list[mx.array] = []

    def call(self: Any, *args: Any, **options: Any) -> Any:
        hidden = kind.__call__(self, *args, **options)
        return hidden[selected[0]] if selected else hidden

    names = {"__call__": call, "__module__": kind.__module__, "selected": selected}
    inner.__class__ = type(kind.__name__, (kind,), names)
    return selected


def _patch_functions(model: Any) -> None:
    """Replace the functions that the model's modules call: see `_PATCHES`."""
    for module in {type(part).__module__ for part in model.modules()}:
        names = vars(sys.modules[module])
        for name, (theirs, ours) in _PATCHES.items():
            if names.get(name) is theirs:
                names[name] = ours


def _attention(
    queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, **more: Any
) -> mx.array:
    attention = Attention(scale, more)
    if isinstance(cache, _LayerView):
        return cache.attend(queries, mask, attention)
    return attention(queries, keys, values, cache=cache, mask=mask)


def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    return cpu.swiglu(gate, x) if cpu.faster_swiglu(gate) else _THEIR_SWIGLU(gate, x)


#: The originals: patching replaces them in the modules that define them, too.
_THEIR_SWIGLU: Final[Any] = activations.swiglu

#: By name: mlx-lm's function, and its replacement, which knows `_LayerView` or is faster on a CPU.
_PATCHES: Final = {
    "scaled_dot_product_attention": (THEIR_ATTENTION, _attention),
    "swiglu": (_THEIR_SWIGLU, _swiglu),
}
