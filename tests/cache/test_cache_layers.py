"""KV caches are copied and rebuilt, and the model then computes bit-identical logits."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from made_kv import identity
from mlx_lm.models import llama
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from cache.kv import layers

BLOCK = 8


@pytest.fixture(scope="module")
def model():
    mx.random.seed(7)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=61,
    )
    model = llama.Model(args)
    mx.eval(model.parameters())
    return model


def prefill(model, caches, tokens) -> mx.array:
    """Prefill in pieces that end at block boundaries, as the device does; return the last logits."""
    at, logits = caches[0].offset, None
    while at < len(tokens):
        end = min(len(tokens), at - at % BLOCK + BLOCK)
        logits = model(mx.array([tokens[at:end]]), cache=caches)[0, -1]
        mx.eval(logits, [cache.state for cache in caches])
        at = end
    return logits


def decode(model, caches, logits, num_tokens) -> tuple[list[int], list[bytes]]:
    """Decode greedily; return the tokens, and the bytes of all logits."""
    tokens, bits = [], []
    for _ in range(num_tokens):
        tokens.append(int(mx.argmax(logits).item()))
        logits = model(mx.array([[tokens[-1]]]), cache=caches)[0, -1]
        mx.eval(logits)
        bits.append(bytes(memoryview(logits)))
    return tokens, bits


def layout_of(model):
    caches = make_prompt_cache(model)
    prefill(model, caches, [0])
    return layers.layout(caches, lambda: make_prompt_cache(model))


def rebuilt(model, restored) -> list:
    return layers.rebuild(restored.tensors, make_prompt_cache(model), restored.num_tokens)


def prompt(num_tokens: int) -> list[int]:
    return [(i * 17 + 3) % 61 for i in range(num_tokens)]


def state(cache, start, end, row=0) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.array(part[row : row + 1, :, start:end]) for part in (cache.keys, cache.values))


async def test_attention_over_restored_kv_never_reads_the_unused_array_memory_behind_its_last_token(
    model, open_store
) -> None:
    """That memory is undefined; here it is NaN, which would be in all results if attention read it."""
    store = await open_store(identity=identity(block_tokens=BLOCK), layout=layout_of(model))
    tokens = prompt(3 * BLOCK + 1)
    caches = make_prompt_cache(model)
    prefill(model, caches, tokens)
    for span in store.kv.wanted(store.kv.chain("a"), tokens):
        assert store.kv.save(store.kv.chain("a"), tokens, span, layers.cut(caches, span.start, span.end))
    expected = decode(model, caches, prefill(model, caches, [*tokens, 9, 9]), 20)
    await store.queue.drained(5)
    restored = await store.kv.load(store.kv.match(store.kv.chain("a"), tokens))
    for array in restored.tensors.values():
        assert array.shape[2] > len(tokens)
        np.array(array, copy=False)[:, :, len(tokens) :] = np.nan
    again = rebuilt(model, restored)
    assert layers.live_bytes(again) == len(tokens) * 2 * 2 * 8 * 4 * 2
    assert decode(model, again, prefill(model, again, [*tokens, 9, 9]), 20) == expected


def test_copying_kv_from_the_device_in_one_transfer_gives_the_same_kv_as_copying_array_by_array(
    model, monkeypatch
) -> None:
    """CUDA uses one transfer. This includes states of several dtypes."""
    caches = [*make_prompt_cache(model), ArraysCache(2)]
    prefill(model, caches[:-1], list(range(BLOCK)))
    caches[-1][0] = mx.arange(7, dtype=mx.uint32)
    caches[-1][1] = mx.ones((3, 5), mx.float16)
    apart = layers.cut(caches, 0, BLOCK, at_end=True)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    together = layers.cut(caches, 0, BLOCK, at_end=True)
    assert [(one.name, one.shape, bytes(one.data)) for one in together] == [
        (one.name, one.shape, bytes(one.data)) for one in apart
    ]


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (3, 3), (4, 3), (0, 13)])
def test_copying_kv_of_tokens_that_the_layer_cache_does_not_hold_raises_an_error(model, start, end) -> None:
    """Caches allocate memory in advance: without the check, zeros would be saved as KV."""
    caches = make_prompt_cache(model)
    prefill(model, caches, prompt(12))
    with pytest.raises(ValueError, match="does not hold"):
        layers.cut(caches, start, end)


def test_the_check_of_a_models_layer_caches_returns_the_name_of_the_first_unsupported_cache_class(
    model,
) -> None:
    class Odd(KVCache):
        pass

    caches = make_prompt_cache(model)
    prefill(model, caches, prompt(1))
    assert layers.unsupported(caches) is None
    assert layers.unsupported([*caches, RotatingKVCache(8)]) == "RotatingKVCache that stays empty"
    assert layers.unsupported([caches[0], CacheList(caches[1], Odd()), KVCache()]) == "Odd"


def test_the_description_of_a_models_layer_caches_lists_their_classes_and_parameters(model) -> None:
    """Snapshots do not contain them. They are a part of the model's identity."""
    assert layers.describe(make_prompt_cache(model)) == "2*KVCache"
    caches = [
        KVCache(),
        CacheList(ArraysCache(2), RotatingKVCache(8, keep=4)),
        ChunkedKVCache(16),
        QuantizedKVCache(32, 4),
    ]
    assert layers.describe(caches) == (
        "KVCache [ArraysCache(2) RotatingKVCache(8,4)] ChunkedKVCache(16) QuantizedKVCache(32,4)"
    )


def test_trimming_a_concatenate_cache_or_a_cache_list_removes_exactly_the_last_tokens() -> None:
    """mlx-lm's trim of `ConcatenateKVCache` leaves the old tokens before the new ones."""
    joined, listed = ConcatenateKVCache(), KVCache()
    first, second = mx.random.normal((1, 2, 10, 4)), mx.random.normal((1, 2, 3, 4))
    for cache in (joined, listed):
        cache.update_and_fetch(first, first)
    layers.trim([joined, CacheList(listed)], 6)
    for cache in (joined, listed):
        keys, _ = cache.update_and_fetch(second, second)
        assert cache.offset == 9
        assert mx.array_equal(keys, mx.concatenate([first[:, :, :6], second], axis=2))
