"""Starts and stops the processes of a demo or a bench: `turnkeep serve`, measuring programs, and others.

A bench imports neither the worker nor MLX: code that needs them runs as a program of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import psutil

from turnkeep_client.client import Client, connect
from turnkeep_client.errors import NoWorkerError, RequestFailedError

from .faults import BenchError

T = TypeVar("T")

_BLAS: Final = re.compile(r"blas|lapack|mkl", re.IGNORECASE)
#: Folders with numpy's and SciPy's own OpenBLAS, whose symbols have other names, so MLX never calls it.
_PRIVATE: Final = frozenset({"numpy.libs", "scipy.libs"})
#: A word of the command line of a worker, which is a child of `turnkeep serve`.
_WORKER: Final = "worker.main"
#: Linux gives outgoing connections ports from 32768 on, macOS from 49152 on.
_PORTS: Final = range(31_000, 32_768)
READY_TIMEOUT_S: Final = 180.0
STOP_TIMEOUT_S: Final = 30.0


class Process:
    """A child process, ended together with its own children; `name` is for messages."""

    def __init__(
        self, name: str, command: Sequence[str], *, logged: bool = False, like: Process | None = None
    ) -> None:
        """Prepare a process, which `start` starts; with `logged`, faults quote its output.

        It loads the same OpenBLAS as the running process `like`: only processes that multiply with the same
        library can be compared, and a worker loads OpenBLAS before MLX on a Linux CPU.
        """
        preload = [str(path) for path in (like.blas if like else ()) if "openblas" in path.name.lower()]
        self.name = name
        self._command, self._logged = command, logged
        self._log: IO[bytes] | None = None
        self._stdin: int | None = None  # as for Popen
        self._stdout: int | None = None
        self._environment = os.environ | ({"LD_PRELOAD": " ".join(preload)} if preload else {})
        self._process: subprocess.Popen[bytes] | None = None
        self._family: list[psutil.Process] = []  # a killed worker's NATS server keeps running

    @property
    def pid(self) -> int:
        """The process id; 0 while the process does not run."""
        return 0 if self._process is None else self._process.pid

    @property
    def blas(self) -> list[Path]:
        """The BLAS libraries that the process has loaded; empty on systems that do not list them (macOS)."""
        found: set[Path] = set()
        if sys.platform == "linux":
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(self.pid)
                family = (process, *process.children())  # of `serve`, a child has loaded them
                found = {Path(region.path) for one in family for region in one.memory_maps()}
        return sorted(path for path in found if _BLAS.search(path.name) and path.parent.name not in _PRIVATE)

    @property
    def exit_code(self) -> int | None:
        """The exit code if the process ended by itself; None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self, *options: str) -> None:
        """Start the process, with additional options.

        The process gets its own terminal session. Otherwise a Ctrl-C would reach it too, and the signal of
        `stop` would be its second one, which ends a worker at once and leaves its NATS server running.
        """
        self._log = tempfile.TemporaryFile() if self._logged else None  # noqa: SIM115  # `_reap` closes it
        self._process = subprocess.Popen(
            [*self._command, *options],
            start_new_session=True,
            env=self._environment,
            stdin=self._stdin,
            stdout=self._stdout or self._log,
            stderr=self._log,
        )

    def kill(self) -> None:
        """Kill the process with SIGKILL. Its children keep running."""
        if self._process is not None:
            process, self._process = self._process, None
            self._reap(process)

    def stop(self) -> None:
        """Stop the process by SIGTERM, and kill it and its children if they are still running after that.

        A worker that ends on SIGTERM also stops its NATS server.
        """
        if self._process is not None:
            self.find_children()
            # Clear `_process` first: then `exit_code` is None, and no other thread takes this for a crash.
            process, self._process = self._process, None
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
            self._reap(process)
        for child in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._family = []

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        with contextlib.suppress(BrokenPipeError), process:  # closes its pipes
            process.wait()
        if self._log is not None:
            self._log.close()

    def check_alive(self) -> None:
        """Raise `BenchError`, with the last line of the log, if the process has ended by itself."""
        if self.exit_code is not None:
            said = []
            if self._log is not None:
                self._log.seek(0)
                said = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
            raise BenchError(": ".join([f"{self.name} ended with exit code {self.exit_code}", *said]))

    async def until(self, reached: Callable[[], Awaitable[T]]) -> T:
        """Call `reached` again and again until it raises no connection error; return its result.

        Raises `BenchError` after three minutes, or if the process ends.
        """
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            self.check_alive()
            with contextlib.suppress(OSError, NoWorkerError):
                return await reached()
            await asyncio.sleep(0.05)
        raise BenchError(f"{self.name} was not ready within {READY_TIMEOUT_S:.0f} s")

    def find_children(self) -> None:
        """Remember the children that the process has now, so that `stop` can kill them."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._process is not None:
                found = psutil.Process(self._process.pid).children(recursive=True)
                self._family += [child for child in found if child not in self._family]


class LocalWorker(Process):
    """`turnkeep serve` on a data directory and a free port of 127.0.0.1. It ends if this process dies."""

    def __init__(
        self,
        data_dir: Path,
        *options: str,
        beside: LocalWorker | None = None,
    ) -> None:
        """Prepare a worker.

        The worker uses the NATS server of the worker `beside` if one is given, else its own.
        """
        port = str(free_port())
        self.place = f"127.0.0.1:{port}"
        self.token_file = data_dir / "nats-token"
        nats: tuple[str, ...] = ("--nats-port", port)
        if beside is not None:
            self.place, self.token_file, nats = beside.place, beside.token_file, ()
        self.data_dir = data_dir
        self._options = options
        more = ("--data-dir", str(data_dir), *nats, "--log-level", "warning", "--until-eof", *options)
        super().__init__("the worker", [sys.executable, "-m", "commands", "serve", *more])
        self._stdin, self._stdout = subprocess.PIPE, subprocess.DEVNULL
        self._is_beside = beside is not None

    def start(self, *options: str) -> None:
        """Start the worker, with additional options."""
        if self._is_beside:
            self._environment["TURNKEEP_NATS"] = self.url
        super().start(*options)

    @property
    def url(self) -> str:
        """The URL of the worker's NATS server. Raises `FileNotFoundError` until the server's token exists."""
        return f"nats://{self.token_file.read_text().strip()}@{self.place}"

    async def ready(self, tenant: str) -> Client:
        """Wait until the worker answers; return a connection. Raises `BenchError` if it never does."""
        client = await self.until(lambda: reach(self.url, tenant=tenant))
        self.find_children()
        return client

    async def kill_worker(self) -> None:
        """`kill -9` the process that has the model; `turnkeep serve` starts it again."""
        with contextlib.suppress(psutil.NoSuchProcess):
            serve = psutil.Process(self.pid)
            while not (workers := [one for one in serve.children() if _WORKER in one.cmdline()]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # it is being started
            # The largest: one without a model waits to take over.
            max(workers, key=lambda one: one.memory_info().rss).kill()

    @property
    def model_folder(self) -> Path:
        """The MLX folder of the worker's model: a local folder, a download, or a converted GGUF file.

        Available once the worker is ready. Raises `BenchError`.
        """
        named = dict(zip(self._options, self._options[1:], strict=False)).get("--model")
        given = named or os.environ.get("TURNKEEP_MODEL", "")
        if (folder := Path(given).expanduser()).is_dir() and given:
            return folder
        if "/" in given and not folder.exists():
            from huggingface_hub import snapshot_download

            try:  # the folder that the worker downloaded, without asking the hub
                return Path(snapshot_download(given, local_files_only=True))
            except Exception as error:  # noqa: BLE001  # the library raises many kinds
                raise BenchError(f"the folder of the model {given} is not known: {error}") from None
        made = sorted((self.data_dir / "models").glob("*/config.json"))
        if len(made) == 1:
            return made[0].parent
        raise BenchError(f"the folder of the model {given or 'packaged'} is not known; name one by --model")


class Program(Process):
    """A program that a bench runs by `python -m module`; it prints a line for each line that it reads.

    An exit with code 0 is no fault.
    """

    def __init__(self, module: str, *arguments: object, like: Process | None = None) -> None:
        """Prepare the program of a module; `like` as for `Process`."""
        command = [sys.executable, "-m", module, *map(str, arguments)]
        super().__init__("the measuring process", command, logged=True, like=like)
        self._stdin = self._stdout = subprocess.PIPE

    @property
    def exit_code(self) -> int | None:
        """The exit code if the program failed; None while it runs, or if it exited with code 0."""
        return super().exit_code or None

    async def exchange(self, line: bytes = b"", timeout_s: float | None = None) -> bytes:
        """Write `line`; return the next line of output, or b"" once the program has exited with code 0.

        Raises `BenchError` after `timeout_s`, or with the program's last line of errors if it has failed.
        """
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise AssertionError("the program was not started")
        given, taken = process.stdin, process.stdout

        def exchange() -> bytes:
            with contextlib.suppress(BrokenPipeError):  # the program has died
                given.write(line)
                given.flush()
            if not (read := taken.readline()).endswith(b"\n"):
                process.wait()
            return read

        try:
            async with asyncio.timeout(timeout_s):
                answer = await asyncio.to_thread(exchange)
        except TimeoutError:
            raise BenchError(f"{self.name} did not answer within {timeout_s:g} s") from None
        self.check_alive()
        return answer


def common_blas(*processes: Process) -> str:
    """Return the names of the BLAS libraries that all processes use. Raises `BenchError` if they differ."""
    names = {one.name: ", ".join(path.name for path in one.blas) or "none" for one in processes}
    if len(set(names.values())) > 1:
        told = ", ".join(f"{name} with {library}" for name, library in names.items())
        raise BenchError(f"the sides multiply with different libraries: {told}")
    return names[processes[0].name]


def free_port() -> int:
    """Return a free port of 127.0.0.1 that no outgoing connection gets before a server listens there."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = random.SystemRandom().choice(_PORTS)
            probe.bind(("127.0.0.1", port))
            return port


async def reach(url: str, **where: Any) -> Client:
    """Connect to a running worker. Raises `NoWorkerError` if no worker answers; does not wait for one."""
    client = await connect(url, **where)
    try:
        with contextlib.suppress(RequestFailedError):  # expected: there is no such session
            await client.session("any").info()
    except BaseException:
        await client.close()
        raise
    return client
