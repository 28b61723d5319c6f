"""Holds the constants of each kind of device (CPU, Metal, CUDA), and sets the limits of MLX's memory.

The constants for CUDA were measured on an H200 (ADR 0061), the ones for Metal follow MLX's sources. `turnkeep
bench device` measures a device and suggests values for some of them.
"""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import mlx.core as mx
import psutil

from turnkeep_client.errors import TurnkeepError
from worker.batch.cpu import on_cpu
from worker.models.known import memory_bytes
from worker.process.formatting import size
from worker.process.settings import SettingsError
from worker.process.system_memory import droppable_bytes, left_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from worker.process.settings import Settings

#: On a CPU: the share of the memory left after loading the weights that MLX may use for everything else.
MEMORY_SHARE: Final = 0.6
#: Keys of `mx.device_info()` with the size of memory: Metal's, CUDA's, and a general one.
_MEMORY: Final = ("max_recommended_working_set_size", "total_memory", "memory_size")

#: Parts of Metal's errors. macOS ends a command buffer that keeps the display waiting, or runs for seconds.
_TOO_MUCH: Final = ("ErrorImpactingInteractivity", "ErrorTimeout", "ErrorHang", "ErrorOutOfMemory")


@dataclass(frozen=True, slots=True)
class Profile:
    """The constants of one kind of device."""

    #: Freed buffers that MLX may keep for reuse; without a limit a few long prompts pin gigabytes.
    freed_bytes: int
    #: Attention to plain KV stores no scores if keys and values have the same head size, one of these.
    fused_head_dims: frozenset[int]
    #: The number of layers whose temporary arrays are in memory at once.
    kept_layers: int
    #: The most blocks of prompts in a step.
    prompt_blocks: int
    #: From this many rows of similar length on, rows share a pool of KV.
    pooled_rows: int
    #: From this many rows on, the KV of rows that cannot share a pass is merged, and their next step can
    #: start before the last one is read.
    merged_rows: int
    #: Plain caches grow by this many tokens at a time.
    growth_tokens: int = 256
    #: The most seconds of a step of prompts.
    longest_s: float = math.inf
    #: The most tokens of a draft.
    max_draft: int = 8
    #: The share of a GPU's memory for weights, KV, temporary and freed buffers.
    memory_share: float = 0.8
    #: Whether a worker runs steps before it is ready, as the first step of a kind compiles its kernels.
    warms_up: bool = False


#: Metal keeps the inputs of a command buffer until it has run, and up to ten of them are in flight.
_GPU: Final = Profile(
    freed_bytes=512 * 2**20,
    fused_head_dims=frozenset((64, 72, 80, 96, 128)),
    kept_layers=10,
    prompt_blocks=8,
    pooled_rows=2,
    merged_rows=1,
)
_PROFILES: Final = {
    # A step is as fast without freed buffers. For two rows, copying them into a pool costs too much.
    "cpu": Profile(
        freed_bytes=16 * 2**20,
        fused_head_dims=frozenset(),
        kept_layers=1,
        prompt_blocks=1,
        pooled_rows=3,
        merged_rows=2,
    ),
    # macOS ends work that keeps the display waiting: pieces that took seconds, at contexts of 90,000 tokens.
    # The recommended working set is two thirds or three quarters of a Mac's memory, so the system has enough
    # beside it. From 0.95 of it on, MLX frees buffers at each allocation.
    # Its attention for few queries takes eight: a draft and the token before it.
    "metal": replace(_GPU, longest_s=2.0, memory_share=0.92, max_draft=7, warms_up=True),
    # Not 256: if a cache's length is a multiple of 256, MLX decodes with cuDNN's attention. It takes the host
    # 20 us a layer more than MLX's own kernel, and the host limits the speed of a step.
    "cuda": replace(_GPU, kept_layers=4, prompt_blocks=16, pooled_rows=3, growth_tokens=264),
}


class DeviceError(TurnkeepError):
    """The device does not support a setting's value, or does not work; the message is one line."""


def name() -> str:
    """Name the kind of device that MLX computes on: `cpu`, `metal` or `cuda`."""
    return "cpu" if on_cpu() else "metal" if mx.metal.is_available() else "cuda"


def kernels() -> str:
    """Return a text that differs between devices and systems whose kernels may compute differently."""
    device = str(mx.default_device())
    if on_cpu():
        return device
    told, version, tf32 = mx.device_info(), platform.mac_ver()[0], os.environ.get("MLX_ENABLE_TF32")
    return f"{device} {told.get('architecture')} {told.get('device_name')} {version} {tf32}"


def loses_kv(error: BaseException) -> bool:
    """Say whether an error of MLX leaves the results of running evaluations, and so KV, undefined.

    A GPU reports a failed command buffer once, to the next evaluation, and continues; the arrays that the
    buffer should have written are undefined. A CPU raises in the call that fails.
    """
    return isinstance(error, RuntimeError) and fails_late()


def was_too_much(error: BaseException) -> bool:
    """Say whether a command buffer of Metal took too much time or memory: a smaller one may succeed."""
    return any(name in str(error) for name in _TOO_MUCH)


def fails_late() -> bool:
    """Say whether the device runs operations asynchronously, so that errors surface in later calls."""
    return not on_cpu()


def profile() -> Profile:
    """Return the constants of the device that MLX computes on."""
    return _PROFILES[name()]


def prepare() -> None:
    """Limit the freed buffers that MLX keeps for reuse, and set by how many tokens plain caches grow."""
    from mlx_lm.models.cache import KVCache  # the rest of this module must not need mlx-lm

    mx.set_cache_limit(profile().freed_bytes)
    KVCache.step = profile().growth_tokens


def limit_active(limit_bytes: int) -> None:
    """On a GPU, make MLX wait for running evaluations before it allocates more than this limit."""
    if not on_cpu():
        mx.set_memory_limit(limit_bytes + profile().freed_bytes)


def check_memory(settings: Settings) -> int:
    """Return the bytes of memory of this machine, or of its CUDA device; refuse settings with more.

    Raises `SettingsError`.
    """
    there = memory_bytes() if name() != "cuda" else int(mx.device_info().get("total_memory", 2**63))
    for setting in ("memory", "device_memory"):
        if (wanted := getattr(settings, setting)) is not None and wanted > there:
            raise SettingsError(
                f"{setting} is {size(wanted)}, and this machine has {size(there)} in all; lower it"
            )
    return there


class MemoryLimit(NamedTuple):
    """A limit of MLX's active memory in bytes, and what it was computed from, in words."""

    size_bytes: int
    why: str


def default_limit(to_load_bytes: int = 0) -> MemoryLimit:
    """Compute the default limit of MLX's active memory from the device's total and free memory.

    On a CPU and on Metal, free memory is the machine's, or less if a control group limits it; on CUDA it is
    the device's. `to_load_bytes` of weights are not in memory yet. Raises `DeviceError` if a GPU does not
    report the size of its memory.
    """
    free, in_use, left = psutil.virtual_memory().available, mx.get_active_memory(), left_bytes()
    if name() == "metal":  # psutil leaves out copies of files that were just read, such as the weights
        free = max(free, droppable_bytes())
    free = free if left is None else min(free, left)
    if not on_cpu():
        return gpu_limit(mx.device_info(), profile(), free, in_use)
    share_bytes = int(max(free - to_load_bytes, 0) * MEMORY_SHARE)
    return MemoryLimit(
        in_use + to_load_bytes + share_bytes,
        f"{MEMORY_SHARE} of the {size(free)} that are free, and the weights",
    )


def gpu_limit(
    told: Mapping[str, Any], device: Profile, free_bytes: int, in_use_bytes: int = 0
) -> MemoryLimit:
    """Compute the default limit of a GPU's memory from what `mx.device_info()` has `told`. Pure.

    MLX uses `in_use_bytes` already, and `free_bytes` more can be had, unless the device tells otherwise.
    Raises `DeviceError` if the device does not tell the size of its memory.
    """
    most = next((int(told[key]) for key in _MEMORY if int(told.get(key, 0)) > 0), 0)
    if not most:
        raise DeviceError("the device does not say how much memory it has; set device_memory")
    free = in_use_bytes + int(told.get("free_memory", free_bytes))
    share = int(most * device.memory_share)
    why = f"{device.memory_share} of the {size(most)} that the GPU has for programs"
    if free < share:
        why = f"the {size(free)} that are free or in use by this worker, of the GPU's {size(most)}"
    freed = device.freed_bytes
    return MemoryLimit(max(min(share, free) - freed, 0), f"{why}, less {size(freed)} for freed buffers")
