"""Models of every kind of cache on the device: same tokens over many turns as from scratch, and sizes."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ChunkedKVCache, ConcatenateKVCache, KVCache, make_prompt_cache
from tiny_models import BLOCK, CONFIGS, alone, append, generate, prefill, prompt

from cache import layers
from worker.models.model import cache_sizes


@pytest.mark.parametrize("kind", CONFIGS)
def test_turn_after_turn_gives_the_tokens_of_a_run_from_scratch(make_model, make_rig, kind) -> None:
    """Append, generate, append, generate on what is resident; caches that cannot be trimmed included."""
    model = make_model(kind)
    rig, fresh = make_rig(model), make_rig(model)
    history, num_held = [], 0
    for turn_index in range(3):
        history = history + prompt(5 + 9 * turn_index, salt=turn_index + 1)
        added = append(history, num_kept=num_held)
        rig.run(added)
        assert added.num_reused == num_held
        turn = generate(history, 7, num_kept=added.num_cached)
        rig.run(turn)
        from_scratch = generate(history, 7)
        fresh.run(from_scratch)
        assert rig.tokens(turn) == fresh.tokens(from_scratch) == alone(model, history, 7)[0]
        assert turn.num_prefilled <= 1, "the append had prefilled all but the last token"
        history, num_held = history + rig.tokens(turn), turn.num_cached


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_rewound_session_goes_on_with_the_tokens_of_a_run_from_scratch(make_model, make_rig, kind) -> None:
    model = make_model(kind)
    rig = make_rig(model)
    before = generate(prompt(30), 10)
    rig.run(before)
    history = prompt(21) + prompt(6, salt=8)
    after = generate(history, 10, num_kept=21)
    rig.run(after)
    assert rig.tokens(after) == alone(model, history, 10)[0]
    assert after.num_reused == (21 if kind == "llama" else 0), "what cannot be trimmed starts anew"


@pytest.mark.parametrize("kind", CONFIGS)
def test_live_bytes_are_what_the_sizes_of_the_model_predict(make_model, make_rig, kind) -> None:
    """Exactly, for the classes that keep everything; never more, for windows."""
    model = make_model(kind)
    per_token, fixed = cache_sizes(model)
    caches = make_prompt_cache(model)
    assert layers.live_bytes(caches) == 0
    prefill(model, caches, prompt(5))
    assert layers.live_bytes(caches) == fixed + 5 * per_token
    prefill(model, caches, prompt(35))
    live_bytes = layers.live_bytes(caches)
    if kind in {"llama", "mamba2", "rwkv7"}:
        assert live_bytes == fixed + 40 * per_token
    else:
        assert fixed + BLOCK * per_token < live_bytes < fixed + 40 * per_token, (
            "a window wraps, a layer does not"
        )


def test_live_bytes_of_quantised_and_chunked_caches_leave_out_what_is_allocated_ahead() -> None:
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
