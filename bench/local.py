"""Processes that a demo or a bench starts and ends: `turnkeep serve`, and others."""

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
    """A child process, ended together with its own children; `name` is for messages."""

    def __init__(
        self, name: str, command: Sequence[str], *, log: IO[bytes] | None = None, preload: str | None = None
    ) -> None:
        """Send output to `log`, and preload the libraries `preload`."""
        self.name = name
        self._command, self._log = command, log
        self._environment = os.environ | ({"LD_PRELOAD": preload} if preload else {})
        self._process: subprocess.Popen[bytes] | None = None
        self._family: list[psutil.Process] = []  # a killed worker's NATS server keeps running

    @property
    def pid(self) -> int:
        """The process id; 0 while the process does not run."""
        return 0 if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code if the process ended by itself; None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self, *options: str) -> None:
        """Start the process, with additional options.

        It gets a session of its own: a Ctrl-C at the terminal would reach it too, and the signal of `stop`
        would be the second one, which ends a worker at once and leaves its NATS server running.
        """
        self._process = subprocess.Popen(
            [*self._command, *options],
            start_new_session=True,
            env=self._environment,
            stdout=self._log,
            stderr=self._log,
        )

    def kill(self) -> None:
        """Kill the process with SIGKILL. Its children keep running."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait()

    def stop(self) -> None:
        """Stop the process as Ctrl-C does, which stops a worker's NATS server too; kill what is left."""
        if self._process is not None:
            self.find_children()
            # Cleared first: to other threads this is no end by itself, so `exit_code` is None.
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
        """Raise `BenchError`, with the last line of the log, if the process has ended by itself."""
        if self.exit_code is not None:
            said = []
            if self._log is not None:
                self._log.seek(0)
                said = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
            raise BenchError(": ".join([f"{self.name} ended with exit code {self.exit_code}", *said]))

    def find_children(self) -> None:
        """Find the children of the process, for `stop`."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._process is not None:
                found = psutil.Process(self._process.pid).children(recursive=True)
                self._family += [child for child in found if child not in self._family]


class LocalWorker(Process):
    """`turnkeep serve` on a data directory and a free port of 127.0.0.1."""

    def __init__(self, data_dir: Path, *options: str, program: Sequence[str] = ("worker",)) -> None:
        """Prepare a worker; `program` is the module to run, with its arguments before `serve`."""
        port = free_port()
        self.url = f"nats://127.0.0.1:{port}"
        self.data_dir = data_dir
        self._options = options
        command = [sys.executable, "-m", *program, "serve", "--data-dir", str(data_dir)]
        command += ["--nats-port", str(port), "--log-level", "warning", *options]
        super().__init__("the bench's worker", command)

    async def ready(self, tenant: str) -> Client:
        """Wait until the worker answers; return a connection. Raises `NoWorkerError` if it never does."""
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
        """The MLX folder of the worker's model: the given one, one from the hub, or a converted GGUF file.

        Known once the worker is ready. Raises `BenchError`.
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
    """Return the CPU seconds that a process and its children have used; 0 if the process is gone."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        family = (process, *process.children(recursive=True))
        return sum(times.user + times.system for times in (one.cpu_times() for one in family))
    return 0.0


def free_port() -> int:
    """Return a free port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _of_hub(name: str) -> Path:
    """Return the folder that the worker downloaded, without asking the hub."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception as error:  # noqa: BLE001  # the library raises many kinds
        raise BenchError(f"the folder of the model {name} is not known: {error}") from None


async def _answers(client: Client) -> bool:
    try:
        await client.session("any").info()
    except RequestFailedError:
        return True  # the worker says that there is no such session
    except NoWorkerError:
        return False
    return True
