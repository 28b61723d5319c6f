"""`mlx_lm.server` as a process of the bench's own, started and ended at will."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

from bench.faults import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NAME: Final = "mlx_lm.server"
#: What it calls the model that it was started with.
MODEL: Final = "default_model"
READY_TIMEOUT_S: Final = 180.0
STOP_TIMEOUT_S: Final = 10.0
_PACKAGE: Final = "mlx_lm"


class MlxServer:
    """One server on a port of 127.0.0.1 (0: a free one). Its output goes to a file in `folder`."""

    def __init__(self, model: Path, folder: Path, environment: Mapping[str, str], port: int = 0) -> None:
        """Raise `BenchError` where the program is not installed."""
        if importlib.util.find_spec(_PACKAGE) is None:
            raise BenchError(
                f"the peer {NAME} is not installed: pip install mlx-lm, or name a running one by --peer"
            )
        self.port = port or _free_port()
        self._command = [sys.executable, "-m", _PACKAGE, "server", "--model", str(model)]
        self._command += ["--host", "127.0.0.1", "--port", str(self.port), "--log-level", "WARNING"]
        self._environment = {**os.environ, **environment}
        self._log = folder / "mlx_lm.server.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def pid(self) -> int | None:
        """Its process, None where it was ended."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it, in a session of its own: a Ctrl-C at the terminal is the bench's to handle.

        Raises `BenchError` where the port is taken: the server itself would neither serve nor end then.
        """
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError as error:
                raise BenchError(f"the peer {NAME} cannot use port {self.port}: {error.strerror}") from None
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    async def ready(self) -> None:
        """Wait until its port answers. Raises `BenchError` where it never does."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            self.check()
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                return
            await asyncio.sleep(0.05)
        raise BenchError(f"the peer {NAME} was not ready within {READY_TIMEOUT_S:.0f} s")

    def check(self) -> None:
        """Raise `BenchError` where it has ended by itself."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise BenchError(f"the peer {NAME} ended with exit code {code}{self._last_line()}")

    def kill(self) -> None:
        """`kill -9`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End it by SIGTERM; where it hangs, it is killed."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
            self.kill()

    def _last_line(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log.read_text(errors="replace").split("\n")
            if said := [line.strip() for line in lines if line.strip()]:
                return f": {said[-1]}"
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
