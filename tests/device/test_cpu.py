"""The operations that numpy runs on a CPU give the same results as MLX."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.activations import swiglu

from cache.kv import sketches
from cache.kv.paged import PAGE
from worker.batch import cpu

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="this is the way on a CPU alone")

SCALE = 0.125


def normal(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def some(rows: int, heads: int, kv_heads: int, tokens: int, length: int) -> tuple[mx.array, ...]:
    """Return random queries, and keys and values that are views of larger buffers, as in a cache."""
    room = length + 7
    keys, values = normal(rows, kv_heads, room, 64, seed=1), normal(rows, kv_heads, room, 64, seed=2)
    return 3 * normal(rows, heads, tokens, 64, seed=0), keys[:, :, :length], values[:, :, :length]


def no_mask(rows: int, tokens: int, length: int) -> None:
    del rows, tokens, length


def causal(rows: int, tokens: int, length: int) -> str:
    del rows, tokens, length
    return "causal"


def window(rows: int, tokens: int, length: int) -> mx.array:
    """Return a mask under which each token sees itself and the four tokens before it."""
    del rows
    at, to = mx.arange(length - tokens, length)[:, None], mx.arange(length)
    return (to <= at) & (to > at - 5)


def lengths(rows: int, tokens: int, length: int) -> mx.array:
    """Return a mask of rows with different lengths."""
    del tokens
    return (mx.arange(length) < mx.array([max(length - 3 * i, 1) for i in range(rows)])[:, None])[
        :, None, None
    ]


def added(rows: int, tokens: int, length: int) -> mx.array:
    return mx.where(window(rows, tokens, length), mx.array(0.5), mx.array(-1e9))


@pytest.mark.parametrize("mask", [no_mask, causal, window, lengths, added])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "tokens", "length"),
    [(1, 9, 3, 128, 700), (1, 9, 3, 1, 2000), (1, 4, 4, 37, 37), (8, 9, 3, 1, 300), (3, 8, 1, 16, 50)],
)
def test_attention_in_numpy_equals_mlxs_attention_under_every_mask(
    mask: Callable[[int, int, int], mx.array | str | None],
    rows: int,
    heads: int,
    kv_heads: int,
    tokens: int,
    length: int,
) -> None:
    queries, keys, values = some(rows, heads, kv_heads, tokens, length)
    made = mask(rows, tokens, length)
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=made)
    found = cpu.attention(queries, keys, values, SCALE, made)
    assert found.shape == expected.shape
    np.testing.assert_allclose(
        np.array(found), np.array(expected), rtol=0, atol=2e-5
    )  # rounding of scores up to 30


def test_attention_does_not_change_its_inputs() -> None:
    given = some(1, 9, 3, 64, 500)
    before = [np.array(array) for array in given]
    mx.eval(cpu.attention(*given, SCALE, "causal"))
    for array, was in zip(given, before, strict=True):
        np.testing.assert_array_equal(np.array(array), was)


def test_attention_refuses_a_mask_of_an_unknown_kind() -> None:
    with pytest.raises(ValueError, match="'sliding'"):
        cpu.attention(*some(1, 2, 1, 4, 4), SCALE, "sliding")


def test_attention_computed_head_by_head_equals_attention_of_all_heads_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = some(2, 9, 3, 16, 300)
    at_once = np.array(cpu.attention(*given, SCALE, "causal"))
    monkeypatch.setattr(cpu, "_CACHED", 1)
    np.testing.assert_array_equal(np.array(cpu.attention(*given, SCALE, "causal")), at_once)


def test_only_large_float32_attention_runs_in_numpy() -> None:
    queries, keys, _ = some(1, 9, 3, 128, 700)
    assert cpu.faster_attention(queries, keys)
    assert not cpu.faster_attention(queries[:, :, :1], keys[:, :, :100])
    assert not cpu.faster_attention(queries.astype(mx.bfloat16), keys.astype(mx.bfloat16))
    assert not cpu.faster_attention(queries, (keys, keys, keys))  # a quantised cache's


@pytest.mark.parametrize("tokens", [1, 5, 128])
def test_swiglu_in_numpy_equals_mlxs_swiglu_even_for_very_large_gates(tokens: int) -> None:
    gate, x = 30 * normal(tokens, 1, 512, seed=3), normal(tokens, 1, 512, seed=4)
    gate = mx.concatenate([gate, mx.full((tokens, 1, 2), -200.0), mx.full((tokens, 1, 2), 200.0)], axis=-1)
    x = mx.concatenate([x, mx.ones((tokens, 1, 4))], axis=-1)
    found = np.array(cpu.swiglu(gate, x))
    np.testing.assert_allclose(found, np.array(swiglu(gate, x)), rtol=1e-5, atol=1e-6)
    assert np.isfinite(found).all()


def test_swiglu_does_not_change_its_inputs() -> None:
    gate, x = normal(16, 1, 512, seed=5), normal(16, 1, 512, seed=6)
    before = np.array(gate), np.array(x)
    mx.eval(cpu.swiglu(gate, x))
    np.testing.assert_array_equal(np.array(gate), before[0])
    np.testing.assert_array_equal(np.array(x), before[1])


@pytest.mark.parametrize("num_queries", [1, 3, 48])
@pytest.mark.parametrize("num_tokens", [64, 4096, 12_352])
@pytest.mark.parametrize(("heads", "size"), [(1, 32), (3, 64), (2, 128)])
def test_comparing_queries_with_2_bit_keys_in_numpy_equals_the_result_of_mlx(
    monkeypatch: pytest.MonkeyPatch, heads: int, size: int, num_tokens: int, num_queries: int
) -> None:
    """The keys are a view of a larger buffer, as in a cache; some scores are far apart."""
    keys = 2 * normal(1, heads, num_tokens + 256, size, seed=1)
    sketch = tuple(part[..., :num_tokens, :] for part in sketches.sketch_of(keys))
    queries = normal(1, heads, num_queries, size, seed=2) * mx.arange(1, num_queries + 1)[:, None] / 8
    found = np.array(sketches.compared(queries, sketch, PAGE))
    monkeypatch.setattr(sketches.mx, "default_device", lambda: mx.gpu)
    expected = np.array(sketches.compared(queries, sketch, PAGE))
    assert found.shape == (num_tokens // PAGE,)
    assert np.allclose(found, expected, rtol=2e-3, atol=1e-6)
