"""Processes of one's own for a demo or a bench: `turnkeep serve`, started and ended at will, and others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import psutil

from turnkeep_client.client import connect
from turnkeep_client.errors import NoWorkerError, RequestFailedError

from .faults import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from turnkeep_client.client import Client

READY_TIMEOUT_S: Final = 180.0
STOP_TIMEOUT_S: Final = 30.0


class Process:
    """A program that is started, and ends with its children; `name` is what faults call it."""

    def __init__(
        self, name: str, command: Sequence[str], *, log: IO[bytes] | None = None, preload: str | None = None
    ) -> None:
        """`log` takes its output, `preload` are libraries that it gets."""
        self.name = name
        self._command, self._log = command, log
        self._environment = os.environ | ({"LD_PRELOAD": preload} if preload else {})
        self._process: subprocess.Popen[bytes] | None = None
        self._family: list[psutil.Process] = []  # a NATS server outlives a worker that was killed

    @property
    def pid(self) -> int:
        """Its process id; 0 while it does not run."""
        return 0 if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended by itself; None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self, *options: str) -> None:
        """Start it, with more options for this time.

        In a session of its own: a Ctrl-C at the terminal would reach it too, and `stop` would then be the
        second signal, which ends a worker at once and leaves its NATS server behind.
        """
        self._process = subprocess.Popen(
            [*self._command, *options],
            start_new_session=True,
            env=self._environment,
            stdout=self._log,
            stderr=self._log,
        )

    def kill(self) -> None:
        """`kill -9`. Its children go on."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait()

    def stop(self) -> None:
        """Stop it as Ctrl-C does; a worker takes its NATS server down with it. What is left is killed."""
        if self._process is not None:
            self.find_children()
            # It ends because it is told to: to whoever asks in another thread it has no exit code any more.
            process, self._process = self._process, None
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
            process.kill()
            process.wait()
        for child in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._family = []

    def check_alive(self) -> None:
        """Raise `BenchError` where it has ended by itself, with the last line of its log."""
        if self.exit_code is not None:
            said = []
            if self._log is not None:
                self._log.seek(0)
                said = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
            raise BenchError(": ".join([f"{self.name} ended with exit code {self.exit_code}", *said]))

    def find_children(self) -> None:
        """Look for its children."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._process is not None:
                found = psutil.Process(self._process.pid).children(recursive=True)
                self._family += [child for child in found if child not in self._family]


class LocalWorker(Process):
    """`turnkeep serve` on a data directory and a free port of 127.0.0.1."""

    def __init__(self, data_dir: Path, *options: str, program: Sequence[str] = ("worker",)) -> None:
        """`program` is the module that is run as `turnkeep`, and what it takes before `serve`."""
        port = free_port()
        self.url = f"nats://127.0.0.1:{port}"
        self.data_dir = data_dir
        self._options = options
        command = [sys.executable, "-m", *program, "serve", "--data-dir", str(data_dir)]
        command += ["--nats-port", str(port), "--log-level", "warning", *options]
        super().__init__("the bench's worker", command)

    async def ready(self, tenant: str) -> Client:
        """Wait until it answers and return a connection; raises `NoWorkerError` if it never does."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.exit_code is not None:
                raise NoWorkerError(f"the worker ended with exit code {self.exit_code}")
            with contextlib.suppress(NoWorkerError):
                client = await connect(self.url, tenant=tenant)
                if await _answers(client):
                    self.find_children()
                    return client
                await client.close()
            await asyncio.sleep(0.1)
        raise NoWorkerError(f"the worker was not ready within {READY_TIMEOUT_S:.0f} s")

    @property
    def model_folder(self) -> Path:
        """The MLX folder of its model: the one it was given, or what it made of a GGUF file.

        Known once it is ready: what it fetched from the hub lies in the hub's cache. Raises `BenchError`.
        """
        named = dict(zip(self._options, self._options[1:], strict=False)).get("--model")
        given = named or os.environ.get("TURNKEEP_MODEL")
        if given is not None and Path(given).expanduser().is_dir():
            return Path(given).expanduser()
        if given is not None and "/" in given and not Path(given).expanduser().exists():
            return _of_hub(given)
        made = sorted((self.data_dir / "models").glob("*/config.json"))
        if len(made) == 1:
            return made[0].parent
        raise BenchError(f"the folder of the model {given or 'packaged'} is not known; name one by --model")


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process and its children have used so far; 0 where it has died."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        family = (process, *process.children(recursive=True))
        return sum(times.user + times.system for times in (one.cpu_times() for one in family))
    return 0.0


def free_port() -> int:
    """Find a port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _of_hub(name: str) -> Path:
    """Find what the worker has fetched, without asking the hub."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception as error:  # noqa: BLE001  # whatever the library raises
        raise BenchError(f"the folder of the model {name} is not known: {error}") from None


async def _answers(client: Client) -> bool:
    try:
        await client.session("any").info()
    except RequestFailedError:
        return True  # it knows that there is no such session
    except NoWorkerError:
        return False
    return True
