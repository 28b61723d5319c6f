"""Loads OpenBLAS into the process before MLX, so that MLX's CPU back end multiplies with it.

The `mlx-cpu` wheel carries the reference BLAS. A library loaded earlier with global symbols takes its place,
for float32 about 15 times faster in prefill. Must not import MLX itself: it has to run first.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from typing import Final

#: Fedora names the threaded build with a p; Debian's alternatives put it behind the plain name.
SONAMES: Final = ("libopenblasp.so.0", "libopenblas.so.0", "libopenblas.so")

_MEND: Final = "apt-get install libopenblas0-pthread (Fedora: dnf install openblas-threads)"


@dataclass(frozen=True, slots=True)
class BlasStatus:
    """What `preload` found. `advice` is one line for the operator, empty where nothing is to be done."""

    library: str | None
    needed: bool
    advice: str


def preload(sonames: tuple[str, ...] = SONAMES) -> BlasStatus:
    """Load OpenBLAS with global symbols where MLX will compute on a Linux CPU.

    Call it before `mlx.core` is imported, from any thread; later calls change nothing.
    """
    if not computes_on_linux_cpu():
        return BlasStatus(None, needed=False, advice="")
    earlier = _is_global()
    late = "mlx.core" in sys.modules and not earlier
    for soname in sonames:
        try:
            ctypes.CDLL(soname, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        advice = (
            "OpenBLAS was loaded after MLX and is not used: prefill is about 15 times slower" if late else ""
        )
        return BlasStatus(soname, needed=True, advice=advice)
    if earlier:
        return BlasStatus("loaded by the process", needed=True, advice="")
    return BlasStatus(
        None,
        needed=True,
        advice=f"OpenBLAS is not installed: prefill is about 15 times slower; mend it: {_MEND}",
    )


def computes_on_linux_cpu() -> bool:
    """Tell whether MLX's back end here is the Linux CPU one: macOS has Accelerate, CUDA its own BLAS."""
    return sys.platform == "linux" and not any(map(_is_installed, ("mlx-cuda", "mlx-cuda-12", "mlx-cuda-13")))


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _is_global() -> bool:
    """Tell whether OpenBLAS's symbols are visible to libraries that are loaded from now on."""
    return hasattr(ctypes.CDLL(None), "openblas_get_config")
