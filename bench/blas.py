"""Gives another program that computes with MLX on a Linux CPU the OpenBLAS that the worker loads.

A worker loads it by itself; a program that is no worker of ours gets it by the dynamic linker. Which library
a process really has is read from its memory map.
"""

from __future__ import annotations

import ctypes.util
import sys
from pathlib import Path
from typing import Final

import psutil

#: Fedora names the threaded build with a p; the worker tries it first too.
_NAMES: Final = ("openblasp", "openblas")


def preload_environment() -> dict[str, str]:
    """Return the variables with which a new process loads OpenBLAS before all else.

    Empty where there is none to load, or where MLX has another BLAS.
    """
    if sys.platform != "linux":
        return {}
    found = (ctypes.util.find_library(name) for name in _NAMES)
    return next(({"LD_PRELOAD": name} for name in found if name), {})


def mapped(pid: int) -> str | None:
    """Return the file of the OpenBLAS that a process has loaded; None without one.

    numpy's wheels bring an OpenBLAS of their own under another name, which MLX does not use.
    """
    try:
        paths = [Path(entry.path) for entry in psutil.Process(pid).memory_maps()]
    except (psutil.Error, OSError, AttributeError):  # not every platform tells
        return None
    return next((str(path.resolve()) for path in paths if path.name.startswith("libopenblas")), None)
