"""Lists recommended models by memory, and estimates whether a model fits this machine.

The models are in `known.toml`, with the sources of its data.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Final

import msgspec
import psutil
from msgspec import Struct

from worker.process.system_memory import limit_bytes

from .blas import computes_on_linux_cpu

#: Memory of a served model as a multiple of its weights: with buffers, and KV of a short context.
_BESIDE: Final = 1.2
#: The share of a machine's memory that other programs leave free.
_SHARE: Final = 0.8


class KnownModel(Struct, frozen=True, forbid_unknown_fields=True):
    """A recommended model of the hub; `known.toml` explains the fields."""

    id: str
    memory_gb: int
    weights_gb: float
    parameters_b: float
    use: str
    sources: tuple[str, ...]


def known() -> tuple[KnownModel, ...]:
    """Read the recommended models from `known.toml`."""
    text = Path(__file__).with_name("known.toml").read_text()
    return msgspec.convert(tomllib.loads(text)["models"], tuple[KnownModel, ...])


def memory_bytes() -> int:
    """Return the bytes of memory of this machine, or of its container's limit."""
    return min(psutil.virtual_memory().total, limit_bytes() or 2**63)


def needed_bytes(weight_bytes: float, num_parameters: float) -> int:
    """Estimate the bytes of memory that serving a model takes; on a CPU its weights become float32."""
    return int(_BESIDE * (4 * num_parameters if computes_on_linux_cpu() else weight_bytes))


def fits(needed: int) -> bool:
    """Return whether this machine can serve a model that needs `needed` bytes."""
    return needed <= _SHARE * memory_bytes()
