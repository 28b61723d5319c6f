"""Take mlx-lm's caches apart into plain bytes, and rebuild them.

Runs on the device thread, which owns every live cache. Knows `KVCache`, whose state can be cut at any
token; other classes are named by `unsupported`, and only sized here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, ConcatenateKVCache, KVCache, QuantizedKVCache

from .format import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Classes that keep every token at its own place, for good.
_PLAIN: Final = (KVCache, ConcatenateKVCache, QuantizedKVCache)
_DTYPES: Final = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16"}


def unsupported(caches: Sequence[Any]) -> str | None:
    """Name the first class that cannot be snapshotted yet; None where all can.

    Subclasses count as unsupported: they may hold state that is unknown here.
    """
    return next((type(cache).__name__ for cache in caches if type(cache) is not KVCache), None)


def cut(caches: Sequence[Any], start: int, end: int) -> tuple[Tensor, ...]:
    """Copy keys and values of the tokens `[start, end)` of every layer.

    The copies are contiguous and evaluated in one go, so that another thread may read their bytes while
    the caches change: assigning to a slice of a cache mutates the very array that a view would look at.
    Raises `ValueError` where the caches do not hold these tokens.
    """
    names: list[str] = []
    copies: list[mx.array] = []
    for i, cache in enumerate(caches):
        if not 0 <= start < end or cache.keys is None or end > _num_held(cache):
            raise ValueError(f"layer {i} does not hold the tokens [{start}, {end})")
        names += (f"{i}.keys", f"{i}.values")
        copies += (mx.contiguous(part[..., start:end, :]) for part in (cache.keys, cache.values))
    mx.eval(copies)
    return tuple(
        Tensor(name, _DTYPES[copy.dtype], tuple(copy.shape), _bytes(copy))
        for name, copy in zip(names, copies, strict=True)
    )


def rebuild(tensors: Mapping[str, mx.array], num_tokens: int) -> list[Any]:
    """Make a session's caches from evaluated arrays that hold its first `num_tokens` tokens.

    The arrays may be longer: that is room, whose contents nobody reads before they are written.
    """
    caches: list[Any] = []
    for i in range(len(tensors) // 2):
        cache = KVCache()  # type: ignore[no-untyped-call]  # mlx-lm has no annotations
        keys, values = tensors[f"{i}.keys"], tensors[f"{i}.values"]
        cache.state = (keys, values, num_tokens)
        caches.append(cache)
    return caches


def trimmable(caches: Sequence[Any]) -> bool:
    """Say whether `trim` can bring these caches back to any length, however far they have come.

    Not their own `is_trimmable`: a rotating cache claims it until its window wraps, a chunked one always.
    """
    return all(
        trimmable(cache.caches) if isinstance(cache, CacheList) else type(cache) in _PLAIN for cache in caches
    )


def trim(caches: Sequence[Any], num_tokens: int) -> None:
    """Forget all but the first `num_tokens` tokens. Nothing is freed; later tokens overwrite the rest."""
    for cache in caches:
        cache.trim(max(0, cache.offset - num_tokens))


def fork(caches: Sequence[Any], num_tokens: int) -> list[Any]:
    """Copy the first `num_tokens` tokens of plain caches, which may go on changing, for another session."""
    copies: list[Any] = []
    for cache in caches:
        copy = KVCache()  # type: ignore[no-untyped-call]  # mlx-lm has no annotations
        parts = (mx.contiguous(part[..., :num_tokens, :]) for part in (cache.keys, cache.values))
        copy.state = (*parts, num_tokens)
        copies.append(copy)
    mx.eval([(copy.keys, copy.values) for copy in copies])
    return copies


def shrink(caches: Sequence[Any]) -> None:
    """Give back what plain caches have allocated but do not use, where that is more than they use.

    They grow by 256 tokens at a time and never shrink: a short session, or one that was rewound, would hold
    many times what it needs. The copy is smaller than what is freed.
    """
    kept: list[mx.array] = []
    for cache in caches:
        if type(cache) is not KVCache or cache.keys is None or cache.values is None:
            continue
        if cache.keys.shape[2] > 2 * cache.offset:
            cache.keys = mx.contiguous(cache.keys[..., : cache.offset, :])
            cache.values = mx.contiguous(cache.values[..., : cache.offset, :])
            kept += (cache.keys, cache.values)
    mx.eval(kept)


def live_bytes(caches: Sequence[Any]) -> int:
    """Count what a session's KV really holds, without what is allocated ahead.

    Over layers: cached positions x KV heads x head_dim x itemsize, for keys and for values; and the whole
    of a recurrent layer's state, whose size is fixed.
    """
    return sum(map(_live_bytes, caches))


def _live_bytes(cache: Any) -> int:
    if isinstance(cache, CacheList):
        return live_bytes(cache.caches)
    if not hasattr(cache, "keys"):
        return int(cache.nbytes)
    # A quantised cache keeps three arrays for its keys, and three for its values.
    parts = dict(tree_flatten([cache.keys, cache.values])).values()
    # A chunked cache counts from where its chunk starts; a rotating one has come further than it holds.
    num_tokens: int = cache.offset - getattr(cache, "start_position", 0)
    return sum(
        part.nbytes // part.shape[2] * min(num_tokens, part.shape[2])
        for part in parts
        if isinstance(part, mx.array)
    )


def _bytes(array: mx.array) -> memoryview:
    view: Any = array  # arrays have the buffer protocol, but MLX's stubs do not say so
    return memoryview(view).cast("B")


def _num_held(cache: Any) -> int:
    """Count the token slots that are filled."""
    if isinstance(cache, KVCache):
        return int(cache.size())  # type: ignore[no-untyped-call]  # mlx-lm has no annotations
    return int(cache.keys.shape[2])
