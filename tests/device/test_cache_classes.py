"""Caches of every class: their snapshots, the size of their KV, and sessions with chunked attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import ConcatenateKVCache, make_prompt_cache
from tiny_models import BLOCK, CONFIGS, OTHERS, VOCABULARY, alone, append, generate, prompt

from cache.kv import layers
from cache.names.blocks import Span
from worker.device.turn import SnapshotCut
from worker.models.model import cache_sizes

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


def run(model: Any, caches: list[Any], tokens: list[int]) -> mx.array:
    logits = model(mx.array([tokens]), cache=caches)[0, -1]
    mx.eval(logits, [cache.state for cache in caches])
    return logits


def arrays(tensors: dict[str, Any]) -> dict[str, mx.array]:
    types = {"F32": mx.float32, "I64": mx.int64}
    return {
        name: mx.view(mx.array(tensor.data), types[tensor.dtype]).reshape(tensor.shape)
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("kind", sorted(CONFIGS | OTHERS))
def test_kv_copied_for_a_snapshot_has_the_tensor_names_types_and_shapes_computed_for_the_model(
    build_model, kind
) -> None:
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


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PLAIN])
def test_the_state_of_a_recurrent_layer_is_copied_and_restored_only_at_its_own_token_position(
    make_caches, kind
) -> None:
    model, new = make_caches(kind)
    caches = new()
    run(model, caches, prompt(2 * BLOCK)[:BLOCK])
    early = {tensor.name: tensor for tensor in layers.cut(caches, 0, BLOCK, at_end=True)}
    before = [bytes(tensor.data) for tensor in early.values()]
    run(model, caches, prompt(2 * BLOCK)[BLOCK:])
    late = {tensor.name: tensor for tensor in layers.cut(caches, 0, 2 * BLOCK, at_end=True)}
    assert early.keys() == late.keys()
    assert [bytes(tensor.data) for tensor in early.values()] == before, "the writer thread reads it later"
    behind = layers.cut(caches, 0, BLOCK)
    assert [tensor.name for tensor in behind] == [name for name in early if not early[name].of_state]

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
def test_restoring_recurrent_states_leaves_the_default_device_of_mlx_unchanged(make_caches, kind) -> None:
    """All threads share one default device, which the device thread uses. A second CPU stands for the GPU."""
    model, new = make_caches(kind)
    caches = new()
    run(model, caches, prompt(BLOCK))
    prove = layers.layout(caches, new).prove
    state = arrays({one.name: one for one in layers.cut(caches, 0, BLOCK, at_end=True)})
    mx.eval(state)
    seen: list[mx.Device] = []

    class Watched(dict[str, mx.array]):
        def items(self) -> Any:
            seen.append(mx.default_device())
            return super().items()

    gpu, ours = mx.Device(mx.cpu, 1), mx.default_device()
    mx.set_default_device(gpu)
    try:
        prove(Watched(state), BLOCK)
        seen.append(mx.default_device())
    finally:
        mx.set_default_device(ours)
    assert seen == [gpu] * 2
    with pytest.raises(ValueError, match=f"after {BLOCK + 1} tokens"):
        prove(state, BLOCK + 1)


def test_a_snapshot_too_large_for_the_write_queue_leaves_out_recurrent_states_first_and_then_all_kv(
    make_caches,
) -> None:
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


def test_a_turn_reserves_write_queue_space_for_its_final_recurrent_state(make_caches, make_rig) -> None:
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
        rig = make_rig(model)
        cutter = rig.device._runner.cutter
        # Nothing that is cut takes room: the disk is fast.
        rig.device.cut_snapshots(lambda cutter=cutter, room_bytes=room_bytes: room_bytes + cutter._cut_bytes)
        turn = append(prompt(3 * BLOCK + 1), spans=spans.copy())
        rig.run(turn)
        cuts = [event for event in rig.of(turn) if isinstance(event, SnapshotCut)]
        # The last one is not cut without its state: it would never get one.
        assert [cut.span for cut in cuts] == spans[: 2 + expected[-1]]
        assert [any(tensor.of_state for tensor in cut.tensors) for cut in cuts] == expected[: len(cuts)]


@pytest.mark.parametrize("kind", [one for one in [*CONFIGS, "llama4", "qwen3_next"] if one != "rwkv7"])
def test_the_kv_of_a_session_takes_exactly_the_computed_number_of_bytes_at_any_length(
    make_model, make_rig, kind
) -> None:
    """Sizes are equal to the byte after prompts and answers; windows and chunks do not exceed their limit."""
    model = make_model(kind)
    size, rig, history = cache_sizes(model), make_rig(model), []
    assert layers.live_bytes(make_prompt_cache(model)) == size.held(0) == 0
    for turn_index in range(3):
        num_held = max(len(history) - 1, 0)
        history = history + prompt((3, 40, 6)[turn_index], salt=turn_index + 1)
        added = append(history, num_kept=num_held)
        rig.run(added)
        assert rig.end(added).live_bytes == size.held(added.num_cached)
        turn = generate(history, 2 + 3 * turn_index, num_kept=added.num_cached)
        rig.run(turn)
        assert rig.end(turn).live_bytes == size.held(turn.num_cached)
        assert rig.tokens(turn) == alone(model, history, 2 + 3 * turn_index)[0]
        history = history + rig.tokens(turn)
    assert size.held(10_000) == size.bytes_per_token * 10_000 + size.bounded_bytes
    per_token = {"mamba2": 0, "exaone4": 128, "llama4": 128}
    assert size.bytes_per_token == per_token.get(kind, size.bytes_per_token)


KIND = "llama4_chunks"
CHUNK = 4 * BLOCK


def answer(model: Any, tokens: Sequence[int], num: int) -> list[int]:
    """Answer greedily without caches: for each token, run the whole session under a mask of its chunks."""
    known = list(tokens)
    for _ in range(num):
        known.append(int(model(mx.array([known]))[0, -1].argmax().item()))
    return known[len(tokens) :]


@pytest.mark.parametrize("end", [3 * CHUNK + 1, 4 * CHUNK])
def test_a_rewind_within_the_last_attention_chunk_prefills_one_token_and_a_longer_rewind_all_tokens(
    make_model, make_rig, end
) -> None:
    model = make_model(KIND)
    rig, context = make_rig(model), prompt(4 * CHUNK + 1)
    first = append(context)
    rig.run(first)
    assert (first.num_cached, rig.end(first).earliest) == (4 * CHUNK, 3 * CHUNK)
    turn = generate(context[:end], 4, num_kept=end - 1)
    rig.run(turn)
    assert turn.num_prefilled == 1
    assert rig.tokens(turn) == answer(model, context[:end], 4)
    beyond = generate(context[:CHUNK], 4, num_kept=CHUNK - 1)
    rig.run(beyond)
    assert beyond.num_prefilled == CHUNK
    assert rig.tokens(beyond) == answer(model, context[:CHUNK], 4)
