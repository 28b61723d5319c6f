"""Sessions with every cache class get the tokens of a run from scratch, and KV of the computed size."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ChunkedKVCache, ConcatenateKVCache, KVCache, make_prompt_cache
from tiny_models import CONFIGS, alone, append, generate, prompt

from cache.kv import layers
from worker.models.model import cache_sizes


@pytest.mark.parametrize("kind", [*CONFIGS, "gemma3_text", "gpt_oss", "llama4", "qwen3_next"])
def test_the_kv_of_a_session_has_exactly_the_computed_size_at_any_length(make_model, make_rig, kind) -> None:
    """Sizes are equal to the byte after prompts and answers; windows and chunks do not exceed their limit."""
    model = make_model(kind)
    size, rig, history = cache_sizes(model), make_rig(model), []
    assert layers.live_bytes(make_prompt_cache(model)) == size.held(0) == 0
    for turn_index in range(4):
        num_held = max(len(history) - 1, 0)
        history = history + prompt((3, 6, 40, 1)[turn_index], salt=turn_index + 1)
        added = append(history, num_kept=num_held)
        rig.run(added)
        assert rig.end(added).live_bytes == size.held(added.num_cached)
        turn = generate(history, 2 + 3 * turn_index, num_kept=added.num_cached)
        rig.run(turn)
        assert rig.end(turn).live_bytes == size.held(turn.num_cached)
        assert rig.tokens(turn) == alone(model, history, 2 + 3 * turn_index)[0]
        history = history + rig.tokens(turn)
    assert size.held(10_000) == size.bytes_per_token * 10_000 + size.bounded_bytes
    per_token = {"mamba2": 0, "rwkv7": 0, "exaone4": 128, "gemma3_text": 128, "gpt_oss": 128, "llama4": 128}
    assert size.bytes_per_token == per_token.get(kind, size.bytes_per_token)


def test_the_live_bytes_of_a_cache_exclude_memory_allocated_in_advance() -> None:
    plain, chunked, joined = KVCache(), ChunkedKVCache(4), ConcatenateKVCache()
    keys = mx.random.normal((1, 2, 10, 64))
    for cache in (plain, chunked, joined):
        cache.update_and_fetch(keys, keys)
    assert (
        layers.live_bytes([plain])
        == layers.live_bytes([joined])
        == layers.live_bytes([chunked])
        == 2 * keys.nbytes
    )
    chunked.maybe_trim_front()
    assert layers.live_bytes([chunked]) == 2 * keys.nbytes * 4 // 10
    quantised = plain.to_quantized(group_size=32, bits=8)
    assert layers.live_bytes([quantised]) == 2 * (10 * 2 * 64 + 10 * 2 * 2 * 2 * 4)
    assert layers.trimmable([plain, quantised, joined])
    assert not layers.trimmable([plain, chunked])
