"""The BLAS library that a process uses: sides can be compared only if all use the same one.

A worker loads OpenBLAS before MLX on a Linux CPU; a process that is compared with the worker gets the same
file preloaded.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

import psutil

_BLAS: Final = re.compile(r"blas|lapack|mkl", re.IGNORECASE)
#: numpy and SciPy carry OpenBLAS under other symbol names, which MLX never calls.
_PRIVATE: Final = frozenset({"numpy.libs", "scipy.libs"})


def mapped(pid: int | None) -> tuple[str, ...] | None:
    """Return the BLAS libraries that a process has mapped; None if the system does not tell."""
    if pid is None or not sys.platform.startswith("linux"):
        return None
    try:
        maps = psutil.Process(pid).memory_maps()
    except psutil.Error:
        return None
    paths = {Path(region.path) for region in maps}
    return tuple(
        sorted(str(path) for path in paths if _BLAS.search(path.name) and path.parent.name not in _PRIVATE)
    )


def preload_of(libraries: tuple[str, ...] | None) -> str | None:
    """Return the LD_PRELOAD that gives a process these libraries; None if it needs none."""
    found = [path for path in libraries or () if "openblas" in Path(path).name.lower()]
    return " ".join(found) or None


def names(libraries: tuple[str, ...] | None) -> str:
    """Return the libraries' names, for a report."""
    if libraries is None:
        return "not known on this system"
    return ", ".join(Path(path).name for path in libraries) or "none"
