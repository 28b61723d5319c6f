"""Memory limits on Metal, CUDA, a CPU and in control groups, and prefill in steps of several blocks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from structlog.testing import capture_logs
from tiny_models import BLOCK, alone, generate, prompt

from cache.kv.size import KvSize
from cache.names.blocks import spans
from worker.device import machine
from worker.device.memory import Estimator, Shape
from worker.process import system_memory

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
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               {free}.
Pages active:                            324340.
Pages inactive:                          321839.
Pages speculative:                         1826.
Pages wired down:                        127117.
Pages purgeable:                           {purgeable}.
"Translation faults":                 392839023.
File-backed pages:                       {files}.
Anonymous pages:                         457665.
Pages stored in compressor:              523456.
"""


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


def test_the_default_memory_limit_on_metal_is_92_percent_of_the_working_set_minus_freed_buffers(
    a_gpu,
) -> None:
    a_gpu(METAL, is_metal=True)
    assert machine.name() == "metal"
    size_bytes, why = machine.default_limit()
    assert size_bytes == int(96 * GIB * 0.92) - FREED
    assert why == "0.92 of the 96 GiB that the GPU has for programs, less 512 MiB for freed buffers"
    a_gpu(METAL, is_metal=True, free=10 * GIB, active=5 * GIB)
    size_bytes, why = machine.default_limit()
    assert size_bytes == 15 * GIB - FREED, "others use the rest of the memory"
    assert why.startswith("the 15 GiB that are free or in use by this worker, of the GPU's 96 GiB")
    a_gpu(METAL, is_metal=True, free=0)
    assert machine.default_limit().size_bytes == 0


@pytest.mark.parametrize("host", [8 * GIB, 128 * GIB])
def test_the_default_memory_limit_on_cuda_depends_on_the_memory_of_the_gpu_and_not_of_the_host(
    a_gpu, host
) -> None:
    a_gpu(CUDA, free=host)
    assert machine.name() == "cuda"
    assert machine.default_limit().size_bytes == int(24 * GIB * 0.8) - FREED
    a_gpu({**CUDA, "free_memory": 4 * GIB}, free=host, active=GIB)
    assert machine.default_limit().size_bytes == 5 * GIB - FREED
    a_gpu({**CUDA, "free_memory": str(4 * GIB)}, free=host)
    assert machine.default_limit().size_bytes == 4 * GIB - FREED


def test_a_gpu_that_reports_memory_size_instead_of_total_memory_gets_a_default_memory_limit(a_gpu) -> None:
    a_gpu({"memory_size": 24 * GIB, "architecture": "sm_80"})
    assert machine.default_limit().size_bytes == int(24 * GIB * 0.8) - FREED


def test_on_a_gpu_that_does_not_report_its_memory_the_worker_asks_for_the_setting_device_memory(
    a_gpu,
) -> None:
    a_gpu({"architecture": "gfx"})
    with pytest.raises(machine.DeviceError, match="set device_memory"):
        machine.default_limit()


@dataclass
class Weights:
    """A model in 4 bits by its config.json, and the size of its files, in bytes, as the hub has them."""

    size_bytes: float
    layers: int  # that keep all tokens
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int

    def room(self, working_set: float) -> int:
        """Return how many tokens of KV fit beside the weights, on a Mac with this working set in GiB."""
        told, device = (
            {"max_recommended_working_set_size": int(working_set * GIB)},
            machine._PROFILES["metal"],
        )
        shape = Shape(self.heads, self.head_dim, self.hidden, self.intermediate, 151_936)
        estimator = Estimator(
            shape=shape,
            limit_bytes=machine.gpu_limit(told, device, 2**50).size_bytes,
            weight_bytes=int(self.size_bytes),
            kv=KvSize(4 * self.layers * self.kv_heads * self.head_dim),
            num_layers=self.layers,
            fused=shape.fuses(device.fused_head_dims),
            kept_layers=device.kept_layers,
        )
        return estimator.kv_limit(8, 128, 32_768) // estimator.kv.bytes_per_token


#: By memory in GB: the recommended working set in GiB, as llama.cpp's logs have it.
MACS = {8: 5.33, 16: 10.67, 24: 16, 32: 21.33, 36: 27, 48: 36, 64: 48, 96: 72, 128: 96}


@pytest.mark.parametrize(
    ("weights", "rooms"),
    [
        pytest.param(Weights(4.6e9, 36, 32, 8, 128, 4096, 12288), [0, 30, 65, 101, 139], id="Qwen3 8B"),
        pytest.param(Weights(8.3e9, 40, 40, 8, 128, 5120, 17408), [0, 4, 35, 67, 101], id="Qwen3 14B"),
        pytest.param(Weights(17.2e9, 48, 32, 4, 128, 2048, 6144), [0, 0, 0, 28, 85], id="Qwen3 30B-A3B"),
        pytest.param(Weights(18.4e9, 64, 64, 8, 128, 5120, 25600), [0, 0, 0, 3, 23, 57], id="Qwen3 32B"),
        pytest.param(Weights(19.7e9, 10, 16, 2, 256, 2048, 6144), [0, 0, 0, 3, 97], id="Qwen3.5 35B-A3B"),
        pytest.param(Weights(39.7e9, 80, 64, 8, 128, 8192, 28672), [0] * 6 + [16, 88, 161], id="Llama 3 70B"),
    ],
)
def test_each_mac_size_has_memory_for_the_documented_number_of_kv_tokens_with_each_documented_model(
    weights: Weights, rooms: list[int]
) -> None:
    """The table has thousands of tokens of KV; a model with none is refused."""
    assert [weights.room(size) // 1000 for size in MACS.values()][: len(rooms)] == rooms


def test_macos_memory_that_only_caches_files_counts_as_free(a_gpu, monkeypatch, tmp_path) -> None:
    """On a Mac of 16 GiB that has just read 6 GiB of weights; 16 KiB a page."""
    program = tmp_path / "vm_stat"
    program.write_text(
        f"#!/bin/sh\ncat <<EOF\n{VM_STAT.format(free=10_000, files=393_216, purgeable=8_000)}EOF\n"
    )
    program.chmod(0o700)
    monkeypatch.setattr(system_memory, "_VM_STAT", str(program))
    assert system_memory.droppable_bytes() == (10_000 + 393_216 + 8_000) * 16_384
    a_gpu({"max_recommended_working_set_size": 11 * GIB}, is_metal=True, free=GIB, active=5 * GIB)
    monkeypatch.setattr(machine, "left_bytes", lambda: None)
    assert machine.default_limit().size_bytes == int(11 * GIB * 0.92) - FREED


@pytest.mark.parametrize("told", ["", "Pages free: 10.", "page size of many bytes\nPages free: 1."])
def test_vm_stat_output_in_an_unknown_form_counts_as_0_bytes_of_free_memory(told: str) -> None:
    assert system_memory.parse_vm_stat(told) == 0


def test_a_worker_logs_the_memory_limit_that_it_chose_and_why(make_rig, make_model) -> None:
    with capture_logs() as lines:
        make_rig(make_model("llama"))
        make_rig(make_model("llama"), limit_bytes=GIB)
    (line,) = [one for one in lines if one["event"] == "chose device_memory"]
    assert "that are free, and the weights" in line["why"]


def test_the_memory_limit_of_mlx_itself_is_set_only_on_a_gpu(a_gpu, monkeypatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(mx, "set_memory_limit", limits.append)
    machine.limit_active(5 * GIB)
    assert limits == []
    a_gpu(METAL, is_metal=True)
    machine.limit_active(5 * GIB)
    assert limits == [5 * GIB + FREED]


@pytest.mark.parametrize(("kind", "lengths"), [("llama", [4]), ("qwen3_next", [1, 2, 3, 4, 5, 6, 7])])
def test_a_prompt_that_runs_alone_prefills_several_blocks_per_step_and_snapshots_each_block(
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


MIB = 2**20


def group(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


def left(tmp_path: Path, own: str) -> int | None:
    (tmp_path / "own").write_text(own)
    return system_memory.left_bytes(tmp_path / "own", tmp_path / "fs")


def test_free_memory_under_cgroup_v2_is_the_limit_minus_the_memory_that_cannot_be_reclaimed(
    tmp_path: Path,
) -> None:
    stat = f"anon {200 * MIB}\nfile {150 * MIB}\ninactive_file {100 * MIB}"
    group(tmp_path / "fs", {"memory.max": 512 * MIB, "memory.current": 300 * MIB, "memory.stat": stat})
    assert left(tmp_path, "0::/\n") == 312 * MIB


def test_free_memory_in_a_container_follows_the_tightest_limit_of_its_cgroup_and_the_parents(
    tmp_path: Path,
) -> None:
    """`memory.high` (systemd's MemoryHigh) counts, too: a group that exceeds it is slowed down."""
    fs = tmp_path / "fs"
    group(fs, {"memory.stat": ""})  # the root has no limit
    group(fs / "a", {"memory.max": "max", "memory.high": 100 * MIB, "memory.current": 60 * MIB})
    group(fs / "a/b", {"memory.max": 500 * MIB, "memory.high": "max", "memory.current": 10 * MIB})
    assert left(tmp_path, "0::/a/b\n") == 40 * MIB
    assert left(tmp_path, "0::/a\n") == 40 * MIB
    assert system_memory.limit_bytes(tmp_path / "own", fs) == 100 * MIB, "whatever is used of it"


def test_a_cgroup_v1_memory_limit_is_read_from_the_group_of_the_memory_controller(tmp_path: Path) -> None:
    files = {
        "memory.limit_in_bytes": 256 * MIB,
        "memory.usage_in_bytes": 100 * MIB,
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {50 * MIB}",
    }
    group(tmp_path / "fs" / "memory" / "docker" / "x", files)
    own = "12:cpu,cpuacct:/docker/x\n5:hugetlb,memory:/docker/x\n1:name=systemd:/docker/x\n0::/\n"
    assert left(tmp_path, own) == 206 * MIB


def test_in_a_container_whose_cgroup_path_is_not_mounted_the_memory_limit_of_the_root_group_is_used(
    tmp_path: Path,
) -> None:
    files = {"memory.limit_in_bytes": 64 * MIB, "memory.usage_in_bytes": 24 * MIB}
    group(tmp_path / "fs" / "memory", files)
    assert left(tmp_path, "4:memory:/kubepods/pod1/not-mounted-here\n") == 40 * MIB


def test_in_a_cgroup_that_exceeds_its_memory_limit_the_worker_has_0_bytes_free(tmp_path: Path) -> None:
    group(tmp_path / "fs", {"memory.max": 10 * MIB, "memory.current": 20 * MIB})
    assert left(tmp_path, "0::/\n") == 0


@pytest.mark.parametrize(
    "own", ["", "0::/\n", "nonsense\n", "0::/../../etc\n", "4:memory:/gone\n", "x" * 10_000, "0::/\0\n"]
)
def test_an_absent_or_unreadable_memory_limit_of_a_cgroup_is_treated_as_no_limit(
    tmp_path: Path, own: str
) -> None:
    group(tmp_path / "fs", {"memory.max": "max", "memory.current": "?", "memory.stat": "a b c\n\nd"})
    assert left(tmp_path, own) is None
    assert system_memory.left_bytes(tmp_path / "gone", tmp_path) is None


def test_the_default_memory_limit_of_the_device_does_not_exceed_the_memory_left_in_the_cgroup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine.mx, "device_info", dict)
    monkeypatch.setattr(machine.mx, "get_active_memory", lambda: 0)
    monkeypatch.setattr(machine, "left_bytes", lambda: 100 * MIB)
    assert machine.default_limit().size_bytes == int(100 * MIB * machine.MEMORY_SHARE)
    assert machine.default_limit(40 * MIB).size_bytes == 40 * MIB + int(60 * MIB * machine.MEMORY_SHARE)
    monkeypatch.setattr(machine, "left_bytes", lambda: 2**60)
    assert machine.default_limit().size_bytes < 2**60 * machine.MEMORY_SHARE
    monkeypatch.setattr(machine, "left_bytes", lambda: None)
    assert machine.default_limit().size_bytes > 0


def test_a_worker_process_in_a_real_cgroup_reads_the_memory_limit_of_that_cgroup() -> None:
    """Skipped where this process may not create a control group."""
    roots = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]
    names = ["memory.limit_in_bytes", "memory.max"]
    for root, name in zip(roots, names, strict=True):
        made = root / f"turnkeep-test-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            if not (made / name).exists():
                continue
            (made / name).write_text(str(256 * MIB))
            program = (
                "import os; from pathlib import Path; from worker.process.system_memory import left_bytes;"
                f"Path({str(made)!r}, 'cgroup.procs').write_text(str(os.getpid())); print(left_bytes())"
            )
            said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
            assert 128 * MIB < int(said.stdout) <= 256 * MIB
        finally:
            with contextlib.suppress(OSError):
                made.rmdir()
        return
    pytest.skip("control groups cannot be made here")
