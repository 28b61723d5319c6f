"""Ring caches: their KV is copied by tokens, rebuilt from sinks and a window, and measured."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from cache.kv import layers
from cache.kv.ring import SLACK, RingCache
from cache.kv.size import KvSize, Window
from cache.names.policy import FULL, Policy

POLICY = Policy(4, 100)
TOKEN_BYTES = 2 * 2 * 8 * 4  # keys and values, heads, dim, bytes


def model(*caches):
    """Make an object with the method `make_cache`, by which `make_prompt_cache` gets a model's caches."""
    return SimpleNamespace(make_cache=lambda: [make() for make in caches])


def run(caches, start: int, end: int) -> list:
    """Write KV for the positions `[start, end)`, which encodes these positions, to rings and plain caches."""
    for at in range(start, end, 100):
        positions = mx.arange(at, min(end, at + 100)).astype(mx.float32)[None, None, :, None]
        keys = positions + mx.arange(16).astype(mx.float32).reshape(1, 2, 1, 8) / 64
        for cache in caches:
            if type(cache) is RingCache:
                cache.write([keys], [keys + 0.5])
            else:
                cache.update_and_fetch(keys, keys + 0.5)
    mx.eval([cache.state for cache in caches])
    return caches


def visible(caches, num_tokens: int) -> dict[str, mx.array]:
    """Copy the KV that a session of `num_tokens` tokens sees, and join it as a restore does."""
    first = POLICY.visible_from(num_tokens)
    spans = [(0, min(4, first)), (first, num_tokens)] if first else [(0, num_tokens)]
    parts = [layers.cut(caches, *span) for span in spans]
    return {
        one[0].name: mx.concatenate(
            [mx.array(memoryview(t.data).cast("f"), mx.float32).reshape(t.shape) for t in one], axis=2
        )
        for one in zip(*parts, strict=True)
    }


def keys_of(caches, start: int, end: int) -> list[float]:
    return [
        cache.tokens(start, end)[0][0][0, 0, :, 0].tolist() for cache in caches if type(cache) is RingCache
    ]


def test_under_sink_window_plain_layers_get_ring_caches_and_windows_and_states_stay() -> None:
    made = model(
        KVCache, lambda: QuantizedKVCache(32, 8), lambda: RotatingKVCache(512), lambda: ArraysCache(2)
    )
    assert layers.describe(layers.make(made)) == (
        "KVCache QuantizedKVCache(32,8) RotatingKVCache(512,0) ArraysCache(2)"
    )
    rings = "RingCache(sink_window(4,100)) RingCache(sink_window(4,100),32,8)"
    of_window = "RingCache(sink_window(0,512)) ArraysCache(2)"
    as_made = "RotatingKVCache(512,0) ArraysCache(2)"
    assert layers.describe(layers.make(made, POLICY)) == f"{rings} {as_made}"
    assert layers.describe(layers.make(made, POLICY, rings=True)) == f"{rings} {of_window}"
    plain = "KVCache QuantizedKVCache(32,8)"
    assert layers.describe(layers.make(made, FULL, rings=True)) == f"{plain} {of_window}"
    kept = model(lambda: RotatingKVCache(512, keep=4))
    assert layers.describe(layers.make(kept, rings=True)) == "RotatingKVCache(512,4)"


@pytest.mark.parametrize("make", [lambda: ChunkedKVCache(4), lambda: CacheList(KVCache(), ChunkedKVCache(4))])
def test_a_policy_on_an_unsupported_layer_raises_an_error_that_names_the_layer(make) -> None:
    with pytest.raises(ValueError, match="sink_window is not for layers of ChunkedKVCache;"):
        layers.make(model(KVCache, make), POLICY)


def test_the_layout_and_sizes_of_ring_layers_are_reported() -> None:
    caches = run(layers.make(model(KVCache, KVCache, lambda: RotatingKVCache(50)), POLICY, rings=True), 0, 1)
    assert layers.unsupported(caches) is None
    rings = (Window(50 + SLACK, TOKEN_BYTES, True), Window(104 + SLACK, 2 * TOKEN_BYTES, True))
    assert layers.sizes(caches) == KvSize(0, rings)
    size = layers.sizes(caches)
    assert size.held(5000, ahead=128) == size.bounded_bytes
    assert size.snapshot(7, at=5000) == 7 * 3 * TOKEN_BYTES
    described = layers.layout(caches, list)
    assert described.kv == tuple(
        (f"{i}.{part}", "F32", (2, 8)) for i in range(3) for part in ("keys", "values")
    )
    assert not described.states


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 103, 104, 105, 359, 360, 361, 1000])
def test_live_bytes_of_a_ring_cache_count_only_its_visible_tokens(num_tokens) -> None:
    caches = run(layers.make(model(KVCache, KVCache), POLICY), 0, num_tokens)
    assert layers.live_bytes(caches) == POLICY.num_visible(num_tokens) * 2 * TOKEN_BYTES
    assert layers.allocated_bytes(caches) == min(-(-num_tokens // SLACK) * SLACK, 360) * 2 * TOKEN_BYTES


@pytest.mark.parametrize("num_tokens", [3, 60, 104, 105, 361, 1000])
def test_a_ring_cache_rebuilt_from_copied_kv_holds_all_visible_tokens(num_tokens) -> None:
    caches = run(layers.make(model(KVCache, KVCache), POLICY), 0, num_tokens)
    again = layers.rebuild(
        visible(caches, num_tokens), layers.make(model(KVCache, KVCache), POLICY), num_tokens
    )
    for cache in (caches, again):
        run(cache, num_tokens, num_tokens + 30)
    first = POLICY.visible_from(num_tokens)
    for span in ((0, min(4, num_tokens)), (first, num_tokens + 30)):
        assert keys_of(again, *span) == keys_of(caches, *span) == 2 * [[float(at) for at in range(*span)]]
    assert layers.earliest(again) == (num_tokens if num_tokens > 104 else 0)
    with pytest.raises(ValueError, match="not the keys and values"):
        layers.rebuild(visible(caches, num_tokens), layers.make(model(KVCache, KVCache), POLICY), 7)


def test_a_ring_cache_can_be_copied_only_for_tokens_that_it_still_has() -> None:
    caches = run(layers.make(model(KVCache), POLICY), 0, 1000)
    assert layers.holds(caches, 700, 900)
    assert layers.holds(caches, 0, 4)
    for span in ((600, 700), (0, 5), (900, 1001)):
        assert not layers.holds(caches, *span)
        with pytest.raises(ValueError, match="not held"):
            layers.cut(caches, *span)


def test_ring_layers_can_be_trimmed_only_to_positions_that_every_layer_allows() -> None:
    caches = run(layers.make(model(KVCache, lambda: RotatingKVCache(50)), POLICY, rings=True), 0, 1000)
    assert layers.trimmable(caches)
    assert layers.earliest(caches) == 1000 - SLACK
    layers.trim(caches, 1000 - SLACK)
    assert [cache.offset for cache in caches] == [744, 744]
    with pytest.raises(ValueError, match="cannot go back"):
        layers.trim(caches, 743)
    assert layers.earliest(run([KVCache()], 0, 1000)) == 0
    assert layers.earliest([ArraysCache(2), *caches]) is None


def test_forking_a_ring_cache_leaves_the_source_unchanged() -> None:
    made = model(KVCache, lambda: QuantizedKVCache(32, 8))
    caches = run(layers.make(model(KVCache, KVCache), POLICY), 0, 600)
    other = layers.fork(caches, layers.make(model(KVCache, KVCache), POLICY), 500)
    run(caches, 600, 700)
    assert [cache.offset for cache in other] == [500, 500]
    assert keys_of(other, 400, 500) == 2 * [[float(at) for at in range(400, 500)]]
    assert keys_of(caches, 600, 700) == 2 * [[float(at) for at in range(600, 700)]]
    with pytest.raises(ValueError, match="cannot go back"):
        layers.fork(caches, layers.make(model(KVCache, KVCache), POLICY), 400)
    quantised = layers.make(made, POLICY)[1]
    parts = [tuple(mx.quantize(mx.random.normal((1, 2, 9, 32)), 32, 8)) for _ in range(2)]
    quantised.write(*parts)
    copy = layers.fork([quantised], [layers.make(made, POLICY)[1]], 7)
    cut, again = layers.cut([quantised], 0, 7), layers.cut(copy, 0, 7)
    assert [bytes(one.data) for one in cut] == [bytes(one.data) for one in again]
    assert [one.name for one in cut[:3]] == ["0.keys.codes", "0.keys.scales", "0.keys.biases"]


def test_a_short_ring_cache_shrinks_to_its_tokens_and_grows_again() -> None:
    caches = run(layers.make(model(KVCache), POLICY), 0, 20)
    assert not layers.grows(caches, 200)
    layers.shrink(caches)
    assert layers.allocated_bytes(caches) == 20 * TOKEN_BYTES
    assert layers.grows(caches, 1)
    run(caches, 20, 700)
    assert keys_of(caches, 600, 700) == [[float(at) for at in range(600, 700)]]
    assert not layers.grows(caches, 200)
    layers.shrink(caches)
    assert layers.allocated_bytes(caches) == 360 * TOKEN_BYTES
