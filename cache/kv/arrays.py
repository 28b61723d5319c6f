"""MLX arrays as plain memory: made first, filled by whoever reads a file, then handed over.

Runs on an I/O thread; only evaluated arrays leave it. Every call names the CPU stream, so that no other
thread than the device thread gives the device work. Knows nothing of files or names.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import mlx.core as mx
import numpy as np

from cache.names.snapshot import Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.names.snapshot import Layout, States

#: Tensors by name, as MLX arrays.
Arrays: TypeAlias = "dict[str, mx.array]"

#: A tensor's name, type and shape.
Spec: TypeAlias = "tuple[str, str, tuple[int, ...]]"

#: A plain cache of mlx-lm grows by so many tokens: with room up to the next multiple, the first append after
#: a restore copies nothing.
STEP_TOKENS: Final = 256

#: By their names in safetensors: MLX's type, and one that numpy knows with items of that size.
_TYPES: Final = {
    "F32": (mx.float32, np.float32),
    "F16": (mx.float16, np.float16),
    "BF16": (mx.bfloat16, np.uint16),
    "BOOL": (mx.bool_, np.bool_),
    "U8": (mx.uint8, np.uint8),
    "I32": (mx.int32, np.int32),
    "U32": (mx.uint32, np.uint32),
    "I64": (mx.int64, np.int64),
}


class Blank:
    """Tensors of a layout with room for `num_tokens` or a few more, and those of a state; contents undefined.

    `places` and `state` are where to write; `arrays` ends that and gives the tensors. Those of the layout are
    longer than what was written to them: whoever takes them must know how many tokens count.
    """

    def __init__(self, layout: Layout, num_tokens: int, states: States = ()) -> None:
        capacity = math.ceil(num_tokens / STEP_TOKENS) * STEP_TOKENS
        kv = [(name, dtype, (1, heads, capacity, dim)) for name, dtype, (heads, dim) in layout]
        self._specs: list[Spec] = [*kv, *states]
        # An evaluated array's buffer is what the CPU sees of it, and MLX documents writing to a view of it;
        # with unified memory the GPU sees the same. CUDA may keep another copy: there, memory of our own.
        self._in_place = not mx.cuda.is_available()
        self._owners: dict[str, Any] = _blank(self._specs) if self._in_place else self._plain()
        self.places: list[Place] = [
            _place(_memory(self._owners[name]), heads, capacity, dim * np.dtype(_TYPES[dtype][1]).itemsize)
            for name, dtype, (heads, dim) in layout
        ]
        self.state: list[memoryview] = [_memory(self._owners[name]) for name, _, _ in states]

    def arrays(self) -> Arrays:
        """Take the tensors, evaluated: (1, heads, capacity, head_dim), and a state's in their own shapes.

        The places are gone then.
        """
        self.places, self.state = [], []  # an array whose memory is lent out might be written to unseen
        owners, self._owners = self._owners, {}
        if not self._in_place:
            for name, dtype, _ in self._specs:
                owners[name] = mx.array(owners[name]).view(_TYPES[dtype][0], stream=mx.cpu)
            mx.eval(owners)
        return owners

    def _plain(self) -> dict[str, Any]:
        return {name: np.empty(shape, _TYPES[dtype][1]) for name, dtype, shape in self._specs}


def _blank(specs: Sequence[Spec]) -> Arrays:
    """Make evaluated arrays whose contents do not matter, with the least work there is."""
    if sys.platform == "linux":
        with suppress(OSError, RuntimeError):  # no /proc, or a limit on files' sizes
            return _read_from_nothing(specs)
    arrays = {name: mx.zeros(shape, _TYPES[dtype][0], stream=mx.cpu) for name, dtype, shape in specs}
    mx.eval(arrays)
    return arrays


def _read_from_nothing(specs: Sequence[Spec]) -> Arrays:
    """Let MLX read a file in memory that is nothing but a header and a hole.

    Its readers work side by side, and so do the faults of fresh memory; `mx.zeros` writes on one thread.
    """
    header = {}
    at = 0
    for name, dtype, shape in specs:
        size_bytes = math.prod(shape) * np.dtype(_TYPES[dtype][1]).itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + size_bytes)}
        at += size_bytes
    text = json.dumps(header).encode()
    file = os.memfd_create("turnkeep")
    try:
        os.write(file, struct.pack("<Q", len(text)) + text)
        os.ftruncate(file, 8 + len(text) + at)
        arrays: Any = mx.load(f"/proc/self/fd/{file}", format="safetensors", stream=mx.cpu)
        mx.eval(arrays)
    finally:
        os.close(file)
    return dict(arrays)


def _memory(owner: Any) -> memoryview:
    # A view of an array without elements cannot be cast.
    return memoryview(owner).cast("B") if owner.size else memoryview(bytearray())


def _place(memory: memoryview, heads: int, capacity: int, token_bytes: int) -> Place:
    row_bytes = capacity * token_bytes
    rows = tuple(memory[head * row_bytes : (head + 1) * row_bytes] for head in range(heads))
    return Place(rows, token_bytes)


def release_thread() -> None:
    """Give up what the calling thread holds of MLX, before it ends; it must not load any more.

    Streams that outlive their thread now and then abort the process at its exit.
    """
    mx.clear_streams()
