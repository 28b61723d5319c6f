"""Memory limits on Metal, CUDA and a CPU, and prefill in steps of several blocks."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import pytest
from tiny_models import BLOCK, alone, generate, prompt

from cache.names.blocks import spans
from worker.device import machine

GIB = 2**30
METAL = {
    "device_name": "Apple M3 Max",
    "architecture": "applegpu_g15s",
    "max_buffer_length": 80 * GIB,
    "max_recommended_working_set_size": 96 * GIB,
    "memory_size": 128 * GIB,
    "resource_limit": 499_000,
}
CUDA = {
    "device_name": "NVIDIA GeForce RTX 4090",
    "architecture": "sm_89",
    "total_memory": 24 * GIB,
    "free_memory": 20 * GIB,
    "uuid": "GPU-0",
}
FREED = 512 * 2**20


@pytest.fixture
def a_gpu(monkeypatch) -> Any:
    """Return a function that makes MLX report this GPU, so many free bytes, and so many in use by MLX."""

    def pretend(
        told: dict[str, Any], *, free: int = 100 * GIB, active: int = 0, is_metal: bool = False
    ) -> None:
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
        monkeypatch.setattr(mx, "device_info", lambda: told)
        monkeypatch.setattr(mx.metal, "is_available", lambda: is_metal)
        monkeypatch.setattr(mx, "get_active_memory", lambda: active)
        monkeypatch.setattr(machine, "left_bytes", lambda: free)
        monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: type("Free", (), {"available": free}))

    return pretend


def test_the_memory_limit_on_metal_is_80_percent_of_the_working_set_minus_freed_buffers(a_gpu) -> None:
    a_gpu(METAL, is_metal=True)
    assert machine.name() == "metal"
    assert machine.default_limit_bytes() == int(96 * GIB * 0.8) - FREED
    a_gpu(METAL, is_metal=True, free=10 * GIB, active=5 * GIB)
    assert machine.default_limit_bytes() == 15 * GIB - FREED, "others use the rest of the memory"
    a_gpu(METAL, is_metal=True, free=0)
    assert machine.default_limit_bytes() == 0


@pytest.mark.parametrize("host", [8 * GIB, 128 * GIB])
def test_the_memory_limit_on_cuda_depends_on_the_gpus_memory_and_not_on_the_hosts(a_gpu, host) -> None:
    a_gpu(CUDA, free=host)
    assert machine.name() == "cuda"
    assert machine.default_limit_bytes() == int(24 * GIB * 0.8) - FREED
    a_gpu({**CUDA, "free_memory": 4 * GIB}, free=host, active=GIB)
    assert machine.default_limit_bytes() == 5 * GIB - FREED
    a_gpu({**CUDA, "free_memory": str(4 * GIB)}, free=host)
    assert machine.default_limit_bytes() == 4 * GIB - FREED


def test_a_gpu_that_reports_memory_size_instead_of_total_memory_gets_a_limit(a_gpu) -> None:
    a_gpu({"memory_size": 24 * GIB, "architecture": "sm_80"})
    assert machine.default_limit_bytes() == int(24 * GIB * 0.8) - FREED


def test_a_gpu_that_does_not_report_its_memory_needs_the_setting_device_memory(a_gpu) -> None:
    a_gpu({"architecture": "gfx"})
    with pytest.raises(machine.DeviceError, match="set device_memory"):
        machine.default_limit_bytes()


def test_mlxs_own_memory_limit_is_set_only_on_a_gpu(a_gpu, monkeypatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(mx, "set_memory_limit", limits.append)
    machine.limit_active(5 * GIB)
    assert limits == []
    a_gpu(METAL, is_metal=True)
    machine.limit_active(5 * GIB)
    assert limits == [5 * GIB + FREED]


@pytest.mark.parametrize(
    ("kind", "lengths"), [("llama", [4]), ("exaone4", [4]), ("qwen3_next", [1, 2, 3, 4, 5, 6, 7])]
)
def test_a_prompt_without_others_prefills_several_blocks_per_step_and_snapshots_each_block(
    make_model, make_rig, monkeypatch, kind, lengths
) -> None:
    """With recurrent layers a piece is one block, since a state exists only at the end of a piece."""
    few = machine.Profile(1 << 24, frozenset(), 1, prompt_blocks=4, pooled_rows=3, merged_rows=2)
    monkeypatch.setattr(machine, "profile", lambda: few)
    model = make_model(kind)
    rig = make_rig(model, room=lambda: 1 << 28)
    tokens = prompt(7 * BLOCK + 3)
    turn = generate(tokens, 5, spans=[*spans(0, len(tokens), BLOCK)])
    rig.run(turn)
    assert rig.chunk_ends(turn) == [*(BLOCK * num for num in lengths), len(tokens)]
    assert [cut for cut in rig.cuts(turn) if cut[1] % BLOCK == 0] == [
        (start, start + BLOCK) for start in range(0, 7 * BLOCK, BLOCK)
    ]
    assert rig.tokens(turn) == alone(model, tokens, 5)[0]


def test_sixteen_prompts_that_arrive_together_are_prefilled_in_one_step(
    make_model, make_rig, monkeypatch
) -> None:
    """They arrive while another prompt's step runs. A step may have 16 blocks, as on CUDA."""
    many = machine.Profile(1 << 24, frozenset(), 1, prompt_blocks=16, pooled_rows=3, merged_rows=2)
    monkeypatch.setattr(machine, "profile", lambda: many)
    model = make_model("llama")
    rig = make_rig(model, block_tokens=128, max_batch=32, stall_s=600.0)
    batch, arrived, steps = rig.device._runner._batch, threading.Event(), []
    run = batch._run

    def counted(parts: Any, tokens: Any, pieces: Any = ()) -> Any:
        steps.extend([len(pieces)] if pieces else [])
        assert arrived.wait(20)
        return run(parts, tokens, pieces)

    monkeypatch.setattr(batch, "_run", counted)
    turns = [generate(prompt(128, salt=i), 3, name=f"s{i}") for i in range(17)]
    for turn in turns:
        rig.device.submit(turn)
    arrived.set()
    rig.finish(*turns)
    assert len(steps) == 2, steps
    for i in (0, 16):
        assert rig.tokens(turns[i]) == alone(model, prompt(128, salt=i), 3, block=128)[0]
