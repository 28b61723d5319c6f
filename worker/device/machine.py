"""Finds how much memory MLX may use on this machine, and sets MLX's limits."""

from __future__ import annotations

import mlx.core as mx
import psutil

from turnkeep_client.errors import TurnkeepError

from .cgroups import left_bytes

#: Bytes of freed buffers that MLX may keep for reuse; without a limit a few long prompts pin gigabytes. On a
#: CPU a step took the same time without any.
MLX_CACHE_BYTES = 512 * 2**20
CPU_CACHE_BYTES = 16 * 2**20

#: Of the memory that the machine has left when the weights are loaded, for everything else on the device.
MEMORY_SHARE = 0.6


class DeviceError(TurnkeepError):
    """The device does not support the value of a setting; the message is one line."""


def on_cpu() -> bool:
    """Say whether MLX computes on the CPU."""
    return bool(mx.default_device() == mx.cpu)


def name() -> str:
    """Name the kind of device that MLX computes on: `cpu`, `metal` or `cuda`."""
    return "cpu" if on_cpu() else "metal" if mx.metal.is_available() else "cuda"


def loses_kv(error: BaseException) -> bool:
    """Say whether an error of MLX leaves unknown what evaluations in flight have written.

    A GPU reports a failed command buffer once, to whoever evaluates next, and then goes on; what the buffer
    was to write holds anything. A CPU raises in the call that fails.
    """
    return isinstance(error, RuntimeError) and fails_late()


def fails_late() -> bool:
    """Say whether the device runs what was launched after the call that launched it has returned."""
    return not on_cpu()


def limit_freed() -> None:
    """Limit the freed buffers that MLX keeps for reuse."""
    mx.set_cache_limit(CPU_CACHE_BYTES if on_cpu() else MLX_CACHE_BYTES)


def default_limit_bytes(to_load_bytes: int = 0) -> int:
    """Derive the limit for all of MLX's memory from the device, or from the machine's free memory.

    A control group may allow less than the machine has free. `to_load_bytes` of weights are not in memory
    yet.
    """
    recommended = mx.device_info().get("max_recommended_working_set_size")
    if isinstance(recommended, int) and recommended > 0:
        return recommended
    available, left = psutil.virtual_memory().available, left_bytes()
    available = max((available if left is None else min(available, left)) - to_load_bytes, 0)
    return mx.get_active_memory() + to_load_bytes + int(available * MEMORY_SHARE)


def wire(size_bytes: int) -> None:
    """Keep `size_bytes` resident; Metal only. Raises `DeviceError` elsewhere, and if Metal refuses."""
    if not mx.metal.is_available():
        raise DeviceError(f"wired_memory is for Metal, and this device is {name()}: leave it off")
    try:
        mx.set_wired_limit(size_bytes)
    except (ValueError, RuntimeError) as error:
        raise DeviceError(
            f"wired_memory of {size_bytes} bytes is refused: {error}; lower it, or raise the system's"
            " iogpu.wired_limit_mb"
        ) from None
