"""Caches of every class continue bit for bit after they were stored in files and restored."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import ConcatenateKVCache, make_prompt_cache
from tiny_models import BLOCK, CONFIGS, OTHERS, VOCABULARY, append, prompt

from cache.kv import layers
from cache.names.blocks import Span
from cache.names.identity import Identity
from cache.store import Store
from worker.device.turn import SnapshotCut

KINDS = [
    "llama",
    "exaone4",
    "gemma3_text",
    "mamba2",
    "rwkv7",
    "qwen3_next",
    "granitemoehybrid",
    "falcon_h1",
    "recurrent_gemma",
    "baichuan_m1",
    "llama4",
    "deepseek_v3",
    "longcat_flash",
    "quantized",
    "concatenated",
]
PLAIN = {"llama", "deepseek_v3", "longcat_flash", "quantized", "concatenated"}
#: On a CPU, MLX computes these only in float32.
MIXTURES = {
    "gpt_oss",
    "deepseek_v3",
    "llama4",
    "llama4_chunks",
    "longcat_flash",
    "granitemoehybrid",
    "qwen3_next",
}
#: At the last of these positions, windows and chunks of 8 and of 12 tokens have wrapped.
POSITIONS = [BLOCK - 1, BLOCK, 3 * BLOCK + 1]


@pytest.fixture(scope="module")
def make_caches(make_model) -> Callable[[str], tuple[Any, Callable[[], list[Any]]]]:
    """Return a function that returns a model of a kind, and a function that makes its caches."""
    mx.random.seed(5)
    args = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 2}
    wide = llama.Model(
        llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, vocab_size=VOCABULARY, **args)  # type: ignore[arg-type]
    )
    mx.eval(wide.parameters())

    def make(kind: str) -> tuple[Any, Callable[[], list[Any]]]:
        if kind == "quantized":
            return wide, lambda: [cache.to_quantized(32, 8) for cache in make_prompt_cache(wide)]
        if kind == "concatenated":
            return wide, lambda: [ConcatenateKVCache() for _ in wide.layers]
        model = make_model(kind)
        return model, lambda: make_prompt_cache(model)

    return make


async def open_store(folder: Path, model: Any, new: Callable[[], list[Any]]) -> Store:
    caches = new()
    run(model, caches, [0])
    identity = Identity(
        weights="w",
        config="c",
        tokenizer="t",
        kv_dtype="float32",
        block_tokens=BLOCK,
        caches=layers.describe(caches),
    )
    return await Store.open(
        folder,
        identity=identity,
        layout=layers.layout(caches, new),
        max_bytes=1 << 30,
        queue_bytes=1 << 30,
        min_free_bytes=0,
    )


def run(model: Any, caches: list[Any], tokens: list[int]) -> mx.array:
    logits = model(mx.array([tokens]), cache=caches)[0, -1]
    mx.eval(logits, [cache.state for cache in caches])
    return logits


def decode(model: Any, caches: list[Any], first: int, num: int) -> tuple[list[int], list[bytes]]:
    """Decode greedily; return the tokens, and the bits of all logits."""
    tokens, bits = [first], []
    for _ in range(num):
        logits = run(model, caches, tokens[-1:])
        bits.append(bytes(memoryview(logits).cast("B")))
        tokens.append(int(mx.argmax(logits).item()))
    return tokens, bits


def spill(store: Store, model: Any, caches: list[Any], tokens: list[int]) -> int:
    """Prefill block by block, save each block, and return the first token that follows."""
    logits = mx.zeros(1)
    for span in store.kv.wanted(store.kv.chain("a"), tokens):
        logits = run(model, caches, tokens[span.start : span.end])
        cut = layers.cut(caches, span.start, span.end, at_end=True)
        assert cut is not None
        assert store.kv.save(store.kv.chain("a"), tokens, span, cut)
    return int(mx.argmax(logits).item())


@pytest.mark.parametrize("kind", KINDS)
async def test_restored_caches_continue_bit_for_bit_from_positions_around_block_boundaries(
    make_caches, tmp_path, kind
) -> None:
    """The store is closed and reopened. Positions are on, before and after a block's boundary."""
    model, new = make_caches(kind)
    store = await open_store(tmp_path, model, new)
    expected = {}
    for position in POSITIONS:
        tokens, caches = prompt(position, salt=position), new()
        first = spill(store, model, caches, tokens)
        expected[position] = first, layers.live_bytes(caches), decode(model, caches, first, 18)
    assert await store.close()

    store = await open_store(tmp_path, model, new)
    for position, (first, live_bytes, went_on) in expected.items():
        # What follows differs from what was saved: nothing but the prompt itself can be meant.
        tokens = prompt(position, salt=position) + [VOCABULARY - 1] * BLOCK
        match = store.kv.match(store.kv.chain("a"), tokens)
        assert match.num_tokens == position
        restored = await store.kv.load(match)
        assert restored is not None
        caches = layers.rebuild(restored.tensors, new(), restored.num_tokens)
        assert layers.live_bytes(caches) == live_bytes
        assert decode(model, caches, first, 18) == went_on, f"from {position} on"
    assert await store.close()


@pytest.mark.parametrize("kind", sorted(CONFIGS | OTHERS))
def test_the_tensors_of_a_snapshot_match_the_layout_computed_for_the_model(build_model, kind) -> None:
    """Checked at several lengths, and in bfloat16, where parts of a state may have another type."""
    model = build_model(kind)
    if kind not in MIXTURES:
        model.set_dtype(mx.bfloat16)
    first = make_prompt_cache(model)
    run(model, first, [0])
    layout = layers.layout(first, lambda: make_prompt_cache(model))
    for position in POSITIONS:
        caches = make_prompt_cache(model)
        run(model, caches, prompt(position))
        cut = layers.cut(caches, 0, position, at_end=True)
        assert cut is not None
        kv = [(one.name, one.dtype, (one.shape[1], one.shape[3])) for one in cut if not one.of_state]
        assert tuple(kv) == layout.kv
        layout.check_states(tuple((one.name, one.dtype, one.shape) for one in cut if one.of_state), position)


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_does_not_change_while_its_caches_continue(make_caches, kind) -> None:
    """The writer thread reads the snapshot later, while a ring cache is overwritten in place."""
    model, new = make_caches(kind)
    caches = new()
    for at in range(0, 3 * BLOCK, BLOCK):
        run(model, caches, prompt(3 * BLOCK)[at : at + BLOCK])
    decode(model, caches, 1, 2)
    tensors = layers.cut(caches, 3 * BLOCK, 3 * BLOCK + 2, at_end=True)
    before = [bytes(tensor.data) for tensor in tensors]
    decode(model, caches, 5, 20)
    assert [bytes(tensor.data) for tensor in tensors] == before
    assert any(tensor.of_state for tensor in tensors) == (kind not in PLAIN)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PLAIN])
def test_a_layers_state_is_copied_and_restored_only_at_its_own_token_position(make_caches, kind) -> None:
    model, new = make_caches(kind)
    caches = new()
    run(model, caches, prompt(2 * BLOCK)[:BLOCK])
    early = {tensor.name: tensor for tensor in layers.cut(caches, 0, BLOCK, at_end=True)}
    run(model, caches, prompt(2 * BLOCK)[BLOCK:])
    late = {tensor.name: tensor for tensor in layers.cut(caches, 0, 2 * BLOCK, at_end=True)}
    assert early.keys() == late.keys()
    behind = layers.cut(caches, 0, BLOCK)
    assert [tensor.name for tensor in behind] == [name for name in early if not early[name].of_state]

    def arrays(tensors: dict[str, Any]) -> dict[str, mx.array]:
        types = {"F32": mx.float32, "I64": mx.int64}
        return {
            name: mx.view(mx.array(tensor.data), types[tensor.dtype]).reshape(tensor.shape)
            for name, tensor in tensors.items()
        }

    layers.rebuild(arrays(late), new(), 2 * BLOCK)
    mixed = {name: (early if name.startswith("state.") else late)[name] for name in late}
    with pytest.raises(ValueError, match=f"after {2 * BLOCK} tokens"):
        layers.rebuild(arrays(mixed), new(), 2 * BLOCK)
    for name in late:
        with pytest.raises(ValueError, match="not "):
            layers.rebuild(arrays({n: t for n, t in late.items() if n != name}), new(), 2 * BLOCK)
    with pytest.raises(ValueError, match="not there"):
        layers.rebuild(arrays({**late, "state.99.numbers": late[next(reversed(late))]}), new(), 2 * BLOCK)
    if kind not in {"mamba2", "rwkv7"}:  # which count no tokens: only who runs them knows where they are
        with pytest.raises(ValueError, match=r"not (all )?at"):
            layers.cut(caches, 0, BLOCK, at_end=True)


@pytest.mark.parametrize("kind", ["qwen3_next", "baichuan_m1", "mamba2"])
def test_checking_restored_recurrent_states_leaves_mlxs_default_device_unchanged(make_caches, kind) -> None:
    """All threads share one default device, which the device thread uses. A second CPU stands for the GPU."""
    model, new = make_caches(kind)
    caches = new()
    run(model, caches, prompt(BLOCK))
    prove = layers.layout(caches, new).prove
    state = layers.cut(caches, 0, BLOCK, at_end=True)
    types = {"F32": mx.float32, "I64": mx.int64}
    arrays = {
        tensor.name: mx.view(mx.array(tensor.data), types[tensor.dtype]).reshape(tensor.shape)
        for tensor in state
    }
    mx.eval(arrays)
    seen: list[mx.Device] = []
    has_begun, may_end = threading.Event(), threading.Event()

    class Watched(dict[str, mx.array]):
        def items(self) -> Any:
            seen.append(mx.default_device())
            return super().items()

    class Waiting(Watched):
        def items(self) -> Any:
            has_begun.set()
            assert may_end.wait(10)
            return super().items()

    gpu, ours = mx.Device(mx.cpu, 1), mx.default_device()
    mx.set_default_device(gpu)
    try:
        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(prove, Waiting(arrays), BLOCK)
            assert has_begun.wait(10)
            second = threads.submit(prove, Watched(arrays), BLOCK)
            may_end.set()
            first.result(10)
            second.result(10)
        seen.append(mx.default_device())
    finally:
        mx.set_default_device(ours)
    assert seen == [gpu] * 3
    with pytest.raises(ValueError, match=f"after {BLOCK + 1} tokens"):
        prove(arrays, BLOCK + 1)


def test_a_snapshot_that_lacks_queue_space_omits_recurrent_states_before_keys_and_values(make_caches) -> None:
    """Later blocks cannot be used without the keys and values of earlier ones."""
    model, new = make_caches("qwen3_next")
    caches = new()
    run(model, caches, prompt(BLOCK))
    tensors = layers.cut(caches, 0, BLOCK, at_end=True)
    state_bytes = sum(tensor.data.nbytes for tensor in tensors if tensor.of_state)
    kv_bytes = sum(tensor.data.nbytes for tensor in tensors if not tensor.of_state)
    rest = tuple(tensor for tensor in tensors if not tensor.of_state)
    for room_bytes, spare_states, expected in (
        (kv_bytes + state_bytes, 0, tensors),
        (kv_bytes + state_bytes - 1, 0, rest),
        (kv_bytes + 2 * state_bytes, 1, tensors),
        (kv_bytes + 2 * state_bytes - 1, 1, rest),
        (kv_bytes, 0, rest),
        (kv_bytes - 1, 0, None),
    ):
        cut = layers.cut(caches, 0, BLOCK, at_end=True, most_bytes=room_bytes, spare_states=spare_states)
        assert cut == expected


def test_a_turn_reserves_queue_space_for_the_recurrent_state_at_its_end(make_caches, make_rig) -> None:
    """At earlier block boundaries a state is stored only if the queue has space for two."""
    model, new = make_caches("mamba2")
    caches = new()
    run(model, caches, prompt(BLOCK))
    state_bytes = sum(tensor.data.nbytes for tensor in layers.cut(caches, 0, BLOCK, at_end=True))
    spans = [Span(0, BLOCK), Span(BLOCK, 2 * BLOCK), Span(2 * BLOCK, 3 * BLOCK)]
    for room_bytes, expected in (
        (2 * state_bytes, [True, True, True]),
        (2 * state_bytes - 1, [False, False, True]),
        (state_bytes - 1, [False, False, False]),
    ):
        rig = make_rig(model, room=lambda room_bytes=room_bytes: room_bytes)
        turn = append(prompt(3 * BLOCK + 1), spans=spans.copy())
        rig.run(turn)
        cuts = [event for event in rig.of(turn) if isinstance(event, SnapshotCut)]
        # The last one is not cut without its state: it would never get one.
        assert [cut.span for cut in cuts] == spans[: 2 + expected[-1]]
        assert [any(tensor.of_state for tensor in cut.tensors) for cut in cuts] == expected[: len(cuts)]
