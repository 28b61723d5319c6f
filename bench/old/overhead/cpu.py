"""CPU time of the processes of a comparison, read before and after a turn."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from .turns import Cpu

if TYPE_CHECKING:
    from bench.local import LocalWorker


@dataclass(frozen=True, slots=True)
class Processes:
    """One side: its process, its NATS servers, and whether it has an event loop in its main thread."""

    process: psutil.Process
    servers: tuple[psutil.Process, ...] = ()
    has_loop: bool = False


def of_worker(worker: LocalWorker) -> Processes:
    """Name the processes of a running worker."""
    return Processes(psutil.Process(worker.pid), worker.family, has_loop=True)


def of_process(pid: int) -> Processes:
    """Name a process without a server."""
    return Processes(psutil.Process(pid))


class Meter:
    """CPU time from its making to `read`."""

    def __init__(self, side: Processes, idle: list[Processes]) -> None:
        self._side = side
        self._idle = idle
        self._client = psutil.Process()
        self._before = self._now()

    def read(self) -> Cpu:
        """Return what was used since."""
        process, loop, server, client, idle = self._now()
        before = self._before
        return Cpu(
            process=process - before[0],
            loop=None if loop is None or before[1] is None else loop - before[1],
            server=server - before[2],
            client=client - before[3],
            idle=idle - before[4],
        )

    def _now(self) -> tuple[float, float | None, float, float, float]:
        side = self._side
        return (
            _seconds(side.process),
            _loop_seconds(side.process) if side.has_loop else None,
            sum(map(_seconds, side.servers)),
            _seconds(self._client),
            sum(_seconds(one) for other in self._idle for one in (other.process, *other.servers)),
        )


def _seconds(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):  # it has died: the turn's failure will tell
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _loop_seconds(process: psutil.Process) -> float | None:
    """Return the CPU time of the main thread, where a worker's loop runs. Linux gives it the process's id."""
    if not sys.platform.startswith("linux"):
        return None
    with contextlib.suppress(psutil.Error):
        for thread in process.threads():
            if thread.id == process.pid:
                return float(thread.user_time + thread.system_time)
    return None
