"""Attention, activations and products as Metal, CUDA and a CPU compute them equal those of MLX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.activations import swiglu
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import alone, batched, begin, generate, prompt

from cache.kv import sketches
from cache.kv.paged import PAGE
from worker.batch import cpu, cuda, metal
from worker.batch import products as products_of
from worker.batch.batch import Batch
from worker.batch.batch_kinds import batch_for
from worker.batch.parts import OwnPart
from worker.batch.products import Products, products_for
from worker.device import machine

ON_CPU = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="this is the way on a CPU alone")


def test_the_longest_draft_on_metal_has_as_many_tokens_as_the_attention_kernel_for_few_queries_takes() -> (
    None
):
    assert machine._PROFILES["metal"].max_draft + 1 == metal._MOST_QUERIES


@pytest.mark.parametrize("most_queries", [8, 0], ids=["few tokens", "more than the kernel takes"])
def test_a_decode_step_of_batch_rows_in_a_shared_kv_array_builds_one_mask_for_all_layers(
    make_model, monkeypatch, most_queries: int
) -> None:
    masks: list[mx.array] = []
    spread = metal.spread

    def kept(mask: mx.array, num_heads: int) -> Any:
        masks.append(spread(mask, num_heads))
        return masks[-1]

    monkeypatch.setattr(metal, "spread", kept)
    monkeypatch.setattr(metal, "_on_metal", lambda: True)
    monkeypatch.setattr(metal, "_MOST_QUERIES", most_queries)
    model, num_steps = make_model("llama"), 6
    batch = batched(model, pooled_rows=2)
    prompts = [prompt(9), prompt(14, salt=5), prompt(21, salt=7)]
    pieces = [begin(model, tokens) for tokens in prompts]
    drawn: list[list[int]] = [[] for _ in prompts]
    for step in range(num_steps):
        batch.step(pieces if step == 0 else [])
        for piece, tokens in zip(pieces, drawn, strict=True):
            assert piece.row is not None
            tokens.extend(one.token for one in piece.row.drawn)
    assert drawn == [alone(model, tokens, num_steps)[0] for tokens in prompts]
    assert len(masks) == (num_steps - 1 if most_queries else 0), "one in each step with a pool"
    for mask in masks:
        rows, heads, num, keys = mask.shape
        assert (rows, heads, num) == (3, model.args.num_attention_heads, 1)
        assert memoryview(mask).strides == (heads * keys, keys, keys, 1)


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_warming_up_the_device_runs_a_prompt_and_two_answers_and_leaves_no_batch_rows_or_timings(
    make_rig, make_model, monkeypatch, kind: str
) -> None:
    """Metal compiles a kernel when it first runs. The time of that is no measure of a step."""
    steps: list[int] = []
    step = Batch.step

    def counted(self: Batch, pieces: Any, **more: Any) -> None:
        step(self, pieces, **more)
        steps.append(len(self.rows))

    monkeypatch.setattr(Batch, "step", counted)
    first = make_rig(make_model(kind)).device._runner
    assert steps == [1]
    monkeypatch.setitem(machine._PROFILES, "cpu", replace(machine._PROFILES["cpu"], warms_up=True))
    rig = make_rig(make_model(kind))
    assert steps == [1, 1, 2, 2]
    runner = rig.device._runner
    for one in (first, runner):
        assert not one._batch.rows
        assert vars(one._prefill_budget) == vars(first._prefill_budget)
        assert one._batch.speculation._times.plain_s(2, ahead=False) is None
    turn = generate(prompt(20), 5)
    rig.run(turn)
    assert rig.tokens(turn) == alone(make_model(kind), prompt(20), 5)[0]


@pytest.mark.parametrize(
    ("num", "length"),
    [(1, 300), (17, 17), (17, 300), (21, 340), (256, 256), (256, 700), (300, 300), (700, 900)],
)
def test_cuda_attention_with_padded_shapes_equals_attention_without_padding(num: int, length: int) -> None:
    keys, values = (mx.random.normal((1, 2, length, 16), key=mx.random.key(i)) for i in (1, 2))
    queries = mx.random.normal((1, 4, num, 16), key=mx.random.key(3))
    found = cuda.attention(queries, keys, values, 0.25)
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask="causal")
    assert found.shape == expected.shape
    assert mx.abs(found - expected).max().item() < 1e-5


def test_padding_reduces_the_attention_shapes_of_a_long_session_to_at_most_64_cudnn_plans() -> None:
    """A session of 200 turns of up to 100 tokens, and prompts of every length up to 1,024."""
    turns = ((17 + i % 84, 100 * i + 17 + i % 84) for i in range(1, 200))
    prompts = ((num, num) for num in range(1, 1025))
    for shapes, most in ((turns, 64), (prompts, 4)):
        padded = set()
        for num, length in shapes:
            before, after = cuda.padding(num, length)
            assert before >= 0
            assert 0 <= after <= max(256, length // 16)
            padded.add((before + num + after, length + after))
        assert len(padded) <= most
        assert all(num <= length for num, length in padded)


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


@ON_CPU
@pytest.mark.parametrize("mask", [no_mask, causal, window, lengths, added])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "tokens", "length"),
    [(1, 9, 3, 128, 700), (1, 9, 3, 1, 2000), (1, 4, 4, 37, 37), (8, 9, 3, 1, 300), (3, 8, 1, 16, 50)],
)
def test_cpu_attention_in_numpy_equals_attention_in_mlx_under_every_mask(
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


@ON_CPU
def test_cpu_attention_in_numpy_does_not_change_its_input_arrays() -> None:
    given = some(1, 9, 3, 64, 500)
    before = [np.array(array) for array in given]
    mx.eval(cpu.attention(*given, SCALE, "causal"))
    for array, was in zip(given, before, strict=True):
        np.testing.assert_array_equal(np.array(array), was)


@ON_CPU
def test_cpu_attention_in_numpy_raises_an_error_for_an_unknown_kind_of_mask() -> None:
    with pytest.raises(ValueError, match="'sliding'"):
        cpu.attention(*some(1, 2, 1, 4, 4), SCALE, "sliding")


@ON_CPU
def test_cpu_attention_computed_head_by_head_equals_attention_of_all_heads_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = some(2, 9, 3, 16, 300)
    at_once = np.array(cpu.attention(*given, SCALE, "causal"))
    monkeypatch.setattr(cpu, "_CACHED", 1)
    np.testing.assert_array_equal(np.array(cpu.attention(*given, SCALE, "causal")), at_once)


@ON_CPU
def test_only_large_float32_attention_on_a_cpu_runs_in_numpy() -> None:
    queries, keys, _ = some(1, 9, 3, 128, 700)
    assert cpu.faster_attention(queries, keys)
    assert not cpu.faster_attention(queries[:, :, :1], keys[:, :, :100])
    assert not cpu.faster_attention(queries.astype(mx.bfloat16), keys.astype(mx.bfloat16))
    assert not cpu.faster_attention(queries, (keys, keys, keys))  # a quantised cache's


@ON_CPU
@pytest.mark.parametrize("tokens", [1, 5, 128])
def test_swiglu_in_numpy_equals_swiglu_in_mlx_even_for_very_large_gates(tokens: int) -> None:
    gate, x = 30 * normal(tokens, 1, 512, seed=3), normal(tokens, 1, 512, seed=4)
    gate = mx.concatenate([gate, mx.full((tokens, 1, 2), -200.0), mx.full((tokens, 1, 2), 200.0)], axis=-1)
    x = mx.concatenate([x, mx.ones((tokens, 1, 4))], axis=-1)
    found = np.array(cpu.swiglu(gate, x))
    np.testing.assert_allclose(found, np.array(swiglu(gate, x)), rtol=1e-5, atol=1e-6)
    assert np.isfinite(found).all()


@ON_CPU
@pytest.mark.parametrize("num_queries", [1, 48])
@pytest.mark.parametrize("num_tokens", [64, 12_352])
@pytest.mark.parametrize(("heads", "size"), [(1, 32), (3, 64), (2, 128)])
def test_scores_of_queries_against_2_bit_keys_in_numpy_equal_those_in_mlx(
    monkeypatch: pytest.MonkeyPatch, heads: int, size: int, num_tokens: int, num_queries: int
) -> None:
    """The keys are a view of a larger buffer, as in a cache; some scores are far apart."""
    keys = 2 * normal(1, heads, num_tokens + 256, size, seed=1)
    sketch = tuple(part[..., :num_tokens, :] for part in sketches.sketch_of(keys))
    queries = normal(1, heads, num_queries, size, seed=2) * mx.arange(1, num_queries + 1)[:, None] / 8
    found = np.array(sketches.page_shares(queries, sketch, PAGE))
    monkeypatch.setattr(sketches.mx, "default_device", lambda: mx.gpu)
    expected = np.array(sketches.page_shares(queries, sketch, PAGE))
    assert found.shape == (num_tokens // PAGE,)
    assert np.allclose(found, expected, rtol=2e-3, atol=1e-6)


class Threads:
    """Stands for OpenBLAS's threads; notes how many were to be used."""

    num = 3

    def __init__(self) -> None:
        self.used: list[int] = []

    def use(self, num: int) -> None:
        self.used.append(num)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products_of, "openblas", Threads)
    monkeypatch.setattr(products_of, "_LEAST_ELEMENTS", 16)


@ON_CPU
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("num_rows", [5, 96, 97])
@pytest.mark.parametrize("num", [1, 2, 3, 4, 7, 8, 9, 16, 17, 128])
def test_a_matrix_product_divided_among_threads_equals_the_undivided_product(num: int, num_rows: int) -> None:
    x = mx.random.normal((num, 1, 64), key=mx.random.key(num))
    weight = mx.random.normal((num_rows, 64), key=mx.random.key(1))
    divided = Products(Threads())
    for some in (x, x.swapaxes(0, 1)):
        found = divided(some, weight)
        assert found.shape == (*some.shape[:-1], num_rows)
        assert mx.allclose(found, some @ weight.T, atol=1e-4)


@ON_CPU
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("family", ["llama", "exaone4"])
def test_a_model_has_the_same_logits_if_its_matrix_products_are_divided_among_threads(
    monkeypatch: pytest.MonkeyPatch, family: str, build_model: Callable[..., Any]
) -> None:
    """One of the two has its embedding as output head."""
    model = build_model(family)
    with monkeypatch.context() as patch:
        patch.setattr(Threads, "num", 1)
        plain = batch_for(model)._run
    expected = [logits(plain, num) for num in (1, 3, 8, 20)]
    assert plain.products is None
    forward = batch_for(model)._run
    for num, one in zip((1, 3, 8, 20), expected, strict=True):
        assert mx.allclose(logits(forward, num), one, atol=1e-4)
    assert forward.products._threads.used == [3, 1, 1, 3], "OpenBLAS divides the others"
    assert batch_for(model)._run.products is forward.products, "its layers have them already"


def logits(forward: Any, num: int) -> mx.array:
    caches = make_prompt_cache(forward._model)
    found: mx.array = forward([OwnPart(caches, 0, num)], [5] * num)
    mx.eval(found)
    return found


@ON_CPU
@pytest.mark.usefixtures("threads")
def test_matrix_products_of_models_with_quantised_weights_or_experts_are_not_divided_among_threads(
    build_model: Callable[..., Any],
) -> None:
    """OpenBLAS's threads are of use there."""
    quantised = build_model("llama")
    nn.quantize(quantised, group_size=32)
    for model in (quantised, Experts()):
        assert products_for(model) is None


class Experts(nn.Module):
    """A model of which few weights belong to linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = mx.ones((4, 32, 32))
        self.head = nn.Linear(32, 8)
