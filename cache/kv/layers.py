"""Copy a model's caches into plain bytes, and rebuild them.

Runs on the device thread, which owns every live cache. A layer that keeps the KV of each token, plainly or in
a ring, is stored per token: any range of tokens can be copied. Any other layer is copied as one state, which
is valid only at the current position. `states` knows each cache class.
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from itertools import accumulate, chain, groupby, pairwise, takewhile
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
    make_prompt_cache,
)

from cache.names.policy import FULL, SLACK
from cache.names.snapshot import CARRIED, GROWING, STATE, ModelLayout, Tensor

from . import states
from .arrays import TYPES
from .chunk import ChunkCache
from .paged import maker
from .ring import RingCache
from .size import KvSize, Window
from .sketches import sketch_layout
from .states import PASSING, leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from cache.names.blocks import Span
    from cache.names.policy import Policy

_DTYPES: Final = {dtype: name for name, (dtype, _) in TYPES.items()}


def make(
    model: Any,
    policy: Policy = FULL,
    *,
    rings: bool = False,
    sketched: Collection[int] | None = None,
    block_tokens: int | None = None,
    most_joint: int = 0,
    grid: int | None = None,
) -> list[Any]:
    """Make new caches for a model under a policy. A policy with a window turns plain layers into rings.

    With `rings` the model's own sliding windows become rings too; attention must then support rings.
    `sketched` are the layers with sketches (2-bit copies of keys) if the policy needs them: by default all.
    With `block_tokens`, layers with chunks of two blocks or more are stored per token; a shorter chunk could
    be dropped before its block is copied, since a block may wait for one more piece of the prompt. The rings
    of the model's own windows then keep at least a block. They have `grid` as `RingCache.grid`, and hold a
    window and at least `most_joint` more tokens, so that so many can run in one pass. Raises `ValueError`
    with the class of a layer that does not support the policy.
    """
    new_ring = maker(policy, sketched)

    def own_ring(window: int) -> RingCache:
        return RingCache(0, window, grid=grid, kept=max(block_tokens or 0, window + most_joint - SLACK))

    own = (
        ChunkCache(cache.chunk_size)  # type: ignore[no-untyped-call]
        if type(cache) is ChunkedKVCache and block_tokens and cache.chunk_size >= 2 * block_tokens
        else cache
        for cache in make_prompt_cache(model)
    )
    given = own_ring if rings else None
    return [_under(policy, partial(new_ring, layer), cache, given) for layer, cache in enumerate(own)]


def _under(
    policy: Policy,
    new_ring: Callable[..., RingCache],
    cache: Any,
    own_ring: Callable[[int], RingCache] | None,
) -> Any:
    kind = type(cache)
    if own_ring is not None and kind is RotatingKVCache and not cache.keep:
        return own_ring(cache.max_size)
    if policy.window is None or kind in (RotatingKVCache, ArraysCache):
        return cache
    if kind is CacheList:
        members = [_under(policy, new_ring, member, own_ring) for member in cache.caches]
        return CacheList(*members)  # type: ignore[no-untyped-call]
    if kind in (KVCache, QuantizedKVCache):
        return new_ring(*((cache.group_size, cache.bits) if kind is QuantizedKVCache else ()))
    raise ValueError(f"{policy.name} is not for layers of {kind.__name__}; use the policy full")


def unsupported(caches: Sequence[Any]) -> str | None:
    """Return the first cache class that snapshots do not support; None if all are supported.

    `caches` must have processed some tokens: a cache that is still empty is unsupported. So is a subclass of
    a supported class, since it may have more contents.
    """
    for _, cache in leaves(caches):
        if not states.is_known(cache):
            return type(cache).__name__
        if cache.empty():
            return f"{type(cache).__name__} that stays empty"
    return None


def describe(caches: Sequence[Any]) -> str:
    """Return the cache classes of all layers as one line; part of a model's identity."""
    named = [
        f"[{describe(cache.caches)}]" if type(cache) is CacheList else states.describe(cache)
        for cache in caches
    ]
    runs = [(name, len(list(run))) for name, run in groupby(named)]
    return " ".join(name if length == 1 else f"{length}*{name}" for name, length in runs)


def layout(
    caches: Sequence[Any], new: Callable[..., list[Any]], sketched: Collection[int] | None = None
) -> ModelLayout:
    """Return the layout of a model's snapshots, from caches that have processed some tokens.

    `new` makes empty caches, under a policy if it gets one as argument. For `sketched` see `make`.
    """
    whole: list[tuple[str, str, tuple[int, ...]]] = []
    kv: dict[Policy, list[tuple[str, str, tuple[int, ...]]]] = {}
    for path, cache in leaves(caches):
        if states.is_cut(cache):
            kv.setdefault(states.reach(cache), []).extend(
                (f"{path}.{part}", _DTYPES[array.dtype], (array.shape[1], array.shape[3]))
                for part, array in states.parts(cache).items()
            )
            continue
        for part, array in states.state(cache, states.num_tokens(cache) or 0).items():
            shape = list(array.shape)
            if hasattr(cache, part):  # keys and values
                shape[GROWING] = -1
            whole.append((f"{STATE}{path}.{part}", _DTYPES[array.dtype], tuple(shape)))

    stateful = [(f"{STATE}{path}", cache) for path, cache in leaves(new()) if not states.is_cut(cache)]

    def prove(tensors: Mapping[str, mx.array], num_tokens: int) -> None:
        groups = _by_path(tensors)
        for path, cache in stateful:
            states.check_state(cache, groups.get(path, {}), num_tokens)

    reaches = tuple(reach for reach, tensors in kv.items() for _ in tensors)
    together = tuple(chain.from_iterable(kv.values()))
    sketches = tuple((name, _DTYPES[dtype], shape) for name, dtype, shape in sketch_layout(caches, sketched))
    return ModelLayout(together, tuple(whole), prove, reaches, sketches)


def cut(
    caches: Sequence[Any],
    start: int,
    end: int,
    *,
    at_end: bool = False,
    most_bytes: int = sys.maxsize,
    spare_states: int = 0,
    carried: Span | None = None,
) -> tuple[Tensor, ...] | None:
    """Copy the KV of the tokens `[start, end)`, for a snapshot; None if the copy exceeds `most_bytes`.

    `at_end` says that the caches are at position `end`. Only then does the copy include the state of layers
    that are not stored per token, since a cache has only the state after its last token; and only if this
    state and `spare_states` more states fit into `most_bytes`. A snapshot without a state can be the middle
    of a chain, but no session can resume at its end. With `carried`, the copy includes the sketches of these
    earlier tokens.

    The copies are contiguous and evaluated, so that another thread may read their bytes while the caches
    change: assigning to a slice of a cache changes the array that a view would share. Raises `ValueError` if
    the caches do not hold these tokens, or with `at_end` are not at `end`.
    """
    if not 0 <= start < end:
        raise ValueError(f"a layer does not hold the tokens [{start}, {end})")
    pieces, reaches = _pieces(caches, start, end)
    if carried is not None:
        pieces |= _carried(caches, carried)
    state = _states(caches, end) if at_end else {}
    most_bytes -= _nbytes(pieces)
    if most_bytes < 0:
        return None
    if _nbytes(state) * (1 + spare_states) <= most_bytes:
        pieces |= state
    copies = {name: mx.contiguous(piece) for name, piece in pieces.items()}
    return tuple(
        Tensor(name, _DTYPES[copy.dtype], tuple(copy.shape), data, reaches.get(name, FULL))
        for (name, copy), data in zip(copies.items(), _memory(list(copies.values())), strict=True)
    )


def _pieces(caches: Sequence[Any], start: int, end: int) -> tuple[dict[str, mx.array], dict[str, Policy]]:
    """Return, by tensor name, views of the KV of the tokens `[start, end)`, and the reach of their layers.

    Only of layers that are stored per token. The reach says which tokens a layer sees.
    """
    pieces: dict[str, mx.array] = {}
    reaches: dict[str, Policy] = {}
    for path, cache in leaves(caches):
        if states.is_cut(cache):
            held = {f"{path}.{part}": array for part, array in states.tokens(cache, start, end).items()}
            pieces |= held
            reaches |= dict.fromkeys(held, states.reach(cache))
            reaches |= {name: FULL for name in held if "sketch" in name}  # every token has a sketch
    return pieces, reaches


def _carried(caches: Sequence[Any], span: Span) -> dict[str, mx.array]:
    """Return the sketches (2-bit keys) of the tokens `span`, under names with the prefix `CARRIED`."""
    return {
        f"{CARRIED}{path}.{part}": array
        for path, cache in leaves(caches)
        for part, array in states.sketched(cache, span.start, span.end).items()
    }


def _states(caches: Sequence[Any], end: int) -> dict[str, mx.array]:
    """Return the states of layers not stored per token. Raises `ValueError` if one is not at `end`."""
    found = {
        f"{STATE}{path}.{part}": array
        for path, cache in leaves(caches)
        if not states.is_cut(cache)
        for part, array in states.state(cache, end).items()
    }
    if found and any(states.num_tokens(cache) not in (None, end) for _, cache in leaves(caches)):
        raise ValueError(f"layers that are not all at {end} tokens")
    return found


def rebuild(tensors: Mapping[str, mx.array], caches: list[Any], num_tokens: int) -> list[Any]:
    """Fill a model's new caches with the evaluated arrays of a session's first `num_tokens` tokens.

    Arrays with a token axis may be longer: the caches then use the rest for further tokens. A ring's arrays
    contain exactly its sinks and its window. Returns `caches`. Raises `ValueError` if the arrays do not fit
    such caches at that position; some caches may be filled then.
    """
    groups = _by_path(tensors)
    for path, cache in leaves(caches):
        is_cut = states.is_cut(cache)
        held = groups.pop(path if is_cut else STATE + path, {})
        (states.set_parts if is_cut else states.set_state)(cache, held, num_tokens)
    if groups:
        raise ValueError(f"tensors of layers that are not there: {', '.join(groups)}")
    return caches


def holds(caches: Sequence[Any], start: int, end: int) -> bool:
    """Whether all layers that are stored per token still hold the tokens `[start, end)`."""
    return all(
        cache.holds(start, end) if isinstance(cache, PASSING) else end <= cache.offset
        for _, cache in leaves(caches)
        if states.is_cut(cache)
    )


def most_run(caches: Sequence[Any], block: int) -> int:
    """Return the most tokens that one pass may run so that their KV can still be copied block by block.

    Rings must keep these tokens and the unfinished block before them. With layers of chunks or with states, a
    pass runs one block: chunks keep no more, and a state exists only at the end of a pass.
    """
    held = sys.maxsize
    for _, cache in leaves(caches):
        if isinstance(cache, RingCache):
            held = min(held, cache.kept + SLACK)
        elif not isinstance(cache, states.AT_PLACES):
            return block
    return max(held - block, block)


def trimmable(caches: Sequence[Any]) -> bool:
    """Whether every layer is stored per token, so that `trim` can shorten the caches, down to `earliest`.

    Unlike mlx-lm's `is_trimmable`, which is true for a rotating cache until its window wraps, and always for
    a chunked cache.
    """
    return all(states.is_cut(cache) for _, cache in leaves(caches))


def earliest(caches: Sequence[Any]) -> int | None:
    """Return the smallest number of tokens to which `trim` can shorten caches; greater numbers work too.

    0 if every layer keeps all tokens. Otherwise a ring may have overwritten the earlier tokens, a chunk may
    have dropped them, or a restore may not have read them. None if a layer has a state, which cannot be
    shortened.
    """
    if not trimmable(caches):
        return None
    return max((cache.earliest for _, cache in leaves(caches) if isinstance(cache, PASSING)), default=0)


def trim(caches: Sequence[Any], num_tokens: int) -> None:
    """Drop all but the first `num_tokens` tokens. Frees no memory; later tokens overwrite the rest.

    The caches must be `trimmable`. Raises `ValueError` if `num_tokens` is below `earliest`.
    """
    for _, cache in leaves(caches):
        if type(cache) is ConcatenateKVCache and num_tokens < cache.offset:
            # `trim` of mlx-lm only lowers the offset: the next tokens would come after the dropped ones.
            parts = states.parts(cache)
            cache.state = tuple(part[..., :num_tokens, :] for part in parts.values())
        else:
            cache.trim(max(0, cache.offset - num_tokens))


def fork(caches: Sequence[Any], new: list[Any], num_tokens: int) -> list[Any]:
    """Fill a model's `new` caches with copies of the first `num_tokens` tokens of `caches`.

    `caches` stay usable; they must be `trimmable`. Returns `new`, evaluated. Raises `ValueError` if
    `num_tokens` is below `earliest`.
    """
    copies: list[mx.array] = []
    for (_, cache), (_, copy) in zip(leaves(caches), leaves(new), strict=True):
        if isinstance(cache, PASSING):
            copy.copy_from(cache)
            copy.trim(copy.offset - num_tokens)
        else:
            held = states.tokens(cache, 0, num_tokens)
            states.set_parts(copy, {part: mx.contiguous(array) for part, array in held.items()}, num_tokens)
        copies += states.parts(copy).values()
    mx.eval(copies)
    return new


def shrink(caches: Sequence[Any]) -> None:
    """Free memory that an idle session does not need: tokens before windows and chunks, and unused memory.

    After a prompt, a window keeps the whole last piece until the next token. A plain cache grows by 256
    tokens at a time and never shrinks, so a short or rewound session would keep many times the memory that it
    needs. A cache is copied if more than half of its memory is unused, so the copy takes less than it frees.
    """
    kept: list[mx.array] = []
    for _, cache in leaves(caches):
        kept += states.drop_passed(cache)
        num_allocated = states.allocated_tokens(cache)
        if num_allocated is not None and num_allocated > 2 * cache.offset:
            kept += states.drop_unused(cache)
    mx.eval(kept)


def grows(caches: Sequence[Any], num_tokens: int) -> bool | None:
    """Whether caches must allocate memory before they can hold `num_tokens` more tokens; None if unknown.

    Plain layers grow together, and not later than rings, so only the first plain layer is checked.
    """
    cache = next((cache for cache in caches if not isinstance(cache, RingCache)), caches[0])
    num_allocated = states.allocated_tokens(cache)
    if num_allocated is None:
        return None
    wanted = cache.offset + num_tokens
    return bool((cache.places_for(wanted) if isinstance(cache, RingCache) else wanted) > num_allocated)


def sizes(caches: Sequence[Any], sketched: Collection[int] | None = None) -> KvSize:
    """Measure a model's KV size on caches that have processed some tokens; for `sketched` see `make`."""
    per_token = fixed = 0
    windows: Counter[tuple[int, bool, int, bool]] = Counter()
    for _, cache in leaves(caches):
        if not hasattr(cache, "keys"):
            fixed += int(cache.nbytes)
            continue
        size = sum(part.nbytes // part.shape[2] for part in states.parts(cache).values())
        most = states.most_tokens(cache)
        if most is None:
            per_token += size
        else:
            is_ring = isinstance(cache, RingCache)
            spare = SLACK + (cache.kept - cache.window if is_ring else 0)
            windows[most, is_ring, spare, isinstance(cache, ChunkCache)] += size
    found = (
        Window(most, size, is_ring, spare, is_chunk)
        for (most, is_ring, spare, is_chunk), size in sorted(windows.items())
    )
    sketch = sum(dtype.size * heads * width for _, dtype, (heads, width) in sketch_layout(caches, sketched))
    return KvSize(per_token, tuple(found), fixed, sketch)


def allocated_bytes(caches: Sequence[Any]) -> int:
    """Return the bytes that a session's caches have allocated, used or not."""
    return sum(int(cache.nbytes) for _, cache in leaves(caches))


def live_bytes(caches: Sequence[Any]) -> int:
    """Return the bytes that a session's KV uses, without memory allocated in advance.

    This is the sum over layers of cached positions x KV heads x head_dim x itemsize, for keys and for values.
    A recurrent layer adds its state's fixed size.
    """
    return sum(states.live_bytes(cache) for _, cache in leaves(caches))


def _nbytes(arrays: Mapping[str, mx.array]) -> int:
    return sum(array.nbytes for array in arrays.values())


def _by_path(tensors: Mapping[str, mx.array]) -> dict[str, dict[str, mx.array]]:
    """Group tensors by their layer's path, then by their part: see `_split`."""
    groups: dict[str, dict[str, mx.array]] = {}
    for name, array in tensors.items():
        path, part = _split(name)
        groups.setdefault(path, {})[part] = array
    return groups


def _split(name: str) -> tuple[str, str]:
    """Split a tensor's name into its layer's path and its part: `state.3.0` and `keys`, for example."""
    prefix = STATE if name.startswith(STATE) else ""
    words = name.removeprefix(prefix).split(".")
    path = list(takewhile(str.isdigit, words))
    return prefix + ".".join(path), ".".join(words[len(path) :])


def _memory(copies: list[mx.array]) -> list[memoryview]:
    """Evaluate contiguous arrays; return their bytes in memory that the host can read.

    On CUDA each array that the host reads is first moved to managed memory: 72 arrays of 256 KiB took 6.6 ms,
    one array with the same bytes 1.4 ms. So on CUDA the arrays are joined first.
    """
    if not mx.cuda.is_available():
        mx.eval(copies)
        return [_bytes(copy) for copy in copies]
    flat = [copy.reshape(-1).view(mx.uint8) for copy in copies if copy.size]
    joined = mx.concatenate(flat) if flat else mx.zeros((0,), mx.uint8)
    mx.eval(joined)
    memory, ends = _bytes(joined), [*accumulate((copy.nbytes for copy in copies), initial=0)]
    return [memory[start:end] for start, end in pairwise(ends)]


def _bytes(array: mx.array) -> memoryview:
    view: Any = array  # arrays have the buffer protocol, but MLX's stubs do not say so
    # A memoryview without elements cannot be cast.
    return memoryview(view).cast("B") if array.size else memoryview(b"")
