"""Memory estimates agree with known values and with MLX's measurements."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import CONFIGS, batched, prompt

from cache.kv.size import KvSize
from cache.names.policy import Policy
from worker.batch.rows import PrefillPiece
from worker.device.machine import _PROFILES
from worker.device.memory import Estimator, Shape, attention_bytes, shape_of

GIB = 2**30


def test_the_memory_estimate_for_attention_and_kv_of_a_long_prompt_equals_a_known_value() -> None:
    """110,000 tokens in chunks of 2,048 for 16 heads of 256, and 10 layers of 2 KV heads in 16 bits."""
    shape = Shape(num_heads=16, head_dim=256, hidden=4096, intermediate=1, vocabulary=1)
    kv = 110_000 * 10 * 2 * 256 * 2 * 2
    assert (attention_bytes(shape, 2048, 110_000, fused=False) + kv) / GIB == pytest.approx(15.557, abs=5e-4)


def test_only_some_head_sizes_use_fused_attention_which_needs_no_memory_for_scores() -> None:
    small, large = (Shape(8, dim, 512, 1, 1) for dim in (128, 129))
    assert attention_bytes(small, 10, 1000, fused=True) == 8 * 10 * 128 * 4
    assert attention_bytes(small, 10, 1000, fused=False) == 8 * 10 * (128 + 1000) * 4
    metal = _PROFILES["metal"].fused_head_dims
    assert small.fuses(metal)
    assert not large.fuses(metal)
    assert not Shape(8, 112, 512, 1, 1).fuses(metal)
    assert not Shape(8, 128, 512, 1, 1, value_dim=64).fuses(metal)
    assert not small.fuses(_PROFILES["cpu"].fused_head_dims)


def test_memory_for_latent_attention_is_estimated_with_latent_head_sizes_and_without_fusion() -> None:
    """In such configurations (deepseek_v3) the field `head_dim` has only the size of the rotary part."""
    config = {
        "num_attention_heads": 128,
        "hidden_size": 7168,
        "head_dim": 64,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    shape = shape_of(config)
    assert (shape.head_dim, shape.value_dim) == (576, 512)
    assert not shape.fuses(_PROFILES["metal"].fused_head_dims)


def test_estimated_scratch_memory_grows_with_the_number_of_layers_whose_arrays_are_kept() -> None:
    """Metal frees a command buffer's inputs only after it has run, and ten buffers may be in flight."""
    shape = Shape(num_heads=8, head_dim=64, hidden=512, intermediate=2048, vocabulary=1000)
    one, ten, four = (
        Estimator(shape, GIB, 0, KvSize(1024), layers, fused=True, kept_layers=kept).scratch_bytes(
            1, [(128, 4096)]
        )
        for layers, kept in ((24, 1), (24, 10), (4, 10))
    )
    rest = 64 * 2**10 + 2 * 2 * 1000 * 4
    assert [ten - rest, four - rest] == [10 * (one - rest), 4 * (one - rest)]


@pytest.mark.parametrize(
    "config",
    [
        {"num_attention_heads": 8, "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 99},
        {"n_head": 8, "n_embd": 512, "n_inner": 1024, "vocab_size": 99},
        {
            "hidden_size": 7,
            "vision_config": {"hidden_size": 9},
            "text_config": {
                "num_attention_heads": 8,
                "hidden_size": 512,
                "intermediate_size": 1024,
                "vocab_size": 99,
            },
        },
    ],
    ids=["plain", "legacy", "nested"],
)
def test_the_shape_of_a_model_is_read_from_plain_legacy_and_nested_configurations(
    config: dict[str, Any],
) -> None:
    assert shape_of(config) == Shape(8, 64, 512, 1024, 99)


def test_a_configuration_without_details_gets_a_default_shape() -> None:
    assert shape_of({"hidden_size": 64}) == Shape(1, 64, 64, 256, 1)


@pytest.mark.parametrize(("num_cached", "num_new"), [(0, 256), (512, 64), (1536, 256)])
def test_a_prefill_step_takes_no_more_memory_than_estimated(
    make_model, num_cached: int, num_new: int
) -> None:
    """It takes at least a fifth of the estimate: one far too high would refuse prompts that fit."""
    model = make_model("llama")
    batch, caches = batched(model), make_prompt_cache(model)
    for start in range(0, num_cached, 256):
        batch.step([PrefillPiece(caches, start, prompt(256))])
    estimator = Estimator(shape_of(CONFIGS["llama"]), GIB, 0, KvSize(2 * 2 * 8 * 4 * 2), 2, fused=False)
    expected = estimator.scratch_bytes(0, [(num_new, num_cached + num_new)])
    batch.step([PrefillPiece(make_prompt_cache(model), 0, prompt(num_new))])  # whatever is made once
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    batch.step([PrefillPiece(caches, num_cached, prompt(num_new))])
    after = mx.get_active_memory()  # its caches may have grown
    assert expected / 5 <= mx.get_peak_memory() - max(before, after) <= expected


def test_memory_is_reserved_for_a_step_of_the_longest_session_that_can_fit() -> None:
    """No session can be longer than the KV that fits into memory, so no step needs more than that."""
    shape = Shape(num_heads=8, head_dim=64, hidden=512, intermediate=2048, vocabulary=1000)
    estimator = Estimator(
        shape=shape,
        limit_bytes=GIB,
        weight_bytes=GIB // 2,
        kv=KvSize(2**16),
        num_layers=8,
        fused=False,
    )

    def needed(num_tokens: int, longest: int) -> int:
        step = estimator.scratch_bytes(4, [(128, longest)]) + estimator.growth_bytes([longest] * 4)
        return estimator.kv.held(num_tokens) + step

    room = estimator.room_for_kv(4, 128, 100_000)
    num_tokens = room // 2**16
    assert needed(num_tokens, num_tokens) <= GIB // 2 < needed(num_tokens + 1, num_tokens + 1)
    assert room > GIB // 2 - needed(0, 100_000)
    short = estimator.room_for_kv(4, 128, 1000)
    assert short == GIB // 2 - needed(0, 1000)


@pytest.mark.parametrize("policy", [Policy(4, 1020), Policy.paged(1024, sink=4)])
def test_a_windowed_or_paged_policy_reserves_less_memory_for_a_step_than_full_attention(
    policy: Policy,
) -> None:
    """So more memory is left for the KV of sessions."""
    estimator = Estimator(
        shape=Shape(num_heads=8, head_dim=64, hidden=512, intermediate=2048, vocabulary=1000),
        limit_bytes=GIB,
        weight_bytes=GIB // 2,
        kv=KvSize(2**12, sketch_bytes=2**6),
        num_layers=8,
        fused=False,
        asked_bytes=100,
    )
    longest, held = 50_000, policy.num_held(50_000)
    kv = estimator.under(policy)
    piece = (8 * 128, 2 * 1024) if policy.recall else (128, 2 * held)
    step = estimator.scratch_bytes(4, [piece]) + kv.growth_bytes([longest] * 4)
    step += 3 * 1024 * 2**12 // 8 + (100 + 2**6) * longest if policy.recall else 0
    assert estimator.room_for_kv(4, 128, longest, policy) == GIB // 2 - step
    assert estimator.kv_limit(4, 128, longest) < 0.8 * (GIB // 2 - step)
