"""Chunked-attention layers: their KV is copied token by token, rebuilt, trimmed and measured."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ChunkedKVCache, KVCache

from cache.kv import layers
from cache.kv.chunk import ChunkCache
from cache.kv.size import KvSize, Window
from cache.names.policy import FULL, Policy

CHUNK, BLOCK = 32, 16
TOKEN_BYTES = 2 * 2 * 8 * 4  # keys and values, heads, dim, bytes


def make(block_tokens: int | None = BLOCK) -> list:
    made = SimpleNamespace(make_cache=lambda: [ChunkedKVCache(CHUNK), KVCache()])
    return layers.make(made, block_tokens=block_tokens)


def run(caches, start: int, end: int, piece: int = BLOCK) -> list:
    """Write the tokens `[start, end)` to the caches in pieces, as llama4 does; keys encode the positions."""
    for at in range(start, end, piece):
        positions = mx.arange(at, min(end, at + piece)).astype(mx.float32)[None, None, :, None]
        keys = positions + mx.arange(16).astype(mx.float32).reshape(1, 2, 1, 8) / 64
        for cache in caches:
            if isinstance(cache, ChunkedKVCache):
                cache.maybe_trim_front()
            cache.update_and_fetch(keys, keys + 0.5)
    return caches


def keys_of(cache, start: int, end: int) -> list[float]:
    return cache.tokens(start, end)[0][0][0, 0, :, 0].tolist()


def counted(start: int, end: int) -> list[float]:
    return [float(at) for at in range(start, end)]


def test_layers_with_attention_chunks_of_two_blocks_are_stored_by_tokens_and_others_as_states() -> None:
    """The class names differ, and are part of the model's identity, so the two kinds are never confused."""
    assert layers.describe(make(BLOCK)) == "ChunkCache(32) KVCache"
    assert layers.trimmable(make(BLOCK))
    for block_tokens in (BLOCK + 1, None):
        assert layers.describe(make(block_tokens)) == "ChunkedKVCache(32) KVCache"
        assert not layers.trimmable(make(block_tokens))


def test_a_chunked_attention_layers_kv_sizes_are_reported_and_each_tokens_kv_is_copied_once() -> None:
    caches = run(make(), 0, 100)
    assert layers.unsupported(caches) is None
    described = layers.layout(caches, make)
    assert (described.states, set(described.reaches)) == ((), {Policy(0, CHUNK), FULL})
    assert layers.sizes(caches) == KvSize(TOKEN_BYTES, (Window(CHUNK, TOKEN_BYTES, is_chunk=True),))
    assert layers.sizes(caches).snapshot(7, at=5000) == 7 * 2 * TOKEN_BYTES
    assert layers.sizes(caches).held(5000, ahead=9) == (5000 + CHUNK + 9) * TOKEN_BYTES
    cut = layers.cut(caches, 80, 96, at_end=False)
    assert sum(len(tensor.data) for tensor in cut) == 16 * 2 * TOKEN_BYTES


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 64, 100])
def test_a_chunked_attention_layer_rebuilt_from_copied_blocks_holds_all_visible_tokens(num_tokens) -> None:
    caches, pieces = make(), []
    for at in range(0, num_tokens, BLOCK):
        run(caches, at, min(at + BLOCK, num_tokens))
        pieces.append(layers.cut(caches, at, min(at + BLOCK, num_tokens)))
    tensors = {
        one[0].name: mx.concatenate(
            [mx.array(memoryview(t.data).cast("f"), mx.float32).reshape(t.shape) for t in one], axis=2
        )
        for one in zip(*pieces, strict=True)
    }
    first = max(num_tokens - CHUNK, 0)
    tensors |= {name: tensors[name][..., first:, :] for name in ("0.keys", "0.values")}
    again = layers.rebuild(tensors, make(), num_tokens)
    layers.shrink(caches)
    assert layers.live_bytes(again) == layers.live_bytes(caches)
    for one in (caches, again):
        run(one, num_tokens, num_tokens + 9)
        assert keys_of(one[0], first, num_tokens + 9) == counted(first, num_tokens + 9)
        assert one[0].start_position == first
    with pytest.raises(ValueError, match="not the keys and values"):
        layers.rebuild({**tensors, "0.keys": tensors["0.keys"][..., 1:, :]}, make(), num_tokens)


def test_a_chunked_attention_layer_can_be_copied_only_for_tokens_that_it_still_has() -> None:
    caches = run(make(), 0, 96)
    assert layers.holds(caches, 48, 96)
    assert not layers.holds(caches, 47, 96)
    for span in ((47, 96), (90, 97)):
        with pytest.raises(ValueError, match="not held"):
            layers.cut(caches, *span)


def test_a_chunked_attention_layer_rewinds_only_into_chunks_whose_beginning_it_still_has() -> None:
    caches = run(make(), 0, 90)
    layers.shrink(caches)
    assert (caches[0].start_position, layers.earliest(caches)) == (58, 64)
    with pytest.raises(ValueError, match="cannot go back to 63"):
        layers.fork(caches, make(), 63)
    other = layers.fork(caches, make(), 64)
    layers.trim(caches, 70)
    run(caches, 70, 110)
    run(other, 64, 80)
    assert keys_of(caches[0], 96, 110) == counted(96, 110)
    assert keys_of(other[0], 64, 80) == counted(64, 80)
    with pytest.raises(ValueError, match="cannot go back to 80"):
        layers.trim(caches, 80)
    assert layers.earliest(run(make(), 0, CHUNK)) == 0


def test_a_chunked_attention_layer_trimmed_to_the_start_of_a_chunk_can_continue() -> None:
    caches = run(make(), 0, 96)
    layers.shrink(caches)
    assert layers.earliest(caches) == 64
    layers.trim(caches, 64)
    other = layers.fork(caches, make(), 64)
    assert layers.live_bytes(other) == 64 * TOKEN_BYTES
    for one in (caches, other):
        run(one, 64, 70)
        assert keys_of(one[0], 64, 70) == counted(64, 70)
    assert isinstance(other[0], ChunkCache)
