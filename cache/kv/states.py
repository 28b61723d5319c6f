"""Knows how each cache class stores KV: tokens at fixed places, tokens in a ring, or one state as a whole.

Functions take a single cache and check its exact class, since a subclass may have more contents than its
base. `layers` uses them to store caches in snapshots and to restore caches. Runs on the device thread.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from cache.names.policy import FULL, Policy

from .chunk import ChunkCache
from .ring import RingCache

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: Classes that keep every token's KV at a fixed place.
AT_PLACES: Final = (KVCache, ConcatenateKVCache, QuantizedKVCache)
#: Plain classes that allocate many tokens at a time.
_AHEAD: Final = (KVCache, QuantizedKVCache)
#: Classes that hold only some tokens, including the last ones, and store them per token.
PASSING: Final = (RingCache, ChunkCache)
#: Classes whose state must be saved as a whole: it changes with every token.
_WHOLE: Final = (RotatingKVCache, ChunkedKVCache, ArraysCache)

#: The arrays of a quantised part, in mlx-lm's order.
_QUANTIZED: Final = ("codes", "scales", "biases")
#: The tensors of the sketch of a ring's keys.
SKETCH: Final = tuple(f"sketch.{kind}" for kind in _QUANTIZED)
#: A tensor in every state: the position, then the other counters of the cache's class.
_NUMBERS: Final = "numbers"


def leaves(caches: Sequence[Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the caches of all layers with their paths: `3`, or `3.0` for the first member of a list."""
    for i, cache in enumerate(caches):
        if type(cache) is CacheList:
            yield from leaves(cache.caches, f"{path}{i}.")
        else:
            yield f"{path}{i}", cache


def is_cut(cache: Any) -> bool:
    """Whether a cache is stored per token: the KV of each token is separate, so ranges can be copied."""
    return type(cache) in AT_PLACES or isinstance(cache, PASSING)


def is_known(cache: Any) -> bool:
    """Whether this module supports the cache's class, and can copy everything that it holds."""
    return is_cut(cache) or type(cache) in _WHOLE


def describe(cache: Any) -> str:
    """Return the name of the cache's class, and the parameters that its state does not contain."""
    name = type(cache).__name__
    match cache:
        case QuantizedKVCache():
            return f"{name}({cache.group_size},{cache.bits})"
        case RingCache():
            grid = "" if cache.grid else ",0"
            return f"{name}({cache.policy}{f',{cache.group_size},{cache.bits}' if cache.bits else ''}{grid})"
        case RotatingKVCache():
            return f"{name}({cache.max_size},{cache.keep})"
        case ChunkedKVCache():
            return f"{name}({cache.chunk_size})"
        case ArraysCache():
            return f"{name}({len(cache.cache)})"
    return name


def reach(cache: Any) -> Policy:
    """Return, as a `Policy`, which tokens of a session the layer needs to continue; not for whole states."""
    if isinstance(cache, ChunkCache):
        return Policy(0, cache.chunk_size)
    return replace(cache.policy, window=cache.kept) if isinstance(cache, RingCache) else FULL


def num_tokens(cache: Any) -> int | None:
    """Return how many tokens the cache has processed; None if its class does not count them."""
    return None if type(cache) is ArraysCache else int(cache.offset)


def allocated_tokens(cache: Any) -> int | None:
    """Return for how many tokens memory is allocated; None if the class allocates only as needed."""
    if type(cache) not in _AHEAD and not isinstance(cache, RingCache):
        return None
    return next((int(array.shape[2]) for array in parts(cache).values()), 0)


def most_tokens(cache: Any) -> int | None:
    """Return the most tokens that a ring, window or chunk keeps between steps; None for other caches."""
    if isinstance(cache, RingCache):
        return cache.capacity
    if type(cache) is RotatingKVCache:
        return int(cache.max_size)
    return int(cache.chunk_size) if isinstance(cache, ChunkedKVCache) else None


def live_bytes(cache: Any) -> int:
    """Return the bytes that a cache's KV uses, without memory allocated in advance."""
    if not hasattr(cache, "keys"):
        return int(cache.nbytes)
    # A quantised cache keeps three arrays for its keys, and three for its values.
    arrays = dict(tree_flatten([cache.keys, cache.values])).values()
    # A chunked cache holds the tokens from its start position on; a rotating one holds fewer tokens than it
    # has run; a ring holds more than are visible.
    num: int = cache.offset - getattr(cache, "start_position", 0)
    sketch = 0
    if isinstance(cache, RingCache):
        num = cache.policy.num_visible(num)
        sketch = sum(part.nbytes // part.shape[2] for part in cache.sketch) * cache.offset
    return sketch + sum(
        part.nbytes // part.shape[2] * min(num, part.shape[2])
        for part in arrays
        if isinstance(part, mx.array)
    )


def drop_passed(cache: Any) -> list[mx.array]:
    """Drop the tokens of a window or chunk that no later token sees; return the new arrays, unevaluated."""
    most = most_tokens(cache)
    if most is None or cache.keys is None or isinstance(cache, RingCache):
        return []
    keep = getattr(cache, "keep", 0)
    num_filled = cache.offset - getattr(cache, "start_position", cache.offset - cache.keys.shape[2])
    passed = num_filled - most
    if passed <= 0:
        return []
    cache.keys, cache.values = left = [
        mx.contiguous(mx.concatenate([part[..., :keep, :], part[..., passed + keep : num_filled, :]], axis=2))
        for part in parts(cache).values()
    ]
    if type(cache) is RotatingKVCache:
        cache._idx = most  # noqa: SLF001  # part of its `state`
    else:
        cache.start_position += passed
    return left


def drop_unused(cache: Any) -> list[mx.array]:
    """Free a cache's unused memory; return the new arrays, unevaluated."""
    if isinstance(cache, RingCache):
        cache.shrink()
    else:
        held = tokens(cache, 0, cache.offset)
        set_parts(cache, {name: mx.contiguous(part) for name, part in held.items()}, cache.offset)
    return list(parts(cache).values())


def parts(cache: Any) -> dict[str, mx.array]:
    """Return a cache's arrays of keys and values by name.

    Axis 2 is the token axis; at its end a plain cache may have unused memory.
    """
    found: dict[str, mx.array] = {}
    for name in ("keys", "values"):
        found |= _named(name, getattr(cache, name))
    return found


def _named(name: str, part: Any) -> dict[str, mx.array]:
    """Return the arrays of keys or of values by name: one array, or three if they are quantised."""
    arrays = [part] if isinstance(part, mx.array) else part or []
    names = [name] if len(arrays) == 1 else [f"{name}.{kind}" for kind in _QUANTIZED]
    return dict(zip(names, arrays, strict=False))


def tokens(cache: Any, start: int, end: int) -> dict[str, mx.array]:
    """Return the arrays of the tokens `[start, end)` by the names of `parts`; some may be views.

    Only for caches that are stored per token. Raises `ValueError` if the cache does not hold all the tokens.
    """
    if isinstance(cache, PASSING):
        keys, values = cache.tokens(start, end)
        return _named("keys", keys) | _named("values", values) | sketched(cache, start, end)
    if cache.keys is None or end > cache.offset:
        raise ValueError(f"a {type(cache).__name__} does not hold the tokens [{start}, {end})")
    return {name: part[..., start:end, :] for name, part in parts(cache).items()}


def sketched(cache: Any, start: int, end: int) -> dict[str, mx.array]:
    """Return the sketches of the tokens `[start, end)`, as arrays by name; empty if the layer has none."""
    held = zip(SKETCH, getattr(cache, "sketch", ()), strict=False)
    return {name: part[..., start:end, :] for name, part in held}


def set_parts(cache: Any, arrays: Mapping[str, mx.array], num_tokens: int) -> None:
    """Fill a new cache that is stored per token. Raises `ValueError` if the arrays do not fit.

    The arrays of a plain cache may have unused memory. A ring's arrays have its sinks, then its window; a
    chunk's arrays have its last tokens.
    """
    is_passing = isinstance(cache, PASSING)
    names, more = ["keys", "values"], {}
    if getattr(cache, "bits", 0):
        names = [f"{name}.{kind}" for name in names for kind in _QUANTIZED]
    if isinstance(cache, RingCache) and cache.policy.recall:
        arrays = dict(arrays)
        more["sketch"] = [arrays.pop(name) for name in SKETCH if name in arrays]
    if set(arrays) != set(names) or (
        not is_passing and any(array.shape[2] < num_tokens for array in arrays.values())
    ):
        raise ValueError(f"not the keys and values of {num_tokens} tokens in a {type(cache).__name__}")
    filled = [arrays[name] for name in names]
    if is_passing:
        cache.fill(filled[: len(names) // 2], filled[len(names) // 2 :], num_tokens, **more)
        return
    if type(cache) is ConcatenateKVCache:  # appends after the whole array: no unused memory
        filled = [array[..., :num_tokens, :] for array in filled]
    quantized = type(cache) is QuantizedKVCache
    cache.keys, cache.values = (filled[:3], filled[3:]) if quantized else filled
    cache.offset = num_tokens


def state(cache: Any, position: int) -> dict[str, mx.array]:
    """Return the whole state of a cache at `position`, as arrays by name; some may be views of the cache.

    The tokens of a rotating cache stay in their order: in another order, attention would round differently.
    Raises `ValueError` if the cache has no state at that position.
    """
    if type(cache) is ArraysCache:
        if cache.lengths is not None or cache.left_padding is not None:
            raise ValueError("a state that is part of a batch")
        arrays: list[Any] = cache.cache
        found = {f"array{i}": array for i, array in enumerate(arrays) if array is not None}
        numbers = [int(array is not None) for array in arrays]
    elif type(cache) is RotatingKVCache:
        found, numbers = _filled(cache, cache.offset), [cache._idx]  # noqa: SLF001  # part of its `state`
    elif type(cache) is ChunkedKVCache:
        found, numbers = _filled(cache, cache.offset - cache.start_position), [cache.start_position]
    else:
        raise ValueError(f"{type(cache).__name__} has no state of its own")
    if not found or num_tokens(cache) not in (None, position):
        raise ValueError(f"a {type(cache).__name__} that is not at {position} tokens")
    return {_NUMBERS: mx.array([position, *numbers], mx.int64), **found}


def set_state(cache: Any, arrays: Mapping[str, mx.array], position: int) -> None:
    """Fill a new cache with the arrays from `state`. Raises `ValueError` if they do not fit `position`."""
    numbers = check_state(cache, arrays, position)
    if type(cache) is ArraysCache:
        for i, is_there in enumerate(numbers):
            if is_there:
                cache[i] = arrays[f"array{i}"]
        return
    cache.keys, cache.values, cache.offset = arrays["keys"], arrays["values"], position
    if type(cache) is RotatingKVCache:
        cache._idx = numbers[0]  # noqa: SLF001  # part of its `state`
    else:
        cache.start_position = numbers[0]


def check_state(cache: Any, arrays: Mapping[str, mx.array], position: int) -> list[int]:
    """Check that a new cache can be filled with evaluated arrays that `state` has returned.

    Returns the numbers that the cache's class stores besides the position. Raises `ValueError` if the arrays
    do not fit `position`. Safe on any thread: makes no arrays, and does not change the cache.
    """
    names = set(arrays) - {_NUMBERS}
    numbers: Any = arrays[_NUMBERS].tolist() if _NUMBERS in arrays else []
    if numbers[:1] != [position]:
        raise ValueError(f"not the state of a {describe(cache)} after {position} tokens")
    del numbers[0]
    if type(cache) is ArraysCache:
        there = {f"array{i}" for i, is_there in enumerate(numbers) if is_there}
        if names != there or len(numbers) != len(cache.cache):
            raise ValueError(f"not the arrays of a {describe(cache)}")
        return list(numbers)
    if names != {"keys", "values"} or len(numbers) != 1:
        raise ValueError(f"not the keys and values of a {describe(cache)}")
    num_held = arrays["keys"].shape[2]
    is_ring = type(cache) is RotatingKVCache
    # A ring's write index lies within the ring; a chunk ends at the last token.
    if arrays["values"].shape[2] != num_held or not (
        0 <= numbers[0] <= num_held if is_ring else 0 <= numbers[0] == position - num_held
    ):
        raise ValueError(f"not a place in a {describe(cache)}")
    return list(numbers)


def _filled(cache: Any, num_filled: int) -> dict[str, mx.array]:
    """Return a cache's arrays by name, without the unused memory after the first `num_filled` tokens."""
    return {
        name: part if part.shape[2] <= num_filled else part[..., :num_filled, :]
        for name, part in parts(cache).items()
    }
