"""A worker of one's own for a demo or a bench: `turnkeep serve` as a process, started and ended at will."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from turnkeep_client.client import connect
from turnkeep_client.errors import NoWorkerError, RequestFailedError

from .faults import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from turnkeep_client.client import Client

READY_TIMEOUT_S: Final = 180.0
STOP_TIMEOUT_S: Final = 30.0


class LocalWorker:
    """`turnkeep serve` on a data directory and a free port of 127.0.0.1."""

    def __init__(self, data_dir: Path, *options: str, program: Sequence[str] = ("worker",)) -> None:
        """`program` is the module that is run as `turnkeep`, and what it takes before `serve`."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        self.url = f"nats://127.0.0.1:{port}"
        self.data_dir = data_dir
        self._options = options
        self._command = [sys.executable, "-m", *program, "serve", "--data-dir", str(data_dir)]
        self._command += ["--nats-port", str(port), "--log-level", "warning", *options]
        self._process: subprocess.Popen[bytes] | None = None
        self._family: list[psutil.Process] = []  # its NATS server, which outlives a worker that was killed

    @property
    def pid(self) -> int | None:
        """Its process; None while it does not run."""
        return None if self._process is None else self._process.pid

    @property
    def family(self) -> tuple[psutil.Process, ...]:
        """Its NATS server, once it has answered."""
        return tuple(self._family)

    def start(self, *options: str) -> None:
        """Start it, with more options for this time. Its progress bars and warnings go to this terminal.

        In a session of its own: a Ctrl-C at the terminal would reach it too, and `stop` would then be the
        second signal, which ends a worker at once and leaves its NATS server behind.
        """
        self._process = subprocess.Popen([*self._command, *options], start_new_session=True)

    async def ready(self, tenant: str) -> Client:
        """Wait until it answers and return a connection; raises `NoWorkerError` if it never does."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process is not None and self._process.poll() is not None:
                raise NoWorkerError(f"the worker ended with exit code {self._process.returncode}")
            with contextlib.suppress(NoWorkerError):
                client = await connect(self.url, tenant=tenant)
                if await _answers(client):
                    self._meet_family()
                    return client
                await client.close()
            await asyncio.sleep(0.1)
        raise NoWorkerError(f"the worker was not ready within {READY_TIMEOUT_S:.0f} s")

    @property
    def exit_code(self) -> int | None:
        """How it ended by itself; None while it runs."""
        return None if self._process is None else self._process.poll()

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

    def kill(self) -> None:
        """`kill -9`. Its NATS server goes on."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait()

    def stop(self) -> None:
        """Stop it as Ctrl-C does; it takes its NATS server down with it. What hangs or is left is killed."""
        if self._process is not None:
            self._meet_family()
            # It ends because it is told to: to whoever asks in another thread it has no exit code any more.
            process, self._process = self._process, None
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for child in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._family = []

    def _meet_family(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._process is not None:
                found = psutil.Process(self._process.pid).children(recursive=True)
                self._family += [child for child in found if child not in self._family]


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
