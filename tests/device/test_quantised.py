"""Quantised KV gives the same tokens in any batch, and has the computed size; some models are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base, llama
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from tiny_models import CONFIGS, VOCABULARY, WIDE, Oracle, alone, batched, begin, drafting, prefill, prompt

from cache.kv import layers
from cache.kv.size import KvSize
from worker.batch import batch as steps
from worker.batch import cpu, forward
from worker.models.model import cache_sizes
from worker.models.model_files import ModelError
from worker.models.quantised import quantise_kv, unpacked_bytes

#: Of the tiny llama with wide heads: 2 layers, keys and values, 2 heads of 32 numbers, each with a scale and
#: a bias of 4 bytes for every 32.
TOKEN_BYTES = {8: 2 * 2 * 2 * (32 + 8), 4: 2 * 2 * 2 * (16 + 8)}


def codes(caches: list[Any], num_tokens: int) -> mx.array:
    """Return the dequantised keys and values of the first tokens."""
    return mx.concatenate(
        [
            mx.dequantize(*(array[..., :num_tokens, :] for array in side), group_size=32, bits=cache.bits)
            for cache in caches
            for side in (cache.keys, cache.values)
        ]
    )


def test_kv_of_rejected_draft_tokens_is_removed_from_a_quantised_cache(make_model) -> None:
    """Each draft is wrong from its third token on."""
    model, tokens = make_model("llama", 4), prompt(21)
    answer = alone(model, tokens, 60)[0]
    oracle = Oracle([answer], lambda here: [*here[:2], *((token + 1) % VOCABULARY for token in here[2:])])
    batch = drafting(model, 3, drafters=(oracle,))
    piece = begin(model, tokens)
    batch.step([piece])
    for _ in range(20):
        batch.step([])
    assert 10 < batch.speculation.num_accepted < batch.speculation.num_drafted
    assert list(piece.row.known[len(tokens) :]) == answer[: 21 + batch.speculation.num_accepted]


def test_batch_rows_with_quantised_kv_are_rolled_back_after_a_failed_step_and_lose_no_token(
    make_model, monkeypatch
) -> None:
    model = make_model("llama", 8)
    batch = batched(model)
    contexts = [prompt(n, salt=n) for n in (10, 255)]  # the second one's caches grow in the step that fails
    pieces = [begin(model, tokens) for tokens in contexts]
    batch.step(pieces)
    batch.step([], run_ahead=True)

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(steps.mx, "eval", fail)
        with pytest.raises(MemoryError):
            batch.step([], run_ahead=True)
    assert batch.roll_back()
    for _ in range(5):
        batch.step([], run_ahead=True)
    for piece, tokens in zip(pieces, contexts, strict=True):
        drawn = piece.row.known[len(tokens) :]
        assert drawn == alone(model, tokens, len(drawn))[0]


@pytest.mark.parametrize("kv_bits", [8, 4])
def test_the_computed_size_of_quantised_kv_equals_the_bytes_that_its_arrays_take(make_model, kv_bits) -> None:
    model = make_model("llama", kv_bits)
    assert replace(cache_sizes(model), sketch_bytes=0) == KvSize(TOKEN_BYTES[kv_bits])
    caches = make_prompt_cache(model)
    assert layers.describe(caches) == f"2*QuantizedKVCache(32,{kv_bits})"
    prefill(model, caches, prompt(20))
    assert layers.live_bytes(caches) == 20 * TOKEN_BYTES[kv_bits]
    assert layers.live_bytes(caches) == sum(t.data.nbytes for t in layers.cut(caches, 0, 20))
    assert layers.allocated_bytes(caches) == 256 * TOKEN_BYTES[kv_bits]
    before = codes(caches, 20)
    layers.shrink(caches)
    assert layers.allocated_bytes(caches) == 20 * TOKEN_BYTES[kv_bits]
    assert mx.array_equal(codes(caches, 20), before)
    assert unpacked_bytes(caches) == 2 * 2 * 32 * 4


@pytest.mark.parametrize(
    ("kind", "described"),
    [
        ("exaone4", "2*RotatingKVCache(8,0) QuantizedKVCache(32,8) RotatingKVCache(8,0)"),
        ("qwen3_next", "3*ArraysCache(2) QuantizedKVCache(32,8)"),
    ],
)
def test_the_setting_kv_bits_leaves_windowed_and_recurrent_layers_unquantised(
    make_model, kind, described
) -> None:
    assert layers.describe(make_prompt_cache(make_model(kind, 8))) == described


def test_kv_of_head_size_64_is_quantised_in_groups_of_64_numbers() -> None:
    config = CONFIGS["llama"] | {"hidden_size": 256, "head_dim": 64}
    model = llama.Model(llama.ModelArgs.from_dict({"model_type": "llama", **config}))
    quantise_kv(model, 4)
    assert [cache.group_size for cache in make_prompt_cache(model)] == [64, 64]


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("llama", {}, "heads of layer 0 have a size of 8, and kv_bits needs a multiple of 32"),
        ("mamba2", {}, "no layer of plain keys and values"),
        ("gpt_oss", WIDE, "attention cannot read quantised KV (ValueError: Quantized SDPA does not support"),
        ("gemma2", WIDE, "attention cannot read quantised KV"),
        ("deepseek_v3", {"kv_lora_rank": 32, "qk_rope_head_dim": 32}, "attention cannot read quantised KV"),
    ],
)
def test_the_setting_kv_bits_with_a_model_without_quantised_kv_is_refused_in_one_line(
    build_model, kind, changes, said
) -> None:
    model = build_model(kind, **changes)
    with pytest.raises(ModelError) as refused:
        quantise_kv(model, 8)
    assert said in str(refused.value)
    assert str(refused.value).endswith("; leave kv_bits at full")
    assert "\n" not in str(refused.value)
    assert not any(type(cache) is QuantizedKVCache for _, cache in layers.leaves(make_prompt_cache(model)))


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="other devices read quantised KV as it is")
def test_attention_over_quantised_kv_on_a_cpu_equals_that_of_mlx_lm() -> None:
    """KV is dequantised first, since MLX's products with quantised matrices are much slower on a CPU."""
    mx.random.seed(2)
    queries = mx.random.normal((1, 8, 40, 64))
    keys, values = (mx.quantize(mx.random.normal((1, 2, 100, 64)), 64, 8) for _ in range(2))
    cache = QuantizedKVCache(64, 8)
    cache.offset = 100
    args = {"cache": cache, "scale": 0.125, "mask": "causal"}
    expected = base.quantized_scaled_dot_product_attention(
        mx.array(queries), keys, values, 0.125, "causal", 64, 8
    )
    assert cpu.should_dequantise(keys)
    assert not cpu.should_dequantise(queries)
    found = forward._attention(queries, keys, values, **args)
    assert mx.allclose(found, expected, atol=1e-5).item()
