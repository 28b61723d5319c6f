"""Computes attention and SwiGLU on a CPU with numpy, in MLX's memory, if MLX is slower. Device thread only.

MLX's CPU back end takes 11 ns for one `exp`, on one thread; numpy's vector code takes half a nanosecond. For
a prompt at a long context, softmax (in attention) and SiLU (in the MLPs) would take most of a forward pass.
Matrix products stay with MLX, which uses BLAS. MLX evaluates lazily, but numpy needs evaluated arrays.
Evaluating at once costs some ten microseconds, so small operations stay with MLX too.

On a CPU MLX's products with quantised matrices are no faster for one token than dequantising and multiplying,
and 17 times slower for a prompt of 128. So attention to quantised KV dequantises one layer of KV first.

The queries of a paged session are compared with its sketches (2-bit copies of keys) in runs of tokens that
fit into the processor's cache.
"""

from __future__ import annotations

from functools import reduce
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Numbers of scores, and of SiLU's inputs, from which on numpy saves more time than evaluating at once costs.
_LEAST_SCORES: Final = 8192
_LEAST_GATES: Final = 4096
#: Tokens whose sketches are compared in one run.
_RUN: Final = 4096
#: For each byte of a sketch, the four 2-bit channels in it.
_CHANNELS: Final = (np.arange(256, dtype=np.uint8)[:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).astype(
    np.float32
)
#: Number of scores below which numpy computes all heads at once: they fit into the processor's cache.
_CACHED: Final = 1 << 17


def faster_attention(queries: Any, keys: Any) -> bool:
    """Say whether `attention` is faster than MLX for these shapes; False for quantised keys (a tuple)."""
    if not isinstance(keys, mx.array):
        return False
    num_scores: int = queries.size // queries.shape[3] * keys.shape[2]
    return num_scores >= _LEAST_SCORES and queries.dtype == keys.dtype == mx.float32 and _on_cpu()


def faster_weighted(scores: mx.array) -> bool:
    """Say whether `weighted` is faster than MLX for this number of scores."""
    return scores.size >= _LEAST_SCORES and scores.dtype == mx.float32 and _on_cpu()


def should_dequantise(keys: Any) -> bool:
    """Say whether to dequantise these keys before attention: they are quantised, and MLX runs on a CPU."""
    return not isinstance(keys, mx.array) and _on_cpu()


def dequantised(part: Any, group_size: int, bits: int) -> mx.array:
    """Dequantise a layer's keys or values, a tuple (codes, scales, biases); the result is not evaluated."""
    codes, scales, biases = part
    return mx.dequantize(codes, scales, biases, group_size=group_size, bits=bits)


def faster_swiglu(gate: mx.array) -> bool:
    """Say whether `swiglu` is faster than MLX for this number of elements."""
    return gate.size >= _LEAST_GATES and gate.dtype == mx.float32 and _on_cpu()


def attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any) -> mx.array:
    """Compute softmax(scale queries keys^T + mask) values; only the last product is not evaluated yet.

    Shapes as for `mx.fast.scaled_dot_product_attention`: queries (rows, heads, tokens, head_dim), keys and
    values (rows, KV heads, length, head_dim); `mask` is None, "causal", or an array that broadcasts to (rows,
    heads, tokens, length), either of booleans (True: visible) or of numbers that are added to the scores.
    """
    rows, heads, num_tokens, head_dim = queries.shape
    kv_heads, length = keys.shape[1], keys.shape[2]
    together = (queries * scale).reshape(rows, kv_heads, -1, head_dim)
    scores = (together @ keys.swapaxes(-1, -2)).reshape(rows, heads, num_tokens, length)
    return weighted(scores, values, mask)


def weighted(scores: mx.array, values: mx.array, mask: Any) -> mx.array:
    """Compute softmax(scores + mask) values; shapes as in `attention`.

    Only the last product is not evaluated yet. Overwrites `scores`, so nothing else may use that array.
    """
    rows, heads, num_tokens, length = scores.shape
    seen = mask if isinstance(mask, mx.array) else None
    mx.eval(scores, *(() if seen is None else (seen,)))
    held = _view(scores)
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f"a mask is an array, None, or 'causal', not {mask!r}")
        _hide_later(held)
    elif seen is not None:
        _apply(held, _view(seen))
    _, sums = _exponentiate(held)
    grouped = scores.reshape(rows, values.shape[1], -1, length)
    return (grouped @ values).reshape(rows, heads, num_tokens, -1) / mx.array(sums)


def exponentiated(scores: mx.array) -> tuple[mx.array, mx.array]:
    """Replace each score in place by exp(score - largest score of its row), evaluated.

    Returns each row's largest score, and the sum of its results. `scores` is overwritten, so nothing else may
    use that array.
    """
    mx.eval(scores)
    largest, sums = _exponentiate(_view(scores))
    return mx.array(largest), mx.array(sums)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Compute SiLU(gate) x, where SiLU(a) = a / (1 + exp(-a)), evaluated."""
    result = -gate
    mx.eval(gate, x, result)
    held = _view(result)
    with np.errstate(over="ignore"):  # exp of a large number is infinite, and the quotient 0
        np.exp(held, out=held)
        held += 1.0
        np.divide(_view(gate), held, out=held)
    held *= _view(x)
    return result


def faster_compared(queries: mx.array) -> bool:
    """Say whether `compared` here is faster than `cache.kv.paged.compared` for these queries."""
    return queries.dtype == mx.float32 and _on_cpu()


def compared(asked: mx.array, sketch: tuple[mx.array, ...], page: int) -> mx.array:
    """Return, per page of `page` tokens, the largest share of attention that any query gives to a token.

    Arguments as for `cache.kv.paged.compared`, which uses only MLX and takes seven times as long for 32
    queries. The result, (pages,), is evaluated.
    """
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


def _on_cpu() -> bool:
    return mx.default_device() == mx.cpu


def _view(array: mx.array) -> np.ndarray[Any, Any]:
    """Return a numpy array that shares an evaluated array's memory."""
    shown: Any = array  # arrays have the buffer protocol, but MLX's stubs do not say so
    return np.array(shown, copy=False)


def _hide_later(scores: np.ndarray[Any, Any]) -> None:
    """Apply a causal mask to scores in place; the queries are those of the context's last tokens."""
    num_tokens = scores.shape[2]
    if num_tokens > 1:
        later = np.triu(np.full((num_tokens, num_tokens), -np.inf, np.float32), 1)
        scores[..., scores.shape[3] - num_tokens :] += later


def _apply(scores: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> None:
    if mask.dtype == np.bool_:
        # Usually few keys are hidden from any query, and they are contiguous.
        hidden = ~mask
        columns = np.flatnonzero(hidden.any(axis=tuple(range(mask.ndim - 1))))
        for run in np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1) if len(columns) else ():
            here = slice(run[0], run[-1] + 1)
            np.copyto(scores[..., here], -np.inf, where=hidden[..., here])
    else:
        scores += mask


def _exponentiate(scores: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Replace each score by exp(score - largest score of its row).

    Returns the largest scores and the sums of the rows, both (rows, heads, tokens, 1). If there are many
    scores, they are computed head by head, so that each head stays in the processor's cache.
    """
    largest, sums = np.empty((2, *scores.shape[:3], 1), np.float32)
    heads = [()] if scores.size < _CACHED else np.ndindex(scores.shape[:2])
    for at in heads:
        head = scores[at]
        np.max(head, axis=-1, keepdims=True, out=largest[at])
        head -= largest[at]
        np.exp(head, out=head)
        np.sum(head, axis=-1, keepdims=True, out=sums[at])
    return largest, sums
