"""A worker of one's own for a demo or a bench: `turnkeep serve` as a process, started and ended at will."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

import psutil

from protocol.client import connect
from protocol.errors import NoWorkerError, RequestFailedError

if TYPE_CHECKING:
    from pathlib import Path

    from protocol.client import Client

READY_TIMEOUT_S: Final = 180.0
STOP_TIMEOUT_S: Final = 30.0


class LocalWorker:
    """`turnkeep serve` on a data directory and a free port of 127.0.0.1."""

    def __init__(self, data_dir: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        self.url = f"nats://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "worker", "serve", "--data-dir", str(data_dir)]
        self._command += ["--nats-port", str(port), "--log-level", "warning", *options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it. Its progress bars and warnings go to this terminal.

        In a session of its own: a Ctrl-C at the terminal would reach it too, and `stop` would then be the
        second signal, which ends a worker at once and leaves its NATS server behind.
        """
        self._process = subprocess.Popen(self._command, start_new_session=True)

    async def ready(self, tenant: str) -> Client:
        """Wait until it answers and return a connection; raises `NoWorkerError` if it never does."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process is not None and self._process.poll() is not None:
                raise NoWorkerError(f"the worker ended with exit code {self._process.returncode}")
            with contextlib.suppress(NoWorkerError):
                client = await connect(self.url, tenant=tenant)
                if await _answers(client):
                    return client
                await client.close()
            await asyncio.sleep(0.1)
        raise NoWorkerError(f"the worker was not ready within {READY_TIMEOUT_S:.0f} s")

    def kill(self) -> None:
        """`kill -9`. Its NATS server goes on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Stop it as Ctrl-C does; it takes its NATS server down with it. One that hangs is killed with it."""
        if self._process is None:
            return
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            for child in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        self._process = None


async def _answers(client: Client) -> bool:
    try:
        await client.session("any").info()
    except RequestFailedError:
        return True  # it knows that there is no such session
    except NoWorkerError:
        return False
    return True
