"""What a cache of each mlx-lm class holds: a place per token, or one state that changes as a whole.

Knows single caches, and their classes by exact type: a subclass may hold what is unknown here. Runs on the
device thread. `layers` puts what it finds into snapshots and back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: Classes that keep every token at its own place, for good.
_PLAIN: Final = (KVCache, ConcatenateKVCache, QuantizedKVCache)
#: Those among them that allocate ahead, many tokens at a time.
_AHEAD: Final = (KVCache, QuantizedKVCache)
#: Classes whose state at one position says nothing of the state at another.
_WHOLE: Final = (RotatingKVCache, ChunkedKVCache, ArraysCache)

#: The arrays of a quantised part, in mlx-lm's order.
_QUANTIZED: Final = ("codes", "scales", "biases")
#: Part of every state: the position that it belongs to, then what its class counts besides.
_NUMBERS: Final = "numbers"


def leaves(caches: Sequence[Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Go through the caches of all layers, each with its path: `3`, or `3.0` for a list's first member."""
    for i, cache in enumerate(caches):
        if type(cache) is CacheList:
            yield from leaves(cache.caches, f"{path}{i}.")
        else:
            yield f"{path}{i}", cache


def is_plain(cache: Any) -> bool:
    """Say whether the cache can be cut, and trimmed, at any of its tokens."""
    return type(cache) in _PLAIN


def is_known(cache: Any) -> bool:
    """Say whether all that the cache holds is known here."""
    return type(cache) in _PLAIN or type(cache) in _WHOLE


def describe(cache: Any) -> str:
    """Name the class with what it was made with: all that its state does not say."""
    name = type(cache).__name__
    match cache:
        case QuantizedKVCache():
            return f"{name}({cache.group_size},{cache.bits})"
        case RotatingKVCache():
            return f"{name}({cache.max_size},{cache.keep})"
        case ChunkedKVCache():
            return f"{name}({cache.chunk_size})"
        case ArraysCache():
            return f"{name}({len(cache.cache)})"
    return name


def num_tokens(cache: Any) -> int | None:
    """Count the tokens that the cache has seen; None where its class does not."""
    return None if type(cache) is ArraysCache else int(cache.offset)


def room(cache: Any) -> int | None:
    """Count the tokens that a cache has allocated for; None where its class does not allocate ahead."""
    if type(cache) not in _AHEAD:
        return None
    return next((int(array.shape[2]) for array in parts(cache).values()), 0)


def most_tokens(cache: Any) -> int | None:
    """Return how many tokens a window or a chunk holds beside what runs; None for other classes."""
    if type(cache) is RotatingKVCache:
        return int(cache.max_size)
    return int(cache.chunk_size) if type(cache) is ChunkedKVCache else None


def drop_passed(cache: Any) -> list[mx.array]:
    """Drop what a window or a chunk would drop before its next token; returns what is left, unevaluated."""
    most = most_tokens(cache)
    if most is None or cache.keys is None:
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


def parts(cache: Any) -> dict[str, mx.array]:
    """Name the arrays of a plain cache; their axis 2 are the tokens, with room for more behind them."""
    found: dict[str, mx.array] = {}
    for name in ("keys", "values"):
        part = getattr(cache, name)
        if isinstance(part, mx.array):
            found[name] = part
        elif part is not None:
            found |= {f"{name}.{kind}": array for kind, array in zip(_QUANTIZED, part, strict=True)}
    return found


def set_parts(cache: Any, arrays: Mapping[str, mx.array], num_tokens: int) -> None:
    """Fill a new plain cache; the arrays may have room for more. Raises `ValueError` if they do not fit."""
    names = ["keys", "values"]
    if type(cache) is QuantizedKVCache:
        names = [f"{name}.{kind}" for name in names for kind in _QUANTIZED]
    if set(arrays) != set(names) or any(array.shape[2] < num_tokens for array in arrays.values()):
        raise ValueError(f"not the keys and values of {num_tokens} tokens in a {type(cache).__name__}")
    filled = [arrays[name] for name in names]
    if type(cache) is ConcatenateKVCache:  # which has no room: what comes next is put behind all of it
        filled = [array[..., :num_tokens, :] for array in filled]
    quantized = type(cache) is QuantizedKVCache
    cache.keys, cache.values = (filled[:3], filled[3:]) if quantized else filled
    cache.offset = num_tokens


def state(cache: Any, position: int) -> dict[str, mx.array]:
    """Name the arrays of the complete state of a cache that is at `position`; some may be views of its own.

    A ring stays turned as it is: put in order, it would be written, and summed over, in another order.
    Raises `ValueError` where there is no such state.
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
    """Fill a new cache with what `state` gave. Raises `ValueError` where that is of another position."""
    held = dict(arrays)
    numbers: Any = held.pop(_NUMBERS).tolist() if _NUMBERS in held else []
    if numbers[:1] != [position]:
        raise ValueError(f"not the state of a {describe(cache)} after {position} tokens")
    if type(cache) is ArraysCache:
        names = {f"array{i}": i for i, is_there in enumerate(numbers[1:]) if is_there}
        if set(held) != set(names) or len(numbers) != 1 + len(cache.cache):
            raise ValueError(f"not the arrays of a {describe(cache)}")
        for name, i in names.items():
            cache[i] = held[name]
        return
    if set(held) != {"keys", "values"} or len(numbers) != 2:
        raise ValueError(f"not the keys and values of a {describe(cache)}")
    num_held = held["keys"].shape[2]
    is_ring = type(cache) is RotatingKVCache
    # Where a ring is written next lies in it, and a chunk ends where its tokens do.
    if held["values"].shape[2] != num_held or not (
        0 <= numbers[1] <= num_held if is_ring else 0 <= numbers[1] == position - num_held
    ):
        raise ValueError(f"not a place in a {describe(cache)}")
    cache.keys, cache.values, cache.offset = held["keys"], held["values"], position
    if is_ring:
        cache._idx = numbers[1]  # noqa: SLF001  # part of its `state`
    else:
        cache.start_position = numbers[1]


def _filled(cache: Any, num_filled: int) -> dict[str, mx.array]:
    """Leave out what is allocated ahead."""
    return {
        name: part if part.shape[2] <= num_filled else part[..., :num_filled, :]
        for name, part in parts(cache).items()
    }
