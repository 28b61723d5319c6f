"""A session restored from disk continues bit for bit; lost KV, and KV that does not fit, is prefilled again.

Whether to read, fetch or prefill follows from measured speeds, and a slow disk is tried again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import engine_process
import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import build
from engine_process import Process
from tiny_models import BLOCK, VOCABULARY, alone, key, prompt

from cache.disk import format as snapshot_format
from cache.disk import header
from cache.names.identity import Identity
from cache.names.policy import FULL, Policy
from cache.names.snapshot import ITEM_BYTES, Tensor
from cache.names.tokens import as_tokens
from turnkeep_client.subjects import SessionKey
from worker.batch.cpu import on_cpu
from worker.batch.row_sampler import RowSampling
from worker.device.request import TurnRequest
from worker.engine import kv_lookup as measured
from worker.engine.kv_lookup import RestoreTimes

HOT = RowSampling(0.9, top_p=0.95, seed=77)


@pytest.fixture
def open_process(open_process, make_model) -> Callable[..., AbstractAsyncContextManager[Process]]:
    """Return a function that runs a `Process` on the test's snapshot directory in an `async with` block."""

    def open_(
        folder: str = "snapshots", kind: str = "llama", kv_bits: int | None = None, **sizes: int
    ) -> AbstractAsyncContextManager[Process]:
        return open_process(make_model(kind, kv_bits), folder, **sizes)

    return open_


async def test_a_turn_restores_a_much_longer_prefix_from_disk_instead_of_using_its_short_kv_on_the_device(
    open_process,
) -> None:
    async with open_process() as process:
        long = prompt(8 * BLOCK)
        await process.append(long, name="writer")
        await process.store.queue.drained(10)
        await process.append(long[:5], name="reader")
        outcome, tokens, _ = await process.generate(long, 5, name="reader")
        assert outcome.num_prefilled <= 1
        assert tokens == alone(process.model, long, 5)[0]


async def test_a_turn_completes_even_if_saving_its_snapshot_raises_an_error(
    open_process, monkeypatch
) -> None:
    """A turn never waits for its KV to be stored."""
    async with open_process() as process:

        def broken(*_: Any) -> bool:
            raise OSError("the directory is gone")

        monkeypatch.setattr(process.store.kv, "save", broken)
        async with asyncio.timeout(10):
            _, tokens, _ = await process.generate(prompt(20), 12)
        assert tokens == alone(process.model, prompt(20), 12)[0]
        assert all(0 <= token < VOCABULARY for token in tokens)


async def test_sessions_of_different_tenants_with_the_same_prompt_share_no_kv(open_process) -> None:
    shared = prompt(6 * BLOCK)
    async with open_process() as process:
        await process.append(shared)
        assert await process.store.queue.drained(5)
        other = SessionKey("other", "s")
        outcome = await process.engine.run(TurnRequest(other, as_tokens(shared)), lambda: False)
        assert (outcome.num_cached, outcome.num_prefilled) == (0, len(shared) - 1)


async def test_concurrent_turns_of_two_tenants_with_the_same_prompt_share_no_prefill(open_process) -> None:
    shared = prompt(6 * BLOCK)
    async with open_process() as process:
        keys = [SessionKey("default", "a"), SessionKey("other", "s"), SessionKey("default", "b")]
        running = (process.engine.run(TurnRequest(key, as_tokens(shared)), lambda: False) for key in keys)
        cached = [outcome.num_cached for outcome in await asyncio.gather(*running)]
    assert cached == [0, 0, len(shared) - 1]


#: Models with recurrent layers, the first two also with attention: within each layer, or in other layers.
STATEFUL = ["falcon_h1", "qwen3_next", "mamba2"]
#: A model with sliding windows and full attention; KV of windows is stored token by token, like other KV.
WINDOWED = "exaone4"
WINDOW = Policy(sink=3, window=20)
#: A model with chunked attention, whose KV is stored in the same way.
CHUNKED = "llama4_chunks"
CUT = (WINDOWED, CHUNKED)


#: Layers of other kinds: states and windows, short chunks, latent attention, several caches in a layer.
OTHERS = ["rwkv7", "recurrent_gemma", "baichuan_m1", "llama4", "deepseek_v3", "longcat_flash"]
#: Plain, recurrent, windowed and chunked layers, quantised KV, and a window of the policy.
EXACT = [
    *((kind, None, FULL) for kind in ("llama", *STATEFUL, *CUT, *OTHERS)),
    ("qwen3_next", None, WINDOW),
    *((kind, bits, FULL) for kind, bits in (("llama", 8), ("exaone4", 8), ("qwen3_next", 4))),
]


@pytest.mark.parametrize(("kind", "kv_bits", "policy"), EXACT, ids=str)
async def test_with_a_new_process_for_each_turn_only_new_tokens_are_prefilled_and_logits_do_not_change(
    open_process, kind, kv_bits, policy
) -> None:
    """Compares a process per turn with one for all turns: all bits of the logits, and tokens drawn by a seed.

    Turns end before, on and behind the boundaries of blocks. A turn is repeated after its KV has left the
    device, too.
    """
    turns = [(1, BLOCK), (8, 7), (30, 12)]  # tokens added and answered
    turns = turns[1:] if kind in OTHERS else turns
    history: list[int] = []
    async with open_process(folder="whole", kind=kind, kv_bits=kv_bits) as whole:
        expected = []
        for turn, (num_added, num_answered) in enumerate(turns):
            history = history + prompt(num_added, salt=turn)
            _, tokens, bits = await whole.generate(history, num_answered, HOT, policy=policy)
            history = history + tokens
            expected.append((tokens, list(bits)))
    assert len({one for _, bits in expected for one in bits}) == sum(num for _, num in turns)
    history = []
    for turn, (num_added, num_answered) in enumerate(turns):
        async with open_process(kind=kind, kv_bits=kv_bits) as process:
            history = history + prompt(num_added, salt=turn)
            outcome, tokens, bits = await process.generate(history, num_answered, HOT, policy=policy)
            assert (tokens, bits) == expected[turn]
            assert outcome.num_prefilled == num_added + (turn > 0)
            await process.store.queue.drained(10)
            process.engine.forget(key())
            again = await process.generate(history, num_answered, HOT, policy=policy)
            assert again[1] == tokens
            assert len(history) < 2 * BLOCK or again[0].num_cached > 0
            history = history + tokens


@pytest.mark.parametrize("kind", ["qwen3_next", *CUT])
async def test_a_rewound_session_reuses_kv_up_to_the_rewind_or_to_the_last_recurrent_state_stored_before_it(
    open_process, kind
) -> None:
    """The device's caches cannot be trimmed. On disk there is a recurrent state at each block boundary."""
    tokens = prompt(5 * BLOCK)
    async with open_process(kind=kind) as process:
        _, answered, _ = await process.generate(tokens, 2 * BLOCK)
        await process.store.queue.drained(10)
        for num_kept in (5 * BLOCK + 9, 3 * BLOCK + 3):
            context = [*tokens, *answered][:num_kept] + prompt(5, salt=9)
            outcome, got, _ = await process.generate(context, 6)
            assert outcome.num_cached == (num_kept if kind in CUT else num_kept // BLOCK * BLOCK)
            assert got == alone(process.model, context, 6)[0]


def remade(path: Path, identity: Identity, change: Callable[[list[Tensor]], list[Tensor]]) -> None:
    """Replace a snapshot file's tensors by `change(tensors)`, with correct checksums."""
    with header.open_file(path) as (file, head, payload_bytes):
        found, payload = header.parse(head, payload_bytes=payload_bytes), memoryview(file.read(payload_bytes))
    specs = [
        (name, dtype, (1, heads, found.name.num_tokens, dim)) for name, dtype, (heads, dim) in found.layout
    ]
    tensors = []
    for name, dtype, shape in [*specs, *found.states]:
        size_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        tensors.append(Tensor(name, dtype, shape, payload[:size_bytes]))
        payload = payload[size_bytes:]
    snapshot_format.write(snapshot_format.encode(found.name, identity, tuple(change(tensors))), path)


def more_heads(tensors: list[Tensor]) -> list[Tensor]:
    shapes = [(1, 2 * one.shape[1], one.shape[2], one.shape[3] // 2) for one in tensors]
    return [replace(one, shape=shape) for one, shape in zip(tensors, shapes, strict=True)]


def another_type(tensors: list[Tensor]) -> list[Tensor]:
    return [replace(one, dtype="I32") for one in tensors]


def one_layer_less(tensors: list[Tensor]) -> list[Tensor]:
    return tensors[:-2]


def heads_of_nothing(tensors: list[Tensor]) -> list[Tensor]:
    return [replace(one, shape=(1, 1 << 20, one.shape[2], 0), data=memoryview(b"")) for one in tensors]


def numbers(place: int, number: int) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return a change that sets integer `place` of each state to `number`."""

    def change(tensors: list[Tensor]) -> list[Tensor]:
        changed = []
        for one in tensors:
            data = bytearray(one.data)
            if one.name.endswith(".numbers") and len(data) > 8 * place:
                data[8 * place : 8 * place + 8] = number.to_bytes(8, "little", signed=True)
            changed.append(replace(one, data=memoryview(bytes(data))))
        return changed

    return change


def states_of_other_heads(tensors: list[Tensor]) -> list[Tensor]:
    return [
        replace(one, shape=(1, 2 * one.shape[1], *one.shape[2:-1], one.shape[-1] // 2))
        if one.of_state and len(one.shape) == 4
        else one
        for one in tensors
    ]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("llama", more_heads),
        ("llama", another_type),
        ("llama", one_layer_less),
        ("llama", heads_of_nothing),
        ("gemma3_text", numbers(1, -1)),
        ("llama4", numbers(1, 1 << 40)),
        ("falcon_h1", numbers(0, 7)),
        ("falcon_h1", states_of_other_heads),
    ],
)
async def test_a_snapshot_whose_tensors_do_not_match_the_models_layout_is_a_miss_and_is_quarantined(
    open_process, tmp_path, kind, change
) -> None:
    """It is rejected before the device gets it, where every turn of the session would fail."""
    tokens = prompt(BLOCK + 3)
    async with open_process(kind=kind) as before:
        await before.append(tokens)
        identity = before.store.kv._under(FULL).identity
    for path in (tmp_path / "snapshots" / "snapshots").iterdir():
        remade(path, identity, change)
    async with open_process(kind=kind) as after:
        outcome, got, _ = await after.generate(tokens, 6)
        assert got == alone(after.model, tokens, 6)[0]
        assert outcome.num_cached == 0
        assert 1 <= after.store.stats().rejected <= 2
        assert list((tmp_path / "snapshots" / "quarantine").iterdir())
    async with open_process(kind=kind) as later:
        outcome, *_ = await later.generate([*tokens, *got], 6)
        assert outcome.num_cached >= len(tokens)
        assert later.store.stats().rejected == 0


MIB = 2**20


def test_a_remote_fetch_skipped_as_slower_than_prefill_is_tried_again_after_at_most_100_skips() -> None:
    for tier_s, disk_s in ((60.0, 1.0), (1.0, 60.0), (1.0, None)):
        rates = RestoreTimes()
        rates.prefilled.learn(1000, seconds=1.0)
        rates.fetched.learn(64 * MIB, tier_s)
        if disk_s is not None:
            rates.restored.learn(64 * MIB, disk_s)
        refused = next(n for n in count() if rates.should_fetch(64 * MIB, 1000))
        assert refused <= 100
        assert (refused > 50) == (disk_s is not None)


def test_a_disk_restore_skipped_as_slower_than_prefill_is_tried_again_after_50_to_100_skips() -> None:
    rates = RestoreTimes()
    rates.prefilled.learn(1000, seconds=1.0)
    rates.restored.learn(64 * MIB, seconds=60.0)
    assert [rates.should_restore(64 * MIB, 1000) for _ in range(100)].index(True) > 50


async def test_a_session_is_prefilled_instead_of_restored_once_the_disk_was_measured_as_slower_than_prefill(
    open_process, monkeypatch
) -> None:
    """The first session is restored from a disk of unknown speed, which that measures."""
    monkeypatch.setattr(measured, "_LEAST_BYTES", 1)
    texts = [prompt(8 * BLOCK, salt=salt) for salt in (3, 4)]
    async with open_process() as before:
        for i, tokens in enumerate(texts):
            await before.append(tokens, name=f"s{i}")
    read = snapshot_format.read

    def slow(*args: Any, **options: Any) -> int:
        time.sleep(0.01)
        return read(*args, **options)

    monkeypatch.setattr(snapshot_format, "read", slow)
    async with open_process() as after:
        after.engine._finder.rates.prefilled.learn(1000, seconds=0.001)
        first, second = [await after.append(tokens, name=f"s{i}") for i, tokens in enumerate(texts)]
    assert (first.num_cached, first.num_prefilled) == (8 * BLOCK - 1, 0)
    assert second.num_prefilled == 8 * BLOCK - 1


KINDS = ["llama", "qwen3_moe", "qwen3_next", "gemma3_text", "qwen3_moe in 4 bits"]
#: On a CPU the machine of sessions watches the others.
HERE = KINDS[-1:] if mx.default_device() == mx.cpu else KINDS


@pytest.fixture(params=HERE)
def open_model(request, tmp_path, trials) -> Callable[[], AbstractAsyncContextManager[Process]]:
    """Return a function that runs a `Process` with weights as a worker loads them on this device."""
    kind, _, packed = request.param.partition(" in ")
    model = build(kind)
    if not on_cpu():
        model.set_dtype(mx.bfloat16)
    if packed:
        nn.quantize(model, 32, 4, class_predicate=lambda _, module: _is_divisible(module, 32))
    mx.eval(model.parameters())
    return lambda: engine_process.open_process(model, tmp_path, num_blocks=2, trials=trials)


def _is_divisible(module: Any, group: int) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % group == 0


@pytest.mark.metal
async def test_sessions_restored_while_another_answer_runs_get_the_same_tokens_as_before_the_restart(
    open_model,
) -> None:
    texts = [prompt(6 * BLOCK + n, salt=n + 2) for n in range(4)]
    async with open_model() as before:
        expected = [(await before.generate(text, 8, name=f"s{n}"))[1] for n, text in enumerate(texts)]
        _, long, _ = await before.generate(prompt(20), 80, name="long")
        assert await before.store.queue.drained(10)
    async with open_model() as after:
        answer = asyncio.create_task(after.generate(prompt(20, salt=3), 80, name="new"))
        for _ in range(3):
            for n, text in enumerate(texts):
                outcome, tokens, _ = await after.generate(text, 8, name=f"s{n}")
                assert tokens == expected[n]
                assert outcome.num_prefilled <= 2 * BLOCK + 1
                after.engine.forget(key(f"s{n}"))
        _, said, _ = await answer
    assert len(said) == len(long) == 80
