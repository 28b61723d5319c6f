"""Runs one forward pass over tokens of many sessions of different length. Device thread only.

mlx-lm's models take tokens as (rows, length) and pad shorter rows. Here every token is a row of length one:
operations on single tokens (embeddings, projections, norms, experts, rotary positions) run over all tokens at
once. Attention, the only operation across tokens, is delegated to the parts of the pass, each with its own
KV. So decoding answers and prompts in prefill share one pass over the weights, nothing is padded, and no
cache is merged.

The code of the models is not changed. During a pass, views with `offset`, `make_mask` and `update_and_fetch`
replace the layers' caches, and the attention function that models call is replaced by one that accepts such
views. Not every architecture fits: `batch_kinds` runs a few tokens with and without this module and compares
the logits.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import activations
from mlx_lm.models.cache import make_prompt_cache

from . import cpu, ring_attention
from .attention import THEIR_ATTENTION, Attention
from .image_rows import input_embeddings, layer_additions
from .parts import of_one_session, rotary_offsets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .parts import OwnPart, Part
    from .products import Products
    from .ring_attention import Rotate
    from .rows import PrefillPiece


class _Masks:
    """The masks of a pass, one for each part. The model passes the object to attention unread."""

    def __init__(self, masks: list[Any]) -> None:
        self.of_parts = masks


class _LayerView:
    """Replaces a layer's cache during a pass; splits keys, values and queries among the parts."""

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
        self.added: mx.array | None = None  # to the layer's output, by layers of models that see

    def make_mask(self, num_tokens: int, **options: Any) -> _Masks:
        """Make one mask per part. `num_tokens`, always 1 here, is ignored: parts know how many they have."""
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

    All these tokens must lie between the same two multiples of the ring's grid (see `ring_attention`).
    """

    def __init__(self, layer: int, part: OwnPart, rotate: Rotate) -> None:
        num_tokens, offset = len(part.positions), _within(part.positions[0], part.grid(layer))
        super().__init__(layer, [part], [num_tokens], offset, rotate)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add keys and values, (1, KV heads, tokens, head_dim), to the ring cache; return them unchanged."""
        super().update_and_fetch(of_one_session(keys), of_one_session(values))
        return keys, values

    def attend(self, queries: mx.array, mask: Any, attention: Attention) -> mx.array:
        """Compute attention for queries of the shape (1, heads, tokens, head_dim)."""
        return of_one_session(super().attend(of_one_session(queries), mask, attention))


class _Offsets:
    """The rotary positions of a pass's tokens, by layer; ring caches count them modulo `RingCache.grid`.

    They have the shape (tokens,), or (3, tokens) if a token has three positions; see `SectionedRope`.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._made: dict[tuple[int, ...], mx.array] = {}

    def of(self, layer: int) -> mx.array:
        grids = tuple(part.grid(layer) for part in self._parts)
        if grids not in self._made:
            found = [
                _within(position, grid)
                for part, grid in zip(self._parts, grids, strict=True)
                for position in part.positions
            ]
            self._made[grids] = rotary_offsets(found)
        return self._made[grids]


def _within(position: Any, grid: int) -> Any:
    return position % grid if grid else position


class Forward:
    """Runs passes of one model over many sessions. Patches the model, which can still be called as before."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._num_layers = len(make_prompt_cache(model))
        #: How each layer rotates queries; None if that cannot be determined, so that rings cannot be used.
        self.rotations = ring_attention.rotations(model, self._num_layers)
        self._selected = _select_hidden(model)
        #: Computes the products of the model's linear layers on all cores; None if MLX does that well.
        self.products: Products | None = None
        _patch_functions(model)

    def __call__(
        self,
        parts: Sequence[Part],
        tokens: Sequence[int] | mx.array,
        pieces: Sequence[PrefillPiece] = (),
        *,
        hidden: bool = False,
    ) -> mx.array:
        """Build one pass over all tokens; arguments and result as for `rows.Pass`."""
        num_parts, wanted = len(parts), list(range(len(tokens)))
        if not isinstance(tokens, mx.array):
            tokens = mx.array([*tokens, *(token for piece in pieces for token in piece.tokens)])
        parts = [*parts, *(piece.part() for piece in pieces)]
        starts = [0, *accumulate(len(part.positions) for part in parts)]
        ends, num_tokens = starts[1:], starts[-1]
        prompts = zip(pieces, ends[num_parts:], strict=True)
        wanted += [end - 1 for piece, end in prompts if piece.has_output]
        offsets = _Offsets(parts)
        if self.products is not None:
            self.products.begin(num_tokens)
        views = [
            _LayerView(i, parts, ends, offsets.of(i), self.rotations[i] if self.rotations else None)
            for i in range(self._num_layers)
        ]
        # A step without prompts wants all: an array of positions would be one more copy from the host.
        chosen = slice(None) if len(wanted) == num_tokens else mx.array(wanted or [0])
        run, options = partial(self._model.model if hidden else self._model, cache=views), {}
        if any(piece.images is not None for piece in pieces):
            places = zip(starts[num_parts:-1], pieces, strict=True)
            images = [(start, piece.images) for start, piece in places]
            embeddings, tokens = input_embeddings(self._model, tokens, images)
            options["input_embeddings"] = embeddings[:, None]
            for view, more in zip(views, layer_additions(embeddings, images), strict=False):
                view.added = more[:, None]
        return self._outputs(partial(run, tokens[:, None], **options), chosen)

    def _outputs(self, run: Callable[[], mx.array], chosen: mx.array | slice) -> mx.array:
        """Run a pass and return the outputs of the `chosen` tokens, for which alone the output head runs."""
        if self._selected is None:
            return run()[chosen][:, -1]
        self._selected.append(chosen)
        try:
            return run()[:, -1]
        finally:
            self._selected.clear()


def _select_hidden(model: Any) -> list[mx.array | slice] | None:
    """Patch the model so that its output head runs only for chosen positions.

    If it runs for all positions, the head takes a tenth of a pass.

    Returns a list: the caller adds the positions before a pass and clears the list after it. While the list
    is empty, the head runs for all positions. Returns None if the model has no inner module `model`.
    """
    inner = getattr(model, "model", None)
    if not isinstance(inner, Module):
        return None
    kind = type(inner)
    if hasattr(kind, "selected"):  # patched by an earlier `Forward`
        earlier: list[mx.array | slice] = kind.selected
        return earlier
    selected: list[mx.array | slice] = []

    def call(self: Any, *args: Any, **options: Any) -> Any:
        hidden = kind.__call__(self, *args, **options)
        return hidden[selected[0]] if selected else hidden

    names = {"__call__": call, "__module__": kind.__module__, "selected": selected}
    inner.__class__ = type(kind.__name__, (kind,), names)
    return selected


def _patch_functions(model: Any) -> None:
    """In the Python modules that define the model's layers, replace mlx-lm's functions: see `_PATCHES`."""
    for module in {type(part).__module__ for part in model.modules()}:
        names = vars(sys.modules[module])
        for name, (theirs, ours) in _PATCHES.items():
            if names.get(name) is theirs:
                ours.__module__ = theirs.__module__  # so that the model's `code_digest` stays the same
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


#: mlx-lm's own function. It is saved here because patching replaces it even in the module that defines it.
_THEIR_SWIGLU: Final[Any] = activations.swiglu

#: By name: mlx-lm's function, and its replacement, which accepts a `_LayerView` or is faster on a CPU.
_PATCHES: Final = {
    "scaled_dot_product_attention": (THEIR_ATTENTION, _attention),
    "swiglu": (_THEIR_SWIGLU, _swiglu),
}
