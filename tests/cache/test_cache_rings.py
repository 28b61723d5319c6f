"""Ring caches and chunked attention: their KV is copied by tokens, rebuilt, trimmed and measured."""

from __future__ import annotations

from itertools import pairwise
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


def test_under_sink_window_plain_layers_get_ring_buffers_as_caches_and_other_layers_keep_their_caches() -> (
    None
):
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
def test_making_sink_window_caches_for_an_unsupported_layer_class_raises_an_error_that_names_the_class(
    make,
) -> None:
    with pytest.raises(ValueError, match="sink_window is not for layers of ChunkedKVCache;"):
        layers.make(model(KVCache, make), POLICY)


@pytest.mark.parametrize("num_tokens", [1, 5, 104, 105, 361, 1000])
def test_the_size_reported_for_the_ring_buffer_of_a_window_counts_only_its_visible_tokens(num_tokens) -> None:
    caches = run(layers.make(model(KVCache, KVCache), POLICY), 0, num_tokens)
    assert layers.live_bytes(caches) == POLICY.num_visible(num_tokens) * 2 * TOKEN_BYTES
    assert layers.allocated_bytes(caches) == min(-(-num_tokens // SLACK) * SLACK, 360) * 2 * TOKEN_BYTES


@pytest.mark.parametrize("num_tokens", [3, 104, 105, 1000])
def test_the_ring_buffer_of_a_window_rebuilt_from_copied_kv_holds_all_visible_tokens(num_tokens) -> None:
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


def test_ring_buffers_of_several_window_layers_can_be_trimmed_only_to_positions_that_every_layer_allows() -> (
    None
):
    caches = run(layers.make(model(KVCache, lambda: RotatingKVCache(50)), POLICY, rings=True), 0, 1000)
    assert layers.trimmable(caches)
    assert layers.earliest(caches) == 1000 - SLACK
    layers.trim(caches, 1000 - SLACK)
    assert [cache.offset for cache in caches] == [744, 744]
    with pytest.raises(ValueError, match="cannot go back"):
        layers.trim(caches, 743)
    assert layers.earliest(run([KVCache()], 0, 1000)) == 0
    assert layers.earliest([ArraysCache(2), *caches]) is None


def rings() -> list:
    return layers.make(model(KVCache, KVCache), POLICY)


def test_the_ring_buffer_of_a_window_and_its_fork_do_not_overwrite_each_other_as_both_grow() -> None:
    """Both go on past the end of their arrays, where a ring overwrites its earliest tokens in place."""
    caches = run(rings(), 0, 600)
    other = layers.fork(caches, rings(), 500)
    run(caches, 600, 900)
    assert [cache.offset for cache in other] == [500, 500]
    assert keys_of(other, 400, 500) == 2 * [[float(at) for at in range(400, 500)]]
    for at in range(500, 900, 100):
        for cache in other:
            cache.write([mx.full((1, 2, 100, 8), -float(at))], [mx.zeros((1, 2, 100, 8))])
    mx.eval([cache.state for cache in other])
    assert [cache.offset for cache in (*caches, *other)] == [900] * 4
    assert keys_of(caches, 800, 900) == 2 * [[float(at) for at in range(800, 900)]]
    assert keys_of(other, 800, 900) == 2 * [[-800.0] * 100]


def test_the_ring_buffer_of_a_window_cannot_be_forked_at_a_position_whose_window_was_overwritten() -> None:
    caches = run(rings(), 0, 700)
    with pytest.raises(ValueError, match="cannot go back"):
        layers.fork(caches, rings(), 400)


def test_a_fork_of_a_quantised_ring_buffer_of_kv_has_the_codes_scales_and_biases_of_its_source() -> None:
    made = model(KVCache, lambda: QuantizedKVCache(32, 8))
    quantised = layers.make(made, POLICY)[1]
    parts = [tuple(mx.quantize(mx.random.normal((1, 2, 9, 32)), 32, 8)) for _ in range(2)]
    quantised.write(*parts)
    copy = layers.fork([quantised], [layers.make(made, POLICY)[1]], 7)
    cut, again = layers.cut([quantised], 0, 7), layers.cut(copy, 0, 7)
    assert [bytes(one.data) for one in cut] == [bytes(one.data) for one in again]
    assert [one.name for one in cut[:3]] == ["0.keys.codes", "0.keys.scales", "0.keys.biases"]


def _run(ring: RingCache, edges: list[int]) -> None:
    """Write tokens whose keys are their positions, and whose values are the positions plus 0.5."""
    for start, end in pairwise(edges):
        keys = mx.arange(start, end).astype(mx.float32).reshape(1, 1, -1, 1)
        ring.write([keys], [keys + 0.5])


def test_the_ring_buffer_of_a_window_refuses_a_trim_to_tokens_that_were_overwritten_or_never_written() -> (
    None
):
    """Attention must never read tokens that were overwritten or never written."""
    ring = RingCache(4, 100)
    _run(ring, [*range(0, 1000, SLACK), 1000])
    ring.trim(200)
    assert ring.offset == 800
    assert ring.can_trim(1000 - SLACK)
    assert not ring.can_trim(1000 - SLACK - 1)
    with pytest.raises(ValueError, match="not held"):
        ring.tokens(600, 650)
    with pytest.raises(ValueError, match="cannot go back to 740"):
        ring.trim(60)
    _run(ring, [800, 900])
    assert ring.can_trim(1000 - SLACK)
    filled = RingCache(4, 100)
    filled.fill([mx.ones((1, 1, 104, 1))], [mx.ones((1, 1, 104, 1))], 1000)
    assert filled.can_trim(1000)
    assert not filled.can_trim(999)
    _run(filled, [1000, 1200])
    assert filled.can_trim(1000)
    assert not filled.can_trim(999)
    young = RingCache(4, 100)
    young.fill([mx.ones((1, 1, 50, 1))], [mx.ones((1, 1, 50, 1))], 50)
    assert young.can_trim(0)


CHUNK, HALF = 32, 16


def make_chunks(block_tokens: int | None = HALF) -> list:
    made = SimpleNamespace(make_cache=lambda: [ChunkedKVCache(CHUNK), KVCache()])
    return layers.make(made, block_tokens=block_tokens)


def run_chunks(caches, start: int, end: int, piece: int = HALF) -> list:
    """Write the tokens `[start, end)` to the caches in pieces, as llama4 does; keys encode the positions."""
    for at in range(start, end, piece):
        positions = mx.arange(at, min(end, at + piece)).astype(mx.float32)[None, None, :, None]
        keys = positions + mx.arange(16).astype(mx.float32).reshape(1, 2, 1, 8) / 64
        for cache in caches:
            if isinstance(cache, ChunkedKVCache):
                cache.maybe_trim_front()
            cache.update_and_fetch(keys, keys + 0.5)
    return caches


def chunk_keys_of(cache, start: int, end: int) -> list[float]:
    return cache.tokens(start, end)[0][0][0, 0, :, 0].tolist()


def counted(start: int, end: int) -> list[float]:
    return [float(at) for at in range(start, end)]


def test_chunked_attention_layers_are_stored_by_token_if_a_chunk_has_two_blocks_and_else_as_states() -> None:
    """The class names differ, and are part of the model's identity, so the two kinds are never confused."""
    assert layers.describe(make_chunks(HALF)) == "ChunkCache(32) KVCache"
    assert layers.trimmable(make_chunks(HALF))
    for block_tokens in (HALF + 1, None):
        assert layers.describe(make_chunks(block_tokens)) == "ChunkedKVCache(32) KVCache"
        assert not layers.trimmable(make_chunks(block_tokens))


@pytest.mark.parametrize("num_tokens", [1, 32, 33, 100])
def test_a_chunked_attention_layer_rebuilt_from_copied_blocks_holds_all_visible_tokens(num_tokens) -> None:
    caches, pieces = make_chunks(), []
    for at in range(0, num_tokens, HALF):
        run_chunks(caches, at, min(at + HALF, num_tokens))
        pieces.append(layers.cut(caches, at, min(at + HALF, num_tokens)))
    tensors = {
        one[0].name: mx.concatenate(
            [mx.array(memoryview(t.data).cast("f"), mx.float32).reshape(t.shape) for t in one], axis=2
        )
        for one in zip(*pieces, strict=True)
    }
    first = max(num_tokens - CHUNK, 0)
    tensors |= {name: tensors[name][..., first:, :] for name in ("0.keys", "0.values")}
    again = layers.rebuild(tensors, make_chunks(), num_tokens)
    layers.shrink(caches)
    assert layers.live_bytes(again) == layers.live_bytes(caches)
    for one in (caches, again):
        run_chunks(one, num_tokens, num_tokens + 9)
        assert chunk_keys_of(one[0], first, num_tokens + 9) == counted(first, num_tokens + 9)
        assert one[0].start_position == first
    with pytest.raises(ValueError, match="not the keys and values"):
        layers.rebuild({**tensors, "0.keys": tensors["0.keys"][..., 1:, :]}, make_chunks(), num_tokens)


def test_copying_kv_that_a_chunked_attention_layer_no_longer_holds_raises_an_error() -> None:
    caches = run_chunks(make_chunks(), 0, 96)
    assert layers.holds(caches, 48, 96)
    assert not layers.holds(caches, 47, 96)
    for span in ((47, 96), (90, 97)):
        with pytest.raises(ValueError, match="not held"):
            layers.cut(caches, *span)


def test_a_chunked_attention_layer_can_be_rewound_only_into_chunks_whose_first_token_it_still_holds() -> None:
    caches = run_chunks(make_chunks(), 0, 90)
    layers.shrink(caches)
    assert (caches[0].start_position, layers.earliest(caches)) == (58, 64)
    with pytest.raises(ValueError, match="cannot go back to 63"):
        layers.fork(caches, make_chunks(), 63)
    other = layers.fork(caches, make_chunks(), 64)
    layers.trim(caches, 70)
    run_chunks(caches, 70, 110)
    run_chunks(other, 64, 80)
    assert chunk_keys_of(caches[0], 96, 110) == counted(96, 110)
    assert chunk_keys_of(other[0], 64, 80) == counted(64, 80)
    with pytest.raises(ValueError, match="cannot go back to 80"):
        layers.trim(caches, 80)
    assert layers.earliest(run_chunks(make_chunks(), 0, CHUNK)) == 0
