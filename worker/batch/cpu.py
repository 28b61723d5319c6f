"""Computes attention and SwiGLU on a CPU with numpy, in MLX's memory, if MLX is slower. Device thread only.

MLX's CPU back end takes 11 ns for one `exp`, on one thread; numpy's vector code takes half a nanosecond. For
a prompt at a long context, softmax (in attention) and SiLU (in the MLPs) would take most of a forward pass.
Matrix products stay with MLX, which uses BLAS. MLX evaluates lazily, but numpy needs evaluated arrays.
Evaluating at once costs some ten microseconds, so small operations stay with MLX too.

On a CPU MLX's products with quantised matrices are no faster for one token than dequantising and multiplying,
and 17 times slower for a prompt of 128. So attention to quantised KV dequantises one layer of KV first.
"""

from __future__ import annotations

from typing import Any, Final

import mlx.core as mx
import numpy as np

#: Numbers of scores, and of SiLU's inputs, from which on numpy saves more time than evaluating at once costs.
_LEAST_SCORES: Final = 8192
_LEAST_GATES: Final = 4096
#: Number of scores below which numpy computes all heads at once: they fit into the processor's cache.
_CACHED: Final = 1 << 17


def on_cpu() -> bool:
    """Say whether MLX computes on the CPU."""
    return bool(mx.default_device() == mx.cpu)


def faster_attention(queries: Any, keys: Any) -> bool:
    """Say whether `attention` is faster than MLX for these shapes; False for quantised keys (a tuple)."""
    if not isinstance(keys, mx.array):
        return False
    num_scores: int = queries.size // queries.shape[3] * keys.shape[2]
    return num_scores >= _LEAST_SCORES and queries.dtype == keys.dtype == mx.float32 and on_cpu()


def faster_weighted(scores: mx.array) -> bool:
    """Say whether `weighted` is faster than MLX for this number of scores."""
    return scores.size >= _LEAST_SCORES and scores.dtype == mx.float32 and on_cpu()


def should_dequantise(keys: Any) -> bool:
    """Say whether to dequantise these keys before attention: they are quantised, and MLX runs on a CPU."""
    return not isinstance(keys, mx.array) and on_cpu()


def faster_swiglu(gate: mx.array) -> bool:
    """Say whether `swiglu` is faster than MLX for this number of elements."""
    return gate.size >= _LEAST_GATES and gate.dtype == mx.float32 and on_cpu()


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
