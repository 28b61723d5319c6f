"""Allocates MLX arrays as plain memory, which the reader of a file fills, then returns the filled arrays.

Runs on an I/O thread and returns only evaluated arrays. Every call names the CPU stream, because only the
device thread may run work on the device; on CUDA the driver copies (`cuda`). Knows nothing of files or names.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from cache.names.policy import FULL
from cache.names.snapshot import ITEM_BYTES, TensorBuffers, layer_path, section, seen

from . import cuda

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.names.blocks import Span
    from cache.names.snapshot import KvPart, ModelLayout, States

#: Tensors by name, as MLX arrays.
Arrays: TypeAlias = "dict[str, mx.array]"

#: A tensor's name, type and shape.
Spec: TypeAlias = "tuple[str, str, tuple[int, ...]]"

#: By name in safetensors: the type of MLX, and a type of numpy with items of that size.
TYPES: Final = {
    "F32": (mx.float32, np.float32),
    "F16": (mx.float16, np.float16),
    "BF16": (mx.bfloat16, np.uint16),
    "BOOL": (mx.bool_, np.bool_),
    "U8": (mx.uint8, np.uint8),
    "I32": (mx.int32, np.int32),
    "U32": (mx.uint32, np.uint32),
    "I64": (mx.int64, np.int64),
}


def _held(layout: ModelLayout, num_tokens: int, only: KvPart | None) -> list[tuple[Span, ...]]:
    """List, for each tensor, the spans of tokens to allocate: what its layer sees, or the part in `only`."""
    if only is None:
        by_reach = {reach: seen(reach, num_tokens) for reach in set(layout.reaches)}
        return [by_reach[reach] for reach in layout.reaches]
    return [
        only.spans if reach == only.reach and only.layer in {None, layer_path(name)} else ()
        for (name, _, _), reach in zip(layout.kv, layout.reaches, strict=True)
    ]


class BlankTensors:
    """Uninitialised tensors for a session's first `num_tokens` tokens, and for states of recurrent layers.

    A layer's tensors have memory for at least `capacity_tokens` tokens; the first `num_tokens` are to be
    filled. If a layer sees only some tokens, its tensors have memory for exactly these. With `only`, just
    some layers get tensors. Write to the buffers until `arrays` returns the tensors.
    """

    def __init__(
        self,
        layout: ModelLayout,
        num_tokens: int,
        states: States = (),
        *,
        capacity_tokens: int = 0,
        only: KvPart | None = None,
        num_carried: int = 0,
    ) -> None:
        # Rounded up as in mlx-lm's plain caches, so that the first append after a restore copies nothing.
        capacity = math.ceil(max(num_tokens, capacity_tokens) / KVCache.step) * KVCache.step
        spans = _held(layout, num_tokens, only)
        sizes = [
            capacity if reach == FULL and only is None else sum(span.num_tokens for span in held)
            for reach, held in zip(layout.reaches, spans, strict=True)
        ]
        kv = [
            (name, dtype, (1, heads, size, dim))
            for (name, dtype, (heads, dim)), size in zip(layout.kv, sizes, strict=True)
            if size or only is None
        ]
        self._specs: list[Spec] = [*kv, *states]
        # MLX documents writing to a view of an evaluated array, and with unified memory the GPU sees the same
        # buffer. Writes to CUDA's managed memory are slow, so there numpy owns the memory until `arrays`.
        self._in_place = not mx.cuda.is_available()
        self._owners: dict[str, Any] = _blank(self._specs) if self._in_place else self._plain()
        #: The buffers of each tensor of the layout, without the tokens of `carried`.
        self.places: list[TensorBuffers] = [
            TensorBuffers(
                _rows(self._owners.get(name), heads), dim * ITEM_BYTES[dtype], section(name, reach), held
            )
            for (name, dtype, (heads, dim)), reach, held in zip(layout.kv, layout.reaches, spans, strict=True)
        ]
        #: The buffers for the first `num_carried` tokens of the sketches, which carriers have too.
        self.carried = self._take_carried(len(layout.kv) - len(layout.carried), num_carried)
        #: The buffers for the tensors of the states, in the order of `states`.
        self.state: list[memoryview] = [_memory(self._owners[name]) for name, _, _ in states]

    def _take_carried(self, start: int, num_tokens: int) -> list[TensorBuffers]:
        """Split the buffers of the tensors from number `start` on, at position `num_tokens`.

        Returns the buffers for the tokens before this position; `places` keeps the others.
        """
        split = [place.split(num_tokens) for place in self.places[start:]]
        self.places[start:] = [place for _, place in split]
        return [place for place, _ in split]

    def arrays(self) -> Arrays:
        """Return the filled tensors, evaluated: (1, heads, tokens, head_dim); a state's may have any shape.

        Drops the buffers: nothing can be written to the tensors afterwards.
        """
        self.places, self.carried, self.state = [], [], []  # from now on nothing may write to the arrays
        owners, self._owners = self._owners, {}
        if not self._in_place:
            return {name: cuda.to_device(owners.pop(name), TYPES[dtype][0]) for name, dtype, _ in self._specs}
        return owners

    def _plain(self) -> dict[str, Any]:
        return {name: np.empty(shape, TYPES[dtype][1]) for name, dtype, shape in self._specs}


def _blank(specs: Sequence[Spec]) -> Arrays:
    """Return evaluated arrays. On a CPU MLX gives no memory that it has not written to."""
    arrays = {name: mx.zeros(shape, TYPES[dtype][0], stream=mx.cpu) for name, dtype, shape in specs}
    mx.eval(arrays)
    return arrays


def _memory(owner: Any) -> memoryview:
    # A view of an array without elements cannot be cast.
    return memoryview(owner).cast("B") if owner is not None and owner.size else memoryview(bytearray())


def _rows(owner: Any, heads: int) -> tuple[memoryview, ...]:
    memory = _memory(owner)
    row_bytes = len(memory) // heads if heads else 0
    return tuple(memory[head * row_bytes : (head + 1) * row_bytes] for head in range(heads))


def release_thread() -> None:
    """Release the calling thread's MLX streams before the thread ends; the thread must not use MLX again.

    A stream that outlives its thread sometimes aborts the process at exit.
    """
    mx.clear_streams()
