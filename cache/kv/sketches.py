"""Copies of keys in two bits per channel (sketches), and queries compared with them. Device thread only.

If a session's KV is mostly on SSD, some layers keep a sketch of every token's key, to choose the chunks that
are read from there. A sketch is codes, scales and biases, (1, KV heads, tokens, size) each.
"""

from __future__ import annotations

from functools import reduce
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from .states import SKETCH, leaves

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

#: How many of the last queries of a pass are compared with the sketches.
ASKED: Final = 16
#: Bits per channel.
_BITS: Final = 2
#: With more queries than this it is faster to dequantise all sketches first: 3 ms instead of 19 on a CPU, for
#: 48 queries and 3,000 tokens of 3 heads; for 3 queries it is slower, 5 ms instead of 1.
_FEW_ROWS: Final = 8
#: Tokens whose sketches numpy compares in one run.
_RUN: Final = 4096
#: For each byte of a sketch, the four 2-bit channels in it.
_CHANNELS: Final = (np.arange(256, dtype=np.uint8)[:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).astype(
    np.float32
)


def sketch_of(keys: mx.array) -> tuple[mx.array, ...]:
    """Return the sketch of keys, (1, KV heads, tokens, head_dim); unevaluated."""
    return tuple(mx.quantize(keys, _group(keys.shape[3]), _BITS))


def sketch_layout(
    caches: Sequence[Any], layers: Collection[int] | None
) -> list[tuple[str, mx.Dtype, tuple[int, int]]]:
    """Return the layout of the sketches (2-bit keys) of a model's plain caches.

    For each tensor: name, type, and (heads, length of a row). `layers` are the layers that have sketches, by
    default all; a layer whose keys cannot be sketched has none.
    """
    found: list[tuple[str, mx.Dtype, tuple[int, int]]] = []
    for path, cache in leaves(caches):
        if type(cache) not in (KVCache, QuantizedKVCache):
            continue
        packed = type(cache) is QuantizedKVCache
        like = cache.keys[1] if packed else cache.keys
        size = cache.keys[0].shape[3] * 32 // cache.bits if packed else like.shape[3]
        group = _group(size)
        if group is not None and (layers is None or int(path.partition(".")[0]) in layers):
            rows = (mx.uint32, size // 16), (like.dtype, size // group), (like.dtype, size // group)
            for name, (dtype, length) in zip(SKETCH, rows, strict=True):
                found.append((f"{path}.{name}", dtype, (like.shape[1], length)))
    return found


def _group(head_dim: int) -> int | None:
    """Return how many channels share a scale in a key's sketch; None if keys cannot be sketched."""
    return next((size for size in (64, 32) if head_dim % size == 0), None)


def page_shares(asked: mx.array, sketch: tuple[mx.array, ...], page: int) -> mx.array:
    """Return, for each page, the largest share of a query's attention that one of its tokens gets: (pages,).

    `asked` are scaled queries, (1, KV heads, queries, head_dim), `page` is the number of tokens per page, and
    `sketch` has whole pages. On a CPU numpy compares them, in runs of tokens that fit into the processor's
    cache: MLX takes seven times as long for 32 queries.
    """
    if asked.dtype == mx.float32 and mx.default_device() == mx.cpu:
        return _compared_by_numpy(asked, sketch, page)
    group, (codes, scales, biases) = _group(asked.shape[3]), sketch
    if asked.shape[2] > _FEW_ROWS:
        keys = mx.dequantize(codes, scales, biases, group, _BITS)
        scores = asked @ keys.swapaxes(-1, -2)
    else:
        scores = mx.quantized_matmul(asked, codes, scales, biases, group_size=group, bits=_BITS)
    shares = mx.softmax(scores.astype(mx.float32), axis=-1).max(axis=(0, 1, 2))
    return shares.reshape(-1, page).max(axis=-1)


def _compared_by_numpy(asked: mx.array, sketch: tuple[mx.array, ...], page: int) -> mx.array:
    mx.eval(asked, sketch)
    heads = zip(*(_view(part)[0] for part in (asked, *sketch)), strict=True)
    found = [_compared(queries, codes, scales, biases, page) for queries, codes, scales, biases in heads]
    return mx.array(np.exp(np.max(found, axis=0)))


def _compared(
    asked: np.ndarray[Any, Any],
    codes: np.ndarray[Any, Any],
    scales: np.ndarray[Any, Any],
    biases: np.ndarray[Any, Any],
    page: int,
) -> np.ndarray[Any, Any]:
    """Return the log of each page's largest share of attention; `asked` are one KV head's queries."""
    num = len(asked)
    pages = np.empty((len(codes) // page, num), np.float32)
    largest, sums = np.full(num, -np.inf, np.float32), np.zeros(num, np.float32)
    at = 0
    for scores in _products(asked, codes, scales, biases):
        # Numpy computes maxima and sums of a few long rows faster than of many short ones.
        within = reduce(np.maximum, scores.reshape(-1, page, num).swapaxes(0, 1))
        pages[at : at + len(within)] = within
        top = np.maximum(largest, within.max(axis=0))
        np.exp(np.subtract(scores, top, out=scores), out=scores)
        sums *= np.exp(largest - top)
        sums += scores.reshape(-1, page * num).sum(axis=0).reshape(page, num).sum(axis=0)
        largest = top
        at += len(within)
    pages -= largest + np.log(sums)
    logs: np.ndarray[Any, Any] = pages.max(axis=1)
    return logs


def _products(
    asked: np.ndarray[Any, Any],
    codes: np.ndarray[Any, Any],
    scales: np.ndarray[Any, Any],
    biases: np.ndarray[Any, Any],
) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the products of the sketches with the queries, one run of tokens at a time: (tokens, queries).

    While numpy reads the products of one run, MLX computes those of the next run. (numpy's own BLAS would
    start a second pool of spinning threads.)
    """
    (num, size), groups = asked.shape, scales.shape[1]
    # A key is its channels times scales, plus one bias per group of channels: one more column per group.
    columns = mx.array(np.concatenate([asked.T, asked.reshape(num, groups, -1).sum(axis=2).T]))
    runs = [mx.zeros((_RUN, size + groups)) for _ in range(2)]
    mx.eval(columns, runs)
    four = _CHANNELS.view(np.complex128)[:, 0]  # four channels as one item, which `take` copies fastest
    product, num_tokens = mx.zeros(0), 0
    for at, keys in zip(range(0, len(codes), _RUN), cycle(runs), strict=False):
        before, num_before = product, num_tokens
        run = slice(at, min(at + _RUN, len(codes)))
        num_tokens = run.stop - at
        held = _view(keys)[:num_tokens]
        channels = four.take(codes[run].view(np.uint8)).view(np.float32).reshape(num_tokens, groups, -1)
        np.multiply(channels, scales[run, :, None], out=held[:, :size].reshape(num_tokens, groups, -1))
        held[:, size:] = biases[run]
        product = keys @ columns
        mx.async_eval(product)  # type: ignore[no-untyped-call]
        if num_before:
            mx.eval(before)
            yield _view(before)[:num_before]
    mx.eval(product)
    yield _view(product)[:num_tokens]


def _view(array: mx.array) -> np.ndarray[Any, Any]:
    """Return a numpy array that shares an evaluated array's memory."""
    shown: Any = array  # arrays have the buffer protocol, but MLX's stubs do not say so
    return np.array(shown, copy=False)
