"""Loads OpenBLAS into the process before MLX, so that MLX's CPU back end uses it for matrix products.

The `mlx-cpu` wheel contains the reference BLAS. An OpenBLAS that was loaded before, with global symbols,
replaces it, and makes float32 prefill about 15 times faster. If the processor is newer than the installed
OpenBLAS, OpenBLAS does not recognise it and uses its oldest kernels, which are five times slower. In that
case this module sets `OPENBLAS_CORETYPE` to kernels that the processor supports, and loads OpenBLAS again.
Must not import MLX, since this module has to run first.
"""

from __future__ import annotations

import _ctypes
import ctypes
import importlib.util
import os
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from turnkeep_client.errors import TurnkeepError

#: Fedora's threaded build has a p in its name; Debian's alternatives use the plain name.
SONAMES: Final = ("libopenblasp.so.0", "libopenblas.so.0", "libopenblas.so")

#: The environment variable that selects OpenBLAS's kernels; OpenBLAS reads it while it is loaded.
_CORE: Final = "OPENBLAS_CORETYPE"

#: Sets of kernels, by OpenBLAS's names, and the processor features that they need; fastest first.
_CORES: Final = (
    ("SkylakeX", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("Haswell", {"avx2", "fma"}),
)

#: MLX's back ends for Linux, by package.
_CPU: Final = "mlx-cpu"
_CUDA: Final = ("mlx-cuda", "mlx-cuda-12", "mlx-cuda-13")

_INSTALL: Final = "apt-get install libopenblas0-pthread (Fedora: dnf install openblas-threads)"


class BackEndError(TurnkeepError):
    """MLX cannot compute here, as only its package without a back end is installed."""


@dataclass(frozen=True, slots=True)
class BlasStatus:
    """The result of `preload`. `advice` is one line for the operator, empty if there is nothing to do."""

    library: str | None
    needed: bool
    advice: str


def preload(sonames: tuple[str, ...] = SONAMES) -> BlasStatus:
    """Load OpenBLAS with global symbols if MLX will compute on a Linux CPU.

    Call it before importing `mlx.core`, from any thread; later calls change nothing. Raises `BackEndError`.
    """
    if lacks_back_end():
        raise BackEndError(
            "MLX has no back end: pip install 'turnkeep[cpu]' brings the one for Linux CPUs, pip install"
            " 'turnkeep[cuda13]' the one for NVIDIA GPUs"
        )
    if not computes_on_linux_cpu():
        return BlasStatus(None, needed=False, advice=_clash())
    earlier = _is_global()
    late = "mlx.core" in sys.modules and not earlier
    for soname in sonames:
        try:
            if not earlier:
                _choose_core(soname)
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
        advice=f"OpenBLAS is not installed: prefill is about 15 times slower; install it: {_INSTALL}",
    )


def lacks_back_end() -> bool:
    """Return whether MLX is installed without the library that its packages for CPUs and for CUDA contain."""
    mlx = importlib.util.find_spec("mlx") if sys.platform == "linux" else None
    places = (mlx and mlx.submodule_search_locations) or ()
    return bool(places) and not any((Path(place) / "lib" / "libmlx.so").exists() for place in places)


def computes_on_linux_cpu() -> bool:
    """Return whether MLX uses its Linux CPU back end; macOS has Accelerate, and CUDA its own BLAS."""
    return sys.platform == "linux" and not any(map(_is_installed, _CUDA))


def _clash() -> str:
    """Return advice if MLX's packages for the CPU and for CUDA are both installed; "" if not.

    Both own `mlx/lib/libmlx.so`, so MLX uses the last one installed.
    """
    found = next(filter(_is_installed, _CUDA), None)
    if found is None or not _is_installed(_CPU):
        return ""
    return (
        f"{_CPU} and {found} are both installed and own the same library; pip uninstall {_CPU}, then"
        f" pip install --force-reinstall --no-deps {found}"
    )


def _choose_core(soname: str) -> None:
    """Select newer kernels if OpenBLAS does not recognise the processor and falls back to its oldest ones."""
    library = ctypes.CDLL(soname, mode=ctypes.RTLD_LOCAL)
    try:
        name = library.openblas_get_corename
    except AttributeError:
        return
    name.restype = ctypes.c_char_p
    if name() != b"Prescott" or _CORE in os.environ:
        return
    try:
        flags = set(Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0].split())
    except OSError:
        return
    better = next((core for core, needs in _CORES if needs <= flags), None)
    if better is not None:
        os.environ[_CORE] = better  # OpenBLAS reads it when it is loaded again
        _ctypes.dlclose(library._handle)  # noqa: SLF001


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _is_global() -> bool:
    """Return whether OpenBLAS is loaded with global symbols, so that libraries loaded later use it."""
    return hasattr(ctypes.CDLL(None), "openblas_get_config")
